"""Models whose forward says what their shapes do not: without a proof they are refused, with one exact or refused.

Each of them once grew without a word into a model that trains differently.
"""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.closeness import EXACT, assert_exact, difference
from harness.refusals import refusal
from harness.runs import step
from harness.toys import loss_on, trained_mlp, vectors, wide_mlp
from harness.zoo import ZOO
from harness.zoo.measure import gap, losses, measure, warmed
from harness.zoo.paths import NOISE, declarations_of, plain
from harness.zoo.transformers import GPT

DTYPES = (torch.float64, pytest.param(torch.float32, marks=pytest.mark.nightly))
HEADS = ("gpt_heads_fixed", "single_head", "head_size_in_view", "qk_norm_heads_fixed")
SUMS = (
    "matrix_factorisation", "gpt_tied_by_function", "sasrec", "tutorial_sqrt_width", "diffusion_sines_grow",
)  # fmt: skip
WIDTHS = ("width_in_forward", "buffer_summed_over", "pixel_shuffle_function", "flatten_equal_sizes")
SILENT = (*HEADS, *SUMS, *WIDTHS)
REMEDIES = ("mnist_example", "swiglu_fused", "inception", "densenet", "vit_heads_grow", "width_in_buffer")
DROPOUT = ("mlp_dropout", "functional_dropout", "stock_encoder_dropout")
DATA = Path(os.environ.get("MUPSCALE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TEXT = DATA / "text" / "openstax.jsonl.xz"
CHARACTERS, LENGTH = 128, 32


@pytest.fixture(params=DTYPES, ids=("float64", "float32"))
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """The default dtype of models and batches."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.fixture
def float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize("name", SILENT)
def test_what_shapes_cannot_show_is_refused_without_a_proof(name: str, dtype: torch.dtype):
    entry = ZOO[name]
    run = warmed(entry)
    refusal(lambda: plain(entry, run), "proof.missing")


@pytest.mark.parametrize("name", SILENT)
def test_with_a_proof_it_is_exact_or_refused(name: str, dtype: torch.dtype):
    line = measure(ZOO[name], "paths", dtype)
    assert line.kind in ("exact", "refused"), line
    assert not line.remedy_wrong, line
    assert not line.false_alarm, line


@pytest.mark.parametrize("name", SILENT)
def test_without_proofs_it_trains_differently(name: str, float64: None):
    """Control: these models are hard cases only as long as the shortest plan is wrong for them."""
    assert measure(ZOO[name], "control", torch.float64).kind == "silent"


@pytest.mark.parametrize("name", REMEDIES)
def test_a_declaration_that_a_refusal_prints_is_right(name: str, dtype: torch.dtype):
    line = measure(ZOO[name], "paths", dtype)
    assert line.kind in ("exact", "refused"), line
    assert not line.remedy_wrong, line


def test_what_a_refusal_prints_is_read(float64: None):
    """Control: a refusal with a declaration in it is understood, so that following it tests something."""
    entry = ZOO["masked_bool"]
    error = refusal(lambda: plain(entry, warmed(entry)))
    assert declarations_of(error), error


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_is_refused_or_mentioned(name: str, float64: None):
    assert measure(ZOO[name], "paths", torch.float64).kind in ("refused", "dropout")


@pytest.mark.parametrize(
    "declared", [{"roles": {"fixed": {0: "in"}}}, {"folds": {"fixed": "1/2"}}], ids=("roles", "folds")
)
def test_a_declaration_for_a_buffer_is_followed(declared: dict[str, Any], float64: None):
    entry = ZOO["buffer_summed_over"]
    run = warmed(entry)
    plan = mu.infer_plan(run.model, entry.grown, loss=entry.loss, declared=mu.Declared(**declared))
    wide = mu.upscale(run, entry.grown, NOISE, plan=plan)
    assert gap(losses(entry, wide), losses(entry, run)) <= EXACT


def test_a_buffer_that_is_not_saved_grows_with_state_dicts_too(float64: None):
    """`grow` copies it; a state dict does not hold it, which is warned of, with the line that helps."""
    entry = ZOO["buffer_not_saved"]
    run = warmed(entry)
    plan = mu.infer_plan(run.model, entry.grown, loss=entry.loss)
    with pytest.warns(UserWarning, match="table"):
        mu.trainers.grow_state_dict(run.model.state_dict(), plan)
    state = mu.trainers.grow_state_dict({**run.model.state_dict(), **dict(run.model.named_buffers())}, plan)
    wide = entry.grown()
    wide.load_state_dict(state, strict=False)
    for name, buffer in wide.named_buffers():
        buffer.copy_(state[name])
    x, _ = entry.batch(0)
    assert_exact(difference(wide(x), run.model(x)))


def habit(kind: str) -> Any:
    """A training step with something that a look at the model cannot see."""
    batches = vectors()

    def take(run: mu.Run, i: int) -> Any:
        x, y = batches[i % len(batches)]
        if kind == "rate":
            for group in run.optimizer.param_groups:
                group["lr"] = 2e-3
        loss = F.mse_loss(run.model(x), y)
        if kind == "penalty":
            loss = loss + 1e-2 * sum(p.square().sum() for p in run.model.parameters())
        clip = (lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1)) if kind == "clip" else None
        step(run, loss, clip)
        return loss.detach()

    return take


@pytest.mark.parametrize(
    ("kind", "holds"), [("plain", True), ("rate", False), ("clip", False), ("penalty", False)]
)
def test_habits_of_a_loop_are_seen_by_verify(kind: str, holds: bool):
    run = trained_mlp(lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
    plan = mu.infer_plan(run.model, wide_mlp, loss=loss_on(vectors()))
    assert mu.verify(run, wide_mlp, step=habit(kind), plan=plan).holds == holds


def characters() -> torch.Tensor:
    """A few textbook modules of OpenStax as codes below 128."""
    with lzma.open(TEXT, "rt", encoding="utf-8") as lines:
        words = "".join(json.loads(line)["text"] for line, _ in zip(lines, range(20), strict=False))
    return torch.frombuffer(bytearray(words.encode("ascii", "replace")), dtype=torch.uint8).long()


@pytest.mark.skipif(not TEXT.exists(), reason=f"there is no {TEXT.name}; set MUPSCALE_DATA")
def test_a_gpt_with_fixed_heads_keeps_its_loss_on_real_text():
    codes = characters()

    def loss(model: nn.Module, number: int = 0) -> torch.Tensor:
        starts = torch.randint(
            len(codes) - LENGTH - 1, (16,), generator=torch.Generator().manual_seed(number)
        )
        rows = codes[starts[:, None] + torch.arange(LENGTH + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def make(w: int) -> nn.Module:
        return GPT(w, 4, vocabulary=CHARACTERS, length=LENGTH)

    torch.manual_seed(0)
    model = make(64)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    for i in range(1, 41):
        step(run, loss(model, i))

    def held_out(model: nn.Module) -> float:
        with torch.no_grad():
            return sum(float(loss(model, -i)) for i in range(1, 5)) / 4

    before = held_out(model)
    folds = {"blocks.*.attn.qkv.*": "2^(-1/4)", "blocks.*.attn.proj.weight": "2^(1/4)"}
    plan = mu.infer_plan(model, lambda: make(128), loss=loss, declared=mu.Declared(folds=folds))
    proved = mu.upscale(run, lambda: make(128), NOISE, plan=plan)
    assert abs(held_out(proved.model) - before) <= 1e-5
    refusal(lambda: mu.upscale(run, lambda: make(128), NOISE), "proof.missing", where="GPT")
    searched = mu.upscale(run, lambda: make(128), NOISE, loss=loss)
    assert abs(held_out(searched.model) - before) <= 1e-5
