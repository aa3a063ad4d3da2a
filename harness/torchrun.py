"""Jobs of trainers on several ranks of this machine, started as users start them, and how far their losses lie apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
Curves = dict[str, list[float]]
"""Losses after the checkpoint, by job."""


def torchrun(
    command: Sequence[str], ranks: int, *, timeout: float, settings: Mapping[str, str] | None = None
) -> None:
    """Run a script, or `-m` and a module, with its arguments on so many ranks; raises with what it said if it fails."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **(settings or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} stopped\n{done.stdout[-4000:]}\n{done.stderr[-9000:]}")


def curves_of(
    script: str, case: str, ranks: int, *, timeout: float, settings: Mapping[str, str] | None = None
) -> Curves:
    """What `script --worker case folder` leaves in `curves.json` of a folder that is then removed."""
    with tempfile.TemporaryDirectory() as folder:
        torchrun([script, "--worker", case, folder], ranks, timeout=timeout, settings=settings)
        curves: Curves = json.loads((Path(folder) / "curves.json").read_text())
        return curves


def gaps_of(curves: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The largest relative difference of a loss from the base's, by job; all jobs must have trained to the end.

    >>> gaps_of({"base": [2.0, 4.0], "wide": [2.0, 5.0]})
    {'wide': 0.25}
    """
    base = curves["base"]
    return {
        job: max(abs(one - other) / abs(one) for one, other in zip(base, losses, strict=True))
        for job, losses in curves.items()
        if job != "base"
    }


def print_gaps(case: str, gaps: Mapping[str, float], labels: Mapping[str, str], steps: int) -> None:
    """A row for every job of a case."""
    for job, gap in gaps.items():
        print(f"{case:<12} {labels.get(job, 'grown'):<40} {gap:.1e} over {steps} steps", flush=True)


def missed_bounds(
    gaps: Mapping[str, float], controls: Iterable[float], equal: float, different: float
) -> list[str]:
    """What does not hold: a case that leaves the base, a control that does not.

    >>> missed_bounds({"plain": 1e-3}, [0.5], 1e-5, 1e-3)
    ["plain: a loss differs from the base's by 1.0e-03, allowed 1e-05"]
    >>> missed_bounds({"plain": 1e-7}, [0.5, 1e-6], 1e-5, 1e-3)
    ['a control differs from the base by 1.0e-06 only']
    """
    failed = [
        f"{case}: a loss differs from the base's by {gap:.1e}, allowed {equal:.0e}"
        for case, gap in gaps.items()
        if not gap <= equal
    ]
    return failed + [
        f"a control differs from the base by {gap:.1e} only" for gap in controls if not gap >= different
    ]
