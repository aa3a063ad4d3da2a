"""Weights that a module computes from other tensors: weight_norm, which can grow, and the rest, which is refused.

weight_norm computes W = g v / |v|, with the norm of each row of v. Copies of the columns make |v| longer by sqrt(k),
whatever v is multiplied by, and the layer needs W/k: so g absorbs 1/sqrt(k). Speech models take the norm of all rows and
columns at each place of a kernel: copies of the rows make it longer too, and g absorbs sqrt(k_rows / k_columns).

>>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.utils.parametrizations.weight_norm(nn.Linear(n, 2)))
>>> import mupscale as mu
>>> plan = mu.plans.plan_between(make, 4, 8)
>>> {name: str(t.fold) for name, t in plan.tensors.items() if not t.fold.is_one}
{'1.parametrizations.weight.original0': '2^(-1/2)'}
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ...errors import Fault
from ...rules.axes import Axis
from ...rules.products import Ways
from ...rules.scale import Scale
from .modules import Facts, facts

_MARK = "parametrizations"


def parametrized(name: str, owners: Mapping[str, nn.Module]) -> str | None:
    """The class of what computes a weight from this tensor, or None if it is an ordinary tensor.

    Names alone do not tell: `weight_v` may be the values of attention. torch's old weight_norm and spectral_norm
    leave a hook in the module, the new ones a list of parametrizations.
    """
    path, _, leaf = name.rpartition(".")
    above = path.rpartition(".")[0]
    if f".{above}".endswith(f".{_MARK}"):
        steps = list(owners[path].children())
        return type(steps[0]).__name__.lstrip("_") if len(steps) == 1 else "a chain of parametrizations"
    for hook in owners[path]._forward_pre_hooks.values():
        kind = type(hook).__name__
        if kind in ("WeightNorm", "SpectralNorm") and leaf.startswith(f"{getattr(hook, 'name', 'weight')}_"):
            return kind
    return None


def weight_norm_facts(
    name: str, owners: tuple[Mapping[str, nn.Module], ...], ways: Ways
) -> tuple[Facts | None, list[Fault]]:
    """The roles and the fold of g and v of weight_norm over the rows of a linear layer or a convolution."""
    path, _, leaf = name.rpartition(".")
    layer = path.partition(f"{_MARK}.")[0].rstrip(".") if f".{_MARK}." in f".{path}." else path
    base, wide = (models[layer] for models in owners)
    (dim, start), (_, goal) = (_direction(models[path]) for models in owners)
    known = isinstance(base, nn.Linear) or (isinstance(base, _ConvNd) and not base.transposed)
    if not known or dim == 1:
        what = f"weight_norm of {type(base).__name__} along dimension {dim}, expected the rows of a linear layer or convolution, or a place of its kernel"
        return None, [
            Fault("model.weight_norm_direction", name, what, "use dim=0, or remove it before growing")
        ]
    found = facts(base, wide, "weight", None, ways)
    if leaf in ("original1", "weight_v"):
        return found, []
    more, k = (_copies(start.shape[d], goal.shape[d], ways) for d in (0, 1))
    if dim:
        return Facts({}, {}, Scale.of(more / k) ** Fraction(1, 2)), []
    rows = {0: found.layouts[0]} if 0 in found.layouts else {}
    return Facts({0: "out"}, rows, Scale.of(k) ** Fraction(-1, 2)), []


def _copies(base: int, wide: int, ways: Ways) -> Fraction:
    return Axis.between(base, wide, None, ways=ways).k if base != wide else Fraction(1)


def _direction(owner: nn.Module) -> tuple[int, Tensor]:
    """The dimension that weight_norm keeps, and its v."""
    steps = [step for step in owner.children() if type(step).__name__ == "_WeightNorm"]
    if steps:
        return int(steps[0].dim), owner.original1  # type: ignore[arg-type, return-value]
    hooks = [h for h in owner._forward_pre_hooks.values() if type(h).__name__ == "WeightNorm"]
    return int(hooks[0].dim), getattr(owner, f"{hooks[0].name}_v")  # type: ignore[attr-defined]
