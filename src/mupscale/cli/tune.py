"""`mupscale tune`: the learning rate after growth, and by copies noise, tuned on a small pair and written as a recipe.

Calls `mu.tune` and prints what was found. Several processes share the work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from traceback import format_list
from typing import Any

from ..budgets.user_file import frames_from
from ..errors import MupscaleError
from ..extras import needs
from ..studies.command import Command
from ..studies.settings import Settings
from ..text import columns
from ..training.recipe import Recipe
from .printing.log_lines import log_lines


def run(chosen: argparse.Namespace, given: Mapping[str, Any], command: Command) -> int:
    shown = nullcontext() if chosen.quiet else log_lines(_say)
    extras = ("tune", "hf") if chosen.proxy.is_dir() else ("tune",)
    with needs("tuning", *extras), _failing(chosen.proxy), shown:
        from ..studies.agenda.outlook import described as planned
        from ..studies.proxy import read_proxy
        from ..studies.report.known import know
        from ..studies.report.report import verdicts_of
        from ..studies.tune import tune

        tokens, about = None, ""
        if chosen.proxy.is_dir():
            from ..studies.directory.study import directory_study

            study = directory_study(
                chosen.proxy,
                chosen.data,
                given,
                context=chosen.context,
                batch=chosen.batch,
                device=chosen.device,
            )
            proxy, settings, tokens = study.proxy, study.settings, study.tokens
            about = f"{chosen.proxy}: {study}\n"
        else:
            proxy, settings = read_proxy(chosen.proxy), Settings(**given)
        if chosen.dry_run or not chosen.quiet:
            _say(about + planned(settings.for_proxy(proxy), tokens) + "\n")
        if chosen.dry_run:
            chosen.found = {"recipe": None}
            _say("dry run: nothing was trained or written")
            return 0
        recipe = tune(
            proxy,
            settings,
            storage=chosen.storage,
            study=chosen.study,
            folder=chosen.folder,
            every=chosen.every,
            beat=chosen.beat,
        )
        if chosen.storage is None:
            command.save(chosen.folder)
        known = know(chosen.folder, chosen.storage, chosen.study)
        for verdict in verdicts_of([known], chosen.storage):
            print(f"\n{verdict}")
    chosen.found = {"recipe": recipe.as_json()}
    use = command.applied(chosen.folder, recipe.k)
    print("\n" + described(recipe, chosen.folder / "recipe.json", use))
    if not chosen.no_report:
        print(_report(chosen))
    return 0


@contextmanager
def _failing(proxy: Path) -> Iterator[None]:
    """Report an exception of the user's file from its own line on; others propagate."""
    try:
        yield
    except MupscaleError:
        raise
    except Exception as error:
        frames = frames_from(proxy, error)
        if not frames:
            raise
        print("".join(format_list(frames)), end="", file=sys.stderr)
        failure = f"{proxy} failed in line {frames[0].lineno}: {type(error).__name__}: {error}"
        raise MupscaleError(
            f"{failure}; fix it and start a new study (--folder, --study)", code="proxy.file_failed"
        ) from error


def _report(chosen: argparse.Namespace) -> str:
    """Write the page. The recipe exists already, so an error here is only a note."""
    from ..studies.report.report import write_report

    try:
        path = write_report(chosen.folder, storage=chosen.storage, study=chosen.study)
    except (MupscaleError, OSError) as error:
        return f"note: no report: {error}"
    return f"report: {path}"


def _say(line: str) -> None:
    print(line, flush=True)


def described(recipe: Recipe, path: Path, use: str) -> str:
    """The recipe as text, with the points that were tried, best first, and how it is applied."""
    units = recipe.by == "units"
    rows = [("" if units else "noise", "lr", "loss", "steps")]
    wide = [row for row in recipe.tried if row["sweep"] == "wide"]
    for row in sorted(wide, key=lambda r: (-r["steps"], inf if r["loss"] is None else r["loss"]))[:10]:
        loss = "diverged" if row["diverged"] else f"{row['loss']:.6g}"
        grown = ("new units" if row["noise"] else "the base") if units else f"{row['noise']:g}"
        rows.append((grown, f"{row['lr']:g}", loss, str(row["steps"])))
    parts = [
        columns(rows, right=(0, 1, 2, 3)),
        f"learning rate of bases: {recipe.base_lr:g}, after growth: {recipe.lr:g}",
    ]
    if recipe.control is not None and recipe.loss is not None:
        instead = "the base, trained on," if recipe.by == "units" else "continued without noise"
        parts.append(f"loss {recipe.loss:.6g}; {instead} {recipe.control:.6g}")
    parts += [f"note: {remark}" for remark in recipe.remarks]
    parts.append(f"written to {path}; apply it: {use}")
    return "\n".join(parts)
