"""Compare what two snapshots hold besides tensors: steps, settings of groups, the schedule, counters and random states."""

from __future__ import annotations

from typing import Any

from ..errors import Fault
from ..files.strict import printable
from ..formats.snapshot import STEP, Filed, Snapshot, Unread
from .profiles import STRICT, Profile
from .report import Found
from .tensors import Pages, apart
from .values import CLASS, EFFECTS, HOW, NEEDED, OTHER_SETTING, alike, few

_RANDOM = "dropout and the order of data are drawn anew: another run of the same kind, not the same run"
_SCHEDULE = "the schedule starts from its beginning, with its warm-up"
_BOOKS = ("_step_count", "_is_initial", "_get_lr_called_within_step", "verbose")
"""What schedules of torch keep to warn of wrong calls."""


def compare_values(a: Snapshot, b: Snapshot, profile: Profile, found: Found) -> None:
    """Add what differs between the values of two snapshots."""
    if a.moments and b.moments:
        _steps(a, b, found)
    _settings(a, b, profile, found)
    _schedule(a, b, profile, found)
    _counters(a, b, profile, found)
    _random(a, b, profile, found)


def _steps(a: Snapshot, b: Snapshot, found: Found) -> None:
    apart_by: dict[tuple[float | None, float | None], list[str]] = {}
    held = {**b.moments, **b.steps}
    for name in (name for name in {**a.moments, **a.steps} if name in held):
        pair = a.steps.get(name), b.steps.get(name)
        if None not in pair:
            found.count("step counts")
        if pair[0] != pair[1]:
            apart_by.setdefault(pair, []).append(name)
    for (one, other), names in apart_by.items():
        what = f"step {_shown(one)} in A, {_shown(other)} in B, for {len(names)} tensors"
        effect = "Adam corrects its moments for another number of steps, so the next ones have another size"
        found.differences.append(Fault("same.step_differs", printable(few(names)), what, effect))


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value:g}" if isinstance(value, float) else printable(str(value))


def _settings(a: Snapshot, b: Snapshot, profile: Profile, found: Found) -> None:
    for side, one, other in (("A", a, b), ("B", b, a)):
        if one.settings and not other.settings:
            what = f"only {side} holds settings of the optimizer"
            effect = "the optimizer takes those of its script, whatever the run had"
            found.differences.append(Fault("same.settings_missing", "param_groups", what, effect))
    if not a.settings or not b.settings:
        return
    names = [name for name in a.settings if name in b.settings]
    if not names:
        what = "groups of one of them do not say which tensors they hold"
        found.unknown.append(Fault("same.groups_unnamed", "param_groups", what))
        return
    differing: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        ours, theirs = a.settings[name], b.settings[name]
        for key in dict.fromkeys([*ours, *theirs]):
            if _matters(key, ours, theirs) and not (
                key in ours and key in theirs and alike(ours[key], theirs[key], profile)
            ):
                shown = [_shown(of[key]) if key in of else "nothing" for of in (ours, theirs)]
                differing.setdefault((key, shown[0], shown[1]), []).append(name)
        found.count("groups' settings")
    for (key, first, second), held in differing.items():
        what = f"{printable(key)} is {first} in A, {second} in B, for {len(held)} tensors"
        fault = Fault("same.setting_differs", printable(few(held)), what, EFFECTS.get(key, OTHER_SETTING))
        known = key in NEEDED or "nothing" not in (first, second)
        (found.differences if known else found.unknown).append(fault)
    for side, one, other in (("A", a, b), ("B", b, a)):
        if lost := [name for name in one.settings if name not in other.settings]:
            what = f"only {side} has {'it' if len(lost) == 1 else 'them'} in a group"
            effect = "the other optimizer does not train it"
            found.differences.append(Fault("same.not_in_a_group", printable(few(lost)), what, effect))


def _matters(key: str, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether a setting is compared: not if it says how steps are computed, nor if one lacks it and it is off in the other."""
    if key in HOW:
        return False
    if (key in ours and key in theirs) or key in NEEDED:
        return True
    return key not in CLASS and bool(ours.get(key, theirs.get(key)))


def _schedule(a: Snapshot, b: Snapshot, profile: Profile, found: Found) -> None:
    ours, theirs = (
        {k: v for k, v in one.schedule.items() if k.rpartition(".")[2] not in _BOOKS and v is not None}
        for one in (a, b)
    )
    for side, one, other in (("A", ours, theirs), ("B", theirs, ours)):
        if one and not other:
            what = f"only {side} holds the state of a schedule"
            found.differences.append(Fault("same.schedule_missing", "schedule", what, _SCHEDULE))
    keys = [key for key in ours if key in theirs]
    if ours and theirs and not keys:
        what = "their schedules hold different values, as those of different classes do"
        found.unknown.append(Fault("same.schedules_of_two_kinds", "schedule", what))
    for key in keys:
        found.count("values of the schedule")
        if not alike(ours[key], theirs[key], profile):
            what = f"{printable(key)} is {_shown(ours[key])} in A, {_shown(theirs[key])} in B"
            effect = "the learning rate follows another curve, or stands at another place of it"
            found.differences.append(Fault("same.schedule_differs", "schedule", what, effect))
    if keys and (alone := [*(ours.keys() ^ theirs.keys())]):
        found.notes.append(f"only one schedule has {', '.join(map(printable, sorted(alone)))}")


def _counters(a: Snapshot, b: Snapshot, profile: Profile, found: Found) -> None:
    for side, ours, theirs in (("A", a.counters, b.counters), ("B", b.counters, a.counters)):
        if alone := [key for key in ours if key not in theirs]:
            found.notes.append(f"only {side} holds the value {printable(few(alone))}")
    for key in (key for key in a.counters if key in b.counters):
        one, other = a.counters[key], b.counters[key]
        found.count("values")
        if alike(one, other, profile):
            continue
        if isinstance(one, Unread) or isinstance(other, Unread):
            what = "its bytes differ, and it is not read, because that would run code"
            found.unknown.append(Fault("same.value_not_read", printable(key), what))
        elif key == STEP:
            what = f"{_shown(one)} in A, {_shown(other)} in B"
            effect = "the job goes on at another step: data is skipped or seen twice, and it ends elsewhere"
            found.differences.append(Fault("same.job_step_differs", "step of the job", what, effect))
        else:
            what = f"{_shown(one)} in A, {_shown(other)} in B; what it does to training is not known"
            found.unknown.append(Fault("same.value_differs", printable(key), what))


def _random(a: Snapshot, b: Snapshot, profile: Profile, found: Found) -> None:
    keys = [key for key in a.random if key in b.random]
    if alone := sorted(a.random.keys() ^ b.random.keys()):
        held = "A" if alone[0] in a.random else "B"
        found.notes.append(f"only {held} holds the random state {printable(few(alone))}; {_RANDOM}")
    for key in keys:
        found.count("random states")
        if not _same_random(a.random[key], b.random[key]):
            if profile.random:
                what = "the random states differ"
                found.differences.append(Fault("same.random_differs", printable(key), what, _RANDOM))
            else:
                found.notes.append(f"the random states {printable(key)} differ; {_RANDOM}")


def _same_random(one: Any, other: Any) -> bool:
    if isinstance(one, Filed) and isinstance(other, Filed):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        with Pages() as pages:
            return not apart(one, other, pages, STRICT).bits
    return alike(one, other, STRICT)
