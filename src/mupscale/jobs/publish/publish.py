"""A complete output becomes visible: nothing is published that was not read back, nor a file that another may write into.

Workers write blocks into shared files, `x.partial`, and open them by that name. Once every block is in a journal, one of them

1. *closes* the files: `x.partial` becomes `x`. From now on nobody can open one for writing.
2. asks which attempts may still have one open (`attempts.py`), and puts a fresh copy in the place of each of those
   (`fresh_file.py`): what such an attempt writes goes to a file without a name.
3. reads every other file from the disk and compares it with the fingerprints that its blocks had in memory and with its fixed
   bytes. One that is gone, has another length or differs in a bit is renewed as well.
4. writes the small files, each read back, and last the record, which says that all of this is done.
5. sees that every name still has the file that was read, unchanged, and renames the directory.

For example, two workers share x and y. Worker 0 writes the first blocks of x and is stopped, say because its virtual machine
is paused. The scheduler starts it again as 0', which does the share of worker 0, and worker 1 does the rest of x, and y.

    journal-0   blocks 0, 1         no end, and another machine       may write into x
    journal-0'  blocks 2, 3, ended
    journal-1   blocks 4 … 9, ended

Worker 1 ends last. It closes x and y. The attempt 0 may still write into x, so x is copied and the copy is read back; y is read
where it is. Then the directory is renamed. When 0 wakes up, its descriptor leads to the old x, which has no name any more, and
it finds the output complete. Without attempt 0, the price of publishing is one read of the output; a copy is the price of
an attempt whose end nobody knows.

A process may be killed after any step, and two may do this at once: files under their final names are only ever replaced by
files that are right and closed, and a directory is renamed once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path

from ...runs.growth_record import NAME as ABOUT
from ..bytes.durable import sync_path
from ..finished import is_complete
from ..job import Job
from ..job_check import PARTIAL
from ..partial import (
    WORKING_JOB,
    carried_files,
    folders,
    locked,
    partial,
    patience,
    text_files,
    write_file,
)
from ..work_units import WorkUnits
from .attempts import open_elsewhere
from .fresh_file import TRIES, differs, renew
from .read_back import State, fingerprints_of, forget, state


def publish(
    job: Job,
    units: WorkUnits,
    base: Mapping[str, str],
    output: Mapping[str, str],
    sums: Mapping[int, str],
    threads: int = 1,
) -> None:
    """Make the output of a job visible, of which every block is written.

    `base` and `output` are the fingerprints of the files that were read and written, `sums` those of the blocks.
    """
    folder = partial(job.folder)
    fresh: set[str] = set()
    with locked(folder, patience(job)):
        for _ in range(TRIES):
            if is_complete(job.folder, job):
                return
            _close(job, folder)
            found = _right_files(job, units, folder, output, sums, fresh, threads)
            *texts, (record, about) = text_files(job, base, output)
            for name, raw in chain(carried_files(job), texts):
                _write(folder / name, raw)
            for inner in ("", *folders(job)):
                sync_path(folder / inner)
            _write(folder / record, about)
            if all(state(folder / name) == was for name, was in found.items()):
                _rename(job, folder)
                return
    raise differs(folder)


def _close(job: Job, folder: Path) -> None:
    for file in job.files:
        if not os.path.lexists(folder / file.name):
            with suppress(FileNotFoundError):  # lost, or closed by another process a moment ago
                os.rename(folder / f"{file.name}{PARTIAL}", folder / file.name)


def _right_files(
    job: Job,
    units: WorkUnits,
    folder: Path,
    output: Mapping[str, str],
    sums: Mapping[int, str],
    fresh: set[str],
    threads: int,
) -> dict[str, State | None]:
    """What lies under the name of every output file, now that it is right and nobody can write into it."""
    doubtful = open_elsewhere(folder, units) - fresh
    before: dict[str, State | None] = {}
    sizes = {}
    for file in job.files:
        path = folder / file.name
        if file.name not in doubtful and state(path) is not None:
            forget(path)
            before[file.name] = was = state(path)
            if was is not None and was[1] == file.size:
                sizes[file.name] = file.size
    found = fingerprints_of(folder, sizes, threads)
    for file in job.files:
        if found.get(file.name) != output[file.name]:
            path = folder / file.name
            before[file.name] = renew(job, units, path, file, sums, output[file.name], threads)
            fresh.add(file.name)
    return before


def _write(path: Path, raw: bytes) -> None:
    """Write a small file and read it back."""
    for _ in range(TRIES):
        write_file(path, raw)
        forget(path)
        if path.read_bytes() == raw:
            return
    raise differs(path)


def _rename(job: Job, folder: Path) -> None:
    """The last step: remove the files that only workers need, and rename the directory."""
    kept = {entry.name for part in (job.files, job.carried, job.texts) for entry in part} | {ABOUT}
    for inner in ("", *folders(job)):
        for path in (folder / inner).iterdir():
            if str(path.relative_to(folder)) not in {*kept, WORKING_JOB} and not path.is_dir():
                path.unlink(missing_ok=True)
    (folder / WORKING_JOB).unlink(missing_ok=True)  # last: without it a process that begins now knows no job
    sync_path(folder)
    os.rename(folder, job.folder)
    sync_path(job.folder.parent)
