"""The model card of a grown directory: what it is, how it was made, what to do next, and the base's own card.

Knows how cards and their front matter read; front matter is kept line by line, so no YAML is parsed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...rules.noise_defaults import NOT_SOON
from ...runs.growth_record import NAME
from ..request import Request
from .train_script import SENTENCES, rate_of, writes_text

_KEY = re.compile(r"([A-Za-z_][\w-]*):")
_OURS = ("base_model", "base_model_relation", "model-index")
"""Fields that speak of one model alone: its own base, and results that were measured on it."""
_TAGS = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "image-classification",
}
"""How the names of classes end -> what the Hub calls that."""
_SHOWN = 30  # lines of the list of differences; tensors left out may be one per layer


def card(about: Mapping[str, Any], base_card: str = "") -> str:
    """The model card: what this is, how it was made, what to do next, then the card of the base.

    Fields of the base's front matter (licence, language, tags and others) are kept; `base_model` names the base.
    """
    fields, text = _split(base_card)
    name = about["base"]["name"]
    front = "\n".join(_front(fields, name, _kinds(about)))
    own_card = f"---\n{front}\n---\n{_section(about)}"
    if not text.strip():
        return own_card
    return f"{own_card}\n---\n\nWhat follows is the card of `{name}`, as it was; results in it were measured there.\n\n{text.strip()}\n"


def _new_parts(request: Request) -> str:
    """What the base does not have and `--to` asked for, in words; "" for copies alone."""
    to, routed = request.goal.to, "experts"
    if to.experts is not None:
        from ...families.types.into import experts_are_copies

        routed = "routers" if experts_are_copies(to.experts) else routed
    wanted: dict[str, object] = {
        "blocks": to.layers,
        routed: to.experts,
        "units": to.sizes,
        "words": to.vocab,
    }
    wanted |= dict(to.further)
    return " and ".join(name for name, value in wanted.items() if value)


def _section(about: Mapping[str, Any]) -> str:
    request = Request.from_json(about["request"])
    known, source = rate_of(about)
    rate = "LR" if known is None else known
    package, load = "transformers", f"{about['architecture']}.from_pretrained(here)"
    if about.get(SENTENCES):
        package, load = SENTENCES, "SentenceTransformer(here)"
    rows = "\n".join(
        f"| {', '.join(f'`{n}`' for n in group['tensors'][:4])}{' …' if len(group['tensors']) > 4 else ''} "
        f"| {group['lr']} | {group['eps']} | {group['weight_decay']} |"
        for group in about["factors"]
    )
    return f"""# {about["base"]["name"]}, {about["parameters"]["wide"] / about["parameters"]["base"]:.1f} times the parameters

