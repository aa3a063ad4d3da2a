"""The proof of a large model costs a few of its training steps, and no copy in float64, with a plan and without one.

GPT-2 is grown from width 384 to 768, 124 M parameters in float32, by a plan that is given. `mu.grow` with `loss=`
measures the gradient identity on the models themselves before it returns; without a proof (`prove=False`) it only
grows. The difference, in CPU seconds, is divided by those of one training step of the wide model (forward, backward,
AdamW) on the same batch. The control multiplies one tensor's s by 1.01, which the proof must refuse.

Before that, four models of 8 blocks grow from 27 M to 83 M (from 21 M to 70 M with tied embeddings) without a plan: with the
projections of queries, keys and values in one layer or in three, tied and untied. Each runs in a process of its own. Its
line says how many gradients and how many losses alone were taken of the wide model, the CPU seconds of `mu.grow` in
training steps, and the peak of the process, weights included. A small model is grown first, so that what torch imports when it
is first used is not counted. With three projections the gradient of the bias of keys is zero by nature, so its rounding in
float32 is judged by that of three copies of the base whose weights are moved by one unit in the last place.

    python benchmarks/proof_cost.py [--tokens N] [--width N] [--search]

The last line is `steps=… float64_copies=… control=refused searched=… peak_gib=… gradients=… losses=…`, the worst of the four
for the last four; the exit code is 1 when a bound fails. `--search` leaves out the first part.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.gpt2 import GPT2, HEAD, VOCABULARY, Block, declared_plan
from harness.program import Outcome, option, pool, run
from mupscale.models import float64
from mupscale.proofs import identity
from mupscale.training.grow import prove

BASE, WIDE = 384, 768
STEPS = 4.0
LAYERS, WORDS = 8, 16384
SEARCHED, PEAK = 10.0, 2.0
GRADIENTS, LOSSES = 1, 2
KINDS = [(fused, tied) for fused in (True, False) for tied in (True, False)]


class Separate(Block):
    """A block of GPT-2 with three projections."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        del self.qkv
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return out


def model(width: int, fused: bool, tied: bool) -> GPT2:
    """GPT-2 with fewer words and blocks."""
    made = GPT2(width, LAYERS, WORDS)
    if not fused:
        made.blocks = nn.ModuleList(Separate(width) for _ in range(LAYERS))
    if not tied:
        made.readout.weight = nn.Parameter(made.tokens.weight.detach().clone())
    return made


class Searched(NamedTuple):
    """What one growth without a plan cost."""

    name: str
    weights: int
    gradients: int
    losses: int
    steps: float
    gib: float

    def __str__(self) -> str:
        counts = f"{self.gradients} gradients and {self.losses} losses of the wide model"
        return (
            f"{self.name}, {self.weights / 1e6:.0f} M: {counts}, {self.steps:.1f} steps, {self.gib:.2f} GiB"
        )


def searched(fused: bool, tied: bool, width: int, tokens: int) -> Searched:
    """Grow one model without a plan."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    loss, counts = _loss(WORDS, tokens), _count_evaluations(2 * width)
    # What torch imports when it is first used on the meta device takes 2 seconds, whatever the size of the model.
    mu.grow(model(HEAD, fused, tied), lambda: model(2 * HEAD, fused, tied), loss=_loss(WORDS, 16))
    base = model(width, fused, tied)
    started = time.process_time()
    wide = mu.grow(base, lambda: model(2 * width, fused, tied), loss=loss).model
    seconds = time.process_time() - started
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    name = f"{'fused' if fused else 'separate'}, {'tied' if tied else 'untied'}"
    weights = sum(p.numel() for p in wide.parameters())
    taken = counts.count(True), counts.count(False)
    return Searched(name, weights, *taken, seconds / _step_seconds(wide, loss), gib)


def measure(chosen: argparse.Namespace) -> Outcome:
    bounds: dict[str, bool] = {}
    worst = [0.0] * 4
    for fused, tied in KINDS:
        with pool(1) as one:
            found = one.submit(searched, fused, tied, chosen.width, chosen.tokens // 4).result()
        print(found, flush=True)
        of = found.steps, found.gib, found.gradients, found.losses
        worst = [max(pair) for pair in zip(worst, of, strict=True)]
    allowed = {"training steps": SEARCHED, "GiB": PEAK, "gradients": GRADIENTS, "losses alone": LOSSES}
    for (what, most), value in zip(allowed.items(), worst, strict=True):
        bounds[f"growing without a plan took {value:.2f} {what}, allowed {most}"] = value <= most
    # The peak of a process is that of its parent at least, so the large model comes last.
    line = "" if chosen.search else f"{_given(chosen.tokens, bounds)} "
    line += f"searched={worst[0]:.2f} peak_gib={worst[1]:.2f} gradients={worst[2]:.0f} losses={worst[3]:.0f}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


def _given(tokens: int, bounds: dict[str, bool]) -> str:
    """The proof of a given plan, and its control."""
    torch.manual_seed(0)
    loss = _loss(VOCABULARY, tokens)
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
    bounds |= {
        f"the proof costs {proof / step:.2f} steps, allowed {STEPS}": proof / step <= STEPS,
        f"the proof copied models {len(copies)} times in float64": not copies,
        "a plan with one factor of 1.01 was accepted": control == "refused",
    }
    return f"steps={proof / step:.2f} float64_copies={len(copies)} control={control}"


def _loss(words: int, tokens: int) -> Callable[[nn.Module], Tensor]:
    batch = torch.randint(words, (2, tokens // 2 + 1))

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    return loss


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


def _count_evaluations(width: int) -> list[bool]:
    """A list that gets an entry for every loss of a model of this width: whether its gradients were taken."""
    found: list[bool] = []
    stock = identity.evaluated

    def counted(model: nn.Module, *args: object, **named: object) -> identity.Evaluated:
        value = stock(model, *args, **named)  # type: ignore[arg-type]
        if next(model.parameters()).shape[-1] == width:
            found.append(bool(value.grads))
        return value

    for name, module in list(sys.modules.items()):
        if name.startswith("mupscale.") and module.__dict__.get("evaluated") is stock:
            module.__dict__["evaluated"] = counted
    return found


if __name__ == "__main__":
    options = (
        option(
            "--tokens",
            type=int,
            default=512,
            help="tokens in the batch; a quarter without a plan (default 512)",
        ),
        option(
            "--width", type=int, default=BASE, help=f"width of the four bases without a plan (default {BASE})"
        ),
        option("--search", action="store_true", help="the four models without a plan alone"),
    )
    sys.exit(run(measure, *options, doc=__doc__))
