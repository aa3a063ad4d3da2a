"""Claims and results of a study in Optuna's storage, shared by any number of workers.

One Optuna trial is one leg of one point, done by one worker. A leg is claimed by creating its trial; of
several claims the one with the lowest number counts; all workers agree on it because storages number trials
consecutively. A worker that stops sending heartbeats is considered dead: its trial is failed and its leg is open again. A trial
that was failed cannot complete, so of every leg exactly one trial counts.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf, isfinite
from pathlib import Path
from time import monotonic
from typing import Any

from optuna.distributions import FloatDistribution
from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from .agenda.halving import Leg
from .agenda.status import LegResult
from .engine import again
from .settings import Settings, check_same

_RANGE = FloatDistribution(0.0, 1e9)


@dataclass(frozen=True)
class Owner:
    """Identifies a worker and its process uniquely, even if the process id is reused later."""

    host: str
    pid: int
    started: str
    worker: str = ""

    @staticmethod
    def this() -> Owner:
        return Owner(_machine(), os.getpid(), _started(os.getpid()), uuid.uuid4().hex)

    @property
    def is_dead(self) -> bool:
        """Whether its process is known to have ended; processes of other machines cannot be checked."""
        return self.host == _machine() and _started(self.pid) != self.started


def _machine() -> str:
    """This machine, boot and process namespace."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if path.endswith("pid") else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return " ".join(parts)


