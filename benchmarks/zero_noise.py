"""Upscaled with zero noise, every optimizer on every model gets its certificate, clipping included.

The pairs are those of `exactness.py` with optimizers of torch. In every second one gradients are clipped by the width-invariant norm, tightly
enough to act at once; the control is the same run clipped by torch's own norm, whose certificate must be refused.

    python benchmarks/zero_noise.py [--quick]

The last line is `pairs=N worst=E clipped=M refused=M`: the worst relative error of a certificate, how many pairs
were clipped, and in how many of them plain clipping was caught. The exit code is 1 when one is not.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from torch import Tensor, nn

import mupscale as mu
from harness.exactness import every_third, precise_muon, prepare_worker, warm_base
from harness.models import CASES
from harness.program import Outcome, option, pool, run
from harness.runs import step
from harness.setups import SETUPS
from mupscale.training.units.clip import grad_norm

STEPS, SHARE, WORST = 3, 0.3, 1e-9


@dataclass(frozen=True)
class Result:
    """One pair: its certificate, and whether plain clipping was refused (None where nothing was clipped)."""

    pair: str
    holds: bool
    worst: float
    caught: bool | None


def certify(setup_name: str, case_name: str, clipped: bool) -> Result:
    setup, case = SETUPS[setup_name], CASES[case_name]

    def stepped(run: mu.Run, i: int, plain: bool = False) -> Tensor:
        def clip(model: nn.Module) -> Tensor:
            if plain:
                return nn.utils.clip_grad_norm_(model.parameters(), bound)
            return mu.trainers.clip_grad_norm_(model, run, max_norm=bound)

        loss = setup.sign * case.loss(run.model, setup.warm + i)
        step(run, loss, clip if clipped else None)
        return loss.detach()

    with precise_muon():
        base = warm_base(setup, case)
        base.model.zero_grad()
        case.loss(base.model, setup.warm).backward()  # type: ignore[no-untyped-call]
        bound = SHARE * float(grad_norm(base.model, base))
        wide = mu.upscale(base, lambda: case.make(case.wide), mu.MupNoise(0.0), plan=case.plan)
        certificate = mu.verify(base, wide, step=stepped, steps=STEPS)
        caught = None
        if clipped and not case.sparse:  # torch does not clip sparse gradients
            control = mu.verify(base, wide, step=lambda r, i: stepped(r, i, plain=True), steps=STEPS)
            caught = not control.holds
    return Result(f"{setup_name} on {case_name}", certificate.holds, certificate.worst, caught)


def measure(chosen: argparse.Namespace) -> Outcome:
    own = [s for s in SETUPS.values() if s.optimizer.__module__.startswith("torch.optim")]
    accepted = [(s.name, c.name) for s in own for c in CASES.values() if s.accepts(c)]
    if chosen.quick:
        accepted = every_third(accepted)
    with pool(prepare=prepare_worker) as workers:
        futures = [workers.submit(certify, s, c, i % 2 == 1) for i, (s, c) in enumerate(accepted)]
        results = [future.result() for future in futures]
    failed = [f"{r.pair}: no certificate, {r.worst:.1e}" for r in results if not r.holds or r.worst > WORST]
    failed += [f"{r.pair}: plain clipping was not caught" for r in results if r.caught is False]
    controls = [r for r in results if r.caught is not None]
    worst, caught = max(r.worst for r in results), sum(bool(r.caught) for r in controls)
    line = f"pairs={len(results)} worst={worst:.1e} clipped={len(controls)} refused={caught}"
    return Outcome(line, failed)


if __name__ == "__main__":
    quick = option(
        "--quick", action="store_true", help="every third pair, in which every setup and model occurs"
    )
    sys.exit(run(measure, quick, doc=__doc__))
