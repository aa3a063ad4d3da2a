"""What the output path already holds: nothing, this job unfinished, or its result, whose job can be made again.

Knows what two growths must have in common, so that the second resumes the first. Writes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import Fault, MupscaleError, raise_faults
from ..files.directory import CARD, CONFIG
from ..files.opened import open_file
from ..files.strict import printable, read_regular
from ..jobs.digests import check_sources
from ..jobs.finished import about_of, has_job, job_digest, recorded_contents, recorded_sources, stored_job
from ..jobs.job import Job, Text
from ..jobs.job_check import JOB, sound_job
from ..jobs.partial import working_job
from ..runs.growth_record import NAME as ABOUT
from ..runs.growth_record import read_about
from ..storage.location import Location, Url, absolute
from ..storage.looking import exists, same_place
from .base import Base
from .growth_job import check_config, job_of
from .request import Request
from .result.train_script import NAME as SCRIPT

_LONGEST = 1 << 30  # bytes of a job; bounds what a foreign file can fill memory with


def is_done(base: Base, out: Location, request: Request) -> bool:
    """Whether this base has been grown like this into this place already: growing it again is not an error."""
    if isinstance(out, Url) and exists(working_job(out)):
        return False  # what only workers need has to be cleared up
    about = read_about(out)
    if about is None or "request" not in about:
        return False
    try:
        if Request.from_json(about["request"]) != request:
            return False
        check_config(base.directory, about)
        check_sources(base.path, recorded_sources(out))
        return _has_files(out)
    except MupscaleError:
        return (
            False  # of another base, or a copy of the record alone; the caller then refuses the occupied path
        )


def _has_files(out: Location) -> bool:
    """Whether the weights and their configuration are there, in the sizes that were written."""
    held = recorded_contents(out)
    for name, (size, _) in {**held.weights, CONFIG: held.small[CONFIG]}.items():
        with open_file(out / name) as file:
            if file.size != size:
                return False
    return True


def job_again(base: Base, out: Location, about: Mapping[str, Any]) -> Job:
    """The job that wrote a finished directory, made again from its record and its base.

    The record has its entries in the order of the plan, in which shards are filled. Records of 0.2.0 are sorted; the job that lies
    next to them says where each tensor is. Words for people are those of the version that wrote them, by their digest.
    """
    like = None
    if has_job(out):
        like = stored_job(out)
        if job_digest(like) != about.get("job"):
            what = f"its digest is not the one in {ABOUT}"
            raise_faults("this is another job", [Fault("job.other_digest", JOB, what)])
    job = job_of(base, out, about_of(about), like=like)
    return replace(job, texts=tuple(_as_written(text, out, about, like) for text in job.texts))


def _as_written(text: Text, out: Location, about: Mapping[str, Any], like: Job | None) -> Text:
    if text.name not in (CARD, SCRIPT):
        return text
    if like is not None:
        return next((old for old in like.texts if old.name == text.name), text)
    with suppress(MupscaleError, UnicodeDecodeError):
        raw = read_regular(out / text.name, _LONGEST)
        if [len(raw), hashlib.sha256(raw).hexdigest()] == about["small_files"].get(text.name):
            return Text(text.name, raw.decode())
    return text


def begun(base: Base, out: Location, request: Request, architecture: str | None) -> Job | None:
    """The unfinished job at the output path; a different job than the one asked for is refused."""
    there = working_job(out)
    if not exists(there):
        return None
    job = replace(sound_job(read_regular(there, _LONGEST)), out=out)
    check_same(job, base.path, request, architecture)
    check_config(base.directory, job.about)
    return replace(job, base=absolute(base.path))  # the job on disk has no password and no signature


def unfinished(out: Location) -> tuple[Location, tuple[Location, Request] | None] | None:
    """Where the growth into a directory is unfinished, with its base and its request once they are fixed; None if there is none."""
    there = working_job(out)
    if not exists(there.parent):
        return None
    try:
        job = sound_job(read_regular(there, _LONGEST))
        return there.parent, (job.base, Request.from_json(job.about["request"]))
    except (MupscaleError, LookupError):
        return there.parent, None  # what was measured before the job was known


def check_same(job: Job, base: Location, request: Request, architecture: str | None) -> None:
    """Raise if a job was made of another base, or for another request; every difference is a fault."""
    before = Request.from_json(job.about["request"])
    old, new = before.as_json(), request.as_json()
    # A request without a recipe has no such key, so each may have keys that the other lacks.
    pairs = {} if before == request else {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    if not same_place(job.base, base):
        pairs["base"] = (str(job.base), str(absolute(base)))
    if architecture is not None:
        pairs["architecture"] = (job.about["base_architecture"], architecture)
    remedy = f"write it as before to resume, or remove {job.out}.partial to start again"
    raise_faults(
        f"{job.out}.partial was started with other arguments",
        [
            Fault("job.other_arguments", key, f"was {printable(was)}, now {printable(now)}", remedy)
            for key, (was, now) in pairs.items()
            if was != now
        ],
    )
