"""A job: everything that has to be done to write a wide checkpoint, as one value with JSON.

A worker is a pure function of the job and the bytes of the base. Knows: what is read, what is written where,
and whether that fits together; a job read from a file is input like any other and is checked. Moves no byte.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.places import OutFile, Place
from ..files.strict import parse_json, printable, refuse_malformed
from ..files.typed import flag, integer, number, short_numbers, text, whole, wholes
from ..rules.axes import Axis
from ..rules.scale import Scale
from ..storage.location import Location, location
from ..tensors.making import Join, Making
from ..tensors.noise import TensorNoise, Waking
from ..tensors.philox import Stream

FORMAT = "mupscale job 1"
BLOCK_BYTES = 8 << 20  # of output per unit of work: memory stays small, and system calls cost little
PAGE = 4096  # bytes; what O_DIRECT is aligned to, see bytes/output_files.py
DIGITS = 12  # of the numbers in an axis or a scale, which is factorised by trial
_MOST_OBJECTS = 3_000_000  # of JSON; a job has a few per tensor
Cells = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One wide tensor in an output file: how it is made, where its sources lie and where it goes."""

    name: str
    making: Making
    sources: tuple[Place, ...]
    target: Place
    cells: Cells = ()
    """Where only a part of the tensor is stored: for every dimension (which, of how many equal parts)."""
    base_cells: Cells = ()
    """The part of the base tensor that its sources hold, where it is another one: a copy of an expert is made from that expert."""

    @property
    def read_cells(self) -> Cells:
        """The part of the base tensor that its sources hold."""
        return self.base_cells or self.cells

    def as_json(self) -> dict[str, Any]:
        making = self.making
        entry: dict[str, Any] = {
            "name": self.name,
            "target": self.target.as_json(),
            "sources": [source.as_json() for source in self.sources],
            "axes": [str(axis) for axis in making.axes],
        }
        noise = making.noise and {
            "seed": making.noise.stream.seed,
            "name": making.noise.stream.name,
            "std": making.noise.std,
            "paired": making.noise.paired,
            **({} if making.noise.without_row is None else {"without_row": making.noise.without_row}),
            **({} if making.noise.zeros is None else {"zeros": _zeros_json(making.noise.zeros)}),
            **({} if making.noise.split is None else {"split": making.noise.split}),
            **({} if making.noise.apart is None else {"apart": making.noise.apart}),
        }
        join = making.join and {"stack" if making.join.stacked else "cat": making.join.dim}
        if making.join is not None and making.join.under is not None:
            join = {**(join or {}), "under": making.join.under}
        optional = {
            "scale": (str(making.scale), "1"),
            "shift": (making.shift, 0),
            "noise": (noise, None),
            "fill": (making.fill or "zero", "zero"),
            "mean": (list(making.mean), []),
            "pad": (making.pad, 0),
            "cells": ([list(cell) for cell in self.cells], []),
            "base_cells": ([list(cell) for cell in self.base_cells], []),
        }
        entry.update({key: value for key, (value, usual) in optional.items() if value != usual})
        return {**entry, **(join or {})}


def _zeros_json(zeros: Waking) -> dict[str, Any]:
    """What zeros get, as JSON; a row of new words is left out where there are none."""
    return {key: value for key, value in asdict(zeros).items() if value is not None}


