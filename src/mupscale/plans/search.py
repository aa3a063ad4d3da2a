"""Try hypotheses about a plan on two models in float64 until the gradient identity holds.

The outputs of all modules are recorded. The first one that is not made of copies of the base's output shows
where a wrong hypothesis is, so only the knobs near it are turned. This only decides what is tried next: a
plan is accepted by the loss and the gradient identity on every tensor, and by nothing else.

How it goes for a GPT-2 of 2 heads, doubled. There are 7 knobs; three of them matter here:

    3  h.*.attn.c_attn (out): blocks of 24, 8 or 1      4  h.*.attn.c_proj (in): blocks of 8 or 1
    6  h.*.attn.c_proj (out): blocks of 1 or 8

    trial   choice          outputs agree   first wrong output   why this choice
    1       0 0 0 0 0 0 0   5               h.0.attn.c_proj      every knob at its likeliest setting
    2-4     knobs 4 and 6   5               h.0.attn.c_proj      knobs inside h.*.attn.c_proj; none helps
    5       0 0 0 1 0 0 0   all             none                 knobs inside h.*.attn: c_attn in blocks of 8

c_attn itself was the error, but its output passed: it consisted of copies, in the wrong order. Hence the
scope widens from the module at fault to the modules that contain it.
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
from .identity import DRAWS, GRADIENT_TOLERANCE, Identity, Loss, compare_gradients, gradients, load_wide_
from .names import pattern_of
from .outputs import Seen, first_difference, watched
from .plan import Plan
from .readers import reader_knobs

TRIALS = 600
"""Hypotheses before the search gives up. Of the 99 model types of transformers that are exact in
`benchmarks/families_wide.json`, 73 needed one trial, 97 at most 10, the hardest 265. A search that fails after 600
takes 30 to 40 CPU seconds on small copies."""
FLIPS = 3
"""Knobs that are changed at once. ModernBERT needs two: with one, its search ends after 11 trials without a plan. No
type is known to need three; measured on 11 types that need more than one trial."""
_PER_SCOPE = 150
"""Trials in one part of the model before its surroundings are tried: a quarter of all, so that a wrong first lead
leaves enough for others. Chosen by hand; on the same 11 types, 30 and 600 need as many trials."""

Choice = tuple[int, ...]
"""Which setting of every knob."""


@dataclass(frozen=True)
class Found:
    """A plan that passed, and what was measured."""

    plan: Plan
    trials: int
    worst: float
    gap: float
    unreached: tuple[str, ...]
    """Trainable tensors whose gradient is exactly zero or absent, which the identity does not test."""


@dataclass(frozen=True)
class _Outcome:
    """How far one choice got."""

    score: tuple[float, int]
    """Larger is better: outputs that agree (infinite if the loss does), then minus the number of wrong gradients."""
    where: tuple[str, ...]
    """Module or tensor names (as patterns) at fault."""
    says: tuple[int, float, str]
    """Smaller is nearer: what failed (0 a gradient, 1 the loss, 2 building a plan), by how much, and a description."""
    plan: Plan | None = None
    identity: Identity | None = None
    gap: float = 0.0


def search(made: Draft, base: nn.Module, wide: nn.Module, loss: Loss) -> Found:
    """The first plan that is exact for these two models; if none is found, the error shows the nearest hypothesis.

    Shapes do not show whether the vector below is a gain or a readout. "out" is tried first and fails; "in" is
    exact:

    >>> import torch
    >>> from mupscale.plans.draft import draft
    >>> class Readout(nn.Module):
    ...     def __init__(self, n: int) -> None:
    ...         super().__init__()
    ...         self.inside, self.vector = nn.Linear(3, n), nn.Parameter(torch.ones(n))
    ...
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return torch.tanh(self.inside(x)) @ self.vector
    >>> x = torch.ones(2, 3, dtype=torch.float64)
    >>> base, wide = Readout(4).double(), Readout(8).double()
    >>> found = search(draft(base, wide, False, None)[0], base, wide, lambda model: model(x).square().mean())
    >>> found.trials, str(found.plan["vector"].axes[0])
    (2, 'in: 4x2')
    """
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
        if not loss_gap(float(self.value), float(gradients(base, loss)[0])) <= GRADIENT_TOLERANCE:
            raise MupscaleError(DRAWS)
        self.seen: list[Seen] = seen
        layouts = list(layout_knobs(made, everywhere=True))
        # Axes that a layout knob already varies are not asked about a second time by the readers.
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
                    outcome.plan, needs=outcome.plan.needs | _assumed_roles(self.made, outcome.plan)
                )
                return Found(plan, len(self.tried), identity.worst[1], outcome.gap, unreached)
        raise _not_found(self.made, len(self.tried), self.nearest[2])

    def _outcomes(self) -> Iterator[_Outcome]:
        """Climb: from the likeliest choice to better ones, near the first fault first; then try the rest.

        Every improvement starts again with the scopes of the new first fault. When no scope has an
        improvement, what is left of `TRIALS` goes to choices near the likeliest one, in case the climb
        followed a wrong lead.
        """
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
        """Knobs inside the module at fault, then inside each module that contains it, then all.

        For "h.*.attn.c_proj": the knobs of h.*.attn.c_proj, of h.*.attn, of h.*, of h, and all knobs.
        """
        done: set[tuple[int, ...]] = set()
        # A wrong layout disturbs many gradients; three of them name its surroundings well enough.
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
                raise  # nothing can be varied, so this error is the answer
            return _Outcome((-1.0, 0), tuple(f.where for f in error.faults), (2, 0.0, str(error)))
        _apply_edits(self.wide, plan)
        load_wide_(self.wide, self.base, plan)
        folds = {float(t.fold) for t in plan.tensors.values()}
        with watched(self.wide) as seen:
            value, grads = gradients(self.wide, self.loss)
        gap = loss_gap(float(self.value), float(value))
        # Not `gap > tolerance`: a loss that is not a number must count as different.
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
    """The current choice, then those that differ from it in one knob of the scope, in two, up to `FLIPS`.

    >>> knobs: list[Knob] = [[..., ...], [..., ...], [..., ...]]  # three knobs of two settings
    >>> list(_near((0, 1, 0), [0, 1], knobs))
    [(0, 1, 0), (1, 1, 0), (0, 0, 0), (1, 0, 0)]
    """
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


def _assumed_roles(made: Draft, plan: Plan) -> set[str]:
    """Raw matrices whose axes grow by the same k: training is the same for both orders of in and out, noise is not.

    s = 1/k_in and r = 1/k_out are equal if k_in = k_out, so the gradient identity passes either way; the size
    of noise depends on which axis is read.
    """
    alike = [
        e.name for e in made.open if len({plan[e.name].axes[d].k for d in e.growing}) == 1 < len(e.growing)
    ]
    return {
        f"{name} reads its last growing axis (both grow by the same factor, so training does not show which; declare roles= before adding noise)"
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
    """Refuse knobs whose tensors all have no gradient: any of their settings would have passed."""
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
