"""All ranks continue, or none: one all-reduce of three numbers that every rank reaches, even after a failure.

Knows: process groups and failures. Does not know what was being done.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from ..errors import Fault, MupscaleError
from .waiting import Heartbeat, Ranks, meet, several

_MESSAGE = 1 << 14  # bytes of an error that other ranks see; a broadcast has a fixed size


class AllOrNone:
    """A block of work that succeeds on every rank or fails on every rank, with the same message.

    All ranks must have the same `identity`. Leaving the block costs one collective. So does every `check` inside it,
    which is needed only before a rank would wait for another.

    >>> with AllOrNone() as together:
    ...     together.identity = "the same everywhere"
    """

    def __init__(self, group: Ranks = None) -> None:
        self.identity = ""
        self._group, self._over = group, False
        self._heartbeat = Heartbeat(group)

    def __enter__(self) -> AllOrNone:
        self._heartbeat.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            self._leave(error)
        finally:
            self._heartbeat.__exit__()

    def _leave(self, error: BaseException | None) -> None:
        if self._over or (error is not None and not isinstance(error, Exception)):
            return  # all ranks know this error already; or this rank is being stopped, which the others will notice
        try:
            self.check(error)
        except Exception as raised:
            if raised is not error:
                raise raised from None

    def check(self, failure: Exception | None = None) -> None:
        """Return if no rank has failed; otherwise raise on every rank."""
        try:
            settle(failure, self.identity, self._group)
        except Exception:
            self._over = True
            raise


def settle(failure: Exception | None, identity: str, group: Ranks = None) -> None:
    """Return if no rank has failed and all have the same identity; otherwise raise on every rank."""
    if not several(group):
        if failure is not None:
            raise failure
        return
    rank, world, device = dist.get_rank(group), dist.get_world_size(group), device_of(group)
    digest = hashlib.blake2b(identity.encode(), digest_size=7).digest()
    number = int.from_bytes(digest, "little")
    report = torch.tensor([world if failure is None else rank, number, -number], device=device)
    with _peers():
        meet(group)
        dist.all_reduce(report, dist.ReduceOp.MIN, group=group)
    first, low, high = report.tolist()
    if first < world:
        own = b"" if failure is None else _packed(failure)
        packed = _from_rank(first, own, device, group)
        if failure is not None and (rank == first or own == packed):
            raise failure
        raise _unpacked(packed, first)
    if low != -high:
        raise MupscaleError(
            "the ranks were not given the same plan, noise, seed and source, so their shards do not fit together; "
            f"give every rank the same (rank {rank} has {identity})",
            code="rank.other_inputs",
        )


def is_first(group: Ranks = None) -> bool:
    """Whether this rank writes and logs for all ranks."""
    return not several(group) or dist.get_rank(group) == 0


def device_of(group: Ranks = None) -> torch.device:
    """The device of the tensors in a group's collectives."""
    if "gloo" in str(dist.get_backend_config(group)) or not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def sum_over_ranks(values: torch.Tensor, group: Ranks = None) -> torch.Tensor:
    """The sum of every rank's vector."""
    if not several(group):
        return values
    moved = values.to(device_of(group))
    with _peers():
        meet(group)
        dist.all_reduce(moved, group=group)
    return moved.to(values.device)


def _packed(failure: Exception) -> bytes:
    """An error as at most `_MESSAGE` bytes: its claim, its code and its faults, the last of which may be left out.

    >>> error = _unpacked(_packed(MupscaleError("it failed", [Fault("file.cut_short", "w", "x" * 99)] * 999)), 0)
    >>> error.codes[:2], error.codes[-1]
    (('file.cut_short', 'file.cut_short'), 'more')
    """
    error = MupscaleError(str(failure), code="rank.another_failed")
    if isinstance(failure, MupscaleError):
        error = failure
    faults = error.faults
    # JSON can take six bytes for one.
    claim = error.claim.encode(errors="replace")[: _MESSAGE // 8].decode(errors="ignore")
    room = _MESSAGE - len(json.dumps([claim, error.code])) - 100
    ends = accumulate(len(json.dumps(fault)) + 2 for fault in faults)
    kept = [fault for fault, end in zip(faults, ends, strict=True) if end <= room]
    if kept and len(kept) < len(faults):
        kept.append(Fault("more", "…", f"and {len(faults) - len(kept)} more"))
    return json.dumps([claim, error.code, kept]).encode()


def _unpacked(raw: bytes, rank: int) -> MupscaleError:
    claim, code, faults = json.loads(raw)
    message = claim or f"rank {rank} failed without an error message"
    return MupscaleError(message, [Fault(*fault) for fault in faults], code=code)


def _from_rank(rank: int, raw: bytes, device: torch.device, group: Ranks) -> bytes:
    buffer = torch.zeros(_MESSAGE, dtype=torch.uint8, device="cpu")
    buffer[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8, device="cpu")
    buffer = buffer.to(device)
    with _peers():
        dist.broadcast(buffer, group=group, group_src=rank)
    return bytes(buffer.cpu().tolist()).rstrip(b"\0")


@contextmanager
def _peers() -> Iterator[None]:
    """Turn torch's error about a rank that died or never started into a MupscaleError."""
    try:
        yield
    except RuntimeError as error:  # torch's own errors of process groups derive from it
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise MupscaleError(
            f"another rank stopped or never started before all ranks had agreed ({reason[:200]}); nothing that was "
            "loaded may be used: start the job again",
            code="rank.stopped_or_absent",
        ) from error
