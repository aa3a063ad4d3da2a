"""Growing from and to an object store: the base is read about once, and killed writers lose nothing.

moto's S3 server runs on loopback in a process of its own, with a proxy before it that counts. A checkpoint of two files is
widened with noise, from the disk to the disk, from the store to the disk, and from the store to the store. Writers to the
store are ended with SIGKILL at random requests and started again; until the last of them has published it, no configuration may be
visible. Pages that are kept are fewer than the base has, so that what is read twice is counted twice.

Then a small base is upscaled from the store to the store while the proxy does one thing to every few requests: it drops or refuses
them, stalls, flips a bit of a part on its way, gives a part another name, answers with a page of HTML, or lists objects, parts and
uploads in pages of two. A job that is refused meanwhile is run again when nothing is wrong any more.

    python benchmarks/storage.py [--quick] [--seed 0]

The last line is `bytes_ratio=R requests=N different=D resumed=K faults=F control=C`: bytes received for the job from the store by
those of the base's files, requests for it, files that differ from those on the disk, kills that were followed by a resumed run,
requests that the proxy harmed, and files that differ where flipped parts are not compared with what was sent. The exit code is 1
when the ratio is above 1.1, anything differs, was visible too early or is left over, a kind of fault harmed nothing, the control is
0, or the other control, a reader that keeps no pages, receives no more.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

from harness.forks import contents, fork
from harness.llama_files import Llama, job_for, write_directory
from harness.object_store import ObjectStore, object_store
from harness.program import Outcome, option, run
from mupscale.errors import MupscaleError
from mupscale.files.directory import read_directory
from mupscale.jobs import upload, upload_parts
from mupscale.jobs.job import Job
from mupscale.jobs.journal import writer
from mupscale.jobs.verify_bytes import check_bytes
from mupscale.jobs.worker import run_job
from mupscale.storage import pages, remote
from mupscale.storage.location import location

BOUND = 1.1
QUICK = Llama(hidden=512, ffn=1376, heads=8, kv_heads=4, layers=4, vocabulary=4000)
WHOLE = Llama(hidden=1024, ffn=2752, heads=16, kv_heads=8, layers=8, vocabulary=8000)
SMALL = Llama(hidden=64, ffn=160, heads=4, kv_heads=2, layers=2, vocabulary=128)
FAULTS = {"drop": 10, "stall": 40, "flip": 5, "rename": 3, "page": 15, "listed": 2}
"""What the proxy does, to every so manieth request or part; of listings, how long a page is."""
THREADS = 2
PART = 5 << 20  # the smallest that S3 allows, so that there are many


def different(one: dict[str, bytes], other: dict[str, bytes]) -> int:
    return sum(one.get(name) != other.get(name) for name in {*one, *other})


def job_of(base: Path | str, out: Path | str, sizes: Llama) -> Job:
    plan = sizes.plan(2)
    made = job_for(plan, read_directory(base), Path("x"), sizes.noise(plan))
    return replace(made, out=location(out), trust_base=True)


@dataclass
class Killed:
    """What became of writers that were killed."""

    kills: int = 0
    early: int = 0
    """Kills after which a configuration was visible although the output was not complete."""
    left: int = 0
    """Objects and uploads that are still there at the end."""
    found: dict[str, bytes] = field(default_factory=dict)


def killed(store: ObjectStore, sizes: Llama, kills: int, draw: random.Random) -> Killed:
    """Write to the store with so many kills on the way. Writers are forked before this process has made any request."""
    result = Killed()
    while True:
        store.traffic.reset()
        limit = draw.randint(4, 12) if result.kills < kills else 1 << 30
        child = fork(lambda: run_job(job_of("s3://models/base", "s3://models/wide", sizes), THREADS))
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
            if store.traffic.requests["PUT"] >= limit:
                os.kill(child, signal.SIGKILL)
                ended = os.waitpid(child, 0)
                break
            time.sleep(0.01)
        visible = store.names("models", "wide/")
        if ended[1] == 0:
            break
        if os.WIFEXITED(ended[1]):
            raise SystemExit("a writer to the store failed")
        result.kills += 1
        result.early += "config.json" in visible and "mupscale.json" not in visible
    result.found = {name: store.get(f"models/wide/{name}") for name in visible}
    _, uploads = store.call("GET", "/models?uploads")
    result.left = len(store.names("models", "wide.partial/")) + uploads.count(b"<UploadId>")
    return result


def received(store: ObjectStore, sizes: Llama, out: Path, total: int) -> tuple[float, int]:
    """What one job receives, by the size of its base, and its requests."""
    store.traffic.reset()
    run_job(job_of("s3://models/base", out, sizes), THREADS)
    return store.traffic.received / total, sum(store.traffic.requests.values())


@contextmanager
def small_store() -> Iterator[ObjectStore]:
    """A store with small parts, which every file has many of, and clients that are not patient."""
    with object_store(smallest=1024) as store, ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {**store.environment, remote.TIMEOUT: "2"}))
        for module, name, value in (
            (remote, "_known", {}),
            (remote, "PAUSES", (0.0, 0.01, 0.1, 0.1, 0.1)),
            (upload_parts, "PART_BYTES", 64 << 10),
            (upload_parts, "SMALLEST_PART", 1024),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield store


@dataclass
class Faulty:
    """What became of jobs whose requests were harmed."""

    unequal: int = 0
    left: int = 0
    harmed: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    control: int = 0


def faulty(folder: Path, times: int) -> Faulty:
    """Upscale from the store to the store while the proxy does what it can."""
    result = Faulty()
    write_directory(folder / "small", SMALL.shapes(), "F32", 3)
    run_job(small_job(folder / "small", folder / "small-wide"))
    want = contents(folder / "small-wide")
    with small_store() as store:
        store.put(folder / "small", "small/base")
        for kind, every in FAULTS.items():
            for number in range(times):
                store.traffic.reset()
                setattr(store.traffic, kind, every + number if kind != "listed" else every)
                job = small_job("s3://small/base", f"s3://small/{kind}{number}")
                try:
                    run_job(job, THREADS)
                except MupscaleError:
                    result.refused += 1
                setattr(store.traffic, kind, 0)
                result.harmed[kind] = result.harmed.get(kind, 0) + store.traffic.harmed
                run_job(job, THREADS)
                result.unequal += different(want, found_in(store, f"{kind}{number}"))
        _, uploads = store.call("GET", "/small?uploads")
        result.left = uploads.count(b"<UploadId>") + sum(
            ".partial/" in name for name in store.names("small", "")
        )
        store.traffic.flip = 2
        with patch.object(upload, "probe", lambda _: False):
            run_job(small_job("s3://small/base", "s3://small/control"), THREADS)
        result.control = different(want, found_in(store, "control"))
    return result


def small_job(base: Path | str, out: Path | str) -> Job:
    plan = SMALL.plan(2)
    directory = read_directory(base)
    made = job_for(plan, directory, Path("x"), SMALL.noise(plan), shard_bytes=400_000, block_bytes=16 << 10)
    return replace(made, out=location(out), trust_base=True)


def found_in(store: ObjectStore, folder: str) -> dict[str, bytes]:
    return {name: store.get(f"small/{folder}/{name}") for name in store.names("small", f"{folder}/")}


def measure(chosen: argparse.Namespace) -> Outcome:
    sizes, kills = (QUICK, 3) if chosen.quick else (WHOLE, 12)
    upload_parts.PART_BYTES, writer.GROUP_BYTES = PART, PART
    with object_store() as store, tempfile.TemporaryDirectory() as name:
        os.environ.update(store.environment)
        folder = Path(name)
        write_directory(folder / "base", sizes.shapes(), "BF16", 2)
        total = sum(path.stat().st_size for path in (folder / "base").iterdir())
        store.put(folder / "base", "models/base")
        pages.KEPT = max(32, total // pages.PAGE // 4)
        print(f"base of {total / 1e6:.0f} MB, {pages.KEPT * pages.PAGE / 1e6:.0f} MB of pages kept")
        run_job(job_of(folder / "base", folder / "near", sizes), THREADS)
        near = contents(folder / "near")
        writers = killed(store, sizes, kills, random.Random(chosen.seed))
        ratio, requests = received(store, sizes, folder / "far", total)
        unequal = different(near, contents(folder / "far")) + different(near, writers.found)
        store.traffic.reset()
        faults = check_bytes(job_of("s3://models/base", "s3://models/wide", sizes), threads=THREADS)
        checked = store.traffic.received / (total + sum(map(len, near.values())))
        print(f"the check receives {checked:.3f} times base and result")
        pages.KEPT = 1
        control = received(store, sizes, folder / "control", total)[0]
        print(f"control, no pages kept: {control:.3f} times the base")
    with tempfile.TemporaryDirectory() as name:
        harmed = faulty(Path(name), 1 if chosen.quick else 4)
    told = ", ".join(f"{kind} {count}" for kind, count in harmed.harmed.items())
    print(f"requests that were harmed: {told}; {harmed.refused} jobs were refused meanwhile")
    unequal += harmed.unequal
    failed = []
    if max(ratio, checked) > BOUND:
        failed.append(f"{max(ratio, checked):.3f} times the files were received, allowed {BOUND}")
    if unequal or faults:
        failed.append(f"{unequal} files differ, {len(faults)} faults of the check")
    if writers.kills < kills:
        failed.append(f"{writers.kills} of {kills} writers were killed")
    if writers.early or writers.left:
        failed.append(f"visible too early {writers.early} times, {writers.left} objects or uploads left over")
    if harmed.left:
        failed.append(f"{harmed.left} objects or uploads left over after faults of the proxy")
    if not (harmed.control and all(harmed.harmed.values())):
        failed.append(f"nothing was measured: {harmed}")
    if control <= ratio:
        failed.append("without kept pages no more is received: nothing was measured")
    line = f"bytes_ratio={ratio:.3f} requests={requests} different={unequal} resumed={writers.kills} "
    line += f"faults={sum(harmed.harmed.values())} control={harmed.control}"
    return Outcome(line, failed)


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help="a smaller base and fewer kills")
    seed = option("--seed", type=int, default=0, help="decides when writers are killed")
    sys.exit(run(measure, quick, seed, doc=__doc__))