`{about["architecture"]}`, grown from `{about["base"]["name"]}` (`{request.goal}`) by
[mupscale](https://pypi.org/project/mupscale) {about["version"]}. {_how(about, request)}
{_words(about.get("words"), about["noise"] is None)}
| | base | this model |
|---|---|---|
| parameters | {about["parameters"]["base"]:,} | {about["parameters"]["wide"]:,} |

The weights load with the stock class. Train them with an optimizer that knows each tensor's units:

```python
import torch
import mupscale as mu
from {package} import {load.partition(".")[0].partition("(")[0]}

here = "path/to/this/directory"
model = {load}
optimizer = mu.trainers.optimizer_in_units(model, here, torch.optim.AdamW, lr={rate})  # as you would give the base; {source}
```

What that does to AdamW's constants since the reference:

| tensors | lr × | eps × | weight decay × |
|---|---|---|---|
{rows}

{_evaluation(about)}Plan, reference, seed and the base's digests stand in `{NAME}`; `mupscale check <this directory> --base <base>` proves the bytes.
{_differences(about)}"""


def _how(about: Mapping[str, Any], request: Request) -> str:
    """What was done, and what that does to the loss and to training."""
    noise = about["noise"]
    new = _new_parts(request)
    awake = f" and new {new} wake" if new else ""
    asleep = f" and its new {new} are zero" if new else ""
    if noise is None:
        return (
            "It computes the same function as the base and, trained with the units below, **trains exactly like the "
            f"base**: copies of a unit stay equal{asleep}, so it cannot use what is new until noise is added "
            "(`mupscale upscale`)."
        )
    if request.wakes:
        readers = (
            "copies of trained weights and noise"
            if noise["asked"]["readers"] == "copied"
            else "noise of their size"
        )
        return (
            "Its width consists of new units, which read "
            f"{readers}, and nothing reads them yet; where zeros are not possible units are copied, and each weight that reads "
            f"copies went whole to one of them (seed {about['request']['seed']}). **Its loss is the base's** up to rounding, and "
            f"everything that is new learns from the second step on.{_means(about)}"
        )
    return (
        f"Noise ({_size(noise['asked'])}; seed {about['request']['seed']}) was added after the exact map, so that copies of a "
        f"unit can part{awake}. {_losses(about['losses'])} {NOT_SOON[0].upper()}{NOT_SOON[1:]}."
    )


def _size(noise: Mapping[str, Any]) -> str:
    """How much noise was asked for, in words.

    >>> _size({"t": 0.08984, "chosen for a rise of": 0.05})
    "t = 0.0898 of each weight's spectral norm, chosen by what it costs"
    >>> _size({"lr": 0.001, "recipe": "proxy of width 64"})
    'by the recipe of a proxy of width 64'
    """
    of = {"t": " of each weight's spectral norm"}
    sizes = ((key, noise[key]) for key in ("t", "sigma", "paired") if key in noise)
    parts = [
        f"{key} = {f'{size:.3g}' if isinstance(size, float) else size}{of.get(key, '')}"
        for key, size in sizes
    ]
    parts += ["chosen by what it costs"] if "chosen for a rise of" in noise else []
    return ", ".join([*parts, *([f"by the recipe of a {noise['recipe']}"] if "recipe" in noise else [])])


def _means(about: Mapping[str, Any]) -> str:
    """What a stream behind LayerNorm got, where its new channels carry the mean of the others."""
    if not any(entry.get("mean") for entry in about["plan"]["tensors"].values()):
        return ""
    return " New channels of a stream carry the mean of the others, which LayerNorm subtracts, so that no output moves."


def _words(words: Mapping[str, Any] | None, asleep: bool) -> str:
    """Which ids are new, and what that does to the loss."""
    if words is None:
        return ""
    first, end = words["ids"]
    text = f"\nIds {first} to {end - 1} are new words; the files of the tokenizer are the base's and do not know them."
    if asleep:
        text += f" It trains like the base by a loss over the base's words, `logits[..., :{first}]`."
    losses = words["losses"]
    if losses is not None:
        text += (
            f" The loss is {losses['old']:.4g} over the base's words and {losses['all']:.4g} over all words."
        )
    return text + "\n"


def evaluation(folder: str) -> list[str]:
    """The command that evaluates a decoder with EleutherAI's harness."""
    return ["lm_eval", "--model", "hf", "--model_args", f"pretrained={folder}", "--tasks", "hellaswag"]


def _evaluation(about: Mapping[str, Any]) -> str:
    if not writes_text(about):
        return ""
    command = shlex.join(evaluation("path/to/this/directory"))
    return f"""To compare it with the base on common tasks (`pip install "lm_eval[hf]"`):

```bash
{command}
```

"""


def _losses(losses: Mapping[str, Any] | None) -> str:
    """What the noise costs, as it was measured before the weights were written."""
    if losses is None:
        return "What it costs was not measured."
    if losses["kind"] == "outputs":
        change = f"{losses['after']:.3f} (root mean square)"
        return f"It changes the cosines between outputs for {losses['text']} by {change}."
    return (
        f"The loss of {losses['text']} is **{losses['before']:.4g} before** the noise, as the base's, and "
        f"**{losses['after']:.4g} after** it."
    )


def _differences(about: Mapping[str, Any]) -> str:
    """What the base has and this directory does not, and what neither stores."""
    lines = [f"- `{name}`: not carried, because {why}" for name, why in about["not_carried"].items()]
    left_out, absent = about["spelling"]["left_out"], about["spelling"]["absent"]
    lines += [f"- `{name}`: a tensor that was left out, because {why}" for name, why in left_out.items()]
    lines += [
        f"- `{name}`: a tensor that the base does not store; it is random until it is trained"
        for name in absent
    ]
    shown = [*lines[:_SHOWN], *([f"- … and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else [])]
    return "\n".join(["", "Not everything of the base is here:", "", *shown, ""]) if lines else ""


def _split(text: str) -> tuple[list[str], str]:
    """The lines of a card's front matter, and the rest."""
    lines = text.lstrip("\ufeff").splitlines()
    if not lines or lines[0].rstrip() != "---":
        return [], text
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == "---"), None)
    return ([], text) if end is None else (lines[1:end], "\n".join(lines[end + 1 :]))


def _kinds(about: Mapping[str, Any]) -> dict[str, str]:
    """What the Hub sorts models by: the library that loads this one, and what it does, where its class says that.

    >>> _kinds({"architecture": "GPT2LMHeadModel", "config": {}})
    {'library_name': 'transformers', 'pipeline_tag': 'text-generation'}
    """
    if about.get(SENTENCES):
        return {"library_name": "sentence-transformers", "pipeline_tag": "sentence-similarity"}
    does = "text-generation" if writes_text(about) else None
    does = does or next((tag for end, tag in _TAGS.items() if about["architecture"].endswith(end)), None)
    return {"library_name": "transformers", **({} if does is None else {"pipeline_tag": does})}


def _front(lines: list[str], name: str, kinds: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Front matter with our fields; the lines of all others are kept as they are, and `kinds` stand where they are missing.

    >>> _front(["license: mit", "base_model: old", "tags:", "- text"], "base")
    ['base_model: base', 'license: mit', 'tags:', '- text', '- mupscale']
    """
    blocks: list[tuple[str, list[str]]] = []
    for line in lines:
        found = _KEY.match(line)
        if found or not blocks:
            blocks.append((found[1] if found else "", []))
        blocks[-1][1].append(line)
    kept = [(key, block) for key, block in blocks if key not in _OURS]
    tags = next((block for key, block in kept if key == "tags"), None)
    if tags is None:
        kept.append(("tags", ["tags:", "- mupscale"]))
    elif not any("mupscale" in line for line in tags):
        tags[:] = _tagged(tags)
    plain = name if re.fullmatch(r"[A-Za-z][\w./-]*", name) else json.dumps(name)
    own = [f"{key}: {value}" for key, value in kinds.items() if key not in dict(kept)]
    return [f"base_model: {plain}", *own, *(line for _, block in kept for line in block)]


def _tagged(block: list[str]) -> list[str]:
    """The lines of `tags:` with one more; a form that is not known is replaced.

    >>> _tagged(["tags: [a, b]"]), _tagged(["tags:", "  - a"])
    (['tags: [a, b, mupscale]'], ['tags:', '  - a', '  - mupscale'])
    """
    value = block[0].partition(":")[2].strip()
    items = [line for line in block[1:] if line.strip().startswith("- ")]
    if len(block) == 1 and value.startswith("[") and value.endswith("]"):
        inner = value[1:-1].strip()
        return [f"tags: [{inner + ', ' if inner else ''}mupscale]"]
    if not value and items:
        indent = items[-1][: len(items[-1]) - len(items[-1].lstrip())]
        return [*block, f"{indent}- mupscale"]
    return ["tags:", *([f"- {value}"] if value and value[0].isalpha() else []), "- mupscale"]
