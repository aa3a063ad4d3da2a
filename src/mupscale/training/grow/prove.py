"""Prove a plan on the models at hand, before anything is grown by it.

The gradient identity is measured on a base and a wide model that holds its copies. Small models are measured on copies
in float64, at weights moved away from any zeros. Large ones are measured as they are, in their own dtype, so that no
second copy of the base is made.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, replace
from math import prod
from typing import Any

import torch
from torch import nn

from ...errors import Fault, MupscaleError, NotExact, raise_faults
from ...models.build import Make
from ...models.clone import copied, unhooked
from ...models.device_map import refuse_other_device_map
from ...models.dropout import dropout_needs, without_dropout
from ...models.fingerprint import changed_code
from ...models.float64 import lifted_casts, prepare
from ...models.names import named_tensors, unwrap
from ...noise.apart import DRAWS, far_apart
from ...noise.kinds import NewUnits, Noise
from ...planning.awake import woken
from ...planning.declare import Declared, sound_with
from ...planning.facts.decided import why_undecided
from ...planning.infer import find_plan, guessed_plan, infer_plan, plan_of_shapes, proved_by
from ...planning.search.not_found import Sizes
from ...plans.attributes import (
    AttributeDifference,
    both_values,
    carry_attributes_,
    compare_attributes,
    plain_value,
)
from ...plans.direction import Direction
from ...plans.ends import check_end, expect_plan
from ...plans.gradient_hooks import has_hooks, refuse_hooks
from ...plans.plan import Plan
from ...plans.wide_model import fill_model_
from ...proofs.certificate import Certificate, Failure
from ...proofs.compare import tolerance_of
from ...proofs.identity import Evaluated, Loss, evaluated
from ...proofs.measuring import Measuring
from ...proofs.modes import Modes, mode_needs
from ...proofs.trial import Trial
from ...rules.products import COPIES, Ways
from ...runs.run import Run
from .woken import moved_by_waking

FLOAT64_BYTES = 2**28
"""Base and wide model of together up to 256 MiB in float64, 33 million numbers, are copied and measured in float64, in
seconds. Above it a copy would cost more memory than the run itself has."""

_LOG = logging.getLogger("mupscale")


def proved_plan(
    base: nn.Module,
    built: nn.Module,
    plan: Plan | None,
    loss: Loss | None,
    prove: bool,
    ways: Ways = COPIES,
    fresh: Make | None = None,
    noise: Noise | None = None,
    declared: Declared | None = None,
) -> tuple[Plan, dict[str, Any]]:
    """The plan to grow by, and the record of what proved it; raises if nothing does.

    `built` is the wide model without weights; it gets the base's settings that are not tensors. `ways` is how spaces grow
    where no plan is given. `fresh` builds the wide model with weights, which are looked at where blocks are new. `noise` is
    what will wake new units or split copies, where waking should move no loss.
    """
    checked = sound_with(declared, plan)
    refuse_other_device_map(base, built)
    if plan is not None:
        expect_plan(plan)
        check_end(plan, base, "base")
        check_end(plan, built, "wide")
    _refuse_hooks(unwrap(base), unwrap(built), plan, ways, checked)
    # Without a proof nothing shows whether the wide model's own settings are meant.
    differences = compare_attributes(base, built, plan) if prove else []
    carry_attributes_(built, differences)
    if loss is None or not prove:
        chosen = plan if plan is not None else infer_plan(base, built, by=ways.by, declared=checked)
        changed = changed_code(chosen.code, base, built) if prove else ""
        if changed:
            warnings.warn(f"{changed}; add loss= or example_inputs=, and it is proved again", stacklevel=3)
        _refuse_unproved(base, built, chosen, prove)
        lost, remedy = [d for d in differences if d.kind == "refused"], "add loss= or example_inputs="
        raise_faults(
            "the base has what is not carried, and nothing was measured that would show whether it matters",
            [Fault("proof.attribute_not_carried", d.path, both_values(d), remedy) for d in lost],
        )
        record: dict[str, Any] = {"by": chosen.proof, **({"changed": changed} if changed else {})}
    else:
        try:
            chosen, record = _measured_plan(base, built, plan, loss, ways, fresh, noise, checked)
        except NotExact as error:
            raise _with_differences(error, differences) from error.__cause__
    carried = {d.path: plain_value(d.base) for d in differences if d.kind == "carried"}
    record |= {"carried": carried} if carried else {}
    for need in (need for need in sorted(chosen.needs) if need.kind in ("dropout", "unreached", "eval mode")):
        warnings.warn(f"growing is exact with {need}", stacklevel=3)
    return chosen, record


def _refuse_hooks(
    base: nn.Module, built: nn.Module, plan: Plan | None, ways: Ways, declared: Declared
) -> None:
    """Raise for hooks on gradients that cannot be carried, before a proof that may take minutes."""
    if has_hooks(base):
        likely = plan
        if plan is None:
            with suppress(MupscaleError):  # what shapes leave open is searched for later
                likely = plan_of_shapes(base, built, ways, declared)
        refuse_hooks(base, built, likely, sure=plan is not None)


def _with_differences(error: NotExact, differences: list[AttributeDifference]) -> NotExact:
    """The error, with what the wide model does not have from the base and what may be the reason."""
    remedies = {"kept": "write the base's value in the factory", "refused": "do it in the factory as well"}
    left = [
        Fault("proof.attribute_not_carried", d.path, both_values(d), remedies[d.kind])
        for d in differences
        if d.kind in remedies
    ]
    return type(error)(error.claim, [*error.faults, *left]) if error.faults and left else error


def _measured_plan(
    base: nn.Module,
    built: nn.Module,
    plan: Plan | None,
    loss: Loss,
    ways: Ways,
    fresh: Make | None,
    noise: Noise | None,
    declared: Declared,
) -> tuple[Plan, dict[str, Any]]:
    """The given plan after it was measured, or the one that a search finds, and the record of the measurement."""
    small = _float64_bytes(base, built) <= FLOAT64_BYTES
    if plan is not None:
        _refuse_lost_scores(plan, small)
        for draw in range(DRAWS if plan.parts_tokens else 1):
            pair = _Pair(base, built, plan, small, loss, draw=draw)
            with pair.computing():
                measured = pair.certificate()
                if measured.holds or not (plan.parts_tokens and pair.between()):
                    break
        measured.raise_if_broken()
        unlearned = Sizes() if noise is None else _unlearned(pair, noise, given=True)
        return _proved(pair, measured, unlearned)
    if not small and (guessed := _guessed(base, built, loss, ways, noise, declared)) is not None:
        return guessed
    found = find_plan(base, built, loss, declared, ways, fresh=fresh)
    unlearned = found.unlearned
    if noise is not None and ways.by != "units":  # such plans were woken while they were searched for
        unlearned = _unlearned(_Pair(base, built, found.plan, small, loss), noise, given=ways.by == "padded")
    worst = max(found.worst, found.gap)
    return found.plan, _record(found.plan, "float64", worst, found.trials, found.modes, unlearned)


def _refuse_lost_scores(plan: Plan, small: bool) -> None:
    """Raise for copies of experts in a large model: so far apart that tokens keep their experts, scores need float64."""
    if small or not plan.parts_tokens:
        return
    what = f"it parts tokens, which is measured in float64, and copies in float64 take more than {FLOAT64_BYTES >> 20} MiB"
    remedy = (
        "measure it where the memory is there, with mu.verify(base, wide, plan=plan, loss=loss).raise_if_broken(), and write "
        "prove=False here"
    )
    raise_faults(
        "this plan is not measured on a model of this size",
        [Fault("experts.too_large_to_measure", "plan", what, remedy)],
    )


def _guessed(
    base: nn.Module, built: nn.Module, loss: Loss, ways: Ways, noise: Noise | None, declared: Declared
) -> tuple[Plan, dict[str, Any]] | None:
    """The likeliest plan, measured on large models as they are; None if it is not exact or leaves anything open."""
    try:
        with unhooked(base):
            plan = guessed_plan(base, copied(built, hooks=False), loss, ways, declared)
        pair = _Pair(base, built, plan, small=False, loss=loss, guess=True)
        with pair.computing():
            measured = pair.certificate()
        if not measured.holds:
            _LOG.info(
                "the likeliest plan is not exact (%s); searching on copies in float64", measured.failure
            )
            return None
        open_rows = [
            row.name for row in measured.tensors if row.silent and not row.rounding and plan[row.name].grows
        ]
        if open_rows:
            _LOG.info("no gradient reaches %s; searching on copies in float64", open_rows[0])
            return None
        unlearned = Sizes()
        if noise is not None or ways.by == "units":
            seen = _unlearned(pair, noise or NewUnits(), given=ways.by == "padded")
            unlearned = Sizes() if noise is None else seen
    except MupscaleError as error:
        _LOG.info("the likeliest plan cannot be measured (%s); searching on copies in float64", error.claim)
        return None
    _LOG.info("the likeliest plan is exact")
    return _proved(pair, measured, unlearned)


def _proved(pair: _Pair, measured: Certificate, unlearned: Sizes) -> tuple[Plan, dict[str, Any]]:
    """A plan that was measured and holds, and the record of the measurement."""
    assert pair.loss is not None
    silent = [row for row in measured.tensors if row.silent and not row.rounding]
    unreached = tuple(row.name for row in silent)
    # Which modes are exact was measured again.
    before = (need for need in pair.plan.needs if need.kind not in ("train mode", "eval mode"))
    needs = dropout_needs(pair.dropout) | mode_needs(measured.modes)
    plan = replace(pair.plan, needs=needs.union(before))
    proved = proved_by(plan, pair.loss, unreached, pair.base, pair.built)
    return proved, _record(proved, measured.dtype, measured.worst, 1, measured.modes, unlearned)


def _unlearned(pair: _Pair, noise: Noise, given: bool) -> Sizes:
    """The sizes whose new units do not learn, found by one step after waking them; raises if waking moves the loss."""
    loss = pair.loss
    assert loss is not None
    with pair.computing():
        trial = pair.pair()
    base, wide = trial.base.model, trial.wide.model

    def measured(model: nn.Module, wanted: Callable[[float], bool]) -> Evaluated:
        with pair.computing(), without_dropout(base, wide):
            return evaluated(model, loss, wanted)

    seen = woken(pair.plan, base, wide, measured, noise)
    if pair.plan.parts_tokens:  # which moves the loss by what few tokens lose, and is measured
        return seen.dead
    if seen.moved(torch.finfo(pair.dtype).eps):
        raise_faults("waking would change the loss", [moved_by_waking(seen.asleep, seen.awake, given)])
    return seen.dead


def _refuse_unproved(base: nn.Module, built: nn.Module, plan: Plan, prove: bool) -> None:
    """Raise unless the plan was proved or the caller goes without a proof; the error shows the argument to add."""
    model = unwrap(base)
    # A plan that modules decide is decided for these modules only, so it is looked at again.
    reason = why_undecided(model, unwrap(built), plan) if plan.proof in ("none", "modules") else None
    if not prove or (plan.proved and reason is None):
        return
    reason = reason or "the plan was not measured"
    remedy = (
        f"add example_inputs=({_arguments(model)}), one batch as forward takes it, or loss=lambda model: …, the loss of "
        "one batch; prove=False grows without a proof, and the result says so"
    )
    raise_faults(
        "nothing has proved that this plan is exact",
        [Fault("proof.missing", type(model).__name__, reason, remedy)],
    )


def _arguments(model: nn.Module) -> str:
    """The arguments that forward needs, as they stand in a tuple.

    >>> class Model(nn.Module):
    ...     def forward(self, ids, mask, cache=None):
    ...         return ids
    >>> _arguments(Model()), _arguments(nn.ReLU())
    ('ids, mask', 'input,')
    """
    try:
        known = list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):
        return "x,"
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [p for p in known if p.kind in plain]
    # A forward whose arguments are all optional, as transformers', still needs its first one.
    needed = [p for p in positional if p.default is inspect.Parameter.empty] or positional[:1]
    names = [p.name for p in needed]
    return f"{names[0]}," if len(names) == 1 else ", ".join(names or ["x,"])


def _float64_bytes(base: nn.Module, built: nn.Module) -> int:
    return 8 * sum(prod(tensor.shape) for model in (base, built) for _, _, tensor in named_tensors(model))


class _Pair(Measuring):
    """A base and a wide model that are measured: copies in float64 of small ones, large ones as they are."""

    def __init__(
        self,
        base: nn.Module,
        built: nn.Module,
        plan: Plan,
        small: bool,
        loss: Loss,
        guess: bool = False,
        draw: int = 0,
    ) -> None:
        own = {t.dtype for _, kind, t in named_tensors(base) if kind == "parameter" and t.is_floating_point()}
        # Of several dtypes the coarsest limits what can be seen.
        coarsest = max(own, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
        dtype = torch.float64 if small else coarsest
        super().__init__(loss=loss, dtype=dtype, tolerance=tolerance_of(dtype, None))
        self.base, self.built, self.plan, self.small = base, built, plan, small
        self.guess, self.draw = guess, draw

    def computing(self) -> AbstractContextManager[object]:
        """What the models are computed in: casts to float64 for copies, and no hooks of the base's parameters otherwise."""
        return lifted_casts(self.base) if self.small else unhooked(self.base)

    def pair(self) -> Trial:
        """The base, or a copy of it, and a wide model that holds its copies."""
        if self.small:
            base, wide = prepare(unwrap(self.base), unwrap(self.built))
        else:
            base, wide = self.base, copied(self.built, hooks=False)
        direction = Direction(self.plan, noise=far_apart(self.plan, base, self.draw))
        fill_model_(wide, base, direction, hooks=False, in_place=self.small)
        return Trial(Run(base), Run(wide), self.plan, self.tolerance)

    def explained(self, failure: Failure) -> Failure:
        """Why a guess is not exact is not asked."""
        return failure if self.guess else super().explained(failure)

    def copy(self) -> Run:
        """A copy of the base."""
        base = unwrap(self.base)
        return Run(prepare(base, unwrap(self.built))[0] if self.small else copied(base, hooks=False))


def _record(
    plan: Plan, dtype: str, worst: float, trials: int, modes: Modes, unlearned: Sizes
) -> dict[str, Any]:
    known = {name: asdict(mode) for name, mode in modes.items()}
    sizes = (
        {"unlearned": [f"{before} -> {after}" for before, after in sorted(unlearned)]} if unlearned else {}
    )
    return {"by": plan.proof, "dtype": dtype, "worst": worst, "trials": trials, "modes": known, **sizes}
