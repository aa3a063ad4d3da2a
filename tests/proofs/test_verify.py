"""The certificate holds where training is exact, and names the culprit where it is not."""

import json
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused

X = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))


def mlp(width, dropout=0.0):
    return nn.Sequential(
        nn.Linear(6, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 3),
    )  # fmt: skip


class Attention(nn.Module):
    """Fused attention over eight tokens; `scale` is "1/d" or "1/sqrt(d)"."""

    def __init__(self, width, heads, scale="1/d"):
        super().__init__()
        self.n_head, self.scale = heads, scale
        self.embed = nn.Linear(6, width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width)
        self.readout = nn.Linear(width, 3)

    def forward(self, x):
        z = self.embed(x.view(8, 8, 6))
        q, k, v = self.qkv(z).unflatten(-1, (3, self.n_head, -1)).unbind(2)
        size = q.shape[-1]
        logits = torch.einsum("bthd,bshd->bhts", q, k) * (1 / size if self.scale == "1/d" else size**-0.5)
        y = torch.einsum("bhts,bshd->bthd", logits.softmax(-1), v).flatten(2)
        return self.readout(z + self.proj(y)).flatten(0, 1)


def step(run, i, clip=None):
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    out = run.model(X)
    loss = F.mse_loss(out, Y.to(out.dtype))
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(run.model.parameters(), clip)
    for optimizer in run.optimizers:
        optimizer.step()
    for scheduler in run.schedulers:
        scheduler.step()
    return loss


def adamw(model):
    return mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.1))


def check(run, wide, **kwargs):
    return mu.verify(run, wide, **{"step": step, **kwargs})


def test_an_exact_run_gets_a_certificate_with_every_tensor_tested():
    certificate = check(adamw(mlp(8)), lambda: mlp(24))
    assert certificate.holds
    assert certificate.worst < 1e-13
    assert certificate.moved > 1e-2
    assert {t.name for t in certificate.tensors} == {n for n, _ in mlp(8).named_parameters()}
    assert not any(t.silent for t in certificate.tensors)
    assert certificate.raise_if_broken() is certificate


def test_the_certificate_reads_as_a_table_and_as_json():
    certificate = check(adamw(mlp(8)), lambda: mlp(24))
    text = str(certificate)
    assert "3.weight" in text
    assert text.splitlines()[-1].startswith("exact: worst relative error")
    data = json.loads(certificate.to_json())
    assert data["holds"] is True
    assert data["tensors"][0]["name"] == "0.weight"


def test_memory_is_logged_and_nothing_is_printed(caplog, capsys):
    with caplog.at_level(logging.INFO, logger="mupscale"):
        certificate = check(adamw(mlp(8)), lambda: mlp(24))
    assert "GB" in caplog.messages[0]
    assert capsys.readouterr().out == ""
    assert certificate.memory > 8 * sum(p.numel() for p in mlp(24).parameters())


def test_the_run_itself_is_left_alone():
    run = adamw(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3)))
    step(run, 0)
    before = {n: t.clone() for n, t in run.model.state_dict().items()}
    state = {k: v.clone() for k, v in run.optimizers[0].state_dict()["state"][0].items()}
    wide = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
    random = torch.get_rng_state()
    assert check(run, lambda: wide).holds
    assert all(torch.equal(before[n], t) for n, t in run.model.state_dict().items())
    assert all(torch.equal(state[k], v) for k, v in run.optimizers[0].state_dict()["state"][0].items())
    assert torch.equal(random, torch.get_rng_state())


def test_a_loss_alone_tests_the_gradient_identity():
    def loss(model):
        out = model(X)
        return F.mse_loss(out, Y.to(out.dtype))

    certificate = mu.verify(mlp(8), lambda: mlp(16), loss=loss)
    assert certificate.holds
    assert all((t.gradient or 0) < 1e-13 for t in certificate.tensors)


def test_schedulers_and_float32_are_accepted():
    run = adamw(mlp(8))
    run = mu.Run(run.model, run.optimizers, torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizers[0], 50))
    assert check(run, lambda: mlp(16)).holds
    assert check(run, lambda: mlp(16), dtype=torch.float32).holds


def test_plain_clipping_is_named():
    certificate = check(adamw(mlp(8)), lambda: mlp(16), step=lambda run, i: step(run, i, clip=0.01))
    assert certificate.failure is not None
    assert certificate.failure.where == "all tensors"
    assert "plain clipping" in certificate.failure.cause


@pytest.mark.parametrize("clip", ["norm", "value"])
def test_plain_clipping_is_named_before_it_acts(clip):
    def clipped(bound):
        def clipping(run, i):
            run.optimizer.zero_grad()
            loss = F.mse_loss(run.model(X), Y)
            loss.backward()
            if clip == "norm":
                nn.utils.clip_grad_norm_(run.model.parameters(), bound)
            elif bound < float("inf"):
                nn.utils.clip_grad_value_(run.model.parameters(), bound)
            run.optimizer.step()
            return loss

        return check(adamw(mlp(8)), lambda: mlp(16), step=clipping, steps=2)

    failure = clipped(1e6).failure
    assert failure is not None
    assert f"clip_grad_{clip}_" in failure.what
    assert "plain clipping" in failure.cause
    assert clipped(float("inf")).holds, "control: a norm that is only measured clips nothing"


