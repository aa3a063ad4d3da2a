"""Figures and tables of docs/reproduction.md, from the stored results. Missing runs are listed as missing.

The text of the page is written by hand. The parts between `<!-- begin NAME -->` and `<!-- end NAME -->` are generated here.

    python -m reproduce.page
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mupscale.budgets.cost import ACCOUNTS

from .books import Books, Range, books, cell, curves_of
from .data import CACHE, ROOT
from .figures_runs import draw_curves, draw_ledger, draw_sweep
from .peers import METHODS, best_noise
from .stages import SWEEP_POINTS, Experiment
from .store import RESULTS

PAGE = ROOT / "docs" / "reproduction.md"
FIGURES = ROOT / "docs" / "figures"
LABELS = {"base": "base", **{name: method.label for name, method in METHODS.items()}}
NOT_RUN = "<!-- not run: hours of training; .ci/run runs it with --smoke -->"
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
    """The generated part of the page about one experiment."""
    setting, scale = experiment.setting, experiment.scale
    lines = [NOT_RUN, "```bash", f"python -m reproduce.{experiment.name}", "```", ""]
    if known is None:
        return "\n".join([*lines, "No results yet: the command has not been run to its end."])
    lines += [f"Time: {known.hours:.1f} hours (wall clock, one shared core, tuning included).", ""]
    lines += [
        *_missing(experiment),
        *_pictures(setting.name, figures),
        *_finals(known),
        *_ledger(experiment, known),
    ]
    recipe = experiment.known_recipe()
    if recipe is not None:
        lines += [
            f"What tuning found, written at width {setting.reference}:",
            "",
            "| sweep 1: learning rate | sweep 2: learning rate after growth | sweep 2: noise |",
            "|---|---|---|",
            f"| {recipe.base_lr:.4g} | {recipe.lr:.4g} | {best_noise(recipe):.3g} |",
            "",
        ]
        lines += [*_sentences(recipe.remarks), ""] if recipe.remarks else []
    lines.append(
        "* Seeds on which ours ends below the run from scratch at equal steps: {} of {}".format(*known.below)
    )
    for bar, ratio in known.pays.items():
        what = "no n/n0" if ratio is None else f"{ratio:.1f}"
        lines.append(
            f"* Smallest n/n0 for a speedup of {bar:g} with base and tuning charged: {what} "
            f"(here {scale.base / scale.proxy:g})"
        )
    return "\n".join(lines)


def _sentences(remarks: Sequence[str]) -> list[str]:
    return [f"{remark[0].upper()}{remark[1:]}." for remark in remarks]


def _missing(experiment: Experiment) -> list[str]:
    """Methods that cannot be applied, and a table of the runs that have not been made."""
    lines = [f"* {LABELS[name]} cannot be applied: {why}" for name, why in experiment.refused().items()]
    lines += [""] if lines else []
    rows = []
    for name in ("base", "scratch", *experiment.methods()):
        planned = sum(job.method == name for job in experiment.jobs())
        done = len(curves_of(experiment, name))
        if done < planned:
            rows.append(f"| {LABELS[name]} | {done} | {planned} |")
    if rows:
        lines += [
            "Incomplete methods:",
            "",
            "| method | runs done | runs planned |",
            "|---|---|---|",
            *rows,
            "",
        ]
    return lines


def _pictures(name: str, figures: Path) -> list[str]:
    lines = []
    for file, text in (
        (
            "curves",
            "training and held-out curves of the base, the run from scratch and ours, with the range of the seeds",
        ),
        ("sweep", "sweep 2: learning rate and noise, and the curves at the best rate"),
        ("peers", "loss of every method against the FLOPs of the run from scratch"),
        ("ledger", "speedup of every method on four accounts"),
    ):
        if (figures / f"reproduce_{name}_{file}.png").is_file():
            lines += [f"![{name}: {text}](figures/reproduce_{name}_{file}.png)", ""]
    return lines


def _finals(known: Books) -> list[str]:
    keys = list(next(iter(known.finals.values())))
    lines = [
        "| final values | " + " | ".join(PANELS[key] for key in keys) + " |",
        "|---" * (1 + len(keys)) + "|",
    ]
    lines += [
        f"| {LABELS[name]} | " + " | ".join(_span(values[key]) for key in keys) + " |"
        for name, values in known.finals.items()
    ]
    return [*lines, ""]


def _ledger(experiment: Experiment, known: Books) -> list[str]:
    peers = [len(curves_of(experiment, name)) for name in experiment.methods() if name != "ours"]
    seeds = f"ours {known.below[1]}" + (f", peers up to {max(peers)}" if any(peers) else "")
    lines = [
        f"Speedup in FLOPs until the training loss reaches {known.target:.4g}, the final loss of the run from scratch. "
        f"Seeds: {seeds}. In its last tenth the run from scratch fell by {100 * known.falling:.1f} % of that loss.",
        "",
        "| | " + " | ".join(ACCOUNTS) + " |",
        "|---" * (1 + len(ACCOUNTS)) + "|",
    ]
    rows = {
        **{LABELS[name]: entry for name, entry in known.entries.items()},
        "ours, whole grid charged": known.grid,
    }
    lines += [
        f"| {name} | " + " | ".join(cell(entry, a) for a in ACCOUNTS) + " |" for name, entry in rows.items()
    ]
    return [*lines, ""]


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


def write_page(page: Path = PAGE, figures: Path = FIGURES) -> None:
    """Replace the generated parts of the page by those of the stored results."""
    found = [(experiment, books(experiment)) for experiment in experiments()]
    parts = {experiment.setting.name: section(experiment, known, figures) for experiment, known in found}
    page.write_text(
        filled(page.read_text(encoding="utf-8"), {**parts, "summary": summary(found)}), encoding="utf-8"
    )


if __name__ == "__main__":
    write_figures(experiments(), FIGURES)
    write_page()
