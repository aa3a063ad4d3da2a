"""Whether what is new is used: how far copies have moved apart, whether new parts are awake, what noise did to a model.

`symmetry` is 0 while all copies are equal, and `awake` while new parts are zero. The model then computes the same function
as the base, at a higher cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ...arguments import wrong_kind
from ...errors import MupscaleError, raise_faults
from ...models.names import named_tensors
from ...noise.kinds import Sigma
from ...noise.resolved import restore_noise
from ...plans.ends import check_end
from ...plans.plan import Plan
from ...proofs.identity import Loss, keeping_buffers
from ...runs.run import Run
from ...tensors.collapse import collapse
from ...tensors.devices import exact
from ...tensors.expand import compute_dtype, expand
from ...tensors.making import Making
from ...tensors.random_states import forked


def symmetry(wide: Run | nn.Module, *, plan: Plan | None = None) -> dict[str, float]:
    """For every tensor with copies, the share of its norm that differs between them: 0 is equal, 1 is unrelated.

    `plan` is the plan that made the copies. The default is the plan by which the run was widened.

    >>> import mupscale as mu
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> wide = mu.widen(base, lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)))
    >>> max(symmetry(wide).values())
    0.0
    """
    model, chosen = (wide.model, plan or wide.plan) if isinstance(wide, Run) else (wide, plan)
    if chosen is None:
        raise MupscaleError(
            "symmetry needs the plan by which the copies were made; pass plan=", code="plan.not_given"
        )
    check_end(chosen, model, "wide")
    found: dict[str, float] = {}
    for name, kind, tensor in named_tensors(model):
        entry = chosen[name]
        if kind == "buffer" or name in chosen.ties or all(axis.k <= 1 for axis in entry.axes):
            continue
        value = tensor.detach().to(compute_dtype(tensor.dtype))
        copied = Making(entry.axes)
        between = value - expand(collapse(value, copied), copied)
        norm = float(torch.linalg.vector_norm(value))
        found[name] = float(torch.linalg.vector_norm(between)) / norm if norm else 0.0
    return found


def awake(wide: Run | nn.Module, *, plan: Plan | None = None) -> dict[str, float]:
    """For every tensor with new entries, the share of its norm that lies in them: 0 is asleep, 1 is all of it.

    New entries are the whole of a new tensor, and the zeros behind the copies in a padded one. New gains are left out: they
    are 1 from the start, and weight decay moves them although their block is asleep. `plan` is the plan that made the new
    parts. The default is the plan by which the run was widened.

    >>> import mupscale as mu
    >>> base = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> make = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    >>> plan = mu.infer_plan(base, make, loss=lambda model: model(torch.ones(2, 3)).sum(), pad=True)
    >>> awake(mu.widen(base, make, plan=plan))
    {'0.weight': 0.0, '0.bias': 0.0, '2.weight': 0.0}
    """
    model, chosen = (wide.model, plan or wide.plan) if isinstance(wide, Run) else (wide, plan)
    if chosen is None:
        raise MupscaleError(
            "awake needs the plan by which the new parts were made; pass plan=", code="plan.not_given"
        )
    check_end(chosen, model, "wide")
    found: dict[str, float] = {}
    for name, kind, tensor in named_tensors(model):
        entry = chosen[name]
        asleep = entry.new and entry.fill == "zero"
        if kind == "buffer" or name in chosen.ties or not (asleep or (entry.padded and entry.sources)):
            continue
        value = tensor.detach().to(compute_dtype(tensor.dtype))
        image = torch.full(entry.base_shape, float(not asleep), dtype=value.dtype, device=value.device)
        new = value * (expand(image, Making(entry.axes)) == 0)
        norm = float(torch.linalg.vector_norm(value))
        found[name] = float(torch.linalg.vector_norm(new)) / norm if norm else 0.0
    return found


@dataclass(frozen=True)
class NoiseRow:
    """The requested noise of one tensor, and the noise it actually received."""

    name: str
    sigma: Sigma
    share: float
    """Size of the noise over size of the widened weight."""
    lost: float
    """Size of the error from rounding the noise to the tensor's dtype, over the size of the noise."""


