"""Norms and means of the base that workers have measured, kept next to the unfinished output so that each is measured once.

Every process appends to a file of its own and reads those of all others. Nothing is locked or waited for: two processes that
measure the same tensor at the same time find the same number. The files are removed when the output is complete.

A norm stands next to the sums of the bytes that it was measured of. Before the output is published they are compared with what
blocks have used (`same_base.py`), so a base that changed between the two is found, also if its size and time are as before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import cast
from urllib.parse import quote

import torch
from torch import Tensor

from ...files.strict import os_errors
from ...noise.measures import Statistic, Wanted
from ...storage.location import Location
from ..bytes.base_reader import encoded
from ..bytes.durable import append, sync_data
from ..bytes.fingerprints import Sums
from ..digests import stamped_file
from ..journal.entries import BaseStamp, Entry, Measured, lines, read_lines
from ..partial import EARLIER, partial

_METHOD = "block Krylov, 16 columns"
"""Part of what is compared: a norm that was measured in another way has other digits."""


class NormJournal:
    """The norms of one base on the way to one output."""

    def __init__(self, out: Path, base: Location, files: Iterable[str]) -> None:
        """`files` are those of the base that hold weights: norms of files that have changed since do not count."""
        stamped = [stamped_file(base, name) for name in sorted(set(files))]
        self.sizes = {file.name: file.size for file, _ in stamped}
        """The files of the base, and the bytes of each."""
        self._stamps: list[Entry] = [BaseStamp(file.name, stamp) for file, stamp in stamped]
        stamps = [" ".join(map(str, both)) for both in stamped]
        self._of = blake2b("\n".join([_METHOD, *stamps]).encode(), digest_size=8).hexdigest()
        self._folder = partial(out)
        self._path = self._folder / f"{EARLIER}{self._of}-{secrets.token_hex(4)}.log"
        self._lock = Lock()
        self._read: dict[Path, int] = {}
        self._found: dict[Wanted, Tensor] = {}

    def known(self) -> dict[Wanted, Tensor]:
        """What all processes have measured so far."""
        with self._lock:
            for path in sorted(self._folder.glob(f"{EARLIER}{self._of}-*.log")):
                self._found.update(self._news(path))
            return dict(self._found)

    def _news(self, path: Path) -> Iterator[tuple[Wanted, Tensor]]:
        """What a file holds in the lines that were not read before."""
        try:
            with open(path, "rb") as file:
                file.seek(self._read.get(path, 0))
                raw = file.read()
        except FileNotFoundError:  # another process has finished the output and cleared up
            return
        whole = raw[: raw.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for entry in read_lines(whole):
            if isinstance(entry, Measured):
                norms = torch.tensor(entry.values, dtype=torch.float64, device="cpu")
                what = cast(Statistic, entry.statistic)
                yield (entry.name, what), norms[0] if what == "norm" else norms

    def add(self, wanted: Wanted, norms: Tensor, used: list[tuple[str, int, Sums]]) -> None:
        """Record one measurement and the grains of the base that it was made of; returns after it is on disk."""
        name, what = wanted
        word = encoded(used, {file: quote(file, safe="") for file in self.sizes})
        entry = Measured(what, tuple(norms.reshape(-1).tolist()), name, word)
        with self._lock, os_errors(self._path):
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            try:
                append(descriptor, lines([*self._stamps, entry]))
                sync_data(descriptor)
            finally:
                os.close(descriptor)
            self._stamps = []
