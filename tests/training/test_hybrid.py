"""A training like nanochat's, with Muon and AdamW in one class, clipping and a schedule by hand, is grown in mid-run."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.models import CASES, GPT2, GPT2Sizes
from harness.muons import NanochatMuonAdamW
from harness.refusals import refusal
from mupscale.rules.optimizer_rule import UNIVERSAL
from mupscale.rules.optimizers import qualified_name

NAME = qualified_name(NanochatMuonAdamW)
ROW = mu.rules.muon_row("nanochat")
BASE, WIDE = GPT2Sizes(12, 4, 10), GPT2Sizes(24, 8, 20)
STEPS, GROWN_AT = 30, 10


@pytest.fixture(autouse=True)
def _float64_and_peaks():
    torch.set_default_dtype(torch.float64)
    mu.rules.declare_neutral("peak")
    yield
    UNIVERSAL.remove("peak")
    torch.set_default_dtype(torch.float32)


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


def train(run: mu.Run, steps: range) -> list[float]:
    """Rates rise, stay and fall by hand; the momentum of the matrices rises."""
    losses = []
    for step in steps:
        share = min(1.0, (step + 1) / 5, (STEPS - step) / 10)
        for group in run.optimizer.param_groups:
            group["lr"] = group["peak"] * group.get("lr_factor", 1.0) * share  # the peak is the reference's
            if group["kind"] == "muon":
                group["momentum"] = 0.85 + 0.1 * min(step / STEPS, 1)
        run.model.zero_grad()
        loss = CASES["GPT-2"].loss(run.model, step)
        loss.backward()
        run.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def begun() -> mu.Run:
    torch.manual_seed(0)
    model = GPT2(BASE)
    run = mu.Run(model, nanochat(model))
    mu.clip_(run.optimizers, run, max_norm=0.5)
    train(run, range(GROWN_AT))
    return run


def gap(rule: mu.rules.OptimizerRule) -> tuple[float, float]:
    """The largest relative difference of losses after growth, and how far the base's loss fell."""
    base = begun()
    wide = mu.widen(base, lambda: GPT2(WIDE), loss=CASES["GPT-2"].loss, rules={NAME: rule})
    wanted, found = (train(run, range(GROWN_AT, STEPS)) for run in (base, wide))
    return max(abs(a - b) / a for a, b in zip(wanted, found, strict=True)), wanted[0] - wanted[-1]


def test_a_hybrid_run_is_continued_exactly():
    off, fell = gap(ROW)
    assert off < 1e-12
    assert fell > 0.05, "the base learns"


def test_one_row_for_all_tensors_is_not_exact():
    """The control: matrices get the rates and decay of AdamW."""
    adamw, muon = ROW.rows["adamw"], ROW.rows["muon"]
    one = replace(ROW, rows={"adamw": adamw, "muon": replace(muon, lr=adamw.lr, decay=adamw.decay)})
    assert gap(one)[0] > 1e-4


def test_the_state_dict_of_a_hybrid_is_widened_as_the_optimizer_is():
    base = begun()
    names = {id(p): name for name, p in base.model.named_parameters()}
    plan = mu.plan_between(GPT2, BASE, WIDE, loss=CASES["GPT-2"].loss)
    wide = mu.widen(base, lambda: GPT2(WIDE), plan=plan, rules={NAME: ROW})
    saved = base.optimizer.state_dict()
    order = [names[id(p)] for group in base.optimizer.param_groups for p in group["params"]]
    grown = mu.widen_optimizer_state_dict(saved, plan, NanochatMuonAdamW, names=order, rules={NAME: ROW})
    for key, state in wide.optimizer.state_dict()["state"].items():
        for kind, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(grown["state"][key][kind]))


def test_a_stack_of_another_length_is_refused():
    base = begun()
    first = base.optimizer.param_groups[0]["params"][0]
    state = base.optimizer.state[first]
    state["momentum_buffer"] = state["momentum_buffer"][:1]
    widen = lambda: mu.widen(base, lambda: GPT2(WIDE), loss=CASES["GPT-2"].loss, rules={NAME: ROW})  # noqa: E731
    refusal(widen, "momentum_buffer", "tensors in a stack")
