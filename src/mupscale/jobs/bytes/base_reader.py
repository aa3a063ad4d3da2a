"""The files of a base, read with a fingerprint of every byte that is used, grain by grain.

Reads are widened to whole grains, so that what two blocks have read, and what one more read of the file gives, can be
compared. Does not know what the bytes are used for.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping

import numpy as np

from ...errors import Fault, MupscaleError
from ...storage.location import Location
from .blocks import Reader
from .fingerprints import GRAIN, Sums, grain_sums

_WINDOW = 1 << 20  # bytes read at once for reads that are shorter than a grain
CHANGED = "the base changed while the job ran, so the output may mix two versions of the base"
START_AGAIN = "remove the .partial directory and start again"


class BaseReader(Reader):
    """Reads like a `Reader`, and remembers the sums of the grains that were read since they were last taken."""

    def __init__(self, folder: Location, sizes: Mapping[str, int]) -> None:
        super().__init__(folder)
        self._sizes = sizes
        self._used: dict[tuple[str, int], int] = {}
        self._edges = bytearray(2 * GRAIN)
        self._window: tuple[str, int, bytes, Sums] = ("", 0, b"", np.empty(0, np.uint64))

    def read_(self, file: str, offset: int, into: memoryview) -> None:
        if len(into) < GRAIN:
            self._read_short_(file, offset, into)
            return
        start, end = self._grains(file, offset, len(into))
        edges = memoryview(self._edges)
        head, tail = edges[: offset - start], edges[GRAIN : GRAIN + end - offset - len(into)]
        self._fill_(file, start, [head, into, tail])
        inner = min(-offset % GRAIN, len(into)) if len(head) else 0
        rest = (len(into) - inner) % GRAIN if len(tail) else 0
        if inner:
            self._note(file, start, bytes(head) + bytes(into[:inner]))
        self._note(file, offset + inner, into[inner : len(into) - rest])
        if rest:
            self._note(file, end - len(tail) - rest, bytes(into[len(into) - rest :]) + bytes(tail))

    def taken(self) -> list[tuple[str, int, Sums]]:
        """Runs of grains that were used: file, first grain, and the sum of each; forgets them."""
        runs: list[tuple[str, int, list[int]]] = []
        for (file, grain), found in sorted(self._used.items()):
            if runs and runs[-1][0] == file and runs[-1][1] + len(runs[-1][2]) == grain:
                runs[-1][2].append(found)
            else:
                runs.append((file, grain, [found]))
        self._used.clear()
        return [(file, first, np.array(sums, np.uint64)) for file, first, sums in runs]

    def _grains(self, file: str, offset: int, length: int) -> tuple[int, int]:
        end = -(-(offset + length) // GRAIN) * GRAIN
        return offset // GRAIN * GRAIN, max(offset + length, min(end, self._sizes[file]))

    def _read_short_(self, file: str, offset: int, into: memoryview) -> None:
        name, start, data, sums = self._window
        if name != file or not start <= offset <= offset + len(into) <= start + len(data):
            start, _ = self._grains(file, offset, len(into))
            raw = bytearray(max(offset + len(into), min(start + _WINDOW, self._sizes[file])) - start)
            self._fill_(file, start, [memoryview(raw)])
            data, sums = bytes(raw), grain_sums(raw, start)[1]
            self._window = (file, start, data, sums)
        at = offset - start
        into[:] = data[at : at + len(into)]
        first, last = at // GRAIN, -(-(at + len(into)) // GRAIN)
        self._keep(file, start // GRAIN + first, sums[first:last])

    def _note(self, file: str, offset: int, raw: memoryview | bytes) -> None:
        if len(raw):
            self._keep(file, *grain_sums(raw, offset))

    def _keep(self, file: str, first: int, sums: Sums) -> None:
        for grain, found in enumerate(sums.tolist(), first):
            if self._used.setdefault((file, grain), found) != found:
                what = f"bytes {grain * GRAIN} to {(grain + 1) * GRAIN} were read twice and differ"
                raise MupscaleError(CHANGED, [Fault("job.base_bytes_changed", file, what, START_AGAIN)])

    def _fill_(self, file: str, offset: int, rooms: list[memoryview]) -> None:
        """Fill several rooms, one after the other, with bytes that lie behind each other in the file."""
        total = sum(map(len, rooms))
        count = self.read_some_(file, offset, rooms)
        done = count
        while done < total:  # a short read: continue in what is left of each room
            left, skipped = [], done
            for room in rooms:
                left += [room[skipped:]] if skipped < len(room) else []
                skipped = max(0, skipped - len(room))
            count = self.read_some_(file, offset + done, left)
            done += count
        self.bytes += total


def encoded(runs: list[tuple[str, int, Sums]], files: Mapping[str, int | str]) -> str:
    """Runs of grains as one word: the number of the file, the first grain, the sums."""
    return ",".join(f"{files[file]}:{first}:{encoded_sums(sums)}" for file, first, sums in runs) or "-"


def decoded(word: str) -> Iterator[tuple[int, int, Sums]]:
    if word == "-":
        return
    for part in word.split(","):
        file, first, sums = part.split(":")
        yield int(file), int(first), decoded_sums(sums)


def encoded_sums(sums: Sums) -> str:
    return base64.b64encode(sums.astype("<u8").tobytes()).decode()


def decoded_sums(word: str) -> Sums:
    return np.frombuffer(base64.b64decode(word), "<u8").astype(np.uint64)
