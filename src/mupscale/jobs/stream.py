"""Writing a wide checkpoint: the whole job on this machine, or one worker's share of it.

Every unit of a job is independent and may be done twice, so any worker may do any unit, be killed, and start
again. What a share is and how it is done, `worker.py` knows.
"""

from __future__ import annotations

from ..errors import MupscaleError
from .job import Job
from .partial import partial
from .worker import Report as Report
from .worker import run_worker as run_worker


def run_job(job: Job, workers: int = 1, report: Report | None = None) -> None:
    """Write the whole output with `workers` threads; run it again to resume.

    `report` is called with the bytes written so far and the bytes to be written.
    """
    if not run_worker(job, 0, 1, report, threads=workers):
        raise MupscaleError(f"{partial(job.out)} is not complete although all of it was done; run it again")
