"""What growth did to a run, as a flat dict of numbers that any tracker can log."""

from __future__ import annotations

import torch

from ...arguments import wrong_kind
from ...errors import raise_faults
from ...optimizers.rates import Rates
from ...proofs.identity import Loss, keeping_buffers
from ...runs.run import Run
from ...tensors.random_states import forked
from ..units.clip import grad_norm
from .symmetry import awake, noise_shares, symmetry


def growth_numbers(
    base: Run | None, wide: Run, *, loss: Loss | None = None, tensors: bool = False
) -> dict[str, float]:
    """Say what growth did, as named numbers for a tracker. Neither run is changed.

    - `lr_before` and `lr_after`: the learning rate at the reference, the largest of all groups.
    - `loss_before` and `loss_after`, `grad_norm_before` and `grad_norm_after` (at the reference), measured with `loss`. They are
      equal where no noise was added.
    - `noise`: how large the noise is next to the weights, and `lost`: how much of it rounding took. Where `lost` is more than a
      tenth, keep float32 master weights, or use larger noise. Both are of the wide run as it was grown, not trained since.
    - `symmetry`: how far copies have parted, the share of a tensor's norm that differs between them: 0 is equal, 1 is unrelated.
    - `awake`: how awake new parts are, the share of a tensor's norm that lies in new entries: 0 is asleep, 1 is all of it.

    The last four are each the largest of all tensors, where there are any.

    Args:
        base: The run before growth; None for what the wide run alone shows, at any time of its training: `symmetry` and `awake`.
        wide: The run after growth.
        loss: `loss(model)` on one fixed batch, measured on both. Without it the losses that `upscale` recorded are given.
        tensors: Whether each of the last four is given for every tensor too, as `symmetry/0.weight`.

    Returns:
        The numbers by name.

    Raises:
        MupscaleError: If one of the two is no run.

    >>> from torch import nn
    >>> import mupscale as mu
    >>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))
    >>> base = mu.Run(make(4))
    >>> growth_numbers(base, mu.grow(base, lambda: make(8)))
    {'symmetry': 0.0}
    >>> growth_numbers(None, mu.upscale(base, lambda: make(8)), tensors=True)["awake/0.bias"] > 0
    True
    """
    faults = [
        fault
        for name, side in (("base", base), ("wide", wide))
        if not (name == "base" and base is None)
        for fault in wrong_kind(name, side, Run, f"write mu.Run({name}), or what mu.upscale gave")
    ]
    raise_faults("growth_numbers compares two runs", faults)
    numbers: dict[str, float] = {}
    for name, run in (("before", base), ("after", wide)) if base is not None else ():
        rates = [rate for optimizer in run.optimizers for rate in Rates(optimizer).at_reference()]
        numbers |= {f"lr_{name}": max(rates)} if rates else {}
        if loss is not None:
            numbers[f"loss_{name}"], numbers[f"grad_norm_{name}"] = _loss_and_norm(run, loss)
        elif "loss" in wide.provenance:
            numbers[f"loss_{name}"] = float(wide.provenance["loss"][name])
    of_tensors = {"symmetry": symmetry(wide), "awake": awake(wide)}
    if base is not None and {"noise", "added_noise"} & wide.provenance.keys():
        noise = noise_shares(base, wide)
        of_tensors["noise"] = {name: found.share for name, found in noise.items()}
        of_tensors["lost"] = {name: found.lost for name, found in noise.items()}
    for what, values in of_tensors.items():
        numbers |= {what: max(values.values())} if values else {}
        numbers |= {f"{what}/{name}": value for name, value in values.items()} if tensors else {}
    return numbers


def _loss_and_norm(run: Run, loss: Loss) -> tuple[float, float]:
    """The loss on its batch and the gradient norm at the reference; gradients and buffers are as before afterwards."""
    parameters = list(run.model.parameters())
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        # The same dropout, where there is some, before and after.
        with forked(run.model, seed=0), keeping_buffers(run.model):
            value = loss(run.model)
            torch.autograd.backward(value)
        return float(value.detach()), float(grad_norm(run.model, run))
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad
