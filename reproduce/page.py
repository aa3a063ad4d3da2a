"""Figures and tables of docs/reproduction.md, from the stored results. What is missing is said to be missing.

The text of the page is written by hand; what stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is made here.

    python -m reproduce.page
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from mupscale.tuning.cost import ACCOUNTS

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
    """Draw what the stored results allow; the files that were written."""
    written = []
    for experiment in chosen:
        name = experiment.setting.name
        written += [*_draw_curves(experiment, folder), *_draw_sweep(experiment, folder)]
        known = books(experiment)
        if known is not None:
            rows = {LABELS[method]: told.speedups for method, told in known.entries.items()}
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
    """What the page says about one experiment."""
    setting, scale = experiment.setting, experiment.scale
    lines = [NOT_RUN, "```bash", f"python -m reproduce.{experiment.name}", "```", ""]
    if known is None:
        return "\n".join([*lines, "The results are missing: the command has not been run to its end."])
    lines += [f"{known.hours:.1f} hours by the clock on one shared core, tuning included.", ""]
    lines += [
        *_missing(experiment),
        *_pictures(setting.name, figures),
        *_finals(known),
        *_ledger(experiment, known),
    ]
    recipe = experiment.known_recipe()
    if recipe is not None:
        lines += [
            f"Sweep 1 found the learning rate {recipe.base_lr:.4g}; sweep 2 {recipe.lr:.4g} after growth with noise "
            f"{best_noise(recipe):.3g}, all at width {setting.reference}. {' '.join(_sentences(recipe.remarks))}".strip(),
            "",
        ]
    lines.append(
        "* At equal steps ours ends below the run from scratch on {} of {} seeds".format(*known.below)
    )
    for bar, ratio in known.pays.items():
        what = "at no n/n0" if ratio is None else f"from n/n0 = {ratio:.1f}"
        lines.append(
            f"* {bar:g} times cheaper with base and tuning charged: {what} (here {scale.base / scale.proxy:g})"
        )
    return "\n".join(lines)


def _sentences(remarks: Sequence[str]) -> list[str]:
    return [f"{remark[0].upper()}{remark[1:]}." for remark in remarks]


def _missing(experiment: Experiment) -> list[str]:
    told = [f"* {LABELS[name]}: cannot be applied, {why}" for name, why in experiment.refused().items()]
    for name in ("base", "scratch", *experiment.methods()):
        wanted = [job for job in experiment.jobs() if job.method == name]
        there = len(curves_of(experiment, name))
        if there < len(wanted):
            told.append(f"* {LABELS[name]}: {there} of {len(wanted)} runs are there")
    return [*told, ""] if told else []


def _pictures(name: str, figures: Path) -> list[str]:
    lines = []
    for file, text in (
        (
            "curves",
            "loss and held-out figures of base, run from scratch and ours, with the range of the seeds",
        ),
        ("sweep", "sweep 2: learning rate and noise, and the curves at the best rate"),
        ("peers", "every method against the FLOPs of the run from scratch"),
        ("ledger", "speedups on four accounts"),
    ):
        if (figures / f"reproduce_{name}_{file}.png").is_file():
            lines += [f"![{name}: {text}](figures/reproduce_{name}_{file}.png)", ""]
    return lines


def _finals(known: Books) -> list[str]:
    keys = list(next(iter(known.finals.values())))
    lines = [
        "| at the end | " + " | ".join(PANELS[key] for key in keys) + " |",
        "|---" * (1 + len(keys)) + "|",
    ]
    lines += [
        f"| {LABELS[name]} | " + " | ".join(_span(told[key]) for key in keys) + " |"
        for name, told in known.finals.items()
    ]
    return [*lines, ""]


def _ledger(experiment: Experiment, known: Books) -> list[str]:
    peers = [len(curves_of(experiment, name)) for name in experiment.methods() if name != "ours"]
    seeds = f"ours: {_count(known.below[1])}" + (f", peers: up to {_count(max(peers))}" if any(peers) else "")
    lines = [
        f"FLOPs until the training loss is that of the run from scratch at its end, {known.target:.4g}, as a speedup "
        f"({seeds}; the last tenth of the run from scratch took off {100 * known.falling:.1f} %):",
        "",
        "| | " + " | ".join(ACCOUNTS) + " |",
        "|---" * (1 + len(ACCOUNTS)) + "|",
    ]
    rows = {
        **{LABELS[name]: told for name, told in known.entries.items()},
        "ours, whole grid charged": known.grid,
    }
    lines += [
        f"| {name} | " + " | ".join(cell(told, a) for a in ACCOUNTS) + " |" for name, told in rows.items()
    ]
    return [*lines, ""]


def _count(seeds: int) -> str:
    return f"{seeds} seed{'s' if seeds > 1 else ''}"


def _span(told: Range) -> str:
    mean, low, high = told
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
    """The table of speedups of ours in all experiments."""
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
    """Put the tables of what is stored into the page."""
    found = [(experiment, books(experiment)) for experiment in experiments()]
    parts = {experiment.setting.name: section(experiment, known, figures) for experiment, known in found}
    page.write_text(
        filled(page.read_text(encoding="utf-8"), {**parts, "summary": summary(found)}), encoding="utf-8"
    )


if __name__ == "__main__":
    write_figures(experiments(), FIGURES)
    write_page()
