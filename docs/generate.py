"""Write the pages that are generated from data: `python docs/generate.py`.

Optimizers and families come from the registries, benchmarks from docs/benchmarks.json, refusals from the calls that make
them, the README's table of real models from benchmarks/public_models_found.json, the words of arguments in api.md from
docs/argument_words.json. A test compares the pages with the data.
`python docs/generate.py --benchmarks covertype limits` runs those scripts and records their last lines with the key of the
code (harness/evidence.py). Nothing is recorded for a script that fails.
"""

import argparse
import ast
import datetime
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.families_wide import DATA, in_draw  # noqa: E402
from benchmarks.families_wide import summary as wide_summary  # noqa: E402
from benchmarks.public_models import table  # noqa: E402
from docs.refusals import refusals  # noqa: E402
from harness.evidence import EARLIER, is_of, key_of, mark  # noqa: E402
from harness.family_configs import EXACT, INEXACT, Case  # noqa: E402
from harness.popular import POPULAR, STORED_UNITS  # noqa: E402
from harness.popular import stored as popular_lines  # noqa: E402
from harness.popular import summary as popular_summary  # noqa: E402
from mupscale.families.config.fields import USUAL  # noqa: E402
from mupscale.families.types.rows import Row, row_for  # noqa: E402
from mupscale.rules.muon_rows import MUONS  # noqa: E402
from mupscale.rules.optimizer_rule import Decay, OptimizerRule, State  # noqa: E402
from mupscale.rules.package_rows import PACKAGES  # noqa: E402
from mupscale.rules.refused import REFUSED  # noqa: E402
from mupscale.rules.torch_rows import TORCH  # noqa: E402
from mupscale.rules.units import NEUTRAL, G, Units, W  # noqa: E402
from mupscale.trainers.menu import MENU  # noqa: E402
from reproduce.growth.page.marked import page as frontier  # noqa: E402

HEAD = """---
hide: [toc]
---

# Which optimizers

Widening multiplies the weights of a tensor by s and its gradients by r, with s r c = 1. A quantity with units W^a G^b is
multiplied by s^a r^b. See [How it works](how_it_works.md).

This page is generated from the registry.

## torch's optimizers

| optimizer | learning rate | weight decay | other settings | state |
|---|---|---|---|---|"""

