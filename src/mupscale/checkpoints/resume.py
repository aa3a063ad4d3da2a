"""What the output path already holds: nothing, this job unfinished, or its result.

Knows what two growths must have in common, so that the second resumes the first. Writes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import Fault, MupscaleError, raise_faults
from ..files.strict import printable, read_regular
from ..jobs.digests import check_base
from ..jobs.job import Job
from ..jobs.job_check import sound_job
from ..jobs.partial import working_job
from ..runs.growth_record import read_about
from ..storage.location import Location, Url, absolute
from ..storage.looking import exists, same_place
from .base import Base
from .growth_job import check_config
from .request import Request

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
        from ..jobs.verify_bytes import read_job

        check_base(read_job(out, base.path))
    except MupscaleError:
        return False  # of another base; the caller then refuses the occupied path
    return True


def begun(base: Base, out: Location, request: Request, architecture: str | None) -> Job | None:
    """The unfinished job at the output path; a different job than the one asked for is refused."""
    there = working_job(out)
    if not exists(there):
        return None
    job = replace(sound_job(read_regular(there, _LONGEST)), out=out)
    check_same(job, base.path, request, architecture)
    check_config(base.directory, job.about)
    return replace(job, base=absolute(base.path))  # the job on disk has no password and no signature


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
