"""Growing proves itself: with a loss or example inputs, in float64 copies or in the models' own dtype."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.refusals import refusal
from mupscale.training.grow import prove

TOKENS, LENGTH = 11, 6
TEXT = torch.arange(4 * LENGTH).view(4, LENGTH) * 5 % TOKENS


class Attention(nn.Module):
    """One block of attention; the number of heads is fixed unless `heads` says otherwise."""

    def __init__(self, width: int, size: int | None = None, scale: float | None = None) -> None:
        super().__init__()
        self.size = size or width // 2
        self.heads = width // self.size
        self.scale = scale
        self.embed = nn.Embedding(TOKENS, width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.readout = nn.Linear(width, TOKENS)

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.readout(x + self.proj(mixed.transpose(1, 2).flatten(2)))


def loss(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TEXT).flatten(0, 1), (3 * TEXT % TOKENS).flatten())


def more_heads(width: int) -> nn.Module:
    torch.manual_seed(0)
    return Attention(width, size=4)


def in_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 0)


def test_a_searched_plan_is_recorded_with_its_trials():
    wide = mu.upscale(more_heads(8), lambda: more_heads(16), mu.MupNoise(0.0), loss=loss)
    proof = wide.provenance["proof"]
    assert (proof["by"], proof["dtype"]) == ("loss", "float64")
    assert proof["worst"] < 1e-12
    assert wide.plan is not None
    assert wide.plan.proof == "loss"
    assert mu.Plan.from_json(wide.plan.to_json()).proof == "loss"


def test_going_without_a_proof_is_recorded():
    base = nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1), nn.Linear(4, 1))
    plan = mu.infer_plan(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)),
                         nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))).fold("0.weight", 1)  # fmt: skip
    make = lambda: nn.Sequential(nn.Linear(3, 8), nn.Softmax(-1), nn.Linear(8, 1))  # noqa: E731
    refusal(lambda: mu.grow(base, make, plan=plan), "proof.missing")
    assert mu.grow(base, make, plan=plan, prove=False).provenance["proof"] == {"by": "none"}
    refusal(lambda: mu.trainers.grow_state_dict(base.state_dict(), plan), "proof.missing")
    assert mu.trainers.grow_state_dict(base.state_dict(), plan, prove=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_models_are_measured_as_they_are(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    in_own_dtype(monkeypatch)
    plan = mu.plans.plan_between(more_heads, 64, 128, loss=loss)
    wide = mu.grow(more_heads(64).to(dtype), lambda: more_heads(128), plan=plan, loss=loss)
    assert wide.provenance["proof"]["dtype"] == str(dtype).removeprefix("torch.")
    for name in ("proj.weight", "qkv.weight", "readout.weight", "embed.weight"):
        spoiled = plan.fold(name, "101/100")
        refusal(
            lambda: mu.grow(more_heads(64).to(dtype), lambda: more_heads(128), plan=spoiled, loss=loss),  # noqa: B023
            "proof.run_deviates",
        )


def test_the_proof_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    in_own_dtype(monkeypatch)
    base = more_heads(8)
    plan = mu.plans.plan_between(more_heads, 8, 16, loss=loss)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    wide = mu.upscale(base, lambda: more_heads(16), mu.MupNoise(0.1), plan=plan, loss=loss)
    plain = mu.upscale(base, lambda: more_heads(16), mu.MupNoise(0.1), plan=plan)
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert all(p.grad is None for model in (base, wide.model) for p in model.parameters())
    for (name, one), two in zip(
        wide.model.state_dict().items(), plain.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), f"{name}: a proof does not change what is returned"


def test_example_inputs_that_reach_not_every_tensor_are_refused():
    class Unused(nn.Sequential):
        def __init__(self, n: int) -> None:
            super().__init__(nn.Linear(3, n), nn.Linear(n, 2))
            self.other = nn.Linear(3, n)

        def forward(self, x: Tensor) -> Any:
            return self[1](self[0](x).relu())

    refusal(
        lambda: mu.grow(Unused(4), lambda: Unused(8), example_inputs=(torch.ones(2, 3),)),
        "proof.tensor_not_reached",
        where="other.weight",
    )
    refusal(
        lambda: mu.grow(nn.Linear(3, 4), lambda: nn.Linear(3, 8), example_inputs=(torch.ones(2, 3),)),
        "model.output_grows",
        where="output 0",
    )


def test_a_loss_that_is_not_a_number_says_so():
    nothing = lambda model: model(TEXT).sum() * math.nan  # noqa: E731
    refusal(lambda: mu.grow(more_heads(8), lambda: more_heads(16), loss=nothing), "search.loss_not_finite")


class Annealed(nn.Module):
    """A model with settings that are no tensors."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(3, n), nn.BatchNorm1d(n), nn.Linear(n, 2)
        self.sharpness, self.started, self.rows = 1.0, False, n + 3

    def forward(self, x: Tensor) -> Any:
        out = self.out(self.norm(self.inside(x)).relu())
        return out * self.sharpness if self.started else out


