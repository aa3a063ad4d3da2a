"""Whether `mu.same` sees every planted fault and no other: honest pairs in every format, faults as small as must be seen, time and memory.

    python benchmarks/same.py             every pair and fault, and 4 GB against 4 GB
    python benchmarks/same.py --gb 1      the same with 1 GB against 1 GB
    python benchmarks/same.py --quick     one format for each fault, weights alone in every two formats, and 64 MB

`time_ratio` is the time of a comparison over that of reading both checkpoints once, in blocks of the same size, from the disk: the
cache is dropped before either. `rss_mib` is the most memory that the process had which compares, torch included.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import mupscale as mu
from harness.limited import peak_mib
from harness.planted import Pair, honest, planted
from harness.program import Outcome, option, pool, run

ROWS, COLUMNS = 1024, 4096
LAYER = 2 * ROWS * COLUMNS
BLOCK = 4 << 20
REPEATS = 3


def measure(chosen: argparse.Namespace) -> Outcome:
    warnings.simplefilter("ignore")
    failed: list[str] = []
    with tempfile.TemporaryDirectory(dir=chosen.folder) as made:
        folder = Path(made)
        pairs, alarms = _honest(folder / "honest", not chosen.quick, failed)
        count, missed = _planted(folder / "planted", 1 if chosen.quick else 3, failed)
        ratio, cached, rss = _measured(folder, 2**26 if chosen.quick else int(chosen.gb * 2**30))
    print(f"from the cache: {cached:.2f} times reading both files once")
    if not chosen.quick and ratio > 1.3:
        failed.append(f"comparing takes {ratio:.2f} times reading both files once, expected at most 1.3")
    if rss > 500:
        failed.append(f"comparing takes {rss:.0f} MiB, expected at most 500")
    equal = sum(pairs.values())
    return Outcome(
        f"pairs={len(pairs)} equal={equal} planted={count} missed={missed} false_alarms={alarms} "
        f"time_ratio={ratio:.2f} rss_mib={rss:.0f}",
        failed,
    )


def _told(pair: Pair, config: Path) -> mu.Same:
    return mu.same(pair.a, pair.b, profile=pair.profile, config=config)


def _honest(folder: Path, runs: bool, failed: list[str]) -> tuple[dict[frozenset[str], bool], int]:
    """Whether the pairs of every two formats are the same, and how many honest pairs are not."""
    folder.mkdir()
    pairs: dict[frozenset[str], bool] = {}
    alarms = count = 0
    for pair in _quiet(honest(folder, runs)):
        found = _told(pair, next(folder.rglob("config.json")))
        formats = frozenset(pair.formats)
        pairs[formats] = pairs.get(formats, True) and bool(found)
        count += 1
        alarms += not found
        if not found:
            failed.append(f"{' against '.join(pair.formats)}: {found}")
    print(f"honest resumes and conversions: {count}")
    return pairs, alarms


def _planted(folder: Path, formats: int, failed: list[str]) -> tuple[int, int]:
    """How many faults were planted, and how many of them were not named."""
    folder.mkdir()
    count = missed = 0
    for pair in _quiet(planted(folder, formats)):
        found = _told(pair, next(folder.rglob("config.json")))
        count += 1
        if pair.code not in {fault.code for fault in found.differences}:
            missed += 1
            failed.append(f"{pair.kind} in {pair.formats[1]}, by the profile {pair.profile}: {found}")
    return count, missed


def _quiet(pairs: Iterator[Pair]) -> Iterator[Pair]:
    """The same pairs, without the bars that writing them shows."""
    while True:
        with contextlib.redirect_stderr(io.StringIO()):
            pair = next(pairs, None)
        if pair is None:
            return
        yield pair


def _measured(folder: Path, size: int) -> tuple[float, float, float]:
    """Time over that of reading once, from the disk and from the cache, and memory, for two directories of one content."""
    places = [_written(folder / str(files), size, files) for files in (1, 4)]
    with pool(1) as workers:
        return workers.submit(_timed, places).result()


def _timed(places: list[Path]) -> tuple[float, float, float]:
    """In a process that has imported no more than a user's."""
    files = [file for place in places for file in sorted(place.glob("*.safetensors"))]
    ratios = []
    for drops in (True, False):
        times: dict[str, list[float]] = {"read": [], "same": []}
        for what in ("same", *("read", "same") * REPEATS):  # the first one imports
            if drops:
                _drop(files)
            start = time.perf_counter()
            if what == "read":
                _read(files)
            elif not mu.same(*places):
                raise AssertionError("the two directories have one content")
            times[what].append(time.perf_counter() - start)
        read, same = min(times["read"]), min(times["same"][1:])
        print(
            f"{'from the disk' if drops else 'from the cache'}: {read:.2f} s to read, {same:.2f} s to compare",
            flush=True,
        )
        ratios.append(same / read)
    return ratios[0], ratios[1], peak_mib()


def _written(folder: Path, size: int, files: int) -> Path:
    """A directory of one content in some files; nothing of it is held in memory."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    layers, each, block = max(4, size // LAYER), LAYER, random.Random(0).randbytes(BLOCK)
    where: dict[str, str] = {}
    for number in range(files):
        own = range(number * layers // files, (number + 1) * layers // files)
        names, name = (
            [f"model.layers.{layer}.mlp.up_proj.weight" for layer in own],
            f"model-{number}.safetensors",
        )
        entries = {
            tensor: {"dtype": "BF16", "shape": [ROWS, COLUMNS], "data_offsets": [at * each, (at + 1) * each]}
            for at, tensor in enumerate(names)
        }
        head = json.dumps(entries).encode()
        head += b" " * (-len(head) % 8)
        where |= dict.fromkeys(names, name)
        with open(folder / name, "wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for layer in own:
                for at in range(0, each, BLOCK):
                    file.write((layer * each + at).to_bytes(8, "little") + block[8:])
            file.flush()
            os.fsync(file.fileno())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def _drop(files: list[Path]) -> None:
    for file in files:
        with open(file, "rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(files: list[Path]) -> None:
    room = memoryview(bytearray(BLOCK))
    for file in files:
        with open(file, "rb", buffering=0) as opened:
            while opened.readinto(room):
                pass


if __name__ == "__main__":
    sys.exit(
        run(
            measure,
            option(
                "--gb", type=float, default=4.0, help="the size of each of two checkpoints that are timed"
            ),
            option("--quick", action="store_true", help="one format for each fault, and 64 MB"),
            option("--folder", help="where the files are written, for a disk of its own"),
            doc=__doc__,
        )
    )
