"""What is known about a study, read from its storage and folder while it runs or after it is done.

Read only. Holds points, their losses at each comparison, their curves, and a summary of the work; knows nothing
about drawings and pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState

from ...errors import MupscaleError
from ...training.recipe import Recipe
from ..agenda.grid import Point
from ..agenda.halving import Agenda, Ladder
from ..agenda.status import EQUALITY, LegResult, Stay, base_agenda, stays, wide_agenda
from ..engine import again, open_storage
from ..ledger import FailedTrial, Failure, Trials
from ..settings import Settings, stored_settings


@dataclass(frozen=True)
class Tried:
    """A point with its loss at every rung that it reached.

    >>> tried = Tried(Point(0.1, 0.2), {10: 3.0, 20: 2.0}, goal=40)
    >>> tried.steps, tried.loss, tried.state
    (20, 2.0, 'stopped')
    """

    point: Point
    rungs: Mapping[int, float]
    """Loss by step; infinite when it diverged."""
    goal: int
    curve: tuple[tuple[int, float], ...] = ()

    @property
    def steps(self) -> int:
        return max(self.rungs, default=0)

    @property
    def loss(self) -> float | None:
        """At the last rung it reached; None before the first."""
        return self.rungs[self.steps] if self.rungs else None

    @property
    def state(self) -> str:
        """finished, stopped (before its end), diverged, or open (nothing known yet)."""
        if self.loss is None:
            return "open"
        if self.loss == inf:
            return "diverged"
        return "finished" if self.steps >= self.goal else "stopped"


@dataclass(frozen=True)
class Sweep:
    """One of the two sweeps, as far as it has run."""

    tried: tuple[Tried, ...]
    ladder: Ladder
    best: Point | None
    """What the sweep chose; None while it runs, or when every point diverged."""
    open: int
    on_edge: bool

    @property
    def leader(self) -> Tried | None:
        """The chosen point, or the one of least loss among those that are farthest."""
        chosen = [t for t in self.tried if t.point == self.best]
        alive = [t for t in self.tried if t.loss is not None and t.loss < inf]
        ranked = sorted(alive, key=lambda t: (-t.steps, t.loss, t.point.lr, t.point.noise or 0))
        return next(iter(chosen or ranked), None)

    @property
    def done(self) -> int:
        """Legs that count."""
        return sum(len(t.rungs) for t in self.tried)

    @property
    def expected(self) -> int:
        """Legs in all, as far as is known: what is there, what is open, and what halving leaves of it."""
        total = sum(self.ladder.on_rungs([t.point for t in self.tried]))
        return max(total, self.done + self.open) if self.open else self.done


@dataclass(frozen=True)
class Work:
    """Summary of the work: trials that count, and trials that do not."""

    trials: int
    counted: int
    running: int
    killed: int
    failed: int
    extra: int
    """Claims and results that came second and were left out."""
    resumed: int
    seconds: float
    began: datetime | None
    ended: datetime | None
    troubles: tuple[FailedTrial, ...]


@dataclass(frozen=True)
class Known:
    """A study at the time of reading."""

    folder: Path
    name: str
    settings: Settings
    base: Sweep
    wide: Sweep | None
    equality: LegResult | None
    """How far zero noise at the two widths differs, where it was measured."""
    stay: Mapping[Stay, LegResult | None]
    """The runs that do not grow, each with its result once it is done; known when the sweeps are done."""
    work: Work
    recipe: Recipe | None
    notes: tuple[str, ...]

    @property
    def done(self) -> bool:
        swept = self.wide is not None and self.wide.best is not None
        return swept and None not in self.stay.values()

    @property
    def unfinished(self) -> bool:
        """Whether the command that began it has more to do; not so where every run of a sweep diverged."""
        sweep = self.base if self.wide is None else self.wide
        return not self.done and (bool(self.stay) or bool(sweep.open) or sweep.best is not None)

    @property
    def status(self) -> str:
        """One line: done, or how much of which sweep is done."""
        if self.done:
            return "done"
        if self.stay:
            ended = sum(result is not None for result in self.stay.values())
            return f"unfinished: {ended} of {len(self.stay)} runs that do not grow"
        number, sweep = (1, self.base) if self.wide is None else (2, self.wide)
        if not self.unfinished:
            return f"ended: every run of sweep {number} diverged"
        return f"unfinished: sweep {number}, {sweep.done} of {sweep.expected} legs, as far as is known"


def know(folder: str | Path, storage: Any = None, study: str = "mupscale") -> Known:
    """Read a study from its folder, and from its storage where that is not the folder's journal."""
    place = Path(folder)
    journal = place / "study.journal" if storage is None else storage
    named = isinstance(journal, (str, Path)) and "://" not in str(journal)
    if named and not Path(journal).is_file():  # opening it would create it
        raise MupscaleError(
            f"{journal}: no such file; name the folder of a study, or its storage (--storage)",
            code="study.no_journal",
        )
    opened = open_storage(journal)
    number, settings = _begun(opened, study)
    stored = Trials(opened, number)
    trials = stored.trials()
    results = stored.results(trials)
    losses = {key: done.loss for key, done in results.items()}
    base = base_agenda(settings, losses)
    wide, stay = None, dict[Stay, LegResult | None]()
    if base.best is not None and (EQUALITY in results or not settings.control_at_base):
        agenda = wide_agenda(settings, base.best, losses)
        wide = _sweep(agenda, settings.wide_ladder, results)
        if agenda.best is not None:
            stay = {leg: results.get(leg.key) for leg in stays(settings, base, agenda)}
    first, equality = _sweep(base, settings.base_ladder, results), results.get(EQUALITY)
    work = _work(trials, results, stored.running(trials), stored.failed(trials))
    known = Known(place, study, settings, first, wide, equality, stay, work, None, ())
    recipe, notes = _recipe(known)
    return replace(known, recipe=recipe, notes=notes)


