"""The first lines that people write, on a device: the README's block, the tutorial's, and a layout that must be searched for.

`mupscale doctor --device` runs them. Each gives what it found and whether that is right; what a library or a device raises on
the way is not caught here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, isfinite

import torch
from torch import Tensor, nn

from ...errors import MupscaleError
from ...noise.kinds import SignalNoise
from ...planning.infer import infer_plan
from ...plans.plan import Plan
from ...runs.run import Run
from ...tensors.differences import loss_gap
from ...tensors.random_states import forked
from ..grow.grow import grow, narrow
from ..grow.upscale import upscale
from .verify import verify

Found = tuple[str, bool]
_CLOSE = 1e-4  # relative, of float32 losses after one step: a hundred times what kernels that add in other orders differ by


def readme(device: torch.device) -> Found:
    """The block of the README, its factory ending in `.to(device)`: train, verify, upscale with `loss=`, train on.

    Control: a loss that reads the width is refused.
    """

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1)).to(device)

    def loss(model: nn.Module) -> Tensor:
        value: Tensor = (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()
        return value

    def reads_width(model: nn.Module) -> Tensor:
        return loss(model) * next(model.parameters()).shape[0]

    def step(run: Run, i: int) -> Tensor:
        value = loss(run.model)
        run.optimizer.zero_grad()
        torch.autograd.backward(value)
        run.optimizer.step()
        return value.detach()

    with forked(torch.empty(0, device=device), seed=0):
        x, model = torch.randn(256, 8, device="cpu").to(device), make(64)
        run = Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for i in range(20):
            step(run, i)
        certificate = verify(run, lambda: make(256), step=step)
        wide = upscale(run, lambda: make(256), loss=loss)
        last = [float(step(wide, i)) for i in range(20, 40)][-1]
        control = _is_refused(lambda: upscale(run, lambda: make(256), loss=reads_width))
    before, after = (wide.provenance["loss"][when] for when in ("before", "after"))
    kept = isclose(before, after, rel_tol=1e-5)  # a hundred roundings of float32
    found = (
        f"verify {certificate.worst:.0e}, loss {before:.3g} before growing, {after:.3g} after, {last:.3g} after 20 steps; "
        f"a loss that reads the width is {'refused' if control else 'ACCEPTED'}"
    )
    return found, certificate.holds and kept and isfinite(last) and _is_on(wide.model, device) and control


def tutorial(device: torch.device) -> Found:
    """The tutorial: verify, grow, one step on both sides, narrow, noise; with a scheduler, and batches drawn on the CPU.

    Control: with the base's rate left unchanged, two steps of the wide run give another loss.
    """

    def make(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 2))

    def step(run: Run, i: int) -> Tensor:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(32, 8, generator=generator, device="cpu").to(next(run.model.parameters()))
        run.optimizer.zero_grad()
        loss: Tensor = (run.model(x) - x[:, :2]).square().mean()
        torch.autograd.backward(loss)
        run.optimizer.step()
        run.scheduler.step()
        return loss.detach()

    with forked(torch.empty(0, device=device), seed=0):
        model = make(16).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        run = Run(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100))
        for i in range(20):
            step(run, i)
        certificate = verify(run, lambda: make(48), step=step)
        sides = [run, *(grow(run, lambda: make(48)) for _ in range(2))]
        for group in sides[2].optimizer.param_groups:
            group["lr"] *= 3
        base, wide, broken = ([float(step(side, i)) for i in (20, 21)] for side in sides)
        back = narrow(sides[1], lambda: make(16))
        noisy = upscale(run, lambda: make(48), SignalNoise(0.05), seed=0)
    gap, different = (max(map(loss_gap, base, curve)) for curve in (wide, broken))
    placed = all(_is_on(side.model, device) for side in (*sides, back, noisy))
    found = f"verify {certificate.worst:.0e}, losses differ by {gap:.0e}, at another rate by {different:.0e}"
    return found, certificate.holds and gap <= _CLOSE < different and placed


class _Attention(nn.Module):
    """Attention whose queries, keys and values come from one matrix: shapes do not show whether in turn or interleaved."""

    def __init__(self, width: int, interleaved: bool = False) -> None:
        super().__init__()
        self.into, self.out, self.interleaved = nn.Linear(4, width), nn.Linear(width, 2), interleaved
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        made = self.qkv(self.into(x)).unflatten(-1, (-1, 3) if self.interleaved else (3, -1))
        queries, keys, values = made.unbind(-1 if self.interleaved else -2)
        return self.out((queries @ keys.mT / queries.shape[-1]).softmax(-1) @ values)  # type: ignore[no-any-return]


def search(device: torch.device) -> Found:
    """The plan of a fused attention, found by the loss on the device, is the one that is found on the CPU.

    Control: where queries, keys and values are interleaved, it is another one.
    """
    with forked(torch.empty(0, device=device), seed=0):
        x = torch.randn(2, 3, 4, device="cpu")
        here, there = (_plan_of(place, x, interleaved=False) for place in (torch.device("cpu"), device))
        other = _plan_of(device, x, interleaved=True)
    found = f"plan {there.hash[:8]} of a fused attention, on the CPU {here.hash[:8]}, interleaved {other.hash[:8]}"
    return found, here.hash == there.hash != other.hash and there.proof == "loss"


def _plan_of(device: torch.device, x: Tensor, interleaved: bool) -> Plan:
    batch, model = x.to(device), _Attention(4, interleaved).to(device)
    wide = lambda: _Attention(8, interleaved).to(device)  # noqa: E731
    return infer_plan(model, wide, loss=lambda m: (m(batch) - 1).square().mean())


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except MupscaleError:
        return True
    return False


def _is_on(model: nn.Module, device: torch.device) -> bool:
    return {t.device.type for t in (*model.parameters(), *model.buffers())} == {device.type}