TAIL = """
- A setting or state that the registry knows and this table omits has no units. It is copied.
- A setting or state that the registry does not know is refused.
- *filled* is the share of a tensor that is not zero padding.
- *rows*, *columns* and *short* are the sizes of the matrix that an optimizer sees in a tensor, and *short* is the smaller of the
  two. *blocks* counts copies outside one matrix: experts in a stack, heads that are stepped one by one.
- A class that holds several optimizers chooses a row by a key of the group, by a key of a parameter's state, or by the number of
  dimensions of a tensor. The table has one line for each.

## Optimizers of other packages

The errors are the largest relative differences of outputs over 12 steps after growth in mid-training, in float64 and in float32
(`python benchmarks/optimizers.py`). Where a package computes in float32 or rounds to 16 bits, or is not installed, float64 is that
of the same optimizer written from its published description.{earlier}

{packages}

- Other names of the Trainer's `optim=` are refused. A test walks the menu of the installed transformers, so that no name is
  neither supported nor refused.
- The 8-bit and 4-bit classes of bitsandbytes and torchao have the rows of their 32-bit ones. Tensors of 4096 entries or more have
  quantised state: a block of neighbouring entries (256 in 8 bits, 128 in 4 bits) shares a scale. `grow` and `upscale` keep the
  codes where a wide block reads one scale, as it does if rows are whole blocks. They round other blocks again, by up to 0.7 %
  of the largest entry in 8 bits, and warn. Later steps round in blocks that hold other entries than those of the base, so losses
  follow the base up to that rounding and not exactly: to between 2e-4 and 1e-2 over 20 steps, where fresh state is off by 0.09 to
  2.4 (`quantised` in the last line of the script). `run.provenance["rounded"]` has the rounding of every tensor. A checkpoint's
  `optimizer.pt` by bitsandbytes is widened if its rows are whole blocks, and refused otherwise, as one by torchao always is. A
  tensor keeps the bits that its state has.
- A class that was copied into your own file is registered with the row of its original:
  `mu.rules.register_optimizer(Lion, mu.rules.rule_for("lion_pytorch.Lion"))`.

## Versions of Muon

Muon is mostly copied from file to file, and classes of one name differ. So a class called `Muon`, `SingleDeviceMuon`,
`MuonWithAuxAdam`, `SingleDeviceMuonWithAuxAdam` or `MuonAdamW` (other than `torch.optim.Muon`) is refused until you register it
with the row of its version, and you prove the row on your copy:

<!-- not run: it needs your file with the class -->
```python
mu.rules.register_optimizer(Muon, mu.rules.muon_row("moonlight"))
mu.rules.check_optimizer(lambda params: Muon(lr=0.1, wd=0.5, muon_params=params))
```

{muons}

- Muon in bfloat16 has the same row; its own rounding, about 1e-3 after ten steps, is larger than any error of the row.

## Add yours in five minutes

Write down how each setting and each state behaves. A quantity that is added to a weight has the units W. One that is added to a
gradient has the units G. Adam's rate is multiplied by a number without units and added to a weight, so it is W; SGD's is multiplied
by a gradient, so it is W / G. A number that multiplies like to like, such as a momentum, has no units and is neutral. Decay is
`DECOUPLED` if the weight is multiplied by 1 - lr · decay, and `COUPLED` if decay times the weight is added to the gradient.

An average of gradients has the units of a gradient, and the update uses only its sign:

```python
import torch
import mupscale as mu
from mupscale.rules import Decay, G, OptimizerRule, W

class SignMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, beta=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "beta": beta, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["beta"])
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(average.sign(), alpha=group["lr"])

row = OptimizerRule(lr=W, decay=Decay.DECOUPLED, state={"average": G}, neutral={"beta"})
mu.rules.register_optimizer(SignMomentum, row)
```

`check_optimizer` proves the row on real training steps, in float64 and in float32, and returns the largest relative error. Give it
large settings, so that a wrong unit shows:

```python
print(mu.rules.check_optimizer(lambda params: SignMomentum(params, lr=0.1, weight_decay=0.5)))
```

From then on a run with this optimizer is widened like any other:

```python
def make(width):
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

model, x = make(8), torch.randn(16, 3)
run = mu.Run(model, SignMomentum(model.parameters(), weight_decay=0.1))
model(x).square().mean().backward()
run.optimizer.step()
wide = mu.grow(run, lambda: make(16))
assert torch.allclose(wide.model(x), model(x), atol=1e-6)
```

A row that leaves out a state or a setting is refused by name, and wrong units are detected:

```python
from dataclasses import replace

for wrong in (replace(row, state={}), replace(row, state={"average": W}), replace(row, lr=W / G)):
    mu.rules.register_optimizer(SignMomentum, wrong)
    try:
        mu.rules.check_optimizer(lambda params: SignMomentum(params, lr=0.1, weight_decay=0.5))
    except mu.MupscaleError as error:
        print(error)
    else:
        raise SystemExit("a wrong row was not caught")
mu.rules.register_optimizer(SignMomentum, row)
```

If a state is a copy of the weights (a master weight, an average), say so: `state={"master": State(W, copy=True)}`. `upscale`
then adds the same noise to it as to the weight. Otherwise the next step would write a copy without noise over the weights.
`check_optimizer` refuses a row that leaves this out.

All names are in `mupscale.rules`:

| what your optimizer does | what to write |
|---|---|
| it is several optimizers in one class | `rule_by("use_muon", {True: muon, False: adamw})` |
| it treats tensors by their number of dimensions | `rule_by(DIMENSIONS, {2: matrix, 4: kernel})` |
| a state has lost the dimension it averages over | `State(G**2, mean_over=-1, dropped=True)` |
| a state averages over the shorter side of a matrix | `State(…, mean_over="short")`; growth that makes the other side shorter is refused |
| a state holds two tensors, one behind the other | `State(G, stack=2)` |
| the first tensor of a group holds the state of all | `stacked=True` |
| each head is a matrix of its own | `blocks="num_heads"`, and `lr=(W / G / BLOCKS) ** Fraction(1, 2)` |
| a group holds a number that scales nothing | `mu.rules.declare_neutral("lr_scale")` |

## Refused optimizers

A class with one of these names is refused in any package, unless you register a row for it.
"""


def spell(units: Units | tuple[Units, ...]) -> str:
    return f"({', '.join(map(str, units))})" if isinstance(units, tuple) else str(units)


def _state(key: str, state: State) -> str:
    return f"{key}: {state.units}{', a copy of the weights' if state.copy else ''}"


