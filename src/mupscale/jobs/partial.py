"""The output while it is being written: `<out>.partial`, which is renamed to `<out>` when it is complete.

Until every byte is written it holds no weight file under its final name, and until all is read back no config, so nothing can
load it as a model. Every step may be repeated or be done by two processes at once. Does not know how bytes are made; what
has to be true before the last step is in `publish/publish.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path, PurePosixPath
from time import monotonic, sleep
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.places import OutFile
from ..files.strict import os_errors, parse_json, raise_few, read_regular
from ..runs.growth_record import NAME as ABOUT
from ..storage.location import Location
from .bytes.durable import sync_data, sync_file, sync_path
from .bytes.output_files import write_all
from .digests import read_carried
from .finished import about_text, is_complete, recorded
from .job import Job, differences
from .job_check import CONFIG, PARTIAL

WORKING_JOB = "job.json"
EARLIER = "norms-"
"""How names of files begin that are written before the job is known: it depends on what is in them."""
_LONGEST_JOB = 1 << 30  # bytes; bounds what a damaged or foreign file can fill memory with
PATIENCE = 10.0
"""Seconds for which a process waits for another one to finish."""
_PAUSE = 0.02
_SHOWN = 12  # differences between two jobs that an error lists


def partial(out: Path) -> Path:
    """Where the output of a job lies until it is finished."""
    return out.with_name(out.name + PARTIAL)


def working_job(out: Location) -> Location:
    """The job file of an output that is being written."""
    return out.with_name(out.name + PARTIAL) / WORKING_JOB


def prepare(job: Job) -> bool:
    """Make the partial directory if it does not exist; True if the job is already done."""
    folder = partial(job.folder)
    if is_complete(job.folder, job):
        return True
    with os_errors(job.folder):
        if os.path.lexists(job.folder) and not (job.folder.is_dir() and not any(job.folder.iterdir())):
            raise MupscaleError(
                f"{job.folder} exists and is not empty",
                [
                    Fault(
                        "directory.not_empty",
                        str(job.folder),
                        "it was not written by this job",
                        "name another output, or remove it",
                    )
                ],
            )
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir()
        if folder.is_symlink() or not folder.is_dir():
            raise MupscaleError(
                f"{folder} is not a directory that mupscale made; remove it", code="job.not_our_directory"
            )
    with locked(folder) as alone, os_errors(folder):
        if is_complete(job.folder, job):  # finished by another process while this one waited
            with suppress(OSError):  # made a moment ago, in the place of the one that was renamed
                folder.rmdir()
            return True
        if half_published(job) is None:
            _claim(job, folder, alone)
        for name in folders(job):
            (folder / name).mkdir(exist_ok=True)
    return False


def carried_files(job: Job) -> Iterator[tuple[str, bytes]]:
    """The files that are carried over, as they were when the job was made."""
    for carried in job.carried:
        raw = read_carried(job.base, carried.name)
        if len(raw) != carried.size or hashlib.sha256(raw).hexdigest() != carried.sha256:
            raise MupscaleError(
                f"{carried.name} of the base changed while the job ran", code="job.carried_file_changed"
            )
        yield carried.name, raw


def text_files(job: Job, base: Mapping[str, str], output: Mapping[str, str]) -> list[tuple[str, bytes]]:
    """The small files in the order in which they are written: the configuration, without which nothing loads, and last the
    record, with which the output is complete."""
    texts = sorted(((text.name, text.content) for text in job.texts), key=lambda text: text[0] == CONFIG)
    return [(name, content.encode()) for name, content in (*texts, (ABOUT, about_text(job, base, output)))]


def is_finished(job: Job) -> bool:
    """Whether the output exists under its final name and belongs to this job."""
    return is_complete(job.folder, job)


def half_published(job: Job) -> tuple[dict[str, str], dict[str, str]] | None:
    """The fingerprints of base and output, if a process ended after all was read back and before the directory was renamed.

    The working job and journals may be gone by then.
    """
    folder = partial(job.folder)
    if is_complete(folder, job):
        with suppress(MupscaleError):
            base, output, about = recorded(folder, job)
            if read_regular(folder / ABOUT, _LONGEST_JOB) == about.encode():
                return base, output
    return None


def finished_by_another(job: Job) -> bool:
    """Whether another process has finished the job; one that is about to is waited for, for a few seconds."""
    folder = partial(job.folder)
    for _ in range(int(PATIENCE / _PAUSE)):
        try:
            with locked(folder, 0.0) as alone:
                gone = not folder.exists()
                if is_finished(job):
                    return True
                if alone or gone:
                    return False
        except OSError:
            return False
        sleep(_PAUSE)
    return False


def folders(job: Job) -> list[str]:
    """The folders inside of the output that hold files of the job, at any depth, inner ones after outer ones."""
    names = [entry.name for part in (job.files, job.carried, job.texts) for entry in part]
    return sorted({str(above) for name in names for above in PurePosixPath(name).parents} - {"."})


def _claim(job: Job, folder: Path, alone: bool) -> None:
    """Write the job into its directory, unless it is there; another job in its place is refused.

    A hard link gives the file its name only if nobody has; where there are no links, the lock keeps others away.
    """
    path = folder / WORKING_JOB
    if not path.exists():
        known = (f".{WORKING_JOB}.", EARLIER)  # drafts of killed workers, and what was measured before
        others = [name for name in os.listdir(folder) if not any(part in name for part in known)]
        if others:
            raise MupscaleError(
                f"{folder} holds {others[0]} and no job; remove the directory",
                code="job.directory_without_job",
            )
        draft = folder / f".{WORKING_JOB}.{secrets.token_hex(4)}"
        write_file(draft, job.to_json().encode())
        try:
            os.link(draft, path)
        except FileExistsError:  # another worker was first; its job is compared like any other
            pass
        except OSError as error:
            if not alone:
                raise MupscaleError(
                    f"the file system of {folder} has neither hard links ({error.strerror}) nor locks, so two workers "
                    "could not agree on one job; write to another file system and copy the result",
                    code="disk.no_links_nor_locks",
                ) from None
            os.replace(draft, path)
        draft.unlink(missing_ok=True)
        sync_path(folder)
    check_same_job(read_regular(path, _LONGEST_JOB), job, folder)


def check_same_job(raw: bytes, job: Job, folder: Location) -> None:
    """Raise unless the text of a job, found in a folder, is that of this job.

    It is parsed only if it differs, which it may in how paths are spelled: a job can have 200,000 tensors.
    """
    if raw == job.to_json().encode():
        return
    found = parse_json(raw, str(folder / WORKING_JOB), objects=10_000_000)
    if _identity(found) != _identity(job.as_json()):
        shown = list(islice(differences(_identity(found), _identity(job.as_json())), _SHOWN))
        raise_few(
            f"{folder} belongs to another job; run that one again to resume it, or remove the directory",
            shown,
        )


def _identity(entry: Any) -> Any:
    """A job without its paths, which can be spelled in several ways, as JSON values, so that jobs can be compared."""
    if not isinstance(entry, dict):
        return entry
    kept = {key: value for key, value in entry.items() if key not in ("base", "out")}
    return json.loads(json.dumps(kept))


def create(job: Job, names: Collection[str]) -> None:
    """Make those of these output files that are not there or have another length, with their fixed bytes.

    A file that has its final name already is left alone, whatever it holds.
    """
    folder = partial(job.folder)
    missing = [file for file in job.files if file.name in names and _is_missing(folder, file)]
    mode = file_mode(job) if missing else 0
    for file in missing:
        _create(folder / f"{file.name}{PARTIAL}", file, mode)
    for above in {(folder / file.name).parent for file in missing}:
        sync_path(above)


def _is_missing(folder: Path, file: OutFile) -> bool:
    # In this order: a file that is renamed between the two looks is seen by the second.
    for name, whole in ((f"{file.name}{PARTIAL}", False), (file.name, True)):
        with suppress(FileNotFoundError):
            return os.lstat(folder / name).st_size != file.size and not whole
    return True


def _create(path: Path, file: OutFile, mode: int) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        fill_fixed(descriptor, file)
    finally:
        os.close(descriptor)


def fill_fixed(descriptor: int, file: OutFile) -> None:
    """Give an open file its length and its fixed bytes."""
    for offset, raw in file.chunks:
        write_all(descriptor, memoryview(raw), offset)
    os.ftruncate(descriptor, file.size)
    sync_data(descriptor)


def file_mode(job: Job) -> int:
    """Who may read the weights: nobody who may not read those of the base."""
    mode = 0o644
    for source in job.sources:
        if isinstance(job.base, Path):
            mode &= (job.base / source.name).stat().st_mode
    return mode | 0o600


def write_file(path: Path, raw: bytes) -> None:
    """Write a file atomically: readers see all of it or nothing."""
    with drafted(path) as draft:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            write_all(descriptor, memoryview(raw), 0)
            sync_file(descriptor)
        finally:
            os.close(descriptor)
        os.replace(draft, path)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A name next to `path` for a file that takes its place once it is complete.

    On an error what has that name is removed, also if another process has published the folder under its final name by then.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield draft
    except BaseException:
        with suppress(OSError):
            os.unlink(draft.name, dir_fd=folder)
        raise
    finally:
        os.close(folder)


def patience(job: Job) -> float:
    """Seconds for which a process that finishes a job is waited for; it may be reading all of the output."""
    return PATIENCE + 1e-9 * sum(file.size for file in job.files)


@contextmanager
def locked(folder: Path, seconds: float | None = None) -> Iterator[bool]:
    """One process at a time, where the file system has locks: yields whether this one is alone.

    Who holds the lock for longer may have been stopped, so the others go on without it. Every step that is done under
    the lock is harmless without it; at worst it is done twice.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:  # finished and renamed by another process
        yield False
        return
    try:
        yield _lock(descriptor, monotonic() + (PATIENCE if seconds is None else seconds))
    finally:
        os.close(descriptor)


def _lock(descriptor: int, until: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if monotonic() >= until:
                return False
            sleep(_PAUSE)
        except OSError:
            return False
        else:
            return True
