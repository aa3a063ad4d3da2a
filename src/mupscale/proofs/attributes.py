"""What differs between a base and a wide model besides their weights: settings, flags, plain tensors, buffers, hooks.

A factory builds the wide model anew, so that what was set on the base afterwards is missing in it. A difference is
named only after it was tried: with the base's values in the wide model, the first loss agrees.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..models.names import module_paths, named_tensors
from ..plans.attributes import HOOKS, both_values, carry_attributes_, compare_attributes
from ..tensors.differences import loss_gap
from .identity import Loss
from .trial import Step, Trial, go


def attributes(trial: Trial, step: Step | None, loss: Loss | None) -> str | None:
    """The cause, if the two models of a fresh trial differ in an attribute and agree once it is set."""
    base, wide = trial.base.model, trial.wide.model
    left = [d for d in compare_attributes(base, wide, trial.plan) if d.kind != "expected"]
    found = [f"{d.path}: {both_values(d)}" for d in left]
    carry_attributes_(wide, [replace(d, kind="carried") for d in left if d.kind != "refused"])
    owners, others = dict(module_paths(base)), dict(module_paths(wide))
    for d in left:
        if d.keys[0] in HOOKS and d.module in owners:
            vars(others[d.module])[d.keys[0]] = vars(owners[d.module])[d.keys[0]]
    buffers = {name: tensor for name, kind, tensor in named_tensors(base) if kind == "buffer"}
    for name, _, tensor in named_tensors(wide):
        own = buffers.get(name, tensor)
        if own.shape == tensor.shape and own.dtype == tensor.dtype and not torch.equal(own, tensor):
            found.append(f"{name}: other values in the base than in the wide model")
            tensor.copy_(own)
    if not found:
        return None
    gap = loss_gap(go(trial.base, step, loss), go(trial.wide, step, loss))
    cause = f"{found[0]}; it was not carried: set it in the factory of the wide model"
    return cause if gap <= trial.tolerance else None
