"""What holds here where the code published with the paper is wrong: each docstring says what that code does.

Training is compared in float64; next to it stands the wrong rule, which must be seen. Noise is tested
as a rule: how its size depends on the width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.closeness import LAST_PLACES, assert_broken, assert_exact, assert_same_tensors, difference
from harness.refusals import refusal
from harness.runs import train_on, trained
from harness.tensors import tensors_of
from harness.toys import MLP, WIDE_MLP, TiedModel, loss_on, mlp, tokens, trained_mlp, vectors, wide_mlp
from harness.wrong import without
from mupscale.plans.explain import kind_of
from mupscale.proofs.identity import gradient_identity
from mupscale.rules.axes import Axis
from mupscale.rules.scale import Scale
from mupscale.rules.sizes import noise_size


def tied_run() -> mu.Run:
    torch.manual_seed(0)
    return trained(
        TiedModel(8), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-5), tokens(3, seed=0)
    )


class ConvNet(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, n, 3, padding=1)
        self.norm = nn.BatchNorm2d(n)
        self.hidden = nn.Conv2d(n, n, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(n)
        self.readout = nn.Linear(n, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x)))
        h = h + torch.relu(self.norm2(self.hidden(h)))
        out: Tensor = self.readout(h.mean((2, 3)))
        return out


def images(count: int = 10, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return [(draw(6, 1, 4, 4), draw(6, 2)) for _ in range(count)]


def conv_run() -> mu.Run:
    torch.manual_seed(0)
    return trained(
        ConvNet(4), lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9), images(3, seed=0)
    )


def test_batch_norm_statistics_are_carried():
    """The spectral variant copies `.parameters()` only, so eval outputs are off by 53 at zero noise.

    Its statistics move on with training too; the published test looks at the first step only.
    """
    base = conv_run()
    wide = mu.grow(base, lambda: ConvNet(12), prove=False)
    x = images()[0][0]
    base.model.eval(), wide.model.eval()
    assert_exact(difference(wide.model(x), base.model(x)))
    assert wide.model.get_buffer("norm.num_batches_tracked") == 3
    statistics = wide.model.get_buffer("norm.running_mean").clone()
    wide.model.get_buffer("norm.running_mean").zero_()
    assert_broken(difference(wide.model(x), base.model(x)))
    wide.model.get_buffer("norm.running_mean").copy_(statistics)
    base.model.train(), wide.model.train()
    assert_exact(difference(train_on(wide, images()), train_on(base, images())))
    for name in ("norm.running_mean", "norm.running_var", "norm2.running_mean", "norm2.running_var"):
        small, large = base.model.get_buffer(name), wide.model.get_buffer(name)
        assert_exact(difference(large, small.repeat_interleave(3)))
        assert_broken(difference(large, small.repeat(3)))


def test_batch_norm_gains_are_repeated_whatever_the_fresh_model_has():
    """The "noise" on gains is the fresh model's own ones, so every gain 1.0 becomes 1.3."""
    plans = []
    for fill in (0.0, 1.0, None):
        models = ConvNet(4), ConvNet(12)
        for gain in (module.norm.weight for module in models):
            nn.init.normal_(gain) if fill is None else nn.init.constant_(gain, fill)
        plans.append(mu.infer_plan(*models))
    assert plans[0] == plans[1] == plans[2]
    planned = plans[0]["norm.weight"]
    assert kind_of(planned) == "vector-like"
    assert noise_size(planned.axes, planned.fold) == Scale.of(1)
    base = conv_run()
    wide = mu.grow(base, lambda: ConvNet(12), prove=False)
    repeated = base.model.get_parameter("norm.weight").repeat_interleave(3)
    assert torch.equal(wide.model.get_parameter("norm.weight"), repeated)


class Patches(nn.Module):
    """Class token and position table as raw parameters with the width last: (1, 1, n) and (1, 4, n)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(1, n)
        self.token = nn.Parameter(torch.randn(1, 1, n))
        self.positions = nn.Parameter(torch.randn(1, 4, n))
        self.readout = nn.Linear(n, 2)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.inputs(x.unsqueeze(-1))
        token = self.token.expand(len(x), -1, -1)
        out: Tensor = self.readout(torch.tanh(torch.cat([token, patches], 1) + self.positions).mean(1))
        return out


def test_a_width_at_dimension_two_is_declared_or_searched():
    """A position table (1, T, n) matches no branch of the published code and stays noise, without a word."""
    error = refusal(lambda: mu.plans.plan_between(Patches, 4, 12), "plan.unknown_role")
    assert {fault.where for fault in error.faults} == {"token", "positions"}
    gaps = []
    for skip in (False, True):
        torch.manual_seed(0)
        base = trained(Patches(4), lambda m: torch.optim.AdamW(m.parameters()), vectors(3))
        plan = mu.plans.plan_between(Patches, 4, 12, loss=loss_on(vectors()))
        wide = mu.grow(base, lambda: Patches(12), plan=plan)
        if skip:
            nn.init.normal_(wide.model.get_parameter("positions"))
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


class Standardize(nn.Module):
    """A norm whose class is not called one."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor) -> Tensor:
        return self.gain * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


