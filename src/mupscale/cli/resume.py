"""What the output path already holds: nothing, this job unfinished, or its result.

Knows what two runs of one command must have in common, so that the second resumes the first. Writes nothing.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from ..checkpoints.grow import check_config
from ..checkpoints.request import Request
from ..errors import Fault, MupscaleError, raise_faults
from ..files.directory import read_directory
from ..files.strict import printable, read_regular
from ..jobs.identity import check_base
from ..jobs.job import Job
from ..jobs.job_check import sound_job
from ..jobs.partial import working_job
from ..jobs.verify_bytes import read_job
from ..runs.growth_record import read_about
from ..storage.location import Url, absolute
from ..storage.looking import exists, same_place

_LONGEST = 1 << 30  # bytes of a job; bounds what a foreign file can fill memory with


def is_done(chosen: argparse.Namespace, request: Request) -> bool:
    """Whether this base has been grown like this into this place already: running a command again is not an error."""
    if isinstance(chosen.out, Url) and exists(working_job(chosen.out)):
        return False  # what only workers need has to be cleared up
    about = read_about(chosen.out)
    if about is None or about.get("request") != json.loads(json.dumps(request.as_json())):
        return False
    try:
        check_config(read_directory(chosen.base), about)
        check_base(read_job(chosen.out, chosen.base))
    except MupscaleError:
        return False  # of another base; the caller then refuses the occupied path
    return True


def begun(chosen: argparse.Namespace, request: Request) -> Job | None:
    """The unfinished job at the output path; a different job than the one asked for is refused."""
    there = working_job(chosen.out)
    if not exists(there):
        return None
    job = replace(sound_job(read_regular(there, _LONGEST)), out=chosen.out)
    _same_request(job, request, chosen)
    check_config(read_directory(chosen.base), job.about)
    return job


def _same_request(job: Job, request: Request, chosen: argparse.Namespace) -> None:
    old, new = Request.from_json(job.about["request"]).as_json(), request.as_json()
    # A request without a recipe has no such key, so each may have keys that the other lacks.
    pairs = {key: (old.get(key), new.get(key)) for key in {**old, **new}}
    if not same_place(job.base, chosen.base):
        pairs["base"] = (str(job.base), str(absolute(chosen.base)))
    if chosen.architecture is not None:
        pairs["architecture"] = (job.about["base_architecture"], chosen.architecture)
    remedy = f"write it as before to resume, or remove {chosen.out}.partial to start again"
    raise_faults(
        f"{chosen.out}.partial was started with other arguments",
        [
            Fault("job.other_arguments", key, f"was {printable(before)}, now {printable(now)}", remedy)
            for key, (before, now) in pairs.items()
            if before != now
        ],
    )
