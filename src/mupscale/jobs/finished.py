"""What a finished output says of itself: `mupscale.json`, by which it is checked and a repeated command knows it.

Knows the entries that finishing a job adds to its `about`, and what 0.2.0 wrote: fewer entries, and the job in a file of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import Fault, MupscaleError
from ..files.strict import parse_json, path_fault, printable, raise_few, read_regular, refuse_malformed
from ..files.typed import named, text, whole
from ..runs.growth_record import NAME as ABOUT
from ..storage.location import Location, absolute
from ..storage.looking import exists
from .bytes.fingerprints import ALGORITHM
from .job import BLOCK_BYTES, BaseFile, Job
from .job_check import JOB, sound_job

_ADDED = ("files", "job", "record", "small_files")
"""Entries of a record that are known when the job is done."""
_LONGEST = 1 << 30  # bytes; bounds what a damaged or foreign file can fill memory with
_MOST_OBJECTS = 10_000_000  # of JSON; a record holds two plans, each with an object per tensor


@dataclass(frozen=True, slots=True)
class Contents:
    """What has to lie in a finished output: the size of every file, and what identifies its bytes."""

    weights: dict[str, tuple[int, str]]
    """Files that moves fill, by fingerprint."""
    small: dict[str, tuple[int, str]]
    """Every other file, by SHA-256."""
    texts: dict[str, bytes] = field(default_factory=dict)
    """Those of them whose text is known."""

    @property
    def sizes(self) -> dict[str, int]:
        return {name: size for name, (size, _) in {**self.weights, **self.small}.items()}


def published(job: Job) -> str:
    """The job without paths of this machine and without its block size, as 0.2.0 left it in the finished directory."""
    entry = replace(job, base=Path(), out=Path(), block_bytes=BLOCK_BYTES).as_json()
    return json.dumps(entry, indent=0, sort_keys=True, allow_nan=False)


def job_digest(job: Job) -> str:
    """The digest of a job, as `mupscale.json` holds it."""
    return hashlib.blake2b(published(job).encode(), digest_size=32).hexdigest()


def about_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The `about` of the job that ended in a record: what finishing it added is left out."""
    kept = {key: value for key, value in record.items() if key not in _ADDED}
    base = {key: value for key, value in record["base"].items() if key in ("name", "config", "versions")}
    return {**kept, "base": base}


def has_job(out: Location) -> bool:
    """Whether a finished directory holds its job in a file, as those of 0.2.0 do."""
    return exists(out / JOB)


def stored_job(out: Location) -> Job:
    """The job that a directory of 0.2.0 holds."""
    try:
        return replace(sound_job(read_regular(out / JOB, _LONGEST)), out=absolute(out))
    except MupscaleError as error:
        raise MupscaleError(error.claim, error.faults or [Fault(error.code, JOB, error.claim)]) from None


def about_text(job: Job, base: Mapping[str, str], output: Mapping[str, str], *, early: bool = False) -> str:
    """The text of `mupscale.json`: the job's `about`, the digest of the job, of every base file and of every output file.

    Entries keep their order: shards are filled in that of the plan. `early` gives the text of 0.2.0, next to which the job lies.
    """
    known = job.about.get("base")
    ends = {} if early else {file.name: {"ends": file.ends} for file in job.sources}
    about = {
        **job.about,
        "base": {
            **(known if isinstance(known, dict) else {}),
            "files": {
                file.name: {"size": file.size, "digest": base[file.name], **ends.get(file.name, {})}
                for file in job.sources
            },
            "digest": ALGORITHM,
            "read": "once" if job.trust_base else "twice",
        },
        "files": {file.name: {"size": file.size, "digest": output[file.name]} for file in job.files},
        "job": job_digest(job),
    }
    if early:
        return json.dumps(about, indent=1, sort_keys=True) + "\n"
    return _closed({**about, "small_files": {name: list(entry) for name, entry in _small(job).items()}})


def _closed(about: Mapping[str, Any]) -> str:
    """The text of a record, with a digest of its other entries at its end."""
    entries = {key: value for key, value in about.items() if key != "record"}
    digest = hashlib.blake2b(json.dumps(entries).encode(), digest_size=32).hexdigest()
    return json.dumps({**entries, "record": digest}, indent=1) + "\n"


def _small(job: Job) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of the small files that a job writes, without its record."""
    texts = {small.name: _of_bytes(small.content.encode()) for small in job.texts}
    return {**texts, **{file.name: (file.size, file.sha256) for file in job.carried}}


def _of_bytes(raw: bytes) -> tuple[int, str]:
    return len(raw), hashlib.sha256(raw).hexdigest()


def contents_of(job: Job, about: str, output: Mapping[str, str]) -> Contents:
    """What a job leaves, with the text of its record and the fingerprints of its output."""
    texts = {small.name: small.content.encode() for small in job.texts}
    texts[ABOUT] = about.encode()
    if has_job(job.out):
        texts[JOB] = published(job).encode()
    small = {**_small(job), **{name: _of_bytes(raw) for name, raw in texts.items()}}
    return Contents({file.name: (file.size, output[file.name]) for file in job.files}, small, texts)


def recorded_contents(out: Location) -> Contents:
    """What a finished output must hold by its own record."""
    if has_job(out):
        job = stored_job(out)
        _, output, about = recorded(out, job)
        return contents_of(job, about, output)
    record = _record(out)
    with _without_fingerprints():
        weights = {
            name: (whole(entry["size"]), text(entry["digest"]))
            for name, entry in named(record["files"]).items()
        }
        small = {name: (whole(size), text(sha)) for name, (size, sha) in named(record["small_files"]).items()}
    wrong = [(name, path_fault(name)) for name in (*weights, *small)]
    raise_few(
        f"{ABOUT} names files elsewhere",
        [Fault(fault.code, printable(name), fault.what) for name, fault in wrong if fault is not None],
    )
    closed = _closed(record).encode()
    return Contents(weights, {**small, ABOUT: _of_bytes(closed)}, {ABOUT: closed})


def recorded_sources(out: Location) -> tuple[BaseFile, ...]:
    """The files of the base that a finished output was made from."""
    if has_job(out):
        return stored_job(out).sources
    record = _record(out)
    with _without_fingerprints():
        files = named(record["base"]["files"]).items()
        return tuple(BaseFile(name, whole(entry["size"]), text(entry["ends"])) for name, entry in files)


def recorded(folder: Location, job: Job) -> tuple[dict[str, str], dict[str, str], str]:
    """The fingerprints of base files and of output files that `mupscale.json` holds, and what its text should be with them."""
    record = _record(folder)
    with _without_fingerprints():
        base = {name: text(entry["digest"]) for name, entry in named(record["base"]["files"]).items()}
        output = {file.name: text(record["files"][file.name]["digest"]) for file in job.files}
        return base, output, about_text(job, base, output, early=has_job(folder))


def is_complete(folder: Location, job: Job) -> bool:
    """Whether `folder` holds the finished output of this very job: its record is written last."""
    try:
        return bool(_record(folder).get("job") == job_digest(job))
    except MupscaleError:
        return False


def _record(out: Location) -> Mapping[str, Any]:
    raw = read_regular(out / ABOUT, _LONGEST)
    with _without_fingerprints():
        return named(parse_json(raw, ABOUT, infinity=True, objects=_MOST_OBJECTS))


def _without_fingerprints() -> Any:
    return refuse_malformed(f"{ABOUT} has no fingerprints of files", "job.record_without_fingerprints")
