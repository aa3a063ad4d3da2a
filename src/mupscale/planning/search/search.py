"""Try hypotheses about a plan on two models in float64 until the gradient identity holds.

Every torch function that the loss calls is recorded. The first one whose output is not made of copies of the base's
shows where a wrong hypothesis is, so what is near it is changed first. This only decides what is tried next: a plan
is accepted by the loss and the gradient identity on every tensor, and by nothing else.

How it goes for a GPT-2 of 2 heads, doubled. Of its 7 knobs, the one for the rows of c_attn has blocks of 24, 8 and 1:

    trial   hypothesis                               first wrong call
    1       every knob at its likeliest setting      transpose of the heads in h.0.attn
    2       rows of c_attn in blocks of 8            none

The view that splits the rows into heads of 8 suggests the second hypothesis. Where no call suggests anything that
helps, knobs are turned one by one: inside the module at fault first, then inside the modules that contain it. The search
ends when nothing is left that a wrong call suggests.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice

from torch import nn

from ...errors import Fault, raise_faults
from ...plans.plan import Plan
from ...plans.tensor_plan import Powers
from ...proofs.identity import Loss
from ...proofs.modes import Modes
from ..draft import Draft
from ..facts.padded_norms import streams, unpaddable, with_streams
from ..knobs import Knob, Setting
from .choices import Choice, Choices, assumed_roles
from .not_found import Sizes, mean_not_written, not_found
from .propose import Proposals
from .shown import shown_layouts, with_shown_roles
from .trials import TrialOutcome, Trials

_LOG = logging.getLogger("mupscale")

TRIALS = 200
"""Hypotheses before the search gives up. Of the models of the zoo DeepFM needs most, 171; of 115 much-used types MiniMax, 39."""
UNITS_TRIALS = 60
"""The same for plans by new units, behind which copies are tried: of the rows of `growth.py --only units` the most is 31."""
SECONDS = 120.0
"""CPU seconds before the search gives up: twice what as many trials take on MiniMax, a small copy with slow calls."""
_PER_PLACE = 40
"""Knobs turned for one wrong call, and as many layouts. Chosen by hand."""
_INSIDE = 2
"""Of the module at fault and those that contain it, how many have their knobs turned before layouts are proposed."""
_TURN = 8
"""Suggestions of one place before another place has its turn. Chosen by hand."""
_DEBTS = 2
"""Folds in a row that are followed although they disturb an earlier call. A penalty on activations needs one."""
_REPORT = 10.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Found:
    """A plan that passed, and what was measured."""

    plan: Plan
    trials: int
    worst: float
    gap: float
    unreached: tuple[str, ...]
    """Trainable tensors whose gradient is exactly zero or absent, which the identity does not test."""
    powers: Powers = field(default_factory=dict)
    """Folds that depend on how much of an axis is filled."""
    modes: Modes = field(default_factory=dict)
    """What holds in train and in eval mode; empty where only one was asked for."""
    unlearned: Sizes = frozenset()
    """Sizes whose new units get no gradient when they wake."""
    assumed: tuple[str, ...] = ()
    """Raw matrices of which no call shows which axis is read."""


@dataclass
class _Place:
    """An outcome that is followed, with what it suggests."""

    outcome: TrialOutcome
    suggested: Iterator[Choice]
    used: int = 0
    debts: int = 0


def search(made: Draft, base: nn.Module, wide: nn.Module, loss: Loss, seconds: float | None = None) -> Found:
    """The first plan that is exact for these two models; if none is found, the error shows the nearest hypothesis.

    It gives up after so many CPU seconds, by default `SECONDS`.

    Shapes do not show whether the vector below is a gain or a readout. "out" is tried first and fails; "in" is
    exact:

    >>> import torch
    >>> from mupscale.planning.draft import draft
    >>> from mupscale.rules.products import Ways
    >>> class Readout(nn.Module):
    ...     def __init__(self, n: int) -> None:
    ...         super().__init__()
    ...         self.inside, self.vector = nn.Linear(3, n), nn.Parameter(torch.ones(n))
    ...
    ...     def forward(self, x: torch.Tensor) -> torch.Tensor:
    ...         return torch.tanh(self.inside(x)) @ self.vector
    >>> x = torch.ones(2, 3, dtype=torch.float64)
    >>> base, wide = Readout(4).double(), Readout(8).double()
    >>> found = search(draft(base, wide, Ways(), None)[0], base, wide, lambda model: model(x).square().mean())
    >>> found.trials, str(found.plan["vector"].axes[0])
    (2, 'in: 4x2')
    """
    return _Search(made, base, wide, loss, SECONDS if seconds is None else seconds).run()


class _Search:
    def __init__(self, made: Draft, base: nn.Module, wide: nn.Module, loss: Loss, seconds: float) -> None:
        raise_faults("these two models cannot be planned", list(unpaddable(made)))
        self.trials = Trials(made, base, wide, loss)
        if made.ways.pads:  # who reads and writes a space with zeros must be known before the first trial
            made = with_shown_roles(made, self.trials.trace)
        found = streams(made, self.trials.trace)
        if found.closed:
            raise mean_not_written(found.closed)
        self.made = made = with_streams(made, found)
        self.choices = Choices(made, base, self.trials.trace.returned, found)
        self.proposals = Proposals(made, self.trials.trace)
        self.tried: set[Choice] = set()
        self.nearest = TrialOutcome((-2.0, 0), (), "nothing was tried")
        self.improved = 0  # trials until the nearest
        self.started = self.reported = time.process_time()
        self.seconds = seconds

    def run(self) -> Found:
        _LOG.info("searching for an exact plan: %d open questions", len(self.choices.knobs))
        for outcome in self._outcomes():
            if outcome.plan is not None and outcome.identity is not None:
                identity = outcome.identity
                _refuse_undecided(self.choices.knobs, set(identity.errors) - set(identity.untested))
                unreached = tuple(
                    n for n, g in self.trials.found.grads.items() if g is None or not bool(g.any())
                )
                plan = replace(
                    outcome.plan, needs=outcome.plan.needs | assumed_roles(self.made, outcome.plan)
                )
                _LOG.info("exact plan found after %d trials", len(self.tried))
                trial = outcome.trial or self.made
                powers = {name: dict(entry.fills) for name, entry in trial.entries.items() if entry.fills}
                assumed = tuple(entry.name for entry in self.made.open if len(entry.growing) == 2)
                return Found(
                    plan, len(self.tried), identity.worst[1], outcome.gap, unreached, powers, assumed=assumed
                )
        if self.nearest.error is not None:
            raise self.nearest.error  # no hypothesis could be built, so this error is the answer
        raise not_found(self.made, len(self.tried), self._over(), self.nearest)

    def _over(self) -> bool:
        """Whether the trials or the time are used up, or by new units only the loss is wrong and stays so.

        What zeros leave wrong outside all modules is set right by one of the first folds, or these sizes grow by copies.
        """
        if time.process_time() - self.started > self.seconds:
            return True
        if self.made.ways.by != "units":
            return len(self.tried) >= TRIALS
        stays = not self.nearest.where and len(self.tried) - self.improved > _TURN
        return stays or len(self.tried) >= UNITS_TRIALS

    def _outcomes(self) -> Iterator[TrialOutcome]:
        """Try the likeliest choice, then what its first wrong call suggests, and go on from every improvement.

        All improvements stay open: `_TURN` suggestions of the best one are tried, then as many of the next. A fold
        may set right one place and disturb an earlier one, which another tensor then has to make up for: up to
        `_DEBTS` such folds are followed as well, after the first turn of the others.
        """
        likeliest = self.choices.likeliest
        first = self._try(likeliest)
        yield first
        places = [_Place(first, self._suggested(likeliest, first))]
        if (shown := self._shown(likeliest, first)) is not None:
            outcome = self._try(shown)
            yield outcome
            if outcome.score > first.score:
                places.append(_Place(outcome, self._suggested(shown, outcome)))
        while places:
            place = min(places, key=lambda p: (p.used // _TURN, -p.outcome.score[0], -p.outcome.score[1]))
            new = next((c for c in place.suggested if c not in self.tried), None)
            if new is None:
                places.remove(place)
                continue
            if self._over():
                return
            place.used += 1
            outcome = self._try(new)
            yield outcome
            better = outcome.score > place.outcome.score
            if better or (place.debts < _DEBTS and self._owes(new, place.outcome, outcome)):
                debts = place.debts if better else place.debts + 1
                suggested = self._suggested(new, outcome)
                places.append(_Place(outcome, suggested, 0 if better else _TURN, debts))

    def _shown(self, choice: Choice, outcome: TrialOutcome) -> Choice | None:
        """The choice with all layouts that the code shows, in every layer at once; None if it shows none."""
        if outcome.trial is None or outcome.deviation is None:
            return None
        aligned = outcome.deviation.aligned
        setting = shown_layouts(outcome.trial, aligned.base, aligned.wide)
        return None if setting is None else self.choices.moved(choice, setting)

    def _owes(self, choice: Choice, before: TrialOutcome, outcome: TrialOutcome) -> bool:
        """True if a fold was added and the call that is wrong now gets a factor.

        Also if the loss agreed before and a layout was added: what wrote in one order may be read in the same.
        """
        where, last = outcome.deviation, self.choices.last(choice)
        if last is None or where is None or where.call is None:
            return False
        agreed = bool(last.layouts) and before.score[0] == float("inf")
        return agreed or (bool(last.folds) and bool(where.aligned.input_factors(where.call)))

    def _suggested(self, choice: Choice, outcome: TrialOutcome) -> Iterator[Choice]:
        """The choice with one change: a fold, a knob near the fault, a layout, a guessed fold, any knob."""
        where, trial = outcome.deviation, outcome.trial
        scopes = list(self.choices.scopes(outcome.where))
        # A call outside all modules, such as the loss itself, has no knobs nearer than all of them.
        inside, around = (scopes[:_INSIDE], scopes[_INSIDE:]) if outcome.where else (scopes, [])
        if where is None or trial is None:
            yield from islice(self.choices.turned(choice, [*inside, *around]), _PER_PLACE)
            return
        yield from self._with(choice, self.proposals.folds(trial, where))
        yield from islice(self.choices.turned(choice, inside), _PER_PLACE)
        yield from self._with(choice, self.proposals.layouts(trial, where))
        yield from self._with(choice, self.proposals.guesses(trial, where))
        yield from islice(self.choices.turned(choice, around), _PER_PLACE)
        if where.call is None:  # after calls that differ nothing shows whether one knob alone is right
            for one in self.choices.turned(choice, scopes):
                yield from self.choices.turned(one, scopes)

    def _with(self, choice: Choice, settings: Iterator[Setting]) -> Iterator[Choice]:
        for setting in settings:
            if (moved := self.choices.moved(choice, setting)) is not None:
                yield moved

    def _try(self, choice: Choice) -> TrialOutcome:
        outcome = self.trials.measure(self.choices.draft(choice))
        self.tried.add(choice)
        if outcome.score > self.nearest.score:
            self.nearest, self.improved = outcome, len(self.tried)
        _LOG.debug("trial %d, score %s: %s", len(self.tried), outcome.score, self.choices.describe(choice))
        now = time.process_time()
        if now - self.reported > _REPORT:
            self.reported = now
            _LOG.info(
                "%d trials in %.0f CPU seconds; nearest: %s",
                len(self.tried),
                now - self.started,
                self.nearest.says,
            )
        return outcome


def _refuse_undecided(knobs: list[Knob], tested: set[str]) -> None:
    """Refuse knobs whose tensors all have no gradient: any of their settings would have passed."""
    faults = []
    for knob in knobs:
        names = {name for setting in knob for name in (*setting.roles, *setting.layouts)}
        if len(knob) > 1 and names and not names & tested:
            what = "its gradient is zero, so every hypothesis passes: the loss does not reach it"
            faults.append(
                Fault(
                    "search.tensor_undecided",
                    ", ".join(sorted(names)),
                    what,
                    "use a loss that reaches it, or write declared=mu.Declared(roles=…, layouts=…)",
                )
            )
    raise_faults("the loss does not decide every tensor", faults)
