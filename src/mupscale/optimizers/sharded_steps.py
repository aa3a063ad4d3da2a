"""Which optimizers torch cannot step on sharded tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..errors import Fault
from ..rules.optimizers import qualified_name
from ..tensors.parts import is_sharded

_NEVER_SHARDED = ("torch.optim.Adafactor", "torch.optim.Rprop")  # their steps fail on DTensors
_FUSED_SHARDED = ("torch.optim.Adam", "torch.optim.AdamW")  # the only fused steps on DTensors


def refused_on_shards(
    optimizer: type[Optimizer], named: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> list[Fault]:
    """Faults for optimizers that torch cannot step on sharded tensors, so that the first step does not stop halfway.

    Other optimizers with dense gradients step DTensors as they step plain tensors. So does Muon, on whole matrices,
    if no dimension is sharded over more ranks than it has entries.
    """
    sharded: dict[str, Any] = {name: t for name, t in named.items() if is_sharded(t)}
    kind = qualified_name(optimizer)
    if not sharded:
        return []
    if kind in _NEVER_SHARDED:
        what = f"torch cannot step it on {len(sharded)} sharded tensors"
        return [Fault("optimizer.cannot_step_shards", kind, what, "use AdamW or SGD")]
    if settings.get("fused") and kind.startswith("torch.") and kind not in _FUSED_SHARDED:
        what = "torch has no fused step of it for sharded tensors"
        return [Fault("optimizer.no_fused_shards", f"{kind}, fused=True", what, "pass foreach=True")]
    faults = []
    for name, tensor in sharded.items() if kind == "torch.optim.Muon" else ():
        ranks = [1] * tensor.dim()
        for n, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            if not placement.is_replicate():
                ranks[placement.dim] *= n
        if any(n > length for n, length in zip(ranks, tensor.shape, strict=True)):
            what = f"shape {tuple(tensor.shape)} on {'x'.join(map(str, ranks))} ranks: torch's Muon cannot step a dimension with fewer entries than ranks"
            remedy = "give it to AdamW with parameters=, or shard it over fewer ranks"
            faults.append(Fault("optimizer.shard_too_small", name, what, remedy))
    return faults
