"""Whether what is new is used: how far copies have moved apart, whether new parts are awake, what noise did to a model.

`symmetry` is 0 while all copies are equal, and `awake` while new parts are zero. The model then computes the same function
as the base, at a higher cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from ...arguments import wrong_kind
from ...errors import MupscaleError, raise_faults
from ...models.names import named_tensors
from ...noise.resolved import restore_noise
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...plans.tensor_plan import TensorPlan
from ...runs.run import Run
from ...tensors.collapse import collapse
from ...tensors.devices import exact
from ...tensors.expand import compute_dtype, expand, expand_
from ...tensors.making import Making


def symmetry(wide: Run | nn.Module, *, plan: Plan | None = None) -> dict[str, float]:
    """Measure how far copies have parted: for every tensor with copies, the share of its norm that differs between them.

    Args:
        wide: The run, or its model with `plan`.
        plan: The plan that made the copies. By default the plan by which the run was grown.

    Returns:
        A number by tensor: 0 is equal, 1 is unrelated.

    Raises:
        MupscaleError: If no plan is known, or it does not fit the model.

    >>> import mupscale as mu
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> wide = mu.grow(base, lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> max(symmetry(wide).values())
    0.0
    """
    found: dict[str, float] = {}
    for name, entry, value in _planned(wide, plan, "symmetry"):
        if any(axis.k > 1 for axis in entry.axes):
            copied = Making(entry.axes)
            found[name] = _share(value - expand(collapse(value, copied), copied), value)
    return found


def awake(wide: Run | nn.Module, *, plan: Plan | None = None) -> dict[str, float]:
    """Measure how awake new parts are: for every tensor with new entries, the share of its norm that lies in them.

    New entries are the whole of a new tensor, and the zeros behind the copies in a padded one. New gains are left out: they
    are 1 from the start, and weight decay moves them although their block is asleep.

    Args:
        wide: The run, or its model with `plan`.
        plan: The plan that made the new parts. By default the plan by which the run was grown.

    Returns:
        A number by tensor: 0 is asleep, 1 is all of it.

    Raises:
        MupscaleError: If no plan is known, or it does not fit the model.

    >>> import mupscale as mu
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> make = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    >>> plan = mu.infer_plan(base, make, loss=lambda model: model(torch.ones(2, 3)).sum(), by="padded")
    >>> awake(mu.grow(base, make, plan=plan))
    {'0.weight': 0.0, '0.bias': 0.0, '2.weight': 0.0}
    """
    found: dict[str, float] = {}
    for name, entry, value in _planned(wide, plan, "awake"):
        asleep = entry.new and entry.fill == "zero"
        if asleep or (entry.padded and entry.sources):
            image = torch.full(entry.base_shape, float(not asleep), dtype=value.dtype, device=value.device)
            found[name] = _share(value * (expand(image, Making(entry.axes)) == 0), value)
    return found


def _planned(
    wide: Run | nn.Module, plan: Plan | None, call: str
) -> Iterator[tuple[str, TensorPlan, torch.Tensor]]:
    """Every parameter of a wide model with its entry in the plan that made it, in a dtype to compute in."""
    model, chosen = (wide.model, plan or wide.plan) if isinstance(wide, Run) else (wide, plan)
    if chosen is None:
        raise MupscaleError(
            f"{call} needs the plan by which the model was made; pass plan=", code="plan.not_given"
        )
    check_end(chosen, model, "wide")
    for name, kind, tensor in named_tensors(model):
        if kind == "parameter" and name not in chosen.ties:
            yield name, chosen[name], tensor.detach().to(compute_dtype(tensor.dtype))


def _share(part: torch.Tensor, whole: torch.Tensor) -> float:
    """The norm of a part over that of the whole; 0 where all is zero."""
    sizes = [float(torch.linalg.vector_norm(value)) for value in (part, whole)]
    return sizes[0] / sizes[1] if sizes[1] else 0.0


class NoiseShare(NamedTuple):
    """The noise of one tensor, as it arrived."""

    share: float
    """Size of the noise over size of the widened weight."""
    lost: float
    """Size of the error from rounding the noise to the tensor's dtype, over the size of the noise."""


def noise_shares(base: Run, wide: Run) -> dict[str, NoiseShare]:
    """Measure the noise that arrived in every tensor, and what rounding took of it.

    Where rounding takes more than a tenth, keep float32 master weights, or use larger noise. The sizes that were asked for,
    and the loss before and after, are in `wide.provenance`.

    Args:
        base: The run before growth.
        wide: The run that `upscale` returned, not trained since.

    Returns:
        By tensor with noise its `share`, relative to the weight, and how much of it was `lost`.

    Raises:
        MupscaleError: If the wide run has no record of noise.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> base = Run(make(4))
    >>> wide = mu.upscale(base, lambda: make(8), mu.MupNoise(0.1))
    >>> list(noise_shares(base, wide)), noise_shares(base, wide)["2.weight"].lost < 1e-3
    (['0.weight', '2.weight'], True)
    """
    faults = wrong_kind("base", base, Run, "write Run(base), or what upscale gave")
    faults += wrong_kind("wide", wide, Run, "write Run(wide), or what upscale gave")
    raise_faults("noise_shares compares two runs", faults)
    growth = wide.provenance.of(wide.plan)
    doses = [] if growth is None else [dose for dose in (growth.noise, *growth.added_noise) if dose]
    if wide.plan is None or not doses:
        raise MupscaleError(
            "the latest growth of the wide run has no record of noise, expected one; pass the run that upscale returned",
            code="noise.no_record",
        )
    tensors = {name: t.detach() for name, _, t in named_tensors(base.model)}
    noises = [restore_noise(dose, wide.plan, base.since) for dose in doses]
    shares = {}
    for name, kind, stored in named_tensors(wide.model):
        planned = kind == "parameter" and name not in wide.plan.ties
        added = [drawn for noise in noises if planned and (drawn := noise.tensor(name)) is not None]
        if not added:
            continue
        entry = noises[0].woken(name, wide.plan[name])
        found = exact(stored.detach())
        source = exact(entry.source(tensors)).to(found.device) if entry.sources else None
        want = expand_(torch.empty_like(found), source, entry.making())
        delta = torch.zeros_like(want)
        for drawn in added:
            delta += expand_(torch.empty_like(found), source, entry.making(drawn)) - want
        # New weights are zero: all of them is noise.
        weight = want if want.any() else delta
        shares[name] = NoiseShare(_share(delta, weight), _share(found - want - delta, delta))
    return shares