def decay(rule: OptimizerRule) -> str:
    if rule.decay is None:
        return "none"
    words = {
        Decay.COUPLED: f"coupled: {G / W}",
        Decay.DECOUPLED: "decoupled: 1/lr",
        Decay.INDEPENDENT: "independent: 1",
    }
    kinds = [str(rule.decay) if isinstance(rule.decay, Units) else words[rule.decay]]
    if rule.decoupled_flag and rule.decay is not Decay.DECOUPLED:
        kinds.append(words[Decay.DECOUPLED])
    return ", or ".join(kinds)


def _chosen(rule: OptimizerRule, path: tuple[str, ...] = ()) -> list[tuple[str, OptimizerRule]]:
    """The rows of an optimizer, each once, with the values that choose it."""
    if not rule.rows:
        return [("; ".join(path), rule)]
    found: dict[int, tuple[list[str], OptimizerRule]] = {}
    for value, row in rule.rows.items():
        same = next((key for key, (_, r) in found.items() if r == row), id(row))
        found.setdefault(same, ([], row))[0].append(str(value))
    if len(found) == 1:
        return [line for _, row in found.values() for line in _chosen(row, path)]
    return [
        line
        for values, row in found.values()
        for line in _chosen(row, (*path, f"{rule.by} = {' or '.join(values)}"))
    ]


def _cells(rule: OptimizerRule) -> str:
    settings = {key: units for key, units in rule.hyper.items() if units != NEUTRAL}
    named = ", ".join(f"{key}: {spell(units)}" for key, units in settings.items()) or "none"
    states = ", ".join(_state(key, s) for key, s in rule.state.items() if s.units != NEUTRAL) or "none"
    return raised(f"{rule.lr} | {decay(rule)} | {named} | {states}")


def rows(name: str, rule: OptimizerRule) -> list[str]:
    short = name.removeprefix("torch.optim.")
    return [f"| {short}{f' ({choice})' if choice else ''} | {_cells(row)} |" for choice, row in _chosen(rule)]


def _measured() -> dict[tuple[str, str], float]:
    """The row and the dtype -> the largest error."""
    measured = json.loads((HERE / "optimizers.json").read_text())
    errors: dict[tuple[str, str], float] = {}
    for figure in measured:
        key = figure["row"], figure["dtype"]
        errors[key] = max(errors.get(key, 0.0), figure["error"])
    return errors


def _muons() -> str:
    """Rows of versions of Muon, and what was measured."""
    errors = _measured()
    lines = ["| version | learning rate | weight decay | other settings | state | float64 | float32 |"]
    lines.append("|---|---|---|---|---|---|---|")
    for version, rule in MUONS.items():
        worst = [errors.get((version, dtype)) for dtype in ("float64", "float32")]
        shown = " | ".join("not run" if error is None else f"{error:.0e}" for error in worst)
        lines += [
            f'| "{version}"{f" ({choice})" if choice else ""} | {_cells(row)} | {shown} |'
            for choice, row in _chosen(rule)
        ]
    return "\n".join(lines)


def _packages() -> str:
    """Rows of other packages, where they are used, and what was measured; classes with one row share a line."""
    errors = _measured()
    together: dict[int, list[str]] = {}
    for name, rule in PACKAGES.items():
        together.setdefault(id(rule), []).append(name)
    lines = [
        "| class | Trainer's `optim=` | learning rate | weight decay | other settings | state | float64 | float32 |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|")
    for names in together.values():
        used = ", ".join(name for name, named in MENU.items() if named.kind in names) or "none"
        worst = [
            max((errors[name, dtype] for name in names if (name, dtype) in errors), default=None)
            for dtype in ("float64", "float32")
        ]
        shown = " | ".join("not run" if error is None else f"{error:.0e}" for error in worst)
        for choice, row in _chosen(PACKAGES[names[0]]):
            label = ", ".join(names) + (f" ({choice})" if choice else "")
            lines.append(f"| {label} | {used} | {_cells(row)} | {shown} |")
    return "\n".join(lines)


def raised(row: str) -> str:
    """A row of a table with powers as raised numbers, W and G on one line.

    >>> raised("| W G^-1 | G^2 |")
    '| W&nbsp;G<sup>-1</sup> | G<sup>2</sup> |'
    """
    powers = re.sub(r"\^(-?[\d/]+)", r"<sup>\1</sup>", row)
    return re.sub(r"(?<=[WG>]) (?=[WG]\b)", "&nbsp;", powers)


