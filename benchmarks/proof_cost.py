"""The proof of a large model costs less than four of its training steps, and no copy in float64.

GPT-2 is grown from width 384 to 768, 124 M parameters in float32, by a plan that is given. `mu.grow` with `loss=`
measures the gradient identity on the models themselves before it returns; without a proof (`prove=False`) it only
grows. The difference, in CPU seconds, is divided by those of one training step of the wide model (forward, backward,
AdamW) on the same batch.

The control multiplies one tensor's s by 1.01, which the proof must refuse.

    python benchmarks/proof_cost.py [--tokens N]

The last line is `steps=… float64_copies=… control=refused`; the exit code is 1 when a bound fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.gpt2 import GPT2, VOCABULARY, declared_plan
from harness.program import Outcome, option, run
from mupscale.models import float64
from mupscale.training.grow import prove

BASE, WIDE = 384, 768
STEPS = 4.0


def measure(chosen: argparse.Namespace) -> Outcome:
    torch.manual_seed(0)
    batch = torch.randint(VOCABULARY, (2, chosen.tokens // 2 + 1))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    base, plan, copies = GPT2(BASE), declared_plan(BASE, WIDE), _count_copies()
    started = time.process_time()
    mu.grow(base, lambda: GPT2(WIDE), plan=plan, prove=False)
    plain = time.process_time() - started
    started = time.process_time()
    wide = mu.grow(base, lambda: GPT2(WIDE), plan=plan, loss=loss)
    proof = time.process_time() - started - plain
    print(wide.provenance["proof"])
    step = _step_seconds(wide.model, loss)
    try:
        mu.grow(base, lambda: GPT2(WIDE), plan=plan.fold("blocks.3.up.weight", "101/100"), loss=loss)
        control = "accepted"
    except mu.MupscaleError as error:
        control = "refused"
        print(error)
    print(f"proof {proof:.1f}, one step {step:.1f} CPU seconds")
    bounds = {
        f"the proof costs {proof / step:.2f} steps, allowed {STEPS}": proof / step <= STEPS,
        f"the proof copied models {len(copies)} times in float64": not copies,
        "a plan with one factor of 1.01 was accepted": control == "refused",
    }
    line = f"steps={proof / step:.2f} float64_copies={len(copies)} control={control}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


def _step_seconds(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> float:
    """CPU seconds of a training step of the wide model, the second of two, after the state exists."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds = 0.0
    for _ in range(2):
        started = time.process_time()
        optimizer.zero_grad()
        loss(model).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        seconds = time.process_time() - started
    return seconds


def _count_copies() -> list[int]:
    """A list that gets an entry for every pair of models that a proof copies in float64."""
    found: list[int] = []
    stock = float64.prepare

    def counted(base: nn.Module, wide: nn.Module) -> tuple[nn.Module, nn.Module]:
        found.append(1)
        return stock(base, wide)

    prove.__dict__["prepare"] = counted
    return found


if __name__ == "__main__":
    tokens = option("--tokens", type=int, default=512, help="tokens in the batch (default 512)")
    sys.exit(run(measure, tokens, doc=__doc__))