def annealed() -> Annealed:
    torch.manual_seed(0)
    base = Annealed(4)
    base.sharpness, base.started = 2.5, True
    return base


def test_settings_that_were_changed_after_building_are_carried_and_recorded():
    base, x = annealed(), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    wide = mu.grow(base, lambda: Annealed(8), example_inputs=(x,))
    model: Any = wide.model
    assert (model.sharpness, model.started, model.rows) == (2.5, True, 11)
    assert wide.provenance["carried"] == {"sharpness": 2.5, "started": True}
    assert torch.allclose(model(x), base(x), atol=1e-5)


def test_hooks_are_measured_with_a_loss_and_refused_without_one():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    base = annealed()
    plan = mu.grow(base, lambda: Annealed(8), example_inputs=(x,)).plan
    base.out.register_forward_hook(lambda module, args, out: out.sin())
    refusal(lambda: mu.grow(base, lambda: Annealed(8), example_inputs=(x,)), "search.no_exact_plan")
    refusal(
        lambda: mu.grow(base, lambda: Annealed(8), plan=plan),
        "proof.attribute_not_carried",
        where="out._forward_hooks",
    )
    with pytest.warns(UserWarning, match="out._forward_hooks"):
        assert mu.grow(base, lambda: Annealed(8), plan=plan, prove=False)


def test_verify_with_example_inputs_says_that_it_saw_the_forward_only():
    certificate = mu.verify(more_heads(8), lambda: more_heads(16), example_inputs=(TEXT,))
    assert certificate.holds
    assert "forward only" in str(certificate)
    assert "forward only" not in str(mu.verify(more_heads(8), lambda: more_heads(16), loss=loss))


def test_a_plan_that_modules_decide_is_not_good_for_other_modules():
    def make(n: int, middle: type[nn.Module]) -> nn.Module:
        return nn.Sequential(nn.Linear(3, n), middle(), nn.Linear(n, 2))

    class Softmax(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.softmax(-1)

    plan = mu.infer_plan(make(4, nn.Tanh), make(8, nn.Tanh))
    refusal(
        lambda: mu.grow(make(4, Softmax), make(8, Softmax), plan=plan), "proof.missing", where="Softmax (1)"
    )
    assert mu.grow(make(4, nn.Tanh), make(8, nn.Tanh), plan=plan)


class TwoInputs(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.image, self.out = nn.Linear(3, n), nn.Linear(3, n), nn.Linear(n, 2)

    def forward(self, x: Tensor, image: Tensor | None = None) -> Any:
        hidden = self.a(x).tanh()
        return self.out(hidden if image is None else hidden + self.image(image).softmax(-1))


def test_a_loss_that_leaves_a_growing_tensor_out_warns():
    x = torch.ones(2, 3)
    with pytest.warns(UserWarning, match=r"image\.weight"):
        wide = mu.grow(TwoInputs(4), lambda: TwoInputs(8), loss=lambda model: model(x).square().mean())
    assert wide.plan is not None
    assert any("image.weight" in need for need in wide.plan.needs)


class Normalised(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(3, n), nn.BatchNorm1d(n), nn.Linear(n, 2)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.calls = self.calls + 1
        return self.out(self.norm(self.a(x)).tanh())


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_the_base_s_and_replaced_buffers_are_put_back(training: bool):
    base, x = Normalised(4).train(training), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    wide = mu.grow(base, lambda: Normalised(8), example_inputs=(x,))
    assert wide.plan is not None
    assert float(base.calls) == 0
    assert wide.model.training is training