def optimizers() -> str:
    own = [
        line for name, rule in TORCH.items() if name.startswith("torch.optim.") for line in rows(name, rule)
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    refused = [f"- **{', '.join(names)}**: {reason}." for reason, names in reasons.items()]
    return (
        "\n".join(
            [
                HEAD,
                *own,
                TAIL.replace("{earlier}", mark("docs/optimizers.json"))
                .replace("{packages}", _packages())
                .replace("{muons}", _muons()),
                *refused,
            ]
        )
        + "\n"
    )


FAMILIES = """# Which models

The plan for a Hugging Face checkpoint is found on a small copy of its own configuration. It is proved there, in float64, before
any work starts:

- the gradient identity holds on every tensor,
- five AdamW steps with carried-over optimizer state agree.

A model type does not have to be in the registry to be grown. A type in the registry is proved in the same way. The registry
contains only what cannot be found from two configurations and the search.

This page is generated from the registry and from the configurations that `benchmarks/families.py` measures.

## Measured at 2 and 3 times the width

| model | type | class | what the registry adds |
|---|---|---|---|"""

USUALLY = """
"nothing" means that everything is inferred:

- which axes grow, and which layers sum over them,
- heads, groups and fused projections,
- tied readouts (1/k goes into the last norm),
- embeddings that the model multiplies by a root of its width,
- (1 + w) gains.

## Sizes that can grow

`-k 2` multiplies all sizes by 2. `-k hidden=2,ffn=4` sets them one by one. `-k text=2` and `-k vision=2` multiply all sizes of
one tower, in `text_config` or `vision_config`. These are the usual configuration fields of each size:
"""


def special(entry: Row) -> str:
    """A short description of a row."""
    parts = []
    if entry.grows is not None:
        parts.append("grows " + ", ".join(f for fields in entry.grows.values() for f in fields))
    if entry.layouts:
        parts.append("layouts of " + ", ".join(f"`{p}`" for p in entry.layouts))
    parts += [f"`{p}` absorbs {f}" for p, f in entry.folds.items()]
    parts += [f"{name} x {f}" for name, f in entry.config.items()]
    if entry.head_size_grows:
        parts.append("head size grows, heads stay")
    return "; ".join(parts) or "nothing"


def measured(case: Case) -> str:
    return f"| {case.name} | {case.model_type} | {case.architecture} | {special(row_for(case.model_type))} |"


def much_used() -> list[str]:
    """The much-used types by verdict, with the reason for what does not grow in all its widths."""
    lines = list(popular_lines().values())
    by = {
        verdict: [x for x in lines if x["verdict"] == verdict] for verdict in ("exact", "ffn_only", "refused")
    }
    reasons = [
        f"- **{x['name']}**{' (`-k ffn=2` is exact)' if x['verdict'] == 'ffn_only' else ''}: {shorter(x['why'])}"
        for x in (*by["ffn_only"], *by["refused"])
    ]
    return [
        "\n## Much-used model types\n",
        "`python benchmarks/families_popular.py` takes 115 types and variants in small configurations. Each one is planned with",
        "`-k 2`, proved, grown, saved, loaded again in the stock class and stepped there with the carried optimizer, in a process with",
        "60 CPU seconds. What `-k 2` refuses is tried with `-k ffn=2`; types with a text and a vision tower are also grown by",
        "`-k text=2` and `-k vision=2`.\n",
        f"`{popular_summary(lines)}`{mark('benchmarks/families_popular.jsonl')}\n",
        f"Exact: {', '.join(x['name'] for x in by['exact'])}.\n",
        f"Each tower alone is exact too: {', '.join(x['name'] for x in lines if 'towers' in x)}.\n",
        "Not in all widths:\n",
        *reasons,
    ]


def much_used_by_units() -> list[str]:
    """The same types by new units, by verdict, with the reason for what is refused and what is exact by copies instead."""
    lines = list(popular_lines(STORED_UNITS).values())
    named = {
        v: ", ".join(x["name"] for x in lines if x["verdict"] == v)
        for v in ("units", "mixed", "copies", "jumps")
    }
    reasons = [
        f"- **{x['name']}** ({tried_by_copies(x)}): {shorter(x['why'])}"
        for x in lines
        if x["verdict"] == "refused"
    ]
    return [
        "\n### By new units\n",
        "`python benchmarks/families_popular.py --by units` plans the same types with `-k 2 --by units`: proved asleep, grown, saved,",
        "loaded again and stepped, and woken on the small copy, where the loss may move by 1e-10. `mupscale upscale` also carries",
        "[means](upscale.md) in streams behind LayerNorm, which count as copies here.\n",
        *(
            [f"So far {len(lines)} of the {len(POPULAR)} types are measured.\n"]
            if len(lines) < len(POPULAR)
            else []
        ),
        f"`{popular_summary(lines, 'units')}`{mark('benchmarks/families_popular_units.jsonl')}\n",
        f"Every width by new units: {named['units'] or 'none'}.\n",
        f"Some widths by new units, others by copies: {named['mixed'] or 'none'}.\n",
        *([f"By copies alone: {named['copies']}.\n"] if named["copies"] else []),
        *([f"The loss moves when it wakes: {named['jumps']}.\n"] if named["jumps"] else []),
        *(["Refused by new units:\n", *reasons] if reasons else []),
    ]


def tried_by_copies(line: dict[str, Any]) -> str:
    """What was tried by copies of a type that is refused by units."""
    return ", ".join(f"`-k {words} --by copies` is exact" for words in line["tried"]) or "nor by copies"


def shorter(why: str) -> str:
    """The beginning of a reason, cut between words."""
    return why if len(why) <= 200 else why[:200].rpartition(" ")[0] + " …"


def families() -> str:
    knobs = [f"- **{knob}**: {', '.join(fields)}" for knob, fields in USUAL.items()]
    cases = [
        (case, reason) for case in INEXACT for _, reason in [*row_for(case.model_type).refused.values()][:1]
    ]
    refused = [f"- **{case.name}**: {reason}." for case, reason in cases]
    found = json.loads(DATA.read_text(encoding="utf-8"))
    drawn, here = in_draw(found), mark("benchmarks/families_wide.json")
    causes = Counter(entry["code"] for entry in drawn.values() if entry["verdict"] == "refused")
    earlier = Counter(str(entry["verdict"]) for name, entry in found.items() if name not in drawn)
    exact = sorted(name for name, entry in found.items() if entry["verdict"] == "exact")
    net = [
        "\n## Other model types, drawn\n",
        "`python benchmarks/families_wide.py` draws model types of transformers by a stored seed, and takes them at their default",
        "configuration. It shrinks each one, searches for a plan, proves it with five AdamW steps, and loads the grown copy again in",
        "the stock class. Types that transformers alone does not build do not count.\n",
        f"`{wide_summary(found)}`{here}\n",
        "| refused because | types |\n|---|---|",
        *(f"| `{cause}` | {count} |" for cause, count in causes.most_common()),
        f"\nBefore the draw, {sum(earlier.values())} other types were tried, most of them well known and chosen: "
        f"{', '.join(f'{verdict} {count}' for verdict, count in sorted(earlier.items()))}{here}. The search was improved while",
        "they were. All reasons are listed in `benchmarks/families_wide.md`.\n",
        f"Exact: {', '.join(exact) or 'none'}.",
    ]
    return (
        "\n".join(
            [
                FAMILIES,
                *map(measured, EXACT),
                USUALLY,
                *knobs,
                "\n## Refused model types\n",
                *refused,
                *much_used(),
                *much_used_by_units(),
                *net,
            ]
        )
        + "\n"
    )


RESULTS = HERE / "benchmarks.json"
BENCHMARKS = """---
hide: [toc]
---

# Benchmarks

Every number in the README and on these pages is printed by a script in `benchmarks/`, or has a source. Each script prints its
figures and its control in its last line. Times and memory are ratios to something measured in the same run.

| exit status | meaning |
|---|---|
| 0 | every bound holds |
| 1 | a bound of the script fails |
| 2 | data are missing |

The table shows the last recorded line of each script, on two shared cores without a GPU. A line is stored with a key of the
code that it depends on. When that code has changed since, the line is marked as {EARLIER}; before a release
all of them are measured again.

| shown | when the claim is tested |
|---|---|
| push | with every change, in most cases shortened by `--quick` |
| nightly | once per day |
| release | before every release |
| by hand | when what it is about has changed |

The tests that are named show the same with every change, often with fewer steps or seeds. `covertype` and `real_models` need
data that are not on GitHub, so the workflows there leave them out. `python docs/generate.py --benchmarks NAME …` runs scripts
and records their lines.

| script | what it shows | bound | shown | last line |
|---|---|---|---|---|"""


def claim(script: Path) -> str:
    """The first line of a script's docstring, which says what it shows."""
    docstring = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0]


