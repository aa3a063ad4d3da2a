"""Write the pages that are printed from data: `python docs/generate.py`.

Optimizers and families come from the registries, benchmarks from docs/benchmarks.json, the source layout from the
docstrings of the package. A test compares pages and data, so they cannot disagree. `python docs/generate.py --benchmarks covertype limits` runs those scripts and keeps their last
lines; a script that fails keeps nothing.
"""

import argparse
import ast
import datetime
import json
import shlex
import subprocess
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from benchmarks.families_wide import DATA  # noqa: E402
from docs.layout import layout  # noqa: E402
from harness.family_configs import EXACT, INEXACT, Case  # noqa: E402
from mupscale.families.rows import USUAL, Row, row_for  # noqa: E402
from mupscale.rules.optimizers import REFUSED, RULES, Decay, OptimizerRule  # noqa: E402
from mupscale.rules.units import NEUTRAL, G, Units, W  # noqa: E402

HEAD = """# Which optimizers

Widening multiplies a tensor's weights by s and its gradients by r, with s r c = 1. A quantity with units W^a G^b is
multiplied by s^a r^b. This page is printed from the registry.

| optimizer | learning rate | weight decay | other settings | state |
|---|---|---|---|---|"""

TAIL = """
A setting or state that is not listed has no units and is copied; one that the registry does not know is refused.
*filled* is the share of a tensor that is not zero padding.

## A third-party optimizer

State its units and prove them on real steps:

```python
import torch
import mupscale as mu

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])

mu.rules.register_optimizer(SignSGD, mu.rules.OptimizerRule(lr=mu.rules.W, decay=mu.rules.Decay.DECOUPLED))
print(mu.rules.check_optimizer(lambda params: SignSGD(params, lr=0.1, weight_decay=0.5)))
```

A wrong row is caught:

```python
mu.rules.register_optimizer(SignSGD, mu.rules.OptimizerRule(lr=mu.rules.W / mu.rules.G, decay=mu.rules.Decay.DECOUPLED))
try:
    mu.rules.check_optimizer(lambda params: SignSGD(params, lr=0.1, weight_decay=0.5))
except mu.MupscaleError as error:
    print(error)
else:
    raise SystemExit("the wrong units were not caught")
```

## Refused
"""


def spell(units: Units | tuple[Units, ...]) -> str:
    return f"({', '.join(map(str, units))})" if isinstance(units, tuple) else str(units)


def decay(rule: OptimizerRule) -> str:
    if rule.decay is None:
        return "none"
    words = {
        Decay.COUPLED: f"coupled: {G / W}",
        Decay.DECOUPLED: "decoupled: 1/lr",
        Decay.INDEPENDENT: "independent: 1",
    }
    kinds = [words[rule.decay]]
    if rule.decoupled_flag and rule.decay is not Decay.DECOUPLED:
        kinds.append(words[Decay.DECOUPLED])
    return ", or ".join(kinds)


def row(name: str, rule: OptimizerRule) -> str:
    settings = ", ".join(f"{key}: {spell(units)}" for key, units in rule.hyper.items()) or "none"
    states = ", ".join(f"{key}: {s.units}" for key, s in rule.state.items() if s.units != NEUTRAL) or "none"
    lr = str(rule.lr) + (", over the change of its own shape factor" if rule.shape_factor else "")
    return f"| {name.removeprefix('torch.optim.')} | {lr} | {decay(rule)} | {settings} | {states} |"


def optimizers() -> str:
    rows = [row(name, rule) for name, rule in RULES.items() if name.startswith("torch.optim.")]
    refused = [f"- **{name.rstrip('.')}**: {reason}." for name, reason in REFUSED.items()]
    return "\n".join([HEAD, *rows, TAIL, *refused]) + "\n"


FAMILIES = """# Which models

A plan for a Hugging Face checkpoint is found on a small copy of its own configuration and proved there before any work
starts: the gradient identity on every tensor, five AdamW steps with state carried over, in float64. So a type need not
be listed to be grown, and being listed does not exempt it from the proof. The registry holds only what two
configurations and the search cannot tell.

This page is printed from the registry and from the configurations of `benchmarks/families.py`.

## Measured at 2 and 3 times the width

| model | type | class | what the registry adds |
|---|---|---|---|"""

USUALLY = """
Where nothing is added, all is inferred: which axes grow, what sums over them, heads and groups, fused projections, tied
readouts (1/k goes into the last norm), embeddings that the model multiplies by a root of its width, (1 + w) gains.

## Widths

`-k 2` multiplies all of them, `-k hidden=2,ffn=4` one by one. The usual fields of each:
"""


def special(entry: Row) -> str:
    """What a row says, in a few words."""
    said = []
    if entry.grows is not None:
        said.append("grows " + ", ".join(f for fields in entry.grows.values() for f in fields))
    if entry.layouts:
        said.append("layouts of " + ", ".join(f"`{p}`" for p in entry.layouts))
    said += [f"`{p}` absorbs {f}" for p, f in entry.folds.items()]
    said += [f"{name} x {f}" for name, f in entry.config.items()]
    if entry.head_size_grows:
        said.append("head size grows, heads stay")
    return "; ".join(said) or "nothing"


