"""Which weights get noise: one rule for live models, files and shards.

Noise parts copies and wakes zeros, so it is added only to weights that have copies or zeros. Of those, it leaves out
the quiet weights of new blocks, which would change the output, weights that are not trained, and the padding row of an embedding, because training would never correct it there.
Gains and biases get none unless the scheme asks for `vectors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..models.names import module_paths, name_in, named_tensors, resolve
from ..plans.plan import Plan
from ..plans.tensor_plan import Becomes, TensorPlan

if TYPE_CHECKING:
    from ..plans.ends import End


@dataclass(frozen=True)
class Exempt:
    """What a model says about noise and a plan does not; names are those of the plan's wide tensors."""

    frozen: frozenset[str] = frozenset()
    """Weights with requires_grad=False. Files hold no such flag: there, only what the model's class freezes is known."""
    norms: frozenset[str] = frozenset()
    """Gains and biases of norms, which count as vectors whatever their shape: LayerNorm([C, H, W]) has three axes."""
    padding: Mapping[str, int] = field(default_factory=dict)
    """Embedding -> its padding row, which gets no gradient."""

    def as_json(self) -> dict[str, Any]:
        return {"frozen": sorted(self.frozen), "gains": sorted(self.norms), "rows": dict(self.padding)}

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> Exempt:
        padding = {str(name): int(row) for name, row in entry["rows"].items()}
        return Exempt(frozenset(map(str, entry["frozen"])), frozenset(map(str, entry["gains"])), padding)


def exempt_of(model: nn.Module, plan: Plan, end: End) -> Exempt:
    """What the model at one end of the plan exempts from noise. At the wide end it is the model that will train.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Embedding(5, n, padding_idx=0), nn.LayerNorm(n))
    >>> exempt_of(make(4), mu.plans.plan_between(make, 4, 8), "base").padding
    {'0.weight': 0}
    """
    from ..models.kinds import KNOWN_NORMS, padding_rows

    names = _wide_names(plan, end)
    frozen: set[str] = set()
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and not tensor.requires_grad:
            frozen.update(names.get(resolve(name, names) or name, ()))
    norms: set[str] = set()
    padding = {wide: row for name, row in padding_rows(model).items() for wide in names.get(name, ())}
    for path, module in module_paths(model):
        if isinstance(module, KNOWN_NORMS):
            for leaf, _ in module.named_parameters(recurse=False):
                norms.update(names.get(name_in(path, leaf), ()))
    return Exempt(frozenset(frozen), frozenset(norms), padding)


def _wide_names(plan: Plan, end: End) -> dict[str, list[str]]:
    """Name at one end, ties included -> the wide tensors that it becomes or is."""
    if end == "wide":
        found = {name: [name] for name in plan.tensors}
    else:
        found = {source: list(names) for source, names in plan.sources.items()}
    return found | {alias: found[name] for alias, name in plan.ties.items() if name in found}


def woken_values(plan: Plan, exempt: Exempt) -> dict[str, Becomes]:
    """The tensors whose zeros become more than noise, with what they become: gains, running variances, tables of words."""
    return {
        name: becomes
        for name, entry in plan.tensors.items()
        if (becomes := entry.sleep.becomes) and entry.trainable and name not in exempt.frozen
    }


def noisy_weights(plan: Plan, exempt: Exempt, *, vectors: bool) -> dict[str, TensorPlan]:
    """The weights that get noise, by name, in the order of the plan.

    >>> from mupscale.rules import Axis
    >>> grown, fixed = Axis.parse("out: 2x4"), Axis.fixed(2)
    >>> plan = Plan({"w": TensorPlan(("w",), (grown, fixed)), "other": TensorPlan(("other",), (fixed, fixed))})
    >>> list(noisy_weights(plan, Exempt(), vectors=False)), list(noisy_weights(plan, Exempt({"w"}), vectors=False))
    (['w'], [])
    """
    return {
        name: entry
        for name, entry in plan.tensors.items()
        if entry.kind == "parameter"
        and must_part(entry)
        and name not in exempt.frozen
        and entry.trainable
        and 0 not in entry.wide_shape
        and (vectors or not (name in exempt.norms or is_vector(entry)))
    }


def must_part(entry: TensorPlan) -> bool:
    """Whether a weight has copies, along an axis or in other tensors, or a part that only noise can wake."""
    return entry.sleep.wakes or (not entry.new and has_copies(entry))


def has_copies(entry: TensorPlan) -> bool:
    """Whether a weight has copies, along an axis or in other tensors.

    >>> from mupscale.rules import Axis
    >>> [has_copies(TensorPlan(("w",), (Axis.parse(text),))) for text in ("out: 4x2+1", "out: 4+2")]
    [True, False]
    """
    return entry.change.c != 1


def pairing(entry: TensorPlan) -> int | None:
    """The dimension along which paired noise sums to zero: the first `in` dimension that has copies."""
    return next((d for d, axis in enumerate(entry.axes) if axis.role == "in" and axis.k > 1), None)


def is_vector(entry: TensorPlan) -> bool:
    """Whether a weight is a gain or a bias by its roles: one number per unit that it writes, and no sum over units.

    A gain is a vector in any spelling, (C,) or (C, 1, 1). A readout of one number is summed over its units and is not
    a vector, as a row of a matrix or by itself.

    >>> from mupscale.rules import Axis
    >>> one, out, summed = Axis.fixed(1), Axis.parse("out: 4x2"), Axis.parse("in: 4x2")
    >>> [is_vector(TensorPlan(("w",), axes)) for axes in [(out,), (out, one, one), (one, summed), (summed,)]]
    [True, True, False, False]
    """
    return all(axis.role == "out" if axis.grows else axis.wide == 1 for axis in entry.axes) or (
        len(entry.axes) < 2 and not entry.grows
    )