class Scaled(nn.Module):
    """A residual branch behind Standardize, with a LayerScale whose initialisation is not zero-mean."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(3, n)
        self.before = Standardize(n)
        self.hidden = nn.Linear(n, n)
        self.layer_scale = nn.Parameter(torch.full((n,), 0.1))
        self.readout = nn.Linear(n, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inputs(x)
        h = h + self.layer_scale * torch.tanh(self.hidden(self.before(h)))
        out: Tensor = self.readout(h)
        return out


def test_a_norm_needs_no_name_and_an_init_no_zero_mean():
    """A gain in a class not called "…norm" becomes 1 + 1 = 2, and so does any init that is not zero-mean."""
    plan = mu.plans.plan_between(Scaled, 4, 12, loss=loss_on(vectors()))
    gaps = []
    for added in (False, True):
        torch.manual_seed(0)
        base = trained(Scaled(4), lambda m: torch.optim.AdamW(m.parameters()), vectors(3))
        wide = mu.grow(base, lambda: Scaled(12), plan=plan)
        for name in ("before.gain", "layer_scale", "hidden.bias"):
            repeated = base.model.get_parameter(name).repeat_interleave(3)
            assert torch.equal(wide.model.get_parameter(name), repeated), name
        if added:
            with torch.no_grad():
                wide.model.get_parameter("before.gain").add_(1.0)
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


class Attention(nn.Module):
    def __init__(self, n_head: int, size: int = 4) -> None:
        super().__init__()
        self.n_head = n_head
        self.q, self.k, self.v, self.proj = (nn.Linear(n_head * size, n_head * size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.n_head, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.proj(mixed)
        return out


class TorchAttention(nn.MultiheadAttention):
    def __init__(self, n_head: int) -> None:
        super().__init__(4 * n_head, n_head, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = super().forward(x, x, x, need_weights=False)[0]
        return out


class Attending(nn.Module):
    def __init__(self, n_head: int, attention: type[nn.Module]) -> None:
        super().__init__()
        self.inputs = nn.Linear(1, 4 * n_head)
        self.attention = attention(n_head)
        self.readout = nn.Linear(4 * n_head, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inputs(x.unsqueeze(-1)).tanh()
        out: Tensor = self.readout((h + self.attention(h)).mean(1))
        return out


@pytest.mark.parametrize("attention", [Attention, TorchAttention])
def test_more_heads_are_exact(attention):
    """Entries are interleaved whatever they mean, which tears heads apart when their number grows."""
    plan = mu.plans.plan_between(lambda heads: Attending(heads, attention), 4, 8, loss=loss_on(vectors()))
    torn = plan.with_tensors(
        {
            name: replace(t, axes=tuple(Axis.between(a.base, a.wide, a.role) for a in t.axes))
            for name, t in plan.tensors.items()
        }
    )
    assert torn != plan
    gaps = []
    for chosen in (plan, torn):
        torch.manual_seed(0)
        base = trained(Attending(4, attention), lambda m: torch.optim.AdamW(m.parameters()), vectors(3))
        with torch.no_grad():  # attention that is far from uniform, so that heads matter
            for name, parameter in base.model.named_parameters():
                parameter.mul_(4.0 if name.startswith("attention") else 1.0)
        wide = mu.grow(base, lambda: Attending(8, attention), plan=chosen, prove=False)
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


@pytest.mark.parametrize(
    ("optimizer", "moment"), [(torch.optim.RMSprop, "square_avg"), (torch.optim.Adagrad, "sum")]
)
def test_the_second_moment_of_rmsprop_and_adagrad_is_scaled_by_the_square(optimizer, moment):
    """Squares of gradients are multiplied by 1/k in place of 1/k²."""
    gaps = []
    for rules in (None, without(optimizer, state={moment: mu.rules.G})):
        base = trained_mlp(lambda model: optimizer(model.parameters(), lr=1e-2))
        wide = mu.grow(base, wide_mlp, rules=rules)
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


def test_a_checkpoint_that_was_trained_without_mup_grows():
    """`transfer_weights_sp` divides embeddings by k and has no optimizer transfer."""
    gaps = []
    for divide in (False, True):
        base = tied_run()
        plan = mu.plans.plan_between(TiedModel, 8, 16, loss=loss_on(tokens()))
        assert plan["embed.weight"].change.s == Scale.of(1)
        wide = mu.grow(base, lambda: TiedModel(16), plan=plan)
        if divide:
            with torch.no_grad():
                wide.model.get_parameter("embed.weight").div_(2)
        assert len(wide.optimizers[0].state) == len(base.optimizers[0].state)
        gaps.append(difference(train_on(wide, tokens()), train_on(base, tokens())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


@pytest.mark.parametrize("lost", ["lr", "weight_decay"])
def test_default_weight_decay_is_kept(lost):
    """`MuAdamW` without `weight_decay=` decays by 0.0 where AdamW decays by 0.01, and without `lr=` it raises a KeyError."""
    default = inspect.signature(torch.optim.AdamW).parameters["lr"].default
    gaps = []
    for lose in (False, True):
        base = trained_mlp(lambda model: torch.optim.AdamW(model.parameters()))
        wide = mu.grow(base, wide_mlp)
        groups = wide.optimizers[0].param_groups
        assert {group["lr"] for group in groups} == {default, default / 2, default / 4}
        for group in groups:
            assert group["lr"] * group["weight_decay"] == pytest.approx(default * 1e-2, rel=LAST_PLACES)
        for group in groups if lose else ():
            group[lost] = {"lr": default, "weight_decay": 0.0}[lost]
        gaps.append(difference(train_on(wide, vectors()), train_on(base, vectors())))
    assert_exact(gaps[0])
    assert_broken(gaps[1])


@pytest.mark.parametrize(
    "wrap",
    [lambda model: torch.compile(model, backend="eager"), nn.DataParallel],
    ids=["compile", "DataParallel"],
)
def test_the_optimizer_of_a_wrapped_model_is_found(wrap):
    """A compiled source raises KeyError '_orig_mod…' when its optimizer is carried; DDP's prefix likewise."""
    torch.manual_seed(0)
    wrapped = wrap(mlp(*MLP).double())
    plan = mu.plans.plan_between(lambda sizes: mlp(*sizes), MLP, WIDE_MLP)
    assert not any(name in plan for name, _ in wrapped.named_parameters()), "control: the prefix is there"
    base = trained(wrapped, lambda model: torch.optim.AdamW(model.named_parameters(), eps=1e-3), vectors(3))
    wide = mu.grow(base, wide_mlp, plan=plan)
    state = base.optimizers[0].state_dict()
    carried = mu.trainers.grow_optimizer_state_dict(state, plan, torch.optim.AdamW)
    own = mlp(*WIDE_MLP).double()
    own.load_state_dict(wide.model.state_dict())
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(own, carried))
    optimizer.load_state_dict(carried)
    outputs = train_on(base, vectors())
    assert_exact(difference(train_on(wide, vectors()), outputs))
    assert_exact(difference(train_on(mu.Run(own, optimizer), vectors()), outputs))