def measured(case: Case) -> str:
    return f"| {case.name} | {case.model_type} | {case.architecture} | {special(row_for(case.model_type))} |"


def families() -> str:
    knobs = [f"- **{knob}**: {', '.join(fields)}" for knob, fields in USUAL.items()]
    cases = [
        (case, reason) for case in INEXACT for reason in [*row_for(case.model_type).refused.values()][:1]
    ]
    refused = [f"- **{case.name}**: {reason}." for case, reason in cases]
    found = json.loads(DATA.read_text(encoding="utf-8"))
    counts = Counter(str(entry["verdict"]) for entry in found.values())
    exact = sorted(name for name, entry in found.items() if entry["verdict"] == "exact")
    told = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
    net = [
        "\n## The wide net\n",
        "`python benchmarks/families.py --wide` takes model types of transformers at their default configuration: shrunk,",
        "searched, proved with five AdamW steps. Most types so far are well-known ones that were chosen, some came in random",
        f"order, and the search was improved while it ran, so this is no held-out rate. {len(found)} types: {told}.",
        f"Accepted plans that failed their proof: {counts['BROKEN']}. Reasons stand in `benchmarks/families_wide.md`. Exact there:",
        f"{', '.join(exact) or 'none'}.",
    ]
    return (
        "\n".join([FAMILIES, *map(measured, EXACT), USUALLY, *knobs, "\n## Refused\n", *refused, *net]) + "\n"
    )


RESULTS = HERE / "benchmarks.json"
BENCHMARKS = """---
hide: [toc]
---

# Benchmarks

What the README and these pages say in numbers is printed by a script of the repository's `benchmarks/`, or names its source. Each prints its figures as its last
line, the control beside them, and exits with 1 when its own bound fails, with 2 when data are missing. Times and memory
are ratios against something measured in the same run.

The lines below are the last that were recorded, on two shared cores without a GPU. **CI** marks what runs with every
change, most of it shortened by `--quick`; **tests** names the tests that show the same with every change, often with fewer
steps or seeds, and **nightly** what runs once a day; the rest is run by hand. `covertype` and `real_models` need data that are not on
GitHub, so the workflow there leaves them out. `python docs/generate.py --benchmarks NAME …` runs scripts and records their lines.

| script | what it shows | bound | last line |
|---|---|---|---|"""


def claim(script: Path) -> str:
    """The first sentence of a script's docstring, which says what it shows."""
    told = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    return told.partition("\n")[0]


def unbroken(text: str) -> str:
    """The same text with hyphens at which a browser does not break 1e-6 into two lines."""
    return text.replace("-", "\N{NON-BREAKING HYPHEN}")


def benchmarks() -> str:
    in_ci, workflow, nightly = (
        (HERE.parent / name).read_text(encoding="utf-8")
        for name in (".ci/run", ".github/workflows/ci.yml", ".github/workflows/nightly.yml")
    )
    rows = []
    for name, entry in json.loads(RESULTS.read_text(encoding="utf-8")).items():
        script = HERE.parent / "benchmarks" / f"{name}.py"
        call, tests = f"benchmarks/{name}.py", entry.get("tests", [])
        mark = "<br>**CI**" if call in in_ci + workflow else "<br>**nightly**" if call in nightly else ""
        mark += f"<br>**tests**: {', '.join(f'`{test}`' for test in tests)}" if tests else ""
        line = f"`{entry['line']}`" if entry["line"] else "not recorded yet"
        if entry["line"] and "--" in entry["command"]:
            line += f"<br>with `{entry['command'].partition('.py ')[2]}`"
        if "missed" in entry:
            line += f"<br>**missed**: {entry['missed']}"
        rows.append(f"| `{name}`{mark} | {claim(script)} | {unbroken(entry['bound'])} | {line} |")
    return "\n".join([BENCHMARKS, *rows]) + "\n"


def record(names: list[str]) -> None:
    """Run benchmarks, one after the other, and keep their last lines."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    unknown = [name for name in names if name not in results]
    if unknown:
        raise SystemExit(f"no such benchmark: {', '.join(unknown)}; known: {', '.join(results)}")
    for name in names:
        command = shlex.split(results[name]["command"])
        done = subprocess.run(
            [sys.executable, *command[1:]], cwd=HERE.parent, stdout=subprocess.PIPE, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{results[name]['command']}: exit status {done.returncode}\n{done.stdout}")
        results[name].pop("missed", None)
        results[name] |= {"line": done.stdout.split("\n")[-2], "date": str(datetime.date.today())}
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


PAGES = {
    "optimizers.md": optimizers,
    "families.md": families,
    "benchmarks.md": benchmarks,
    "layout.md": layout,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--benchmarks", nargs="+", default=[], metavar="NAME", help="run these and keep their lines"
    )
    record(parser.parse_args().benchmarks)
    for name, make in PAGES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
