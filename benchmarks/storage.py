"""A base in an object store is read about once, and the result is that of a local base, byte for byte.

moto's S3 server runs on loopback in a process of its own, with a proxy before it that counts. A checkpoint of two files is
widened with noise from the store and from the disk, and checked against both. Pages that are kept are fewer than the base has,
so that what is read twice is counted twice.

    python benchmarks/storage.py [--quick]

The last line is `bytes_ratio=R requests=N different=D`: bytes received for the job by those of the base's files, requests
for the job, and files that differ between the two results. The exit code is 1 when the ratio is above 1.1, anything differs, or
the control, a reader that keeps no pages, stays below the bound.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.llama_files import Llama, job_for, write_directory
from harness.object_store import ObjectStore, object_store
from mupscale.files.directory import read_directory
from mupscale.jobs.job import Job
from mupscale.jobs.verify_bytes import check_bytes
from mupscale.jobs.worker import run_job
from mupscale.storage import pages

BOUND = 1.1
QUICK = Llama(hidden=512, ffn=1376, heads=8, kv_heads=4, layers=4, vocabulary=4000)
WHOLE = Llama(hidden=1024, ffn=2752, heads=16, kv_heads=8, layers=8, vocabulary=8000)
THREADS = 2


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def different(one: dict[str, bytes], other: dict[str, bytes]) -> int:
    return sum(one.get(name) != other.get(name) for name in {*one, *other})


def made_from(where: Path | str, out: Path, sizes: Llama) -> Job:
    plan = sizes.plan(2)
    return replace(job_for(plan, read_directory(where), out, sizes.noise(plan)), trust_base=True)


def received(store: ObjectStore, sizes: Llama, out: Path, total: int) -> tuple[float, int]:
    """What one job receives, by the size of its base, and its requests."""
    store.traffic.reset()
    run_job(made_from("s3://models/base", out, sizes), THREADS)
    return store.traffic.received / total, sum(store.traffic.requests.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smaller base")
    sizes = QUICK if parser.parse_args().quick else WHOLE
    with object_store() as store, tempfile.TemporaryDirectory() as name:
        os.environ.update(store.environment)
        folder = Path(name)
        base = write_directory(folder / "base", sizes.shapes(), "BF16", 2)
        total = sum(path.stat().st_size for path in (folder / "base").iterdir())
        store.put(folder / "base", "models/base")
        pages.KEPT = max(32, total // pages.PAGE // 4)
        print(f"base of {total / 1e6:.0f} MB, {pages.KEPT * pages.PAGE / 1e6:.0f} MB of pages kept")
        run_job(made_from(folder / "base", folder / "near", sizes), THREADS)
        ratio, requests = received(store, sizes, folder / "far", total)
        unequal = different(contents(folder / "near"), contents(folder / "far"))
        store.traffic.reset()
        faults = check_bytes(folder / "far", "s3://models/base", threads=THREADS)
        checked = store.traffic.received / total
        print(f"the check receives {checked:.3f} times the base")
        pages.KEPT = 1
        control = received(store, sizes, folder / "control", total)[0]
        print(f"control, no pages kept: {control:.3f} times the base")
        assert base.weights
    failed = []
    if max(ratio, checked) > BOUND:
        failed.append(f"{max(ratio, checked):.3f} times the base were received, allowed {BOUND}")
    if unequal or faults:
        failed.append(f"{unequal} files differ, {len(faults)} faults of the check")
    if control <= ratio:
        failed.append("without kept pages as little is received: nothing was measured")
    for failure in failed:
        print(f"FAILED: {failure}")
    print(f"\nbytes_ratio={ratio:.3f} requests={requests} different={unequal}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
