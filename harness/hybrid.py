"""A training like nanochat's, grown in mid-run: Muon and AdamW in one class, chosen by group, clipping, a schedule by hand."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.data import cross_entropy
from harness.models import GPT2, GPT2Sizes
from harness.muons import NanochatMuonAdamW
from harness.runs import step
from mupscale.rules.muon_rows import muon_row
from mupscale.rules.optimizers import qualified_name

NAME = qualified_name(NanochatMuonAdamW)
ROW = muon_row("nanochat")
_ADAMW, _MUON = ROW.rows["adamw"], ROW.rows["muon"]
ONE_ROW = replace(ROW, rows={"adamw": _ADAMW, "muon": replace(_MUON, lr=_ADAMW.lr, decay=_ADAMW.decay)})
"""The control: matrices get the rates and the decay of AdamW."""
STEPS, GROWN_AT = 30, 10
Loss = Callable[[nn.Module, int], Tensor]
"""The loss of a model on the batch with a number."""


def nanochat(model: nn.Module) -> NanochatMuonAdamW:
    """Matrices of the blocks to Muon, one group for each shape; embeddings, readout and vectors to AdamW."""
    shapes: dict[Any, list[nn.Parameter]] = {}
    rest: dict[str, list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if name.startswith("blocks") and p.dim() == 2:
            shapes.setdefault(p.shape, []).append(p)
        else:
            rest.setdefault("embedding" if "embed" in name or "positions" in name else "other", []).append(p)
    muon = {"kind": "muon", "lr": 0.02, "momentum": 0.95, "ns_steps": 3, "beta2": 0.9, "weight_decay": 0.1}
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.01}
    groups = [{"params": params, **muon} for params in shapes.values()]
    groups += [
        {"params": ps, **adamw, "lr": 0.1 if kind == "embedding" else 0.01} for kind, ps in rest.items()
    ]
    for group in groups:
        group["peak"] = group["lr"]
    return NanochatMuonAdamW(groups)


def train(run: mu.Run, loss_of: Loss, steps: range) -> list[float]:
    """Rates rise, stay and fall by hand; the momentum of the matrices rises."""
    losses = []
    for number in steps:
        share = min(1.0, (number + 1) / 5, (STEPS - number) / 10)
        for group in run.optimizer.param_groups:
            group["lr"] = group["peak"] * group.get("lr_factor", 1.0) * share  # the peak is the reference's
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.1 * min(number / STEPS, 1)
        loss = loss_of(run.model, number)
        step(run, loss)
        losses.append(float(loss.detach()))
    return losses


def begun(sizes: GPT2Sizes, loss_of: Loss) -> mu.Run:
    """A run that is clipped, at the step at which it is grown."""
    torch.manual_seed(0)
    model = GPT2(sizes)
    run = mu.Run(model, nanochat(model))
    mu.clip_before_step_(run.optimizers, run, max_norm=0.5)
    train(run, loss_of, range(GROWN_AT))
    return run


def continued(
    base: GPT2Sizes, wide: GPT2Sizes, loss_of: Loss, row: mu.rules.OptimizerRule = ROW
) -> tuple[float, float]:
    """The largest relative difference of losses after growth, and how far the base's loss fell."""
    run = begun(base, loss_of)
    grown = mu.grow(run, lambda: GPT2(wide), loss=lambda model: loss_of(model, 0), rules={NAME: row})
    wanted, found = (train(of, loss_of, range(GROWN_AT, STEPS)) for of in (run, grown))
    return max(abs(a - b) / a for a, b in zip(wanted, found, strict=True)), wanted[0] - wanted[-1]


BASE_TEXT = GPT2Sizes(32, 16, 64, tokens=256, length=64)
WIDE_TEXT = GPT2Sizes(64, 32, 128, tokens=256, length=64)
_BATCH = 8


def text_loss(path: Path) -> Loss:
    """Next bytes of the first textbook modules in `openstax.jsonl.xz`; a batch has eight windows of 64."""
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        read = "".join(json.loads(next(lines))["text"] for _ in range(20)).encode()
    data = torch.frombuffer(bytearray(read), dtype=torch.uint8).long()
    many, size = _BATCH, BASE_TEXT.length + 1

    def loss(model: nn.Module, number: int) -> Tensor:
        windows = data[number * many * size : (number + 1) * many * size].reshape(many, size)
        return cross_entropy(model(windows[:, :-1]), windows[:, 1:])

    return loss
