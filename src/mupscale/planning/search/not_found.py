"""The refusal of a search that found no plan: where the two models part, by which factor, and what to look for."""

from __future__ import annotations

from ...errors import Fault, MupscaleError
from ...rules.scale import ONE
from ..draft import Draft
from ..facts.modules import leaking_pads
from .first_wrong_call import Alignment, Deviation


def not_found(
    made: Draft,
    tried: int,
    out_of_time: bool,
    nearest: str,
    where: Deviation | None,
    aligned: Alignment | None,
) -> MupscaleError:
    """The error for two models without an exact plan."""
    what = f"none passes the gradient identity; nearest: {nearest}"
    faults = [Fault("search.no_exact_plan", f"{tried} hypotheses tried", what)]
    if out_of_time:
        faults.append(
            Fault("search.ended_at_limit", "the search", "it ended at its limit of trials or of time")
        )
    if where is not None and aligned is not None:
        faults.append(_place(where, aligned))
    if made.ways.pads:
        faults += leaking_pads(made.models[0], "build the wide model at a whole multiple")
    for name, reader in made.conflicts.items():
        if made.entries[name].declared_fold is None:
            faults.append(
                Fault(
                    "plan.tied_readout",
                    f"{name} = {reader}",
                    "a tied readout: it sums over the width, its other use does not, and no tensor before it absorbed 1/k",
                    "divide the logits by the width in the model, or untie",
                )
            )
    return MupscaleError("no exact plan was found for these two models", faults)


def _place(where: Deviation, aligned: Alignment) -> Fault:
    """The first call whose output does not consist of copies of the base's."""
    if where.call is None:
        return Fault(
            "search.calls_differ",
            f"torch call {where.index}",
            "from here on the two models call different functions",
            "look for a loop or a branch that depends on the width",
        )
    call = where.call
    module = call.path or "the model or the loss"
    place = f"{module}, {call.name}" + (f" at {call.line}" if call.line else "")
    factors = set(map(str, aligned.input_factors(call)))
    if where.excess is not None and where.excess != ONE:
        factors = {str(where.excess)}
    if factors:
        return Fault(
            "search.factor_not_absorbed",
            place,
            f"what it gets is copies of the base's times {' or '.join(sorted(factors))}, and no tensor before it can absorb that",
            "look for a sum over the width, or a width in the code, such as 1/sqrt(d)",
        )
    return Fault(
        "search.first_difference",
        place,
        "the first result that does not consist of copies of the base's",
        "look for an order of channels (view, concatenation, shuffle), a table or random numbers as long as the width, dropout, or a weight that is used in two ways",
    )
