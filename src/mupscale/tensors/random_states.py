"""Random states: kept for the CPU and the devices in use, or read and set for every accelerator of the machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .devices import default_device


@contextmanager
def forked(*used: nn.Module | Tensor, seed: int | None = None) -> Iterator[None]:
    """Random numbers drawn inside leave no trace: the CPU's state and those of the devices in use are put back.

    In use are the devices of `used`, torch's default device and the accelerator's current one, where a factory draws.
    `seed` seeds these and no other, as `torch.manual_seed` would seed all.

    >>> before = torch.get_rng_state()
    >>> with forked(seed=0): first = torch.rand(1)
    >>> with forked(seed=0): again = torch.rand(1)
    >>> bool(first == again), torch.equal(before, torch.get_rng_state())
    (True, True)
    """
    devices = _devices(used)
    host = torch.get_rng_state()
    states = [(_module(device), device, _module(device).get_rng_state(device)) for device in devices]
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            for device in devices:
                _seed_(device, seed)
        yield
    finally:
        torch.set_rng_state(host)
        for module, device, state in states:
            module.set_rng_state(state, device)


def accelerator_states() -> dict[str, list[Tensor]]:
    """The state of every device of the accelerator that this process uses, by the name of its kind."""
    kind = _accelerator()
    if kind is None:
        return {}
    module = _module(kind)
    return {kind.type: [module.get_rng_state(index) for index in range(module.device_count())]}


def set_accelerator_states_(states: Mapping[str, Sequence[Tensor]]) -> None:
    """Put back what `accelerator_states` gave; states of another kind or number of devices are left out."""
    kind = _accelerator()
    if kind is not None and len(states.get(kind.type, ())) == _module(kind).device_count():
        for index, state in enumerate(states[kind.type]):
            _module(kind).set_rng_state(state, index)


def _devices(used: Sequence[nn.Module | Tensor]) -> list[torch.device]:
    """The devices in use, each with its number, besides the CPU."""
    found = {default_device()}
    for thing in used:
        tensors = [thing] if isinstance(thing, Tensor) else [*thing.parameters(), *thing.buffers()]
        found |= {tensor.device for tensor in tensors}
    kind = _accelerator()
    if kind is not None:
        found.add(torch.device(kind.type, torch.accelerator.current_device_index()))
    found = {device for device in found if device.type not in ("cpu", "meta")}
    return sorted(found, key=str)


def _accelerator() -> torch.device | None:
    """The kind of accelerator that torch has here, once something has used it: asking for its state would start it."""
    if not torch.accelerator.is_available():
        return None
    kind = torch.accelerator.current_accelerator()
    if kind is None:
        return None
    started = getattr(_module(kind), "is_initialized", None)
    return kind if started is None or started() else None


def _seed_(device: torch.device, seed: int) -> None:
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device)
    try:
        _module(device).manual_seed(seed)
    finally:
        torch.accelerator.set_device_index(before)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