def test_the_clipping_of_this_package_is_no_plain_clipping():
    run = adamw(mlp(8))
    mu.clip_before_step_(run.optimizers, run, max_norm=0.01)
    assert check(run, lambda: mlp(16)).holds


def test_dropout_is_off_and_the_certificate_says_so():
    certificate = check(adamw(mlp(8, 0.5)), lambda: mlp(16, 0.5))
    assert certificate.holds
    assert "dropout was off (2)" in str(certificate)
    assert not check(adamw(mlp(8)), lambda: mlp(16)).remarks


def test_an_unscaled_eps_is_named_with_its_tensor():
    run = adamw(mlp(8))
    wide = mu.grow(run, lambda: mlp(16))
    assert check(run, wide).holds
    for group in wide.optimizers[0].param_groups:
        group["eps"] = 1e-4
    failure = check(run, wide).failure
    assert failure is not None
    assert (failure.where, "unscaled eps" in failure.cause) == ("0.weight", True)


def test_an_absolute_learning_rate_in_the_loop_is_named():
    def scheduled(run, i):
        for group in run.optimizers[0].param_groups:
            group["lr"] = 1e-3 if i >= 3 else group["lr"]
        return step(run, i)

    failure = check(adamw(mlp(8)), lambda: mlp(16), step=scheduled).failure
    assert failure is not None
    assert (failure.step, "absolute learning rate" in failure.cause) == (3, True)


def test_the_attention_scale_is_named_when_the_head_size_grows():
    assert check(adamw(Attention(16, 4)), lambda: Attention(32, 4)).holds
    broken = adamw(Attention(16, 4, "1/sqrt(d)"))
    failure = check(broken, lambda: Attention(32, 4, "1/sqrt(d)")).failure
    assert failure is not None
    assert (failure.where, "attention scale" in failure.cause) == ("module proj", True)
    folds = {"qkv.weight": "2^(-1/4)", "proj.weight": "2^(1/4)"}
    plan = mu.infer_plan(broken.model, Attention(32, 4, "1/sqrt(d)"), declared=mu.Declared(folds=folds))
    assert check(broken, lambda: Attention(32, 4, "1/sqrt(d)"), plan=plan).holds


def test_a_wrong_layout_is_named_with_its_module():
    run = adamw(Attention(16, 4))
    blocks: dict[str, Any] = {
        "qkv.weight": {0: 4, 1: 1},
        "proj.weight": {0: 1, 1: 4},
        "embed.weight": 1,
        "readout.weight": 1,
    }
    right = mu.infer_plan(run.model, Attention(32, 8), declared=mu.Declared(layouts=blocks))
    assert check(run, lambda: Attention(32, 8), plan=right).holds
    wrong = mu.infer_plan(
        run.model, Attention(32, 8), declared=mu.Declared(layouts={**blocks, "qkv.weight": {0: 1, 1: 1}})
    )
    failure = check(run, lambda: Attention(32, 8), plan=wrong).failure
    assert failure is not None
    assert (failure.where, "wrong layout" in failure.cause) == ("module proj", True)


def test_a_missing_readout_multiplier_is_named():
    class Averaging(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.hidden, self.readout, self.width = (
                nn.Linear(6, width),
                nn.Linear(width, 3, bias=False),
                width,
            )

        def forward(self, x):
            return self.readout(self.hidden(x).tanh()) / self.width

    failure = check(adamw(Averaging(8)), lambda: Averaging(16)).failure
    assert failure is not None
    assert "readout" in failure.cause
    assert "0.5 times" in failure.what
    plan = mu.plans.plan_between(Averaging, 8, 16, declared=mu.Declared(folds={"readout.weight": 2}))
    assert check(adamw(Averaging(8)), lambda: Averaging(16), plan=plan).holds


def test_a_broken_certificate_raises_with_step_place_and_cause():
    certificate = check(adamw(mlp(8)), lambda: mlp(16), step=lambda run, i: step(run, i, clip=0.01))
    assert certificate.failure is not None
    with refused(
        "proof.run_deviates", where=["step 0", certificate.failure.where, certificate.failure.cause]
    ):
        certificate.raise_if_broken()


def test_a_step_that_steps_nothing_is_refused():
    with refused("proof.no_optimizer_stepped"):
        check(adamw(mlp(8)), lambda: mlp(16), step=lambda run, i: 0.0)
    with refused("proof.nothing_to_measure"):
        mu.verify(adamw(mlp(8)), lambda: mlp(16))


def test_runs_with_other_numbers_of_optimizers_are_refused():
    with refused("proof.other_number_of_optimizers"):
        check(adamw(mlp(8)), mu.Run(mlp(16)), plan=mu.plans.plan_between(mlp, 8, 16))