def unbroken(text: str) -> str:
    """The text with non-breaking hyphens, so that a browser does not break 1e-6 into two lines."""
    return text.replace("-", "\N{NON-BREAKING HYPHEN}")


def script_of(command: str) -> Path:
    """The file that says what a row shows: the program or the test that its command runs."""
    return HERE.parent / next(word for word in shlex.split(command) if word.endswith(".py"))


def benchmarks() -> str:
    rows = []
    for name, entry in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        tests = [f"<code>{test.replace('/', '/<wbr>')}</code>" for test in entry.get("tests", [])]
        shown = entry["shown"] + (f"<br>tests: {', '.join(tests)}" if tests else "")
        if "pytest" in entry["command"]:
            line = f"`{entry['command']}` passes"
        else:
            line = f"`{unbroken(entry['line'])}`"
        if "pytest" not in entry["command"] and "--" in entry["command"]:
            line += f"<br>with `{entry['command'].partition('.py ')[2]}`"
        if "missed" in entry:
            line += f"<br>**missed**: {entry['missed']}"
        if "line" in entry and not is_of(key_of(name), entry):
            line += f"<br>{EARLIER}"
        what = entry.get("claim") or claim(script_of(entry["command"]))
        rows.append(f"| `{name}` | {what} | {unbroken(entry['bound'])} | {shown} | {line} |")
    return "\n".join([BENCHMARKS.replace("{EARLIER}", EARLIER.strip("()")), *rows]) + "\n"


