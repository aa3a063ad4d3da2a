"""Try hypotheses about a plan on two models in float64 until the gradient identity holds.

The outputs of all modules are watched: the first one that is not made of copies of the base's tells which part
of the model a wrong hypothesis is in, so that only its knobs are turned. Watching only decides what is tried
next; a plan is accepted by the loss and the gradient identity on every tensor, and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import nn

from ..errors import Fault, MupscaleError, raise_faults
from ..tensors.differences import loss_gap
from .draft import Draft
from .fits import check_duplicates
from .folds import fold_knobs
from .hypotheses import Knob, combinations_of, layout_knobs, paired_knobs, role_knobs
from .identity import GRADIENT_TOLERANCE, Identity, Loss, compare_gradients, gradients, load_wide_
from .names import pattern_of
from .outputs import Seen, first_difference, watched
from .plan import Plan
from .readers import reader_knobs

TRIALS = 600
FLIPS = 3
_PER_SCOPE = 150

Choice = tuple[int, ...]
"""Which setting of every knob."""


@dataclass(frozen=True)
class Found:
    """A plan that holds, and what was measured."""

    plan: Plan
    trials: int
    worst: float
    gap: float
    unreached: tuple[str, ...]
    """Trainable tensors whose gradient is exactly zero or absent, which the identity does not test."""


@dataclass(frozen=True)
class _Outcome:
    """How far one choice got: outputs that agree, then gradients that do."""

    score: tuple[float, int]
    where: tuple[str, ...]
    """Module or tensor names (as patterns) at fault."""
    says: tuple[int, float, str]
    plan: Plan | None = None
    identity: Identity | None = None
    gap: float = 0.0


def search(made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> Found:
    """The first plan that is exact for these two models, or a refusal that says how near the search came."""
    return _Search(made, base, wide, loss).run()


class _Search:
    def __init__(self, made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> None:
        self.made, self.base, self.wide, self.loss = made, base, wide, loss
        with watched(base) as seen:
            self.value, self.grads = gradients(base, loss)
        if not bool(self.value.isfinite()):
            raise MupscaleError(
                f"the loss of the base model is {float(self.value)}, expected a finite number; plans are found by "
                "comparing losses, so check the batch"
            )
        self.seen: list[Seen] = seen
        layouts = list(layout_knobs(made, everywhere=True))
        decided = {(n, d) for knob in layouts for s in knob for n, dims in s.layouts.items() for d in dims}
        proposed = (
            *fold_knobs(made, base, [s.path for s in seen]),
            *layouts,
            *paired_knobs(made),
            *role_knobs(made),
            *reader_knobs(made, decided),
        )
        self.knobs: list[Knob] = [knob for knob in proposed if knob]
        self.names = [_names(knob) for knob in self.knobs]
        self.tried: dict[Choice, _Outcome] = {}
        self.nearest: tuple[int, float, str] = (2, 0.0, "no hypothesis could be built")

    def run(self) -> Found:
        for outcome in self._outcomes():
            if outcome.plan is not None and outcome.identity is not None:
                identity = outcome.identity
                _refuse_undecided(self.knobs, set(identity.errors) - set(identity.untested))
                unreached = tuple(n for n, g in self.grads.items() if g is None or not bool(g.any()))
                plan = replace(
                    outcome.plan, needs=outcome.plan.needs | _taken_for_granted(self.made, outcome.plan)
                )
                return Found(plan, len(self.tried), identity.worst[1], outcome.gap, unreached)
        raise _not_found(self.made, len(self.tried), self.nearest[2])

    def _outcomes(self) -> Iterator[_Outcome]:
        """Climb: from the likeliest choice to better ones, near the first fault first; then try the rest."""
        choice: Choice = (0,) * len(self.knobs)
        best = self._try(choice)
        yield best
        climbing = True
        while climbing:
            climbing = False
            for scope in self._scopes(best):
                for near in islice(_near(choice, scope, self.knobs), _PER_SCOPE):
                    if near in self.tried:
                        continue
                    if len(self.tried) >= TRIALS:
                        return
                    outcome = self._try(near)
                    yield outcome
                    if outcome.score > best.score:
                        choice, best, climbing = near, outcome, True
                        break
                if climbing:
                    break
        for other in _near((0,) * len(self.knobs), list(range(len(self.knobs))), self.knobs):
            if len(self.tried) >= TRIALS:
                return
            if other not in self.tried:
                yield self._try(other)

    def _scopes(self, outcome: _Outcome) -> Iterator[list[int]]:
        """Knobs inside the module at fault, then inside what contains it, at last all."""
        done: set[tuple[int, ...]] = set()
        for path in outcome.where[:3]:
            words = path.split(".")
            for depth in range(len(words), 0, -1):
                prefix = ".".join(words[:depth])
                scope = [i for i, names in enumerate(self.names) if any(_within(n, prefix) for n in names)]
                if scope and tuple(scope) not in done and len(scope) < len(self.knobs):
                    done.add(tuple(scope))
                    yield scope
        yield list(range(len(self.knobs)))

    def _try(self, choice: Choice) -> _Outcome:
        outcome = self._measure(choice)
        self.tried[choice] = outcome
        self.nearest = min(self.nearest, outcome.says)
        return outcome

    def _measure(self, choice: Choice) -> _Outcome:
        trial = self.made
        for knob, setting in zip(self.knobs, choice, strict=True):
            trial = knob[setting].apply(trial)
        try:
            plan = trial.plan()
            check_duplicates(plan)
        except MupscaleError as error:
            if not self.knobs:
                raise
            return _Outcome((-1.0, 0), tuple(f.where for f in error.faults), (2, 0.0, str(error)))
        _apply_edits(self.wide, plan)
        load_wide_(self.wide, self.base, plan)
        folds = {float(t.fold) for t in plan.tensors.values()}
        with watched(self.wide) as seen:
            value, grads = gradients(self.wide, self.loss)
        gap = loss_gap(float(self.value), float(value))
        if not gap <= GRADIENT_TOLERANCE:
            index, where = first_difference(self.seen, seen, folds)
            says = (
                1,
                gap,
                f"the loss differs by {gap:.1e}, first in {where or 'its last layers'}",
            )
            return _Outcome((float(index), 0), (pattern_of(where),) if where else (), says)
        identity = compare_gradients(self.grads, grads, plan)
        wrong = [n for n, e in identity.errors.items() if not e <= GRADIENT_TOLERANCE]
        if not wrong:
            return _Outcome((float("inf"), 0), (), (-1, 0.0, ""), plan, identity, gap)
        name, worst = identity.worst
        says = (0, worst, f"the loss agrees, the gradient of {name} is off by {worst:.1e}")
        return _Outcome((float("inf"), -len(wrong)), tuple(dict.fromkeys(map(pattern_of, wrong))), says)


def _near(choice: Choice, scope: Sequence[int], knobs: Sequence[Knob]) -> Iterator[Choice]:
    """Choices that differ in one knob of the scope, then in two, …; knobs at their present setting first."""
    inside = [[choice[i], *(j for j in range(len(knobs[i])) if j != choice[i])] for i in scope]
    for settings in combinations_of(inside, FLIPS):
        new = list(choice)
        for i, setting in zip(scope, settings, strict=True):
            new[i] = setting
        yield tuple(new)


def _names(knob: Knob) -> set[str]:
    return {pattern_of(n) for s in knob for n in (*s.roles, *s.layouts, *s.folds)}


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def _taken_for_granted(made: Draft, plan: Plan) -> set[str]:
    """Raw matrices whose axes grow alike: training cannot tell in from out, sizes of noise can."""
    alike = [
        e.name for e in made.open if len({plan[e.name].axes[d].k for d in e.growing}) == 1 < len(e.growing)
    ]
    return {
        f"{name} reads its last growing axis (both grow alike, so training does not tell; declare roles= before adding noise)"
        for name in dict.fromkeys(map(pattern_of, alike))
    }


def _not_found(made: Draft, tried: int, nearest: str) -> MupscaleError:
    faults = [
        Fault(
            f"{tried} hypotheses tried",
            f"none passes the gradient identity; nearest: {nearest}",
            "declare roles=, layouts= or folds=, or look for a width in the model's code (1/sqrt(d), dropout, a table)",
        )
    ]
    for name, reader in made.conflicts.items():
        if made.entries[name].declared_fold is None:
            faults.append(
                Fault(
                    f"{name} = {reader}",
                    "a tied readout with nowhere to fold 1/k: no norm with a gain before it passed",
                    'divide the logits by the width in the model, or untie, or declare folds={"<tensor>": "1/k"}',
                )
            )
    return MupscaleError("no exact plan was found for these two models", faults)


def _refuse_undecided(knobs: list[Knob], tested: set[str]) -> None:
    """A hypothesis that only concerns tensors without a gradient passes whatever it says."""
    faults = []
    for knob in knobs:
        names = {name for setting in knob for name in (*setting.roles, *setting.layouts)}
        if len(knob) > 1 and names and not names & tested:
            what = "its gradient is zero, so every hypothesis passes: the loss does not reach it"
            faults.append(
                Fault(
                    ", ".join(sorted(names)),
                    what,
                    f'use a loss that does, or declare roles={{"{min(names)}": "out"}} or "in", and its layouts=',
                )
            )
    raise_faults("the loss does not decide every tensor", faults)


def _apply_edits(wide: nn.Module, plan: Plan) -> None:
    for edit in plan.edits:
        path, _, leaf = edit.path.rpartition(".")
        setattr(wide.get_submodule(path), leaf, edit.new)
