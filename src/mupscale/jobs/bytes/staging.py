"""Bytes on their way to a device: host buffers that are filled again only when the device has read them.

On a CUDA device the buffers are pinned and two, so that one is filled from storage while the other is copied, and
nothing waits but the third block for the first. On the CPU a buffer is used where it lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor


class CopyEvent(Protocol):
    """What says that a copy has been made: an event of the device."""

    def synchronize(self) -> None: ...


@dataclass
class Buffer:
    """Host memory, and the copy from it that may still be under way."""

    memory: Tensor
    copied: CopyEvent | None = None


class Staging:
    """Two host buffers in front of one device.

    >>> staging = Staging(torch.device("cpu"))
    >>> room = staging.room(torch.float32, (2, 3))
    >>> staging.on_device(room.fill_(1.0)) is room
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        count = 1 if device.type == "cpu" else 2
        self._buffers = [Buffer(torch.empty(0, dtype=torch.uint8, device="cpu")) for _ in range(count)]
        self._next = 0

    @property
    def room_bytes(self) -> int:
        """Host memory that is kept, in bytes."""
        return sum(buffer.memory.numel() for buffer in self._buffers)

    def room(self, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Host memory to fill, valid until as many more have been asked for as there are buffers."""
        self._next = (self._next + 1) % len(self._buffers)
        buffer, size = self._buffers[self._next], prod(shape) * dtype.itemsize
        if buffer.copied is not None:
            buffer.copied.synchronize()
            buffer.copied = None
        if buffer.memory.numel() < size:
            pinned = self._device.type == "cuda"
            buffer.memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        return buffer.memory[:size].view(dtype).view(list(shape))

    def on_device(self, room: Tensor) -> Tensor:
        """What the last room holds, on the device; the copy may still be under way."""
        if self._device.type == "cpu":
            return room
        moved = room.to(self._device, non_blocking=True)
        self._buffers[self._next].copied = self._event()
        return moved

    def _event(self) -> CopyEvent:
        event = torch.Event(self._device)
        event.record()
        return event
