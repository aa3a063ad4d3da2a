"""Fill the marked parts of pages from data: `python docs/generate.py`.

A page is Markdown. What stands between `<!-- NAME -->` and `<!-- end of NAME -->` is made here: optimizers and families come
from the registries, benchmarks from docs/benchmarks.json, refusals from the calls that make them, the README's table of real
models from benchmarks/public_models_found.json. A test compares the pages with the data.
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
from harness.frontier_advice import larger  # noqa: E402
from harness.frontier_advice import table as known_of  # noqa: E402
from harness.popular import POPULAR, STORED_UNITS  # noqa: E402
from harness.popular import stored as popular_lines  # noqa: E402
from harness.popular import summary as popular_summary  # noqa: E402
from mupscale.budgets.law import stored as stored_law  # noqa: E402
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
from reproduce.growth.questions.probe import stored as probes  # noqa: E402

OPTIMIZERS = [
    "| optimizer | learning rate | weight decay | other settings | state |",
    "|---|---|---|---|---|",
]
MODELS = ["| model | type | class | what the registry adds |", "|---|---|---|---|"]
SCRIPTS = ["| script | what it shows | bound | shown | last line |", "|---|---|---|---|---|"]
RESULTS = HERE / "benchmarks.json"


def filled(name: str, **parts: str) -> str:
    """A page with its marked parts as they are made; a part that the page lacks, or that nothing makes, is a fault."""
    text = (HERE / name).read_text(encoding="utf-8")
    marked = re.findall(r"^<!-- end of (\w+) -->$", text, re.M)
    if sorted(marked) != sorted(parts):
        raise SystemExit(f"{name} marks {sorted(marked)}, expected {sorted(parts)}")
    for part, made in parts.items():
        between = re.compile(rf"(?<=<!-- {part} -->\n).*?(?=<!-- end of {part} -->)", re.S)
        text = between.sub(lambda _, made=made: f"\n{made}\n\n", text)
    return text


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
    """The page about optimizers."""
    own = [
        line for name, rule in TORCH.items() if name.startswith("torch.optim.") for line in rows(name, rule)
    ]
    reasons: dict[str, list[str]] = {}
    for name, reason in REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    refused = [f"- **{', '.join(names)}**: {reason}." for reason, names in reasons.items()]
    return filled(
        "optimizers.md",
        torch="\n".join([*OPTIMIZERS, *own]),
        packages=f"{_packages()}\n\nErrors of `docs/optimizers.json`{mark('docs/optimizers.json')}.",
        versions=_muons(),
        refused="\n".join(refused),
    )


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


def much_used() -> str:
    """The much-used types by verdict, with the reason for what does not grow in all its widths."""
    lines = list(popular_lines().values())
    by = {
        verdict: [x for x in lines if x["verdict"] == verdict] for verdict in ("exact", "ffn_only", "refused")
    }
    reasons = [
        f"- **{x['name']}**{' (`-k ffn=2` is exact)' if x['verdict'] == 'ffn_only' else ''}: {shorter(x['why'])}"
        for x in (*by["ffn_only"], *by["refused"])
    ]
    return "\n".join(
        [
            f"`{popular_summary(lines)}`{mark('benchmarks/families_popular.jsonl')}\n",
            f"Exact: {', '.join(x['name'] for x in by['exact'])}.\n",
            f"Each tower alone is exact too: {', '.join(x['name'] for x in lines if 'towers' in x)}.\n",
            "Not in all widths:\n",
            *reasons,
        ]
    )


def much_used_by_units() -> str:
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
    return "\n".join(
        [
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
    )


def tried_by_copies(line: dict[str, Any]) -> str:
    """What was tried by copies of a type that is refused by units."""
    return ", ".join(f"`-k {words} --by copies` is exact" for words in line["tried"]) or "nor by copies"


def shorter(why: str) -> str:
    """The beginning of a reason, cut between words."""
    return why if len(why) <= 200 else why[:200].rpartition(" ")[0] + " …"


def drawn() -> str:
    """The types that were drawn, by verdict."""
    found = json.loads(DATA.read_text(encoding="utf-8"))
    inside, here = in_draw(found), mark("benchmarks/families_wide.json")
    causes = Counter(entry["code"] for entry in inside.values() if entry["verdict"] == "refused")
    earlier = Counter(str(entry["verdict"]) for name, entry in found.items() if name not in inside)
    exact = sorted(name for name, entry in found.items() if entry["verdict"] == "exact")
    return "\n".join(
        [
            f"`{wide_summary(found)}`{here}\n",
            "| refused because | types |\n|---|---|",
            *(f"| `{cause}` | {count} |" for cause, count in causes.most_common()),
            f"\nBefore the draw: {', '.join(f'{verdict} {count}' for verdict, count in sorted(earlier.items()))}{here}.\n",
            f"Exact: {', '.join(exact) or 'none'}.",
        ]
    )


def families() -> str:
    """The page about model types."""
    cases = [
        (case, reason) for case in INEXACT for _, reason in [*row_for(case.model_type).refused.values()][:1]
    ]
    return filled(
        "families.md",
        measured="\n".join([*MODELS, *map(measured, EXACT)]),
        sizes="\n".join(f"- **{knob}**: {', '.join(fields)}" for knob, fields in USUAL.items()),
        refused="\n".join(f"- **{case.name}**: {reason}." for case, reason in cases),
        popular=much_used(),
        units=much_used_by_units(),
        drawn=drawn(),
    )


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
    """The page about benchmarks."""
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
    return filled("benchmarks.md", scripts="\n".join([*SCRIPTS, *rows]))


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


def readme() -> str:
    """The README with its table of real models as it is stored."""
    return filled("../README.md", models=table())


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


def cost() -> str:
    """The page about costs with what the advice is made of, how often it is right, and how well a probe ranks."""
    row = json.loads(RESULTS.read_text(encoding="utf-8"))["advise"]
    law = stored_law()
    told = {
        "known": known_of(law),
        "larger": larger(HERE.parent / "reproduce" / "results", law),
        "judged": f"`{row['line']}`",
        "probes": probes(),
    }
    return filled("cost.md", **told)


def refused() -> str:
    """The page of refusals."""
    return filled("refusals.md", codes=refusals())


PAGES = {
    "../README.md": readme,
    "cost.md": cost,
    "exactness.md": exactness,
    "optimizers.md": optimizers,
    "families.md": families,
    "benchmarks.md": benchmarks,
    "refusals.md": refused,
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
