"""Quantised state in a Trainer's optimizer.pt moves by whole blocks, with the bits of the run that is widened in memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.known_optimizers import WRITTEN_RULES
from harness.low_bit import BnbAdamW, BnbAdEMAMix
from harness.refusals import refusal
from mupscale.checkpoints.state.trainer_state import trainer_moves
from mupscale.files.pickles.torch_file import read_tree
from mupscale.jobs.digests import make_job
from mupscale.jobs.worker import run_job
from mupscale.optimizers.identify import identify
from mupscale.optimizers.read import parts
from mupscale.rules.optimizers import RULES

HIDDEN = {"state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2"}


def make(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 2))


def saved(kind: Any, width: int, folder: Path) -> mu.Run:
    """A run and its optimizer.pt, as bitsandbytes writes it."""
    torch.manual_seed(0)
    model = make(width)
    run = mu.Run(model, kind(model.parameters(), lr=1e-2, optim_bits=8))
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        run.optimizer.step()
    state = run.optimizer.state_dict()
    for i, of in state["state"].items():
        parts = {key: value for key, value in of.items() if key in HIDDEN}
        state["state"][i] = {"step": of["step"], "__bnb_optimizer_quant_state__": parts}
    folder.mkdir()
    torch.save(state, folder / "optimizer.pt")
    return run


@pytest.mark.parametrize("kind", [BnbAdamW, BnbAdEMAMix])
def test_quantised_state_is_streamed_with_the_bits_of_a_run_in_memory(kind, tmp_path):
    run = saved(kind, 256, tmp_path / "base")
    with pytest.warns(UserWarning, match="0 of the 2 "):
        wide = mu.grow(run, lambda: make(512), rules=WRITTEN_RULES)
    assert wide.plan is not None
    names = [[name for name, _ in run.model.named_parameters()]]
    row = f"bitsandbytes.optim.{kind.__name__.removeprefix('Bnb')}"
    ends = run.model, wide.model
    with pytest.warns(UserWarning, match="quantised"):
        file, moves = trainer_moves(tmp_path / "base", wide.plan, *ends, optimizer=row, names=names)
    run_job(make_job(tmp_path / "base", tmp_path / "wide", [file], moves, block_bytes=4096))
    found = torch.load(tmp_path / "wide" / "optimizer.pt", weights_only=True)["state"]
    for i, name in enumerate(names[0]):
        wanted = wide.optimizer.state[wide.model.get_parameter(name)]
        assert found[i].keys() == wanted.keys()
        assert all(torch.equal(torch.as_tensor(found[i][k]), torch.as_tensor(v)) for k, v in wanted.items())
    assert found[2]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(("kind", "told"), [(BnbAdamW, True), (BnbAdEMAMix, False)])
def test_adamw_is_told_from_the_shape_of_its_state(kind, told, tmp_path):
    """AdEMAMix keeps two averages in one tensor. A file that may be that of either is refused until it is named."""
    saved(kind, 8, tmp_path / "base")
    groups, state = parts(read_tree(tmp_path / "base" / "optimizer.pt"), "optimizer.pt")
    if told:
        assert identify(groups, state.values()) is RULES["bitsandbytes.optim.AdamW"]
    else:
        refusal(
            lambda: identify(groups, state.values()),
            "state.optimizer_unclear",
            where="bitsandbytes.optim.AdEMAMix",
        )


def test_state_whose_rows_are_not_whole_blocks_is_refused_in_a_file(tmp_path):
    run = saved(BnbAdamW, 80, tmp_path / "base")
    plan = mu.plans.plan_between(make, 80, 160)
    names = [[name for name, _ in run.model.named_parameters()]]
    refusal(
        lambda: trainer_moves(
            tmp_path / "base", plan, run.model, make(160), optimizer="bitsandbytes.optim.AdamW", names=names
        ),
        "state.blocks_not_whole",
        where=("2.weight", "256"),
    )
