"""A training like nanochat's, with Muon and AdamW in one class, clipping and a schedule by hand, is grown in mid-run."""

import os
from pathlib import Path

import pytest
import torch

import mupscale as mu
from harness.hybrid import BASE_TEXT, NAME, ONE_ROW, ROW, WIDE_TEXT, begun, continued, text_loss
from harness.models import CASES, GPT2, GPT2Sizes
from harness.muons import NanochatMuonAdamW
from harness.refusals import refusal
from mupscale.rules.optimizer_rule import UNIVERSAL

BASE, WIDE = GPT2Sizes(12, 4, 10), GPT2Sizes(24, 8, 20)
LOSS = CASES["GPT-2"].loss
TEXT = (
    Path(os.environ.get("MUPSCALE_DATA", Path(__file__).parents[3] / "shared" / "data"))
    / "text/openstax.jsonl.xz"
)


@pytest.fixture(autouse=True)
def _float64_and_peaks():
    torch.set_default_dtype(torch.float64)
    mu.rules.declare_neutral("peak")
    yield
    UNIVERSAL.remove("peak")
    torch.set_default_dtype(torch.float32)


def test_a_hybrid_run_is_continued_exactly():
    off, fell = continued(BASE, WIDE, LOSS)
    assert off < 1e-12
    assert fell > 0.05, "the base learns"


def test_one_row_for_all_tensors_is_not_exact():
    assert continued(BASE, WIDE, LOSS, ONE_ROW)[0] > 1e-4


@pytest.mark.skipif(not TEXT.exists(), reason=f"there is no {TEXT.name}; set MUPSCALE_DATA")
def test_a_hybrid_run_on_real_text_is_continued_exactly():
    loss = text_loss(TEXT)
    off, fell = continued(BASE_TEXT, WIDE_TEXT, loss)
    assert off < 1e-12
    assert fell > 0.3, "the base learns"
    assert continued(BASE_TEXT, WIDE_TEXT, loss, ONE_ROW)[0] > 1e-4, "control: one row for all tensors"


def test_the_state_dict_of_a_hybrid_is_widened_as_the_optimizer_is():
    base = begun(BASE, LOSS)
    names = {id(p): name for name, p in base.model.named_parameters()}
    plan = mu.plans.plan_between(GPT2, BASE, WIDE, loss=LOSS)
    wide = mu.grow(base, lambda: GPT2(WIDE), plan=plan, rules={NAME: ROW})
    saved = base.optimizer.state_dict()
    order = [names[id(p)] for group in base.optimizer.param_groups for p in group["params"]]
    grown = mu.trainers.grow_optimizer_state_dict(
        saved, plan, NanochatMuonAdamW, names=order, rules={NAME: ROW}
    )
    for key, state in wide.optimizer.state_dict()["state"].items():
        for kind, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(grown["state"][key][kind]))


def test_a_stack_of_another_length_is_refused():
    base = begun(BASE, LOSS)
    first = base.optimizer.param_groups[0]["params"][0]
    state = base.optimizer.state[first]
    state["momentum_buffer"] = state["momentum_buffer"][:1]
    grow = lambda: mu.grow(base, lambda: GPT2(WIDE), loss=LOSS, rules={NAME: ROW})  # noqa: E731
    refusal(grow, "state.other_stack_length", where=["blocks.0.attention.qkv.weight", "momentum_buffer"])