def _started(pid: int) -> str:
    """Start time of a process in kernel ticks; empty when it does not exist or is a zombie."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self/stat").exists() else "unknown"
    return "" if after[0] in "ZX" else after[19]


class Failure(Enum):
    """Why a trial was failed by a worker; its value says it to people."""

    ENDED = "its worker ended"
    SILENT = "its worker was silent"
    SECOND = "another claim was first"
    TWICE = "claimed twice when the connection broke"


def failure_of(attributes: Mapping[str, Any]) -> Failure | None:
    """Why a failed trial was lost; None for one that raised an error.

    Studies of 0.2.0 store the words alone, which are looked up.

    >>> failure_of({"lost": "SILENT"}), failure_of({"extra": "its worker ended"}), failure_of({"extra": "ValueError: x"})
    (<Failure.SILENT: 'its worker was silent'>, <Failure.ENDED: 'its worker ended'>, None)
    """
    if "lost" in attributes:
        return Failure[attributes["lost"]]
    return _WORDS.get(attributes.get("extra", ""))


_WORDS = {
    "its worker ended": Failure.ENDED,
    "its worker was silent": Failure.SILENT,
    "another claim was first": Failure.SECOND,
    "claimed twice when the connection broke": Failure.TWICE,
}
"""The words that 0.2.0 stored."""


_LEG, _DETAILS, _WHY = "stretch", "told", "extra"
"""Attributes of a trial by the names of 0.2.0, which studies that are stored have: its leg's key, what its worker recorded, and
why it failed."""


@dataclass(frozen=True)
class FailedTrial:
    """A trial that does not count because it was lost, or because it raised an error."""

    number: int
    leg: str
    """The key of its leg."""
    lost: Failure | None
    why: str


class Trials:
    """A study as its storage holds it; reads only."""

    def __init__(self, storage: BaseStorage, study: int) -> None:
        self.storage, self.study = storage, study

    def trials(self) -> list[FrozenTrial]:
        """All trials, by number."""
        found = again(lambda: self.storage.get_all_trials(self.study, deepcopy=False))
        return sorted(found, key=lambda trial: trial.number)

    def results(self, trials: list[FrozenTrial]) -> dict[str, LegResult]:
        """The legs that are done, each by the one trial that counts."""
        found: dict[str, LegResult] = {}
        for trial in trials:
            if trial.state == TrialState.COMPLETE and trial.values is not None:
                kept = trial.user_attrs
                result = LegResult(
                    trial.values[0], trial.number, kept.get(_DETAILS, {}), kept.get("begin", 0)
                )
                found.setdefault(kept[_LEG], result)
        return found

    def running(self, trials: list[FrozenTrial]) -> dict[str, FrozenTrial]:
        """The claims that count: per leg, the running trial with the lowest number."""
        found: dict[str, FrozenTrial] = {}
        for trial in trials:
            if trial.state == TrialState.RUNNING:
                found.setdefault(trial.user_attrs[_LEG], trial)
        return found

    def failed(self, trials: list[FrozenTrial]) -> list[FailedTrial]:
        """The trials that failed, with why."""
        return [
            FailedTrial(t.number, str(kept.get(_LEG, "")), failure_of(kept), str(kept.get(_WHY, "")))
            for t in trials
            if t.state == TrialState.FAIL
            for kept in (t.user_attrs,)
        ]


class Ledger(Trials):
    """One worker's view of the study."""

    def __init__(self, storage: BaseStorage, name: str, settings: Settings, beat: float = 10.0) -> None:
        super().__init__(storage, again(lambda: _begun(storage, name, settings)))
        self.beat_every, self.grace = beat, 6 * beat
        self.owner = Owner.this()
        self._seen: dict[int, tuple[Any, float, float]] = {}
        self._mine: frozenset[int] = frozenset()  # the trial that this worker is running

    def reap(self, trials: list[FrozenTrial]) -> int:
        """Fail the trials whose worker has ended or has been silent too long, and return how many.

        Silence is measured by this worker's clock, in small increments: while the database is unreachable, no
        worker counts as silent.
        """
        count, now = 0, monotonic()
        for trial in trials:
            if trial.state != TrialState.RUNNING:
                continue
            owner, beat = Owner(**trial.user_attrs["owner"]), trial.user_attrs.get("beat")
            before, at, silent = self._seen.get(trial._trial_id, (beat, now, 0.0))
            silent = 0.0 if beat != before else silent + min(now - at, 2 * self.beat_every)
            self._seen[trial._trial_id] = (beat, now, silent)
            if owner == self.owner and trial._trial_id not in self._mine:
                count += self.fail(trial._trial_id, Failure.TWICE)
            elif owner.is_dead or silent > self.grace:
                count += self.fail(trial._trial_id, Failure.ENDED if owner.is_dead else Failure.SILENT)
        return count

    def claim(self, leg: Leg) -> int | None:
        """Claim a leg and return its trial; None when another worker was first."""
        token = uuid.uuid4().hex
        point = leg.point
        params = {"lr": point.lr, **({} if point.noise is None else {"noise": point.noise})}
        made = create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=dict.fromkeys(params, _RANGE),
            user_attrs={
                _LEG: leg.key,
                "claim": token,
                "owner": vars(self.owner),
                "begin": leg.begin,
                "end": leg.end,
            },
        )
        again(lambda: self.storage.create_new_trial(self.study, made))
        trials = self.trials()
        ours = [t for t in trials if t.user_attrs.get("claim") == token and t.state == TrialState.RUNNING]
        first = self.running(trials).get(leg.key)
        won = first if first in ours and leg.key not in self.results(trials) else None
        for trial in ours:  # more than one when the connection broke after a commit
            if trial is not won:
                self.fail(trial._trial_id, Failure.SECOND)
        self._mine = frozenset() if won is None else frozenset({won._trial_id})
        return None if won is None else won._trial_id

    def beat(self, trial: int) -> bool:
        """Send a heartbeat; False when another worker has failed the trial."""
        try:
            again(lambda: self.storage.set_trial_user_attr(trial, "beat", uuid.uuid4().hex[:8]))
        except UpdateFinishedTrialError:
            return False
        return True

    def complete(self, trial: int, loss: float, details: Mapping[str, Any]) -> bool:
        """Record a result; False when the trial was failed in the meantime, so that the result does not count."""
        plain = json.loads(json.dumps(dict(details)))
        try:
            again(lambda: self.storage.set_trial_user_attr(trial, _DETAILS, plain))
            again(
                lambda: self.storage.set_trial_state_values(
                    trial, TrialState.COMPLETE, [loss if isfinite(loss) else inf]
                )
            )
        except UpdateFinishedTrialError:
            pass  # by another worker, or by this call when its connection broke after the commit
        finally:
            self._mine = frozenset()
        return again(lambda: self.storage.get_trial(trial)).state == TrialState.COMPLETE

    def fail(self, trial: int, why: Failure | str) -> bool:
        """Mark a trial as failed, lost or by an error in words; False when it has already ended."""
        try:
            if isinstance(why, Failure):
                again(lambda: self.storage.set_trial_user_attr(trial, "lost", why.name))
            words = why.value if isinstance(why, Failure) else why
            again(lambda: self.storage.set_trial_user_attr(trial, _WHY, words))
            again(lambda: self.storage.set_trial_state_values(trial, TrialState.FAIL))
        except UpdateFinishedTrialError:
            return False
        return True


def _begun(storage: BaseStorage, name: str, settings: Settings) -> int:
    """The study of this name, which is created if there is none; raises if it was begun with other settings."""
    try:
        study = storage.create_new_study([StudyDirection.MINIMIZE], name)
    except DuplicatedStudyError:
        study = storage.get_study_id_from_name(name)
    if "settings" not in storage.get_study_user_attrs(study):
        storage.set_study_user_attr(study, "settings", settings.as_json())
    check_same(settings, storage.get_study_user_attrs(study)["settings"])
    return study
