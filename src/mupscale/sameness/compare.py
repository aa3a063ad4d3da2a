"""Compare two snapshots: tensors block by block, then everything else that training goes on from.

Knows: what a run consists of, and which difference is one. Reads tensors through `tensors.py`, knows no format.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any

import torch

from ..errors import Fault
from ..files.places import torch_dtype
from ..files.strict import printable
from ..formats.snapshot import UNNAMED, Filed, Snapshot, heads_in
from ..jobs.progress import Report
from ..jobs.threads import in_threads
from .names import Matched, matched
from .other_values import compare_values
from .profiles import STRICT, Profile
from .report import Found, Same
from .stepped import Ways, side_by_side
from .tensors import Apart, Pages, apart, resemblance
from .values import OTHER_SLOT, SLOTS, few

_LOOKED_AT = 8  # differing tensors of which it is looked for how they differ


@dataclass(frozen=True)
class Task:
    """Two tensors to be compared."""

    kind: str
    name: str
    a: Filed
    b: Filed
    rounds: bool = False
    """Whether the finer one is rounded first, because copies that are not rounded are compared as well."""


def compare(
    a: Snapshot,
    b: Snapshot,
    profile: Profile,
    threads: int = 1,
    report: Report | None = None,
    config: Mapping[str, Any] | None = None,
    ways: Ways | None = None,
) -> Same:
    """Whether two snapshots continue the same run. `config` is the model's, where neither of them has one."""
    both, found = matched(a, b, None if config is None else heads_in(config)), Found()
    found.notes += [*a.notes, *b.notes, *both.notes]
    found.unknown += [*both.unknown, *_unread(both)]
    if (
        2 * len(both.both) < min(len(one.weights.keys() | one.masters.keys()) for one in (both.a, both.b))
        or not both.both
    ):
        names = printable(few(sorted(both.a.names) or ["nothing"]))
        what = f"{len(both.both)} tensors have a name in both; A has {names}"
        found.unknown.append(Fault("same.no_name_fits", printable(str(b.path)), what))
    else:
        with Pages() as pages:
            _drop_tied(both, pages, found)
        tasks = [*_weights(both, profile, found), *_moments(both, found)]
        _measure(tasks, profile, threads, report, found)
        compare_values(both.a, both.b, profile, found)
        if ways is not None:
            found.measured, notes = side_by_side(both, ways, config or a.config or b.config)
            found.notes += notes
    return Same(
        str(a.path),
        str(b.path),
        (a.kind, b.kind),
        profile.name,
        found.compared,
        tuple(found.differences),
        tuple(found.unknown),
        tuple(dict.fromkeys(found.notes)),
        found.measured,
    )


def _unread(both: Matched) -> Iterator[Fault]:
    """What could not be read of either; state without names is known where both have their positions."""
    by_position = all(any(n.startswith(UNNAMED) for n in one.moments) for one in (both.a, both.b))
    if by_position:
        both.notes.append("the optimizers' tensors have no names and are compared by position")
    for side, one in (("A", both.a), ("B", both.b)):
        for fault in one.unknown:
            if not (by_position and fault.code == "same.state_unnamed"):
                yield _on_side(fault, side)


def _on_side(fault: Fault, side: str) -> Fault:
    return fault._replace(where=f"{side}: {fault.where}")


def _drop_tied(both: Matched, pages: Pages, found: Found) -> None:
    """A tensor that one snapshot holds once more, under another name, is the tensor that it is tied to."""
    shared = both.both
    for side, other in (("a", "b"), ("b", "a")):
        one: Snapshot = getattr(both, side)
        for name in sorted(one.weights.keys() - getattr(both, other).weights.keys()):
            own = one.weights[name]
            twins = [n for n in shared if n in one.weights and _equal(own, one.weights[n], pages)]
            if twins:
                del one.weights[name]
                one.masters.pop(name, None)
                one = one.renamed({name: twins[0]})
                setattr(both, side, one)
                found.notes.append(f"{side.upper()} holds {twins[0]} once more, as {name}")


def _equal(x: Filed, y: Filed, pages: Pages) -> bool:
    if (x.shape, x.dtype) != (y.shape, y.dtype) or not prod(x.shape):
        return False
    start, shape = (0,) * len(x.shape), (1,) * (len(x.shape) - 1) + x.shape[-1:]
    if not torch.equal(pages.read(x, start, shape), pages.read(y, start, shape, 1)):
        return False
    return not apart(x, y, pages, STRICT).bits