def record(names: list[str]) -> None:
    """Run benchmarks one after the other and record their last lines."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    unknown = [name for name in names if name not in results]
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(unknown)}; known: {', '.join(results)}")
    for name in names:
        key, command = key_of(name), shlex.split(results[name]["command"])
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{results[name]['command']}: exit status {done.returncode}\n{done.stdout}")
        results[name].pop("missed", None)
        line = done.stdout.split("\n")[-2]
        results[name] |= {"line": line, "date": str(datetime.date.today()), "key": key}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


MODELS = re.compile(r"(?<=<!-- models -->\n).*(?=<!-- end of models -->)", re.S)
"""What stands between two marks of the README."""


def readme() -> str:
    """The README with its table of real models as it is stored."""
    text = (HERE.parent / "README.md").read_text(encoding="utf-8")
    filled, marks = MODELS.subn(lambda _: f"{table()}\n", text)
    if marks != 1:
        raise SystemExit("README.md: expected one <!-- models --> and one <!-- end of models -->")
    return filled


FIGURE = re.compile(r"(<!-- (\w+): (\w+) -->)[^<]*(?=<!-- end -->)")
"""A figure in a text: the row of benchmarks.json and the word of its line that it is taken from."""


def with_figures(text: str) -> str:
    """A text with its figures as they are stored, to one decimal.

    >>> with_figures("at most <!-- proof_cost: losses -->9<!-- end --> losses")
    'at most <!-- proof_cost: losses -->2.0<!-- end --> losses'
    """
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))

    def stored(found: re.Match[str]) -> str:
        mark, row, word = found.groups()
        figures = dict(part.split("=", 1) for part in rows[row]["line"].split() if "=" in part)
        return f"{mark}{float(figures[word]):.1f}"

    return FIGURE.sub(stored, text)


def exactness() -> str:
    """The page about proofs with the figures of their cost."""
    return with_figures((HERE / "exactness.md").read_text(encoding="utf-8"))


def reference() -> str:
    """The reference of the API with the words of arguments at its end."""
    page, mark, _ = (HERE / "api.md").read_text(encoding="utf-8").partition("| word | meaning |\n|---|---|\n")
    words = json.loads((HERE / "argument_words.json").read_text(encoding="utf-8"))["words"]
    return page + mark + "".join(f"| `{word}` | {meaning} |\n" for word, meaning in words)


PAGES = {
    "../README.md": readme,
    "api.md": reference,
    "exactness.md": exactness,
    "optimizers.md": optimizers,
    "families.md": families,
    "benchmarks.md": benchmarks,
    "refusals.md": refusals,
    "frontier.md": frontier,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--benchmarks",
        nargs="+",
        default=[],
        metavar="NAME",
        help="run these scripts and record their last lines",
    )
    record(parser.parse_args().benchmarks)
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