def window(sizes: Sequence[int], cells: Cells) -> tuple[list[int], list[int]]:
    """Start and shape of the stored part of a tensor of these sizes; all of it where there are no cells.

    >>> window((8, 6), ((1, 2), (0, 1)))
    ([4, 0], [4, 6])
    """
    counted = cells or ((0, 1),) * len(sizes)
    shape = [size // count for size, (_, count) in zip(sizes, counted, strict=True)]
    return [which * n for (which, _), n in zip(counted, shape, strict=True)], shape


@dataclass(frozen=True, slots=True)
class Carried:
    """A file of the base that is copied as it is."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Text:
    """A small file that is written when everything else is there."""

    name: str
    content: str


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A file of the base that moves read: its size, and a digest of its two ends that is cheap to check."""

    name: str
    size: int
    ends: str


@dataclass(frozen=True)
class Job:
    """A complete job. `about` becomes `mupscale.json`, with a digest of every base file added at the end."""

    base: Location
    out: Location
    files: tuple[OutFile, ...]
    moves: tuple[Move, ...]
    sources: tuple[BaseFile, ...]
    carried: tuple[Carried, ...] = ()
    texts: tuple[Text, ...] = ()
    block_bytes: int = BLOCK_BYTES
    about: dict[str, Any] = field(default_factory=dict)
    trust_base: bool = False
    """Whether the base is not read once more before the output is published."""

    @property
    def folder(self) -> Path:
        """The output of a job that writes to this machine."""
        assert isinstance(self.out, Path), self.out
        return self.out

    def as_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "base": str(self.base),
            "out": str(self.out),
            "about": self.about,
            "block_bytes": self.block_bytes,
            "sources": {file.name: [file.size, file.ends] for file in self.sources},
            "carried": {file.name: [file.size, file.sha256] for file in self.carried},
            "texts": {small.name: small.content for small in self.texts},
            "files": {
                file.name: {
                    "size": file.size,
                    "chunks": [[at, base64.b64encode(raw).decode()] for at, raw in file.chunks],
                }
                for file in self.files
            },
            "moves": [move.as_json() for move in self.moves],
            **({"trust_base": True} if self.trust_base else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.as_json(), indent=0, allow_nan=False)

    @staticmethod
    def from_json(raw: bytes) -> Job:
        """The job that `to_json` wrote. It is not checked further here: see `job_check.sound_job`."""
        return Job.of_json(parse_json(raw, "the job", objects=_MOST_OBJECTS))

    @staticmethod
    def of_json(entry: Mapping[str, Any]) -> Job:
        """The job that `as_json` gave; anything else is refused."""
        with refuse_malformed("this is not a job", "job.malformed_record"):
            if entry["format"] != FORMAT:
                raise MupscaleError(
                    f"expected a {FORMAT!r}, found {printable(entry['format'])}", code="job.wrong_format"
                )
            return Job(
                base=location(text(entry["base"])),
                out=location(text(entry["out"])),
                files=tuple(
                    OutFile(
                        name,
                        whole(file["size"]),
                        tuple(
                            (whole(at), base64.b64decode(data, validate=True)) for at, data in file["chunks"]
                        ),
                    )
                    for name, file in entry["files"].items()
                ),
                moves=tuple(_move(move) for move in entry["moves"]),
                sources=tuple(BaseFile(n, whole(s), text(d)) for n, (s, d) in entry["sources"].items()),
                carried=tuple(Carried(n, whole(s), text(d)) for n, (s, d) in entry["carried"].items()),
                texts=tuple(Text(name, text(content)) for name, content in entry["texts"].items()),
                block_bytes=whole(entry["block_bytes"]),
                about=dict(entry["about"]),
                trust_base=flag(entry.get("trust_base", False)),
            )


def differences(old: Any, new: Any, where: str = "") -> Iterator[Fault]:
    """What differs between two jobs, as JSON values, most readable first.

    >>> [(fault.code, fault.where) for fault in differences({"seed": 0, "k": 2}, {"seed": 1, "k": 2})]
    [('job.entry_differs', 'seed')]
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*old, *(key for key in new if key not in old)]:
            path = f"{where}.{key}" if where else str(key)
            yield from differences(old.get(key, "absent"), new.get(key, "absent"), path)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for i, (a, b) in enumerate(zip(old, new, strict=True)):
            label = a.get("name", i) if isinstance(a, dict) else i
            yield from differences(a, b, f"{where}[{label}]")
    elif isinstance(old, list) and isinstance(new, list):
        yield Fault("job.entry_differs", printable(where), f"had {len(old)} entries, now {len(new)}")
    elif old != new:
        yield Fault("job.entry_differs", printable(where), f"was {printable(old)}, now {printable(new)}")


def _place(entry: Any) -> Place:
    file, offset, dtype, shape = entry
    return Place(text(file), whole(offset), text(dtype), wholes(shape))


@lru_cache(maxsize=4096)  # a model of 100,000 tensors has a few dozen axes
def _axis(value: str) -> Axis:
    return Axis.parse(short_numbers(value, DIGITS))


@lru_cache(maxsize=4096)
def _scale(value: str) -> Scale:
    if len(value) > 40:
        raise ValueError(f"scale {printable(value)} is too long")
    scale = Scale.of(short_numbers(value, DIGITS))
    if not 0 < float(scale) < float("inf"):
        raise ValueError(f"scale {value} is not a float")
    return scale


def _noise(entry: Any) -> TensorNoise | None:
    if entry is None:
        return None
    sizes = _sizes(entry["std"])
    dims = (entry["paired"], entry.get("without_row"), entry.get("split"), entry.get("apart"))
    paired, row, split, apart = (None if n is None else whole(n) for n in dims)
    waking = entry.get("zeros")
    zeros = None
    if waking is not None:
        mean = None if waking.get("mean") is None else tuple(map(number, waking["mean"]))
        cut, level = tuple(map(whole, waking["cut"])), number(waking["level"])
        zeros = Waking(_sizes(waking["std"]), cut, level, mean, flag(waking.get("copied", False)))
    stream = Stream(int(entry["seed"]), text(entry["name"]))
    return TensorNoise(stream, sizes, paired, row, zeros, split, apart)


def _sizes(std: Any) -> float | tuple[float, ...]:
    return tuple(map(number, std)) if isinstance(std, (list, tuple)) else number(std)


def _making(entry: Any) -> Making:
    fill, sources = entry.get("fill", "zero"), entry["sources"]
    if fill not in ("zero", "one"):
        raise ValueError(f"fill {fill!r} is neither zero nor one")
    if sources and "fill" in entry:
        raise ValueError(f"fill {fill!r} of a tensor that has sources")
    under = whole(entry["under"]) if "under" in entry else None
    joins = [Join(whole(entry[key]), key == "stack", under) for key in ("cat", "stack") if key in entry]
    if len(joins) > 1:
        raise ValueError("sources are concatenated or stacked, not both")
    return Making(
        axes=tuple(_axis(text(axis)) for axis in entry["axes"]),
        scale=_scale(text(entry.get("scale", "1"))),
        shift=int(entry.get("shift", 0)),
        noise=_noise(entry.get("noise")),
        fill=None if sources else fill,
        join=joins[0] if joins else None,
        mean=wholes(entry.get("mean", ())),
        pad=integer(entry.get("pad", 0)),
    )


def _cells(entry: Any) -> Cells:
    return tuple((whole(which), whole(count)) for which, count in entry)


def _move(entry: Any) -> Move:
    return Move(
        name=text(entry["name"]),
        making=_making(entry),
        sources=tuple(map(_place, entry["sources"])),
        target=_place(entry["target"]),
        cells=_cells(entry.get("cells", ())),
        base_cells=_cells(entry.get("base_cells", ())),
    )