def _weights(both: Matched, profile: Profile, found: Found) -> Iterator[Task]:
    a, b = both.a, both.b
    for side, one, other in (("A", a, b), ("B", b, a)):
        lost = sorted((one.weights.keys() | one.masters.keys()) - other.weights.keys() - other.masters.keys())
        if lost:
            what = f"only {side} has {'it' if len(lost) == 1 else 'them'}"
            effect = "the other model initialises it anew, or is another model"
            found.differences.append(Fault("same.weight_missing", printable(few(lost)), what, effect))
    rounded: dict[str, list[str]] = {"A": [], "B": []}
    for name in both.both:
        wa, wb, ma, mb = (held.get(name) for held in (a.weights, b.weights, a.masters, b.masters))
        if wa is not None and wb is not None:
            yield Task("weights", name, wa, wb, rounds=ma is not None or mb is not None)
        fine_a, fine_b = ma or wa, mb or wb
        assert fine_a is not None
        assert fine_b is not None
        coarser = _eps(fine_b) - _eps(fine_a)
        if not coarser and (ma is not None or mb is not None):
            yield Task("masters", name, fine_a, fine_b)
        elif coarser and (ma is not None or mb is not None or a.moments or b.moments):
            rounded["B" if coarser > 0 else "A"].append(name)
    for side, names in rounded.items():
        if names:
            what = f"{side} holds rounded weights alone, the other one finer copies"
            effect = "training goes on from rounded weights, and steps smaller than the rounding are lost"
            found.differences.append(Fault("same.masters_missing", printable(few(names)), what, effect))


def _eps(stored: Filed) -> float:
    kind = torch_dtype(stored.dtype)
    return torch.finfo(kind).eps if kind.is_floating_point else 0.0


def _moments(both: Matched, found: Found) -> Iterator[Task]:
    a, b = both.a.moments, both.b.moments
    if not a and not b:
        found.notes.append("neither holds moments of an optimizer: weights alone were compared")
    if a and b and not a.keys() & b.keys():
        what = "the state of the optimizers has no name in common"
        found.unknown.append(Fault("same.state_names_differ", printable(few(sorted(b))), what))
        return
    lost: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*a, *b]):
        ours, theirs = a.get(name, {}), b.get(name, {})
        for slot in dict.fromkeys([*ours, *theirs]):
            if slot in ours and slot in theirs:
                yield Task("moments", f"{name}: {slot}", ours[slot], theirs[slot])
            else:
                lost.setdefault(("B" if slot in ours else "A", slot), []).append(name)
    for (side, slot), names in lost.items():
        what = f"{side} has no {slot} of {'it' if len(names) == 1 else f'these {len(names)} tensors'}"
        effect = SLOTS.get(slot, OTHER_SLOT)
        where = f"{printable(few(names))}: {slot}"
        found.differences.append(Fault("same.moments_missing", where, what, effect))


def _measure(tasks: list[Task], profile: Profile, threads: int, report: Report | None, found: Found) -> None:
    """Measure every pair of tensors, and note those that differ by more than the profile allows."""
    alike = [task for task in tasks if task.a.shape == task.b.shape]
    sizes = [prod(task.a.shape) for task in alike]
    total, lock = sum(sizes), Lock()
    results: dict[int, Apart] = {}

    def work(todo: Iterator[int]) -> None:
        with Pages() as pages:
            for number in todo:
                task = alike[number]
                measured = apart(task.a, task.b, pages, profile, task.rounds)
                with lock:
                    results[number] = measured
                    if report is not None:
                        report(sum(sizes[n] for n in results), total)

    in_threads(threads, range(len(alike)), work)
    wrong = [(task, results[n]) for n, task in enumerate(alike) if not results[n].within(profile)]
    shapes = [task for task in tasks if task.a.shape != task.b.shape]
    for task in tasks:
        found.count(task.kind)
    with Pages() as pages:
        for number, (task, measured) in enumerate(wrong):
            like = resemblance(task.a, task.b, pages) if number < _LOOKED_AT else ""
            found.differences.append(_fault(task, measured, like))
        for number, task in enumerate(shapes):
            like = resemblance(task.a, task.b, pages) if number < _LOOKED_AT else ""
            what = f"shape {task.a.shape} in A, {task.b.shape} in B{'; ' if like else ''}{like}"
            effect = "it is of a model of another size, or it cannot be loaded"
            if like:
                effect = "it cannot be loaded, or its entries are taken for others"
            found.differences.append(Fault("same.shape_differs", printable(task.name), what, effect))


def _fault(task: Task, measured: Apart, like: str) -> Fault:
    dtypes = "" if task.a.dtype == task.b.dtype else f", {task.a.dtype} in A and {task.b.dtype} in B"
    where = f"first at {measured.first}, by up to {measured.gap:.3g} (root mean square {measured.size:.3g})"
    what = f"{measured.differing} of {measured.entries} entries differ, {where}{dtypes}"
    if not measured.differing:
        what = "its bytes differ in zeros with a sign or in payloads of NaN"
    what, name = f"{what}; {like}" if like else what, printable(task.name)
    if task.kind == "weights":
        return Fault("same.weight_differs", name, what, "the two models compute different functions")
    if task.kind == "masters":
        effect = "training goes on from these copies, so from different weights"
        return Fault("same.master_differs", name, what, effect)
    return Fault("same.moment_differs", name, what, "the next steps of these tensors differ")
