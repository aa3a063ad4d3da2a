"""Norms and means of the base that workers have measured, kept next to the unfinished output so that each is measured once.

Every process appends to a file of its own and reads those of all others. Nothing is locked or waited for: two processes that
measure the same tensor at the same time find the same number. The files are removed when the output is complete.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from ...files.strict import os_errors
from ...noise.measures import Statistic, Wanted
from ...storage.location import Location
from ..bytes.durable import append, sync_data
from ..digests import stamped_file
from ..journal.entries import Measured, lines, read_lines
from ..partial import EARLIER, partial

_METHOD = "block Krylov, 16 columns"
"""Part of what is compared: a norm that was measured in another way has other digits."""


class NormJournal:
    """The norms of one base on the way to one output."""

    def __init__(self, out: Path, base: Location, files: Iterable[str]) -> None:
        """`files` are those of the base that hold weights: norms of files that have changed since do not count."""
        stamps = [" ".join(map(str, stamped_file(base, name))) for name in sorted(set(files))]
        self._of = blake2b("\n".join([_METHOD, *stamps]).encode(), digest_size=8).hexdigest()
        self._folder = partial(out)
        self._path = self._folder / f"{EARLIER}{self._of}-{secrets.token_hex(4)}.log"

    def known(self) -> dict[Wanted, Tensor]:
        """What all processes have measured so far."""
        found: dict[Wanted, Tensor] = {}
        for path in sorted(self._folder.glob(f"{EARLIER}{self._of}-*.log")):
            try:
                raw = path.read_bytes()
            except FileNotFoundError:  # another process has finished the output and cleared up
                continue
            for entry in read_lines(raw):
                if isinstance(entry, Measured):
                    norms = torch.tensor(entry.values, dtype=torch.float64, device="cpu")
                    what = cast(Statistic, entry.statistic)
                    found[entry.name, what] = norms[0] if what == "norm" else norms
        return found

    def add(self, wanted: Wanted, norms: Tensor) -> None:
        """Record one measurement; returns after it is on disk."""
        name, what = wanted
        entry = Measured(what, tuple(norms.reshape(-1).tolist()), name)
        with os_errors(self._path):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                append(descriptor, lines([entry]))
                sync_data(descriptor)
            finally:
                os.close(descriptor)
