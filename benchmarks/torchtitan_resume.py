"""A wide torchtitan job starts from a narrow torchtitan checkpoint, and its losses are the base's.

The stock Trainer trains a tiny Llama (grouped queries, fused projections, AdamW, warm-up and decay, clipping by a
norm) with FSDP2 on two ranks, in float32, and goes on to the end. From its checkpoint in the middle a job of twice
the width starts through `GrowingCheckpointManager`, without noise. Two controls start from it in the same way and then step in plain
units, or clip by the plain norm. A last job resumes the wide one from a checkpoint of its own.

    python benchmarks/torchtitan_resume.py [--variations]

The last line is `worst=E control=C clip=P resumed=R`: the largest relative difference of a loss from the base's, the
same without units, with units and the plain norm, and for the resumed job from the wide one. With `--variations`,
other ways to shard, other models and other starts are compared instead, and the last line is `variations=N worst=E`. The
exit code is 1 when a bound fails. Without torchtitan it prints SKIPPED and succeeds.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchtitan_jobs import (
    END,
    LATER,
    STOP,
    TOKENS,
    Curve,
    K,
    Setup,
    measure_jobs,
    model_config,
    on_cpu,
)

__all__ = ["END", "STOP", "TOKENS", "K", "gap", "main", "measure", "model_config", "on_cpu"]

EQUAL, DIFFERENT = 1e-5, 1e-3
COMPARED = ("base", "wide", "plain_units", "plain_norm", "resumed")


@dataclass(frozen=True)
class Row:
    """One line of the table: the job `other` must log what `one` logs, for so many steps."""

    label: str
    steps: int
    one: str = "base"
    other: str = "wide"


VARIATIONS: dict[Setup, tuple[tuple[str, ...], tuple[Row, ...]]] = {
    Setup(tensor_parallel=2): (("base", "wide"), (Row("tensor parallelism over 2 ranks", END - STOP),)),
    Setup(world=4, tensor_parallel=2): (
        ("base", "wide"),
        (Row("FSDP × tensor parallelism over 4 ranks", END - STOP),),
    ),
    Setup(backend="full_dtensor"): (("base", "wide"), (Row("spmd_backend=full_dtensor", END - STOP),)),
    Setup(fused=False): (("base", "wide"), (Row("separate projections", END - STOP),)),
    Setup(): (
        ("base", "wide", "again", "base_weights", "wide_weights", "base_files", "wide_files"),
        (
            Row(f"grown again, ×{K} at step {STOP} and ×{K} at step {LATER}", END - LATER, other="again"),
            Row("weights only, from DCP", END, "base_weights", "wide_weights"),
            Row("weights only, from safetensors", END, "base_weights", "wide_files"),
        ),
    ),
}


def measure() -> dict[str, Curve]:
    """The curves of the base, the wide job, both controls and the resumed job."""
    return measure_jobs(COMPARED, Setup())


def gap(one: Curve, other: Curve, what: int = 0) -> float:
    """The largest relative difference of what `other` logged: 0 for losses, 1 for gradient norms."""
    return max(abs(one[step][what] - value[what]) / abs(one[step][what]) for step, value in other.items())


def compare() -> bool:
    """Print losses and differences of the comparison with its controls; whether all bounds hold."""
    curves = measure()
    base, wide, resumed = curves["base"], curves["wide"], curves["resumed"]
    print(f"{'step':>4} {'base':>10} {'wide':>10} {'plain units':>11} {'plain norm':>10}")
    for step in sorted(wide, key=int):
        print(f"{step:>4}", *(f"{curves[job][step][0]:10.6f}" for job in COMPARED[:4]))
    worst, norms, again = gap(base, wide), gap(base, wide, 1), gap(wide, resumed)
    control, clip = gap(base, curves["plain_units"]), gap(base, curves["plain_norm"])
    complete = len(wide) == END - STOP and len(resumed) == END - LATER
    print(f"{len(wide)} steps, of which {len(resumed)} again; gradient norms differ by at most {norms:.1e}")
    print(f"worst={worst:.1e} control={control:.1e} clip={clip:.1e} resumed={again:.1e}")
    return complete and max(worst, norms) <= EQUAL and min(control, clip) >= DIFFERENT and again == 0


def compare_variations() -> bool:
    """Print a row for each variation as it is done; whether all hold."""
    gaps, complete = [], True
    print(f"{'changed':<50} {'steps':>5} {'losses':>8} {'norms':>8}")
    for setup, (jobs, rows) in VARIATIONS.items():
        curves = measure_jobs(jobs, setup)
        for row in rows:
            one, other = curves[row.one], curves[row.other]
            losses, norms = gap(one, other), gap(one, other, 1)
            gaps += [losses, norms]
            complete = complete and len(other) == row.steps
            print(f"{row.label:<50} {len(other):>5} {losses:>8.1e} {norms:>8.1e}", flush=True)
    print(f"variations={len(gaps) // 2} worst={max(gaps):.1e}")
    return complete and max(gaps) <= EQUAL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--variations", action="store_true", help="other shardings, models and starts")
    given = parser.parse_args()
    if find_spec("torchtitan") is None:
        print("SKIPPED: torchtitan is not installed; pip install torchtitan==0.3.0 triton")
        return 0
    return 0 if (compare_variations() if given.variations else compare()) else 1


if __name__ == "__main__":
    sys.exit(main())
