"""Jobs of trainers on several ranks of this machine, started as users start them, and how far their losses lie apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.pages import apart
from harness.program import Outcome

ROOT = Path(__file__).resolve().parents[1]
Curves = dict[str, list[float]]
"""Losses after the checkpoint, by job."""
EQUAL, DIFFERENT = 1e-5, 1e-3
CONTROLS = {
    "units": "control: moments copied without units",
    "fresh": "control: moments of zero",
    "rates": "control: the base's rates in every group",
    "trained": "control: new units, once they are trained",
}
CHANGED = ("units", "fresh", "rates")
"""The controls that start from the grown checkpoint with one thing changed."""
AWAKE = "awake"
"""The job whose new units are awake: its first loss is the base's, and no later one."""


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


def finish(folder: Path, curves: Curves) -> None:
    """What every rank of a worker does last: the first one leaves the curves, and all of them leave the group."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        (folder / "curves.json").write_text(json.dumps(curves))
    dist.barrier()
    dist.destroy_process_group()


def gaps_of(curves: Mapping[str, list[float]]) -> dict[str, float]:
    """The largest relative difference of a loss from the base's, by job; not a number for one that did not train to the end.

    >>> gaps_of({"base": [2.0, 4.0], "wide": [2.0, 5.0]})
    {'wide': 0.25}
    >>> gaps_of({"base": [2.0, 4.0], "awake": [2.0, 5.0]})
    {'awake': 0.0, 'trained': 0.25}
    """
    gaps = {job: apart(curves["base"], losses) for job, losses in curves.items() if job != "base"}
    if AWAKE in gaps:
        gaps["trained"] = gaps[AWAKE]
        gaps[AWAKE] = apart(curves["base"][:1], curves[AWAKE][:1])
    return gaps


def compared(
    script: str, cases: Mapping[str, int], *, timeout: float, settings: Mapping[str, str] | None = None
) -> Outcome:
    """Run the jobs of each case on its number of ranks, print how far each is from the base, and hold all against the bounds.

    A curve named "different" is a count of wide weights that are not those of `mu.grow`.
    """
    worst: dict[str, float] = {}
    controls: list[float] = []
    weights: list[float] = []
    for case, ranks in cases.items():
        curves = curves_of(script, case, ranks, timeout=timeout, settings=settings)
        weights += curves.pop("different", [])
        for job, gap in gaps_of(curves).items():
            steps = 1 if job == AWAKE else len(curves["base"])
            label = CONTROLS.get(job, "grown, awake" if job == AWAKE else "grown")
            print(f"{case:<12} {label:<40} {gap:.1e} over {steps} steps", flush=True)
            if job in CONTROLS:
                controls.append(gap)
            elif job == AWAKE:
                worst[AWAKE] = max(gap, worst.get(AWAKE, 0.0))
            else:
                worst[case] = gap
    if AWAKE in worst:
        worst[AWAKE] = worst.pop(AWAKE)  # behind the cases
    failed = missed_bounds(worst, controls)
    if sum(weights):
        failed.append(f"{sum(weights):.0f} wide weights are not those of mu.grow")
    line = [f"weights={sum(weights):.0f}"] if weights else []
    line += [f"{case}={gap:.1e}" for case, gap in worst.items()]
    return Outcome(" ".join([*line, f"control={min(controls, default=0.0):.1e}"]), failed)


def missed_bounds(gaps: Mapping[str, float], controls: Iterable[float]) -> list[str]:
    """What does not hold: a case that leaves the base, a control that does not.

    >>> missed_bounds({"plain": 1e-3}, [0.5])
    ["plain: a loss differs from the base's by 1.0e-03, allowed 1e-05"]
    >>> missed_bounds({"plain": 1e-7}, [0.5, 1e-6])
    ['a control differs from the base by 1.0e-06 only']
    """
    failed = [
        f"{case}: a loss differs from the base's by {gap:.1e}, allowed {EQUAL:.0e}"
        for case, gap in gaps.items()
        if not gap <= EQUAL
    ]
    return failed + [
        f"a control differs from the base by {gap:.1e} only" for gap in controls if not gap >= DIFFERENT
    ]