def _begun(storage: BaseStorage, study: str) -> tuple[int, Settings]:
    """The number of a study in its storage, and its settings."""
    try:
        number = again(lambda: storage.get_study_id_from_name(study))
        stored = again(lambda: storage.get_study_user_attrs(number))["settings"]
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in stored.items()}
        return number, Settings(**stored_settings(plain))
    except KeyError:
        names = sorted(found.study_name for found in again(storage.get_all_studies))
        there = ", ".join(map(repr, names[:9])) or "none"
        raise MupscaleError(
            f"there is no study {study!r} of mupscale here; studies in this storage: {there} (--study NAME)",
            code="study.unknown_name",
        ) from None
    except TypeError as error:
        raise MupscaleError(
            f"study {study!r} was begun by another version of mupscale: {error}", code="study.other_version"
        ) from None


def _sweep(agenda: Agenda, ladder: Ladder, results: Mapping[str, LegResult]) -> Sweep:
    tried = []
    for point in dict.fromkeys(agenda.points):
        reached = {leg.end: results[leg.key] for leg in ladder.legs(point) if leg.key in results}
        curve = {
            int(step): float(loss)
            for done in reached.values()
            for step, loss in done.details.get("curve", ())
        }
        rungs = {end: done.loss for end, done in reached.items()}
        tried.append(Tried(point, rungs, ladder.rungs[-1], tuple(sorted(curve.items()))))
    return Sweep(tuple(tried), ladder, agenda.best, len(agenda.open), agenda.on_edge)


def _work(
    trials: Sequence[FrozenTrial],
    results: Mapping[str, LegResult],
    running: Mapping[str, FrozenTrial],
    failed: Sequence[FailedTrial],
) -> Work:
    counted = {done.number for done in results.values()}
    lost = Counter(trial.lost for trial in failed)
    killed = lost[Failure.ENDED] + lost[Failure.SILENT]
    second = lost[Failure.SECOND] + lost[Failure.TWICE]
    late = sum(t.state == TrialState.COMPLETE and t.number not in counted for t in trials)
    late += sum(t.state == TrialState.RUNNING and t not in running.values() for t in trials)
    return Work(
        trials=len(trials),
        counted=len(counted),
        running=len(running),
        killed=killed,
        failed=len(failed) - killed - second,
        extra=second + late,
        resumed=sum(done.resumed for done in results.values()),
        seconds=sum(float(done.details.get("seconds", 0.0)) for done in results.values()),
        began=min((t.datetime_start for t in trials if t.datetime_start), default=None),
        ended=max((t.datetime_complete for t in trials if t.datetime_complete), default=None),
        troubles=tuple(failed),
    )


def tried_rows(known: Known) -> list[dict[str, Any]]:
    """Every point that has a loss, as a recipe lists it."""
    rows = []
    for name, sweep in (("base", known.base), ("wide", known.wide)):
        for tried in sweep.tried if sweep is not None else ():
            if tried.loss is not None:
                diverged = tried.loss == inf
                loss = None if diverged else tried.loss
                point = {"sweep": name, "noise": tried.point.noise, "lr": tried.point.lr}
                rows.append({**point, "steps": tried.steps, "loss": loss, "diverged": diverged})
    return rows


def _recipe(known: Known) -> tuple[Recipe | None, tuple[str, ...]]:
    """The folder's recipe if it is this study's, and notes about the study."""
    notes = [] if known.done else [known.status]
    difference, allowed = 0.0, inf
    if known.equality is not None:
        difference, allowed = known.equality.loss, float(known.equality.details.get("tolerance", inf))
    if not difference <= allowed:
        notes.append(
            f"zero noise at both widths differs by {difference:.2g}, allowed {allowed:.2g}: not a growth of this base"
        )
    path = known.folder / "recipe.json"
    if not path.is_file():
        if known.done:
            notes.append(f"{path} is missing: run the same `mupscale tune` again, and it is written")
        return None, tuple(notes)
    try:
        recipe = Recipe.read(path)
    except (MupscaleError, UnicodeDecodeError) as error:
        return None, (*notes, f"{path} is left out here: {error}")
    if known.done and [dict(row) for row in recipe.tried] == tried_rows(known):
        return recipe, (*notes, *recipe.remarks)
    notes.append(f"{path} belongs to another study or to other settings, and is left out here")
    return None, tuple(notes)
