"""The refusal of a search that found no plan: where the two models part, by which factor, and what to look for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from types import MappingProxyType

from torch import Tensor

from ...errors import Fault, NotExact
from ...models.names import pattern_of
from ...rules.scale import ONE
from ..draft import Draft
from ..facts.modules import leaking_pads
from .first_wrong_call import Deviation
from .trials import TrialOutcome

Sizes = frozenset[tuple[int, int]]
"""Sizes of growing axes, in the base and in the wide model."""


class NoPlanError(NotExact):
    """No hypothesis passed."""

    sizes: Sizes = frozenset()
    """The sizes that grow where the nearest hypothesis went wrong; empty where that is not known."""
    centred: Sizes = frozenset()
    """The sizes of spaces whose new channels were to carry a mean."""
    roles: Mapping[str, Mapping[int, str]] = MappingProxyType({})
    """Matrices that no module explains, read the other way round: both ways are exact, and one may be the better to wake."""


def not_found(made: Draft, tried: int, ended: bool, nearest: TrialOutcome) -> NoPlanError:
    """The error for two models without an exact plan; `ended` says that the search came to its limit."""
    what = f"none passes the gradient identity; nearest: {nearest.says}"
    faults = [Fault("search.no_exact_plan", f"{tried} hypotheses tried", what)]
    if ended:
        faults.append(
            Fault("search.ended_at_limit", "the search", "it ended at its limit of trials or of time")
        )
    if nearest.deviation is not None:
        faults.append(_place(nearest.deviation))
    if made.ways.pads:
        by_units = made.ways.by == "units"
        remedy = 'write by="copies"' if by_units else "build the wide model at a whole multiple"
        faults += leaking_pads(made.models[0], remedy)
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
    error = NoPlanError("no exact plan was found for these two models", faults)
    if nearest.trial is not None and nearest.score[0] == inf:
        error.sizes = _read_by(nearest.trial, nearest.where)
    elif nearest.deviation is not None:
        error.sizes = sizes_at_fault(nearest.deviation)
    return error


def _read_by(trial: Draft, patterns: Sequence[str]) -> Sizes:
    """The sizes with zeros that tensors of these patterns read: where a gradient is wrong, new units are not silent."""
    entries = [entry for entry in trial.entries.values() if pattern_of(entry.name) in patterns]
    reads = [
        (e, d) for e in entries for d in e.growing if (e.roles or {}).get(d) == "in" and trial.padded(e, d)
    ]
    return frozenset((e.base_shape[d], e.wide_shape[d]) for e, d in reads)


def mean_not_written(sizes: Sizes) -> NoPlanError:
    """The error for spaces that norms subtract the mean of, and that not only linear layers and tables write into."""
    error = NoPlanError(
        "a norm or an activation writes into a space that norms subtract the mean of, so new channels cannot carry the mean",
        code="search.mean_not_written",
    )
    error.centred = error.sizes = sizes
    return error


def sizes_at_fault(where: Deviation) -> Sizes:
    """The sizes that grow at the first wrong call: in its output, or in its inputs, or where its factor comes from.

    Channels from 3 to 6 that are summed. The loss doubles, and nothing in the call that returns it grows:

    >>> import torch
    >>> from fractions import Fraction
    >>> from mupscale.models.calls import traced
    >>> from mupscale.planning.search.first_wrong_call import Alignment
    >>> from mupscale.planning.search.up_to_copies import Comparison
    >>> def trace(n: int):
    ...     x = torch.ones(n).double()
    ...     return traced(torch.nn.Identity(), lambda: x.exp().sum().neg())[1]
    >>> aligned = Alignment(trace(3), trace(6), Comparison({Fraction(2)}))
    >>> sizes_at_fault(aligned.first(2))
    frozenset({(3, 6)})
    """
    calls = [where.index] if where.call is not None else []
    for index in calls:
        base, wide = where.aligned.base.calls[index], where.aligned.wide.calls[index]
        found = _growing(base.outputs, wide.outputs) or _growing(base.inputs, wide.inputs)
        if found:
            return found
        made = (parent for parent in base.parents if parent is not None and parent not in calls)
        calls += [parent for parent in made if where.aligned.factor(parent) != ONE]
    return frozenset()


def _growing(base: Sequence[Tensor], wide: Sequence[Tensor]) -> Sizes:
    shapes = [(a.shape, b.shape) for a, b in zip(base, wide, strict=False) if a.dim() == b.dim()]
    return frozenset((n, m) for a, b in shapes for n, m in zip(a, b, strict=True) if n != m)


def _place(where: Deviation) -> Fault:
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
    factors = set(map(str, where.aligned.input_factors(call)))
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
