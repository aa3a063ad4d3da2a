"""What a case returned on the CPU and on the device, flattened to named tensors, numbers and words, and compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.devices.case import Case

FLOOR = 1e-3
"""Differences are relative to the largest entry of a tensor, and to this where all are smaller."""
_STEP = "*.step"  # optimizers that are neither fused nor capturable count their steps on the CPU


def flat(value: object, at: str = "") -> Iterator[tuple[str, object]]:
    """Every tensor, number and word in a result, with the way to it."""
    if isinstance(value, mu.Run):
        yield from flat(value.model, f"{at}.model")
        names = {id(p): name for name, p in value.model.named_parameters()}
        for i, optimizer in enumerate(value.optimizers):
            for parameter, state in optimizer.state.items():
                yield from flat(state, f"{at}.optimizer{i}.{names.get(id(parameter))}")
            for j, group in enumerate(optimizer.param_groups):
                for key in ("lr", "eps", "weight_decay"):
                    yield from flat(group.get(key), f"{at}.optimizer{i}.group{j}.{key}")
        yield from flat(value.ema, f"{at}.ema")
    elif isinstance(value, nn.Module):
        yield from flat(dict(value.state_dict(keep_vars=True)), at)
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from flat(part, f"{at}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from flat(part, f"{at}[{i}]")
    elif isinstance(value, Tensor):
        yield at, value.detach()
    elif isinstance(value, (int, float)):
        yield at, float(value)
    elif value is not None:
        yield at, str(value)


class Difference(NamedTuple):
    """The largest relative difference, whether all bits are the same, and what else is wrong."""

    largest: float
    bits: bool
    faults: list[str]


def _distance(p: Tensor, q: Tensor) -> float:
    if not p.numel():
        return 0.0
    a, b = p.cpu().double(), q.cpu().double()
    if torch.equal(a.isnan(), b.isnan()):
        a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max()) / max(float(a.abs().max()), FLOOR)


def _misplaced(case: Case, name: str, found: torch.device) -> bool:
    if any(fnmatchcase(name, pattern) for pattern in (*case.on_cpu, _STEP)) and found.type == "cpu":
        return False
    wanted = torch.device(case.device)
    return found.type != wanted.type or (wanted.index is not None and found != wanted)


def compared(case: Case, on_cpu: object, there: object) -> Difference:
    """Compare two results of a case."""
    x, y = dict(flat(on_cpu)), dict(flat(there))
    largest, bits = 0.0, True
    faults = [f"{name} is in one result only" for name in sorted(x.keys() ^ y.keys())]
    for name in x.keys() & y.keys():
        p, q = x[name], y[name]
        distance = 0.0
        if isinstance(p, Tensor) and isinstance(q, Tensor):
            if _misplaced(case, name, q.device):
                faults.append(f"{name} is on {q.device}")
            if p.shape != q.shape or p.dtype != q.dtype:
                faults.append(f"{name} is {q.dtype} {tuple(q.shape)}, on the CPU {p.dtype} {tuple(p.shape)}")
                continue
            bits &= torch.equal(p.cpu(), q.cpu())
            distance = _distance(p, q)
        elif isinstance(p, float) and isinstance(q, float):
            if p != q and not (p != p and q != q):
                bits, distance = False, abs(p - q) / max(abs(p), FLOOR)
        elif p != q:
            faults.append(f"{name} is {str(q)[:80]!r}, on the CPU {str(p)[:80]!r}")
        if not distance <= case.bound:
            faults.append(f"{name} differs by {distance:.1e}, bound {case.bound:.0e}")
        largest = max(largest, distance)
    return Difference(largest, bits, faults)
