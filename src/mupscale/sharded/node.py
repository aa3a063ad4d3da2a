"""What a checkpoint's `.metadata` says, read by one rank of every node and shared with the others there.

Millions of chunks take minutes to read as a pickle. The first rank of a node writes them as a table into a file in the
node's memory, from which the others map it. Containers that cannot see each other's files read for themselves.
Knows: nodes and process groups. Does not know: what the table is used for.
"""

from __future__ import annotations

import os
import socket
import tempfile
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import MupscaleError
from ..files.dcp.metadata import read_dcp
from ..files.dcp.table import DcpDirectory, map_table, write_table
from ..files.elsewhere import DCP_METADATA
from ..storage.location import Location, Url
from .agreement import sum_over_ranks
from .waiting import Ranks, several

_MEMORY = Path("/dev/shm")
_LONGEST = 256  # bytes of a path that ranks send each other; a directory for temporary files has a short one


def shared_dcp(path: Location, group: Ranks = None) -> DcpDirectory:
    """`read_dcp`, by the first rank of each node for all of its ranks. Three collectives, which no failure leaves out."""
    if not several(group):
        return read_dcp(path)
    rank, nodes = dist.get_rank(group), _texts_of_ranks(_node(path), group)
    first = nodes.index(nodes[rank])
    own: DcpDirectory | None = None
    table, failure = "", None
    if first == rank:
        try:
            own = read_dcp(path)
            table = _written(own) if nodes.count(nodes[rank]) > 1 else ""
        except Exception as error:
            failure = error
    tables = _texts_of_ranks(table if failure is None else "-", group)
    try:
        if own is None and failure is None:
            own = _mapped(tables[first], path, first)
    except Exception as error:
        failure = error
    _texts_of_ranks("", group)  # all have opened what they need
    if table:
        with suppress(FileNotFoundError):
            os.unlink(table)
    if failure is not None:
        raise failure
    assert own is not None
    return own


def _mapped(table: str, path: Location, first: int) -> DcpDirectory:
    if table == "-":
        raise MupscaleError(
            f"rank {first} could not read the checkpoint for the ranks of its node",
            code="rank.node_could_not_read",
        )
    if table:
        with suppress(OSError, MupscaleError):  # another container, which looks like this one
            return map_table(Path(table), path)
    return read_dcp(path)


def _written(directory: DcpDirectory) -> str:
    """The name of a new file with the table; "" where none can be written, so that each rank reads for itself."""
    name = ""
    try:
        handle, name = tempfile.mkstemp(
            prefix="mupscale-chunks-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None
        )
        with open(handle, "wb") as file:
            write_table(directory, file)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        return ""
    return name if len(name.encode()) <= _LONGEST else ""


def _node(path: Location) -> str:
    """A text that processes of one node have in common that read the same file."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname(), boot.read_text() if boot.exists() else ""]
    if isinstance(path, Url):
        parts.append(str(path))
        return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()
    with suppress(OSError):
        found = os.stat(path / DCP_METADATA)
        parts += [str(n) for n in (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)]
    return blake2b(" ".join(parts).encode(), digest_size=16).hexdigest()


def _texts_of_ranks(text: str, group: Ranks) -> list[str]:
    """The text of every rank, on every rank."""
    raw = text.encode()[:_LONGEST]
    values = torch.zeros(dist.get_world_size(group), _LONGEST, dtype=torch.int32, device="cpu")
    values[dist.get_rank(group), : len(raw)] = torch.tensor(list(raw), dtype=torch.int32, device="cpu")
    return [bytes(row).rstrip(b"\0").decode() for row in sum_over_ranks(values, group).tolist()]