@dataclass(frozen=True)
class NoiseReport:
    """What noise did, tensor by tensor, and to the loss; prints as a table.

    >>> row = NoiseRow("0.weight", sigma=0.1, share=0.05, lost=0.0)
    >>> print(NoiseReport((row,), without=(), loss_before=1.0, loss_after=1.25))
    tensor                                   noise / weight lost by rounding
    0.weight                                          0.050             0.0%
    loss: 1 before noise, 1.25 after
    """

    rows: tuple[NoiseRow, ...]
    without: tuple[str, ...]
    loss_before: float | None
    loss_after: float | None

    def __str__(self) -> str:
        lines = [f"{'tensor':40} {'noise / weight':>14} {'lost by rounding':>16}"]
        lines += [f"{row.name:40} {row.share:14.3f} {row.lost:16.1%}" for row in self.rows]
        if self.without:
            lines.append(f"no noise: {', '.join(self.without)}")
        if self.loss_before is not None and self.loss_after is not None:
            lines.append(f"loss: {self.loss_before:.6g} before noise, {self.loss_after:.6g} after")
        if any(row.lost > 0.1 for row in self.rows):
            lines.append(
                "rounding removes more than 10 % of the noise in some tensors: keep float32 master weights, or use "
                "larger noise"
            )
        return "\n".join(lines)


def noise_report(base: Run, wide: Run, *, loss: Loss | None = None) -> NoiseReport:
    """What the noise of an upscaled run did: its size relative to the weights, rounding, the loss before and after.

    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> base = Run(make(4))
    >>> wide = mu.upscale(base, lambda: make(8), mu.MupNoise(0.1))
    >>> [row.name for row in noise_report(base, wide).rows]
    ['0.weight', '2.weight']
    """
    sides = (("base", base), ("wide", wide))
    kinds = [
        f
        for name, side in sides
        for f in wrong_kind(name, side, Run, f"write Run({name}), or what upscale gave")
    ]
    raise_faults("noise_report compares two runs", kinds)
    growth = wide.provenance.of(wide.plan)
    doses = [] if growth is None else [dose for dose in (growth.noise, *growth.added_noise) if dose]
    if wide.plan is None or not doses:
        raise MupscaleError(
            "the latest growth of the wide run has no record of noise, expected one; pass the run that upscale returned",
            code="noise.no_record",
        )
    tensors = {name: t.detach() for name, _, t in named_tensors(base.model)}
    noises = [restore_noise(dose, wide.plan, base.since) for dose in doses]
    rows = []
    for name, kind, stored in named_tensors(wide.model):
        planned = kind == "parameter" and name not in wide.plan.ties
        asked = [(noise, drawn) for noise in noises if planned and (drawn := noise.tensor(name)) is not None]
        if not asked:
            continue
        entry = wide.plan[name]
        found = exact(stored.detach())
        if entry.sources:
            want = expand(exact(entry.source(tensors)), entry.making()).to(found.device)
        else:
            want = entry.making().fill_(torch.empty_like(found))
        places = entry.axes, [0] * stored.dim(), stored.shape
        delta = asked[0][1].slice(*places, want)
        for _, drawn in asked[1:]:
            delta += drawn.slice(*places, want)
        size = float(torch.linalg.vector_norm(delta))
        arrived = float(torch.linalg.vector_norm(found - want - delta))
        # New weights are zero: all of them is noise.
        weight = float(torch.linalg.vector_norm(want)) or size or 1.0
        one = asked[0][0].tensors[name]
        sigma = one.woken if one.sigma is None else one.sigma
        assert sigma is not None, "noise that is drawn has a size"
        rows.append(NoiseRow(name, sigma, size / weight, arrived / size if size else 0.0))
    values = [None, None] if loss is None else [_value(side.model, loss) for side in (base, wide)]
    return NoiseReport(tuple(rows), noises[0].without, values[0], values[1])


def _value(model: nn.Module, loss: Loss) -> float:
    with torch.no_grad(), forked(model, seed=0), keeping_buffers(model):
        return float(loss(model))
