"""A base and what was grown from it: compared through the job that its record leads to, as `mupscale check` does.

Knows records and jobs. A grown checkpoint that was trained on is compared with another one of its own size, in `compare.py`.
"""

from __future__ import annotations

from math import prod

from ..checkpoints.about import KEYS
from ..checkpoints.base import Base
from ..checkpoints.resume import job_again
from ..errors import Fault, MupscaleError
from ..files.strict import printable
from ..formats.snapshot import Snapshot
from ..jobs.job import Job
from ..jobs.progress import Report
from ..jobs.verify_bytes import check_bytes
from ..runs.growth_record import NAME, read_about
from .profiles import Profile
from .report import Same

_NOISE = "new units or copies that noise parts train from here on: the loss begins at A's, and the run goes on otherwise"


def grown_pair(
    a: Snapshot, b: Snapshot, profile: Profile, threads: int, report: Report | None
) -> Same | None:
    """What is to be said of a base and its grown result; None if neither was grown, or both have one size."""
    if {n: t.shape for n, t in a.weights.items()} == {n: t.shape for n, t in b.weights.items()}:
        return None
    for base, wide, side, other in ((a, b, "B", "A"), (b, a, "A", "B")):
        about = None if wide.config is None else read_about(wide.path)
        if about is None or base.config is None or not all(key in about for key in KEYS):
            continue
        if about == read_about(base.path) or _entries(base) > _entries(wide):
            continue
        found, job = _compared(base, wide, threads, report)
        note = f"{side} says in {NAME} that it was grown; it was compared with what its plan makes of {other}"
        notes = [f"{note}; mupscale check {wide.path} --base {base.path} proves the plan as well"]
        notes += [f"not carried: {what}: {why}" for what, why in dict(about["not_carried"]).items()]
        if not found and about["noise"] is not None:
            found.append(Fault("same.grown_with_noise", side, "it was grown with noise or new units", _NOISE))
        counted = {} if job is None else {"bytes of the grown files": sum(file.size for file in job.files)}
        kinds = (a.kind, f"{b.kind}, grown") if side == "B" else (f"{a.kind}, grown", b.kind)
        return Same(str(a.path), str(b.path), kinds, profile.name, counted, tuple(found), notes=tuple(notes))
    return None


def _entries(one: Snapshot) -> int:
    return sum(prod(tensor.shape) for tensor in one.weights.values())


def _compared(
    base: Snapshot, wide: Snapshot, threads: int, report: Report | None
) -> tuple[list[Fault], Job | None]:
    """What differs between the files of a grown directory and those that its record and this base lead to."""
    where = printable(str(wide.path))
    effect = "it is no continuation of this base, or it was changed or trained since"
    try:
        job = job_again(Base(base.path), wide.path, read_about(wide.path) or {})
    except (MupscaleError, LookupError, TypeError, ValueError, AttributeError) as error:
        # The record is untrusted input: any malformed entry means that it does not lead back to this base.
        why = error.claim if isinstance(error, MupscaleError) else f"{type(error).__name__} in {NAME}"
        return [Fault("same.not_grown_from_it", where, printable(why), effect)], None
    faults = check_bytes(job, report=report, threads=threads)
    return [Fault("same.not_grown_from_it", f.where, f.what, effect) for f in faults], job
