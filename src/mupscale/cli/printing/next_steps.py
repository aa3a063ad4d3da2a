"""Next steps for a grown directory, printed once it is written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.noise_words import WAKING
from ...checkpoints.request import SHARD_BYTES, Request
from ...checkpoints.result.card import evaluation
from ...checkpoints.result.train_script import NAME as SCRIPT
from ...checkpoints.result.train_script import SENTENCES, data_of, rate_of, writes_text
from ...files.directory import OPTIMIZER, TOKENIZERS
from ...jobs.job import Job
from ...storage.location import Location, Url

_DATA = {
    "tokens": ("the stock Trainer (each line of the file is JSON with a text)", "text.jsonl"),
    "pairs": (
        'sentence-transformers (each line of the file is JSON with "anchor" and "positive")',
        "pairs.jsonl",
    ),
    "images": ("the stock Trainer (the file holds pixel_values and labels)", "images.safetensors"),
}
"""What the data of a `train.py` are."""


def next_steps(base: Location, out: Location, job: Job, declare: Path | None = None) -> str:
    """The commands that a user runs next; `declare` is the file of declarations that was used."""
    about = job.about
    known, source = rate_of(about)
    rate = "LR" if known is None else f"{known:g}"
    lines = [f"written: {out}   ({about['architecture']}, {about['parameters']['wide']:,} parameters)", ""]
    if about["noise"] is None:
        again = [
            "mupscale",
            "upscale",
            str(base),
            f"{out}-awake",
            *_arguments(about["request"]),
            *([] if declare is None else ["--declare", str(declare)]),
        ]
        by = "" if about.get("words") is None else f" by a loss over its {about['words']['ids'][0]} words"
        lines += [
            f"It trains exactly like the base{by}, and cannot use what is new. To use it, at the loss of the base:",
            f"  {shlex.join(again)}",
            "",
        ]
    check = f"  {shlex.join(['mupscale', 'check', str(out), '--base', str(base)])}"
    if isinstance(out, Url):
        return "\n".join([*lines, "To prove what was written:", check])
    stated = any(file.name == OPTIMIZER for file in job.files)
    if stated:
        lines += [
            "To continue with the stock Trainer, its optimizer state and its schedule:",
            f'  trainer = Trainer(..., callbacks=[mu.trainers.HuggingFaceCallback("{out}")])',
            f'  trainer.train(resume_from_checkpoint="{out}")',
            "",
        ]
    lines += _words(about, out)
    data = data_of(about)
    if data is not None and any(text.name == SCRIPT for text in job.texts):
        by, file = _DATA[data]
        lines += [
            f"To train it with {by}:",
            f"  {shlex.join(['python', str(out / SCRIPT), '--data', file, *([] if known else ['--learning-rate', 'LR'])])}",
            "",
        ]
    package, loaded = "transformers", f'transformers.{about["architecture"]}.from_pretrained("{out}")'
    if about.get(SENTENCES):
        package, loaded = SENTENCES, f'{SENTENCES}.SentenceTransformer("{out}")'
    lines += [
        f"To {'start with a fresh optimizer' if stated else 'train it in your own loop'} (lr as you would give the base; {source}):",
        f"  import mupscale as mu, torch, {package}",
        f"  model = {loaded}",
        f'  optimizer = mu.trainers.optimizer_in_units(model, "{out}", torch.optim.AdamW, lr={rate})',
        "",
        "To prove what was written:",
        check,
    ]
    if writes_text(about) and any(file.name in TOKENIZERS for file in job.carried):
        lines += [
            "",
            'To compare it with the base on common tasks (pip install "lm_eval[hf]"):',
            f"  {shlex.join(evaluation(str(out)))}",
        ]
    return "\n".join(lines)


def same_command(base: Location, out: Location, request: Request) -> str:
    """The command that makes a request, so that running it goes on with what it began; files that it read are left open.

    >>> from pathlib import Path
    >>> from mupscale.families.config.goal import Goal
    >>> same_command(Path("base"), Path("wide"), Request(Goal.parse(2, by="units"), noise=("copied", 1.0), seed=3))
    'mupscale upscale base wide -k 2 --by units --seed 3'
    >>> same_command(Path("base"), Path("wide"), Request(Goal.parse("ffn=2"), dtype="BF16", shard_bytes=18000))
    'mupscale grow base wide -k ffn=2 --dtype BF16 --shard-size 18000'
    """
    verb = "upscale" if request.adds_noise else "grow"
    words = ["mupscale", verb, str(base), str(out), *_arguments(request.as_json())]
    if request.noise is not None and request.noise != WAKING:
        scheme, size = request.noise
        words += ["--noise", f"{scheme}={size!r}"]
    unusual: dict[str, int] = {}
    if request.seed:
        unusual["--seed"] = request.seed
    if request.shard_bytes != SHARD_BYTES:
        unusual["--shard-size"] = request.shard_bytes
    words += [word for option, value in unusual.items() for word in (option, str(value))]
    words += ["--trust-base"] if request.trust_base else []
    files = {"--recipe": request.recipe, "--declare": request.declared}
    return " ".join(
        [shlex.join(words), *(f"{option} FILE" for option, value in files.items() if value is not None)]
    )


def _words(about: Mapping[str, Any], out: Path) -> list[str]:
    """How the tokenizer gets the words that the model has already."""
    if about.get("words") is None:
        return []
    first, end = about["words"]["ids"]
    return [
        f"To give the tokenizer its {end - first} new words, whose ids are {first} to {end - 1}:",
        f'  tokenizer = transformers.AutoTokenizer.from_pretrained("{out}")',
        f'  tokenizer.add_tokens(["first new word", …])  # it must have {first} words before',
        "",
    ]


def _arguments(request: Mapping[str, Any]) -> list[str]:
    """The arguments other than base, output and noise."""
    found = str(Request.from_json(request).goal).split()
    for key in ("export", "dtype", "optimizer"):
        found += [f"--{key}", str(request[key])] if request[key] is not None else []
    return found if request["state"] else [*found, "--no-state"]
