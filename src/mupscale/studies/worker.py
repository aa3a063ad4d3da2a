"""One worker of a study: claims an open leg, trains it, and repeats until all legs are done.

Any number of workers run this loop; they coordinate through the ledger only and share a folder for checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep

import torch

from ..errors import Fault, MupscaleError, raise_faults
from ..runs.run import Run
from ..tensors.differences import curve_gap
from .agenda.grid import Point
from .agenda.halving import Leg
from .agenda.status import (
    EQUAL_STEPS,
    EQUALITY,
    GOES_ON,
    Equality,
    LegResult,
    Stay,
    StudyStatus,
    study_status,
)
from .checkpoint import KeptPoint, kept
from .ledger import Failure, Ledger
from .leg import LegOutcome, Lost, train_leg, untrained
from .progress_line import line_of
from .proxy import Proxy
from .runs import Runs
from .settings import Settings

_log = logging.getLogger(__name__)


class Worker:
    """One worker process of a study."""

    def __init__(
        self,
        proxy: Proxy,
        settings: Settings,
        ledger: Ledger,
        folder: Path,
        *,
        every: float = 30.0,
    ) -> None:
        self.proxy, self.settings, self.ledger, self.every = proxy, settings, ledger, every
        self.runs = Runs(proxy, settings)
        text = json.dumps(settings.as_json(), sort_keys=True)
        # Other settings get other checkpoints, even under the same study name.
        self.folder = folder / "points" / hashlib.sha256(text.encode()).hexdigest()[:12]
        self._order = random.Random()

    def work(self) -> tuple[StudyStatus, dict[str, LegResult]]:
        """Work until every leg is done, by any worker, and return the final status and results."""
        while True:
            trials = self.ledger.trials()
            if self.ledger.reap(trials):
                trials = self.ledger.trials()
            results = self.ledger.results(trials)
            now = study_status(self.settings, results)
            self._check_equality(results)
            if now.done:
                return now, results
            busy = self.ledger.running(trials)
            free = [leg for leg in now.open if leg.key not in busy]
            if not free:
                sleep(min(1.0, self.ledger.beat_every / 2))
                continue
            leg = self._order.choice(free)
            trial = self.ledger.claim(leg)
            if trial is not None:
                self._do(leg, trial, now)

    def _do(self, leg: Leg, trial: int, now: StudyStatus) -> None:
        try:
            with self._beating(trial) as owned:
                if isinstance(leg, Equality):
                    outcome = self._equality(leg, owned)
                elif isinstance(leg, Stay):
                    outcome = self._stay(leg, now, owned)
                else:
                    outcome = self._train(leg, now, owned)
        except Lost:
            self.ledger.fail(trial, Failure.SILENT)
            return
        except BaseException as error:
            self.ledger.fail(trial, f"{type(error).__name__}: {error}"[:500])
            raise
        details = {key: value for key, value in vars(outcome).items() if key != "loss"}
        if self.ledger.complete(trial, outcome.loss, {**details, "diverged": outcome.diverged}):
            trials = self.ledger.trials()
            results, busy = self.ledger.results(trials), len(self.ledger.running(trials))
            _log.info(line_of(self.settings, leg, outcome, results, busy))

    def _train(self, leg: Leg, now: StudyStatus, owned: Callable[[], bool]) -> LegOutcome:
        point, settings = leg.point, self.settings
        start = None
        make: Callable[[], Run] = partial(self.runs.base, point.lr)
        if point.noise is not None:
            base = self.base_of(now)
            start = untrained(base.losses)
            make = partial(self.runs.wide, point, base.parts, point.is_control and settings.control_at_base)
        total = settings.steps if point.noise is None else settings.after
        path = self.folder / f"{point.name}.pt"
        return train_leg(self.proxy, make, leg, path, total=total, start=start, every=self.every, owned=owned)

    def _stay(self, leg: Stay, now: StudyStatus, owned: Callable[[], bool]) -> LegOutcome:
        base = self.base_of(now)
        make: Callable[[], Run] = partial(self.runs.base, leg.point.lr, steps=leg.end)
        if leg.how == GOES_ON:
            make = partial(self.runs.wide, leg.point, base.parts, at_base=True, steps=leg.end)
        path = self.folder / f"stay-{leg.how.replace(' ', '-')}.pt"
        return train_leg(
            self.proxy,
            make,
            leg,
            path,
            total=leg.end,
            start=untrained(base.losses),
            every=self.every,
            owned=owned,
        )

    def base_of(self, now: StudyStatus) -> KeptPoint:
        """The checkpoint of the best base after sweep 1."""
        assert now.base.best is not None
        path = self.folder / f"{now.base.best.name}.pt"
        found = kept(path)
        if found is None or found.step < self.settings.steps:
            raise MupscaleError(
                f"{path} is missing or unfinished although the study has its result: all workers need the same folder",
                code="study.checkpoint_missing",
            )
        return found

    def _checkpoint(self, path: Path) -> KeptPoint:
        found = kept(path)
        if found is None:
            raise MupscaleError(
                f"{path} is missing: all workers need the same folder", code="study.checkpoint_missing"
            )
        return found

    def _equality(self, leg: Leg, owned: Callable[[], bool]) -> LegOutcome:
        """The largest relative difference between zero noise at the two widths, as a result."""
        base = self._checkpoint(self.folder / f"{Point(leg.point.lr).name}.pt")
        losses, start = [], untrained(base.losses)
        for at_base in (True, False):
            path = self.folder / f"equality-{'base' if at_base else 'wide'}.pt"
            # A constant rate instead of warm-up or decay, so that a few steps move the weights.
            make = partial(self.runs.wide, leg.point, base.parts, at_base, constant=True)
            train_leg(self.proxy, make, leg, path, total=self.settings.after, start=start, owned=owned)
            losses.append(self._checkpoint(path).losses)
        differ = curve_gap(*losses)
        kinds = {t.dtype for t in base.parts["model"].values() if t.is_floating_point()}
        tolerance = max(min(0.1, 3 * torch.finfo(kind).eps ** 0.5) for kind in kinds)
        return LegOutcome(differ, 0, 2 * leg.end, 0.0, tolerance=tolerance)

    def _check_equality(self, results: Mapping[str, LegResult]) -> None:
        done = results.get(EQUALITY)
        if done is None:
            return
        tolerance = float(done.details["tolerance"])
        if not done.loss <= tolerance:
            what = f"losses differ by {done.loss:.2e} within {EQUAL_STEPS} steps, allowed {tolerance:.1e}"
            remedy = (
                "give loss(model) so that the layout is proved; or, if the loop draws random numbers by shape (dropout), "
                "control_at_base=False (--no-control-at-base)"
            )
            raise_faults(
                "zero noise at k times the width does not continue the base",
                [Fault("study.control_differs", "proxy", what, remedy)],
            )

    @contextmanager
    def _beating(self, trial: int) -> Iterator[Callable[[], bool]]:
        """Send heartbeats while the block runs; yields a function that says whether this worker still owns the trial."""
        ended, lost = threading.Event(), threading.Event()

        def beat() -> None:
            while not ended.wait(self.ledger.beat_every):
                if not self.ledger.beat(trial):
                    lost.set()
                    return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield lambda: not lost.is_set()
        finally:
            ended.set()
            thread.join()