def polluted(check: Callable[[nn.Module], Any]) -> bool:
    """Does a check change any tensor of the model it is given, its BatchNorm statistics among them?"""
    model = conv_run().model
    before = {n: t.clone() for n, t in tensors_of(model).items()}
    check(model)
    assert model.training
    return any(not torch.equal(t, before[n]) for n, t in tensors_of(model).items())


def optimized(model: nn.Module) -> mu.Run:
    return mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.05))


def one_step(run: mu.Run, i: int) -> Tensor:
    run.optimizers[0].zero_grad()
    loss = loss_on(images())(run.model)
    loss.backward()
    run.optimizers[0].step()
    return loss


def test_looking_at_a_model_keeps_its_batch_norm_statistics():
    """`train()` runs all data, validation too, through the net in train mode before the first epoch."""
    loss = loss_on(images())
    assert not polluted(lambda model: mu.infer_plan(model, ConvNet(12), loss=loss))
    assert not polluted(lambda model: mu.grow(model, lambda: ConvNet(12), prove=False))
    assert not polluted(lambda model: mu.verify(model, lambda: ConvNet(12), loss=loss))
    assert not polluted(lambda model: mu.verify(optimized(model), lambda: ConvNet(12), step=one_step))
    plan = mu.plans.plan_between(ConvNet, 4, 12)

    def identity(model: nn.Module) -> None:
        wide = mu.grow(model, lambda: ConvNet(12), plan=plan, prove=False).model
        before = {n: t.clone() for n, t in tensors_of(wide).items()}
        assert gradient_identity(model, wide, plan=plan, loss=loss).worst[1] <= 1e-9
        assert_same_tensors(tensors_of(wide), before)

    assert not polluted(identity)
    assert polluted(loss), "control: a forward pass in train mode is seen"
