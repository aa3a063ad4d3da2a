"""Figures and tables of docs/reproduction.md, from the stored results. Missing runs are listed as missing.

The text of the page is written by hand. The parts between `<!-- begin NAME -->` and `<!-- end NAME -->` are generated here.

    python -m reproduce.page
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mupscale.budgets.cost import ACCOUNTS

from .books import BARS, Books, Range, books, cell, curves_of
from .data import CACHE, ROOT
from .figures_runs import draw_curves, draw_ledger, draw_sweep
from .peers import METHODS, best_noise
from .stages import SWEEP_POINTS, Experiment
from .store import RESULTS

PAGE = ROOT / "docs" / "reproduction.md"
FIGURES = ROOT / "docs" / "figures"
LABELS = {"base": "base", **{name: method.label for name, method in METHODS.items()}}
PANELS = {"loss": "training loss", "held_out": "held-out loss", "accuracy": "held-out accuracy"}


def experiments() -> Iterator[Experiment]:
    """Every experiment at the scale of the page."""
    from .gpt2 import scales as gpt2_scales
    from .gpt2 import setting as gpt2
    from .mlp import scales as mlp_scales
    from .mlp import setting as mlp
    from .resnet import scales as resnet_scales
    from .resnet import setting as resnet

    for name, scales, of in (
        ("mlp", mlp_scales.SCALES, mlp.of),
        ("resnet", resnet_scales.SCALES, resnet.of),
        ("gpt2", gpt2_scales.SCALES, gpt2.of),
    ):
        for variant, scale in scales["here"].items():
            yield Experiment(name, of(scale, variant), scale, RESULTS / name, CACHE / "reproduce" / name)


def write_figures(chosen: Iterable[Experiment], folder: Path) -> list[Path]:
    """Draw the figures for which results are stored; return the files that were written."""
    written = []
    for experiment in chosen:
        name = experiment.setting.name
        written += [*_draw_curves(experiment, folder), *_draw_sweep(experiment, folder)]
        known = books(experiment)
        if known is not None:
            rows = {LABELS[method]: entry.speedups for method, entry in known.entries.items()}
            rows["ours, whole grid"] = known.grid.speedups
            path = folder / f"reproduce_{name}_ledger.png"
            draw_ledger(f"{name}: FLOPs to the final loss of the run from scratch", rows, ACCOUNTS, path)
            written.append(path)
    return written


def _draw_curves(experiment: Experiment, folder: Path) -> Iterator[Path]:
    name = experiment.setting.name
    for file, methods, along in (
        ("curves", ["base", "scratch", "ours"], "share of the steps"),
        ("peers", ["scratch", *experiment.methods()], "share of the FLOPs of the run from scratch"),
    ):
        found = {m: [curve for _, curve in curves_of(experiment, m)] for m in methods}
        found = {m: curves for m, curves in found.items() if curves}
        if len(found) < 2 or (file == "peers" and len(found) < 3):
            continue
        keys = [key for key in PANELS if key in next(iter(found.values()))[0]]
        panels = {PANELS[key]: {m: [c[key] for c in curves] for m, curves in found.items()} for key in keys}
        path = folder / f"reproduce_{name}_{file}.png"
        draw_curves(name, panels, LABELS, along, path)
        yield path


def _draw_sweep(experiment: Experiment, folder: Path) -> Iterator[Path]:
    recipe = experiment.known_recipe()
    kept = experiment.store.known(experiment.sweep_key("main"))
    if recipe is not None and kept is not None:
        path = folder / f"reproduce_{experiment.setting.name}_sweep.png"
        best, every = (recipe.lr, best_noise(recipe)), max(1, recipe.wide_steps // SWEEP_POINTS)
        draw_sweep(f"{experiment.setting.name}: sweep 2", recipe.tried, best, kept["curves"], every, path)
        yield path


def section(experiment: Experiment, known: Books | None, figures: Path) -> str:
    """The generated part of the page about one experiment: pictures and a table of the methods."""
    if known is None:
        return "No results yet."
    return "\n".join(
        [
            *_pictures(experiment.setting.name, figures),
            *_refused(experiment),
            *_table(experiment, known),
        ]
    )


def _refused(experiment: Experiment) -> Iterator[str]:
    """Methods that cannot be applied, by reason."""
    refused = experiment.refused()
    for why in dict.fromkeys(refused.values()):
        names = ", ".join(LABELS[name] for name in refused if refused[name] == why)
        yield from (f"Cannot be applied: {names}, because {why}.", "")


def _pictures(name: str, figures: Path) -> Iterator[str]:
    for file, text in (
        ("curves", "losses of base, run from scratch and ours"),
        ("sweep", "sweep 2"),
        ("peers", "loss against FLOPs, by method"),
        ("ledger", "speedups by method"),
    ):
        if (figures / f"reproduce_{name}_{file}.png").is_file():
            yield from (f"![{name}: {text}](figures/reproduce_{name}_{file}.png)", "")


def _table(experiment: Experiment, known: Books) -> Iterator[str]:
    """Every method: how many of its planned runs have been made, where it ends, and its speedup without tuning."""
    keys, accounts = list(next(iter(known.finals.values()))), ACCOUNTS[:2]
    yield "| | runs | " + " | ".join([*(PANELS[key] for key in keys), *accounts]) + " |"
    yield "|---" * (2 + len(keys) + len(accounts)) + "|"
    for name in ("base", "scratch", *experiment.methods()):
        planned = sum(job.method == name for job in experiment.jobs())
        values, entry = known.finals.get(name), known.entries.get(name)
        ends = [_span(values[key]) if values else "" for key in keys]
        ends += [cell(entry, account) if entry is not None and entry.speedups else "" for account in accounts]
        yield f"| {LABELS[name]} | {len(curves_of(experiment, name))}/{planned} | " + " | ".join(ends) + " |"


def _span(values: Range) -> str:
    mean, low, high = values
    if mean != mean:
        return "diverged"
    return f"{mean:.4g}" if low == high else f"{mean:.4g} ({low:.4g}–{high:.4g})"


def filled(text: str, parts: dict[str, str]) -> str:
    """A page with its generated parts replaced.

    >>> filled("a\\n<!-- begin x -->\\nold\\n<!-- end x -->\\nb", {"x": "new"})
    'a\\n<!-- begin x -->\\n\\nnew\\n\\n<!-- end x -->\\nb'
    """
    for name, part in parts.items():
        mark = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.S)
        if not mark.search(text):
            raise ValueError(f"the page has no place for {name}: <!-- begin {name} --> … <!-- end {name} -->")
        text = mark.sub(lambda found, part=part: f"{found[1]}\n{part.rstrip()}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


def summary(found: Sequence[tuple[Experiment, Books | None]]) -> str:
    """The table with the speedups of ours in all experiments."""
    lines = [
        "| | " + " | ".join(ACCOUNTS) + " | both charged, whole grid |",
        "|---" * (2 + len(ACCOUNTS)) + "|",
    ]
    for experiment, known in found:
        cells = ["missing"] * (1 + len(ACCOUNTS))
        if known is not None:
            cells = [cell(known.entries["ours"], account) for account in ACCOUNTS]
            cells.append(cell(known.grid, "both charged"))
        lines.append(f"| {experiment.setting.name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tuned(found: Sequence[tuple[Experiment, Books | None]]) -> str:
    """The table with what tuning found in all experiments, and from which n/n0 on it pays."""
    lines = [
        "| | hours | from scratch ends at | its last tenth | sweep 1: rate | sweep 2: rate | noise | ours lower | "
        + " | ".join(f"n/n0 for {bar:g}" for bar in BARS)
        + " |",
        "|---" * (8 + len(BARS)) + "|",
    ]
    remarks: dict[str, list[str]] = {}
    for experiment, known in found:
        recipe = experiment.known_recipe()
        if known is None or recipe is None:
            continue
        for remark in recipe.remarks or ():
            remarks.setdefault(remark, []).append(experiment.setting.name)
        pays = ("never" if ratio is None else f"{ratio:.1f}" for ratio in known.pays.values())
        tried = (
            f"{recipe.base_lr:.4g}",
            f"{recipe.lr:.4g}",
            f"{best_noise(recipe):.3g}",
            "{}/{}".format(*known.below),
        )
        cells = (f"{known.hours:.1f}", f"{known.target:.4g}", f"-{100 * known.falling:.1f} %", *tried, *pays)
        lines.append(f"| {experiment.setting.name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {', '.join(names)}: {remark}." for remark, names in remarks.items())])


def write_page(page: Path = PAGE, figures: Path = FIGURES) -> None:
    """Replace the generated parts of the page by those of the stored results."""
    found = [(experiment, books(experiment)) for experiment in experiments()]
    parts = {experiment.setting.name: section(experiment, known, figures) for experiment, known in found}
    parts |= {"summary": summary(found), "tuned": tuned(found)}
    page.write_text(filled(page.read_text(encoding="utf-8"), parts), encoding="utf-8")


if __name__ == "__main__":
    write_figures(experiments(), FIGURES)
    write_page()
