"""Training loops as people write them: accumulation, clipping, averages, scalers, several optimizers, groups, closures."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mupscale as mu
from harness.data import regression
from harness.loops.situation import *
from harness.runs import step as stepped


def backward(found: Tensor) -> None:
    found.backward()  # type: ignore[no-untyped-call]


@situation(Exact())
def accumulated_micro_batches() -> Pair:
    def accumulated(run: mu.Run, number: int) -> Tensor:
        run.optimizer.zero_grad()
        parts = [loss(run.model, 10 * number + i) / 4 for i in range(4)]
        for part in parts:
            backward(part)
        run.optimizer.step()
        return torch.stack(parts).sum().detach()

    return grown(trained(step=accumulated), step=accumulated)


@situation(Exact())
def autocast_and_scaler() -> Pair:
    """Mixed precision as in PyTorch's recipe; the scaler belongs to the loop and serves both runs."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def mixed(run: mu.Run, number: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss(run.model, number)
        run.optimizer.zero_grad()
        backward(scaler.scale(found))
        scaler.step(run.optimizer)
        scaler.update()
        return found.detach()

    return grown(trained(step=mixed), step=mixed)


@situation(Exact())
def clipped_by_torch_in_the_base_and_by_clip_in_the_wide_run() -> Pair:
    """`clip_before_step_` bounds the norm that the base's own clip_grad_norm_ bounds."""

    def clipped(run: mu.Run, number: int) -> Tensor:
        found = loss(run.model, number)
        stepped(run, found, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        return found.detach()

    pair = grown(trained(step=clipped), step=clipped)
    mu.clip_before_step_(pair.wide.optimizer, pair.wide, max_norm=0.05)
    return Pair(pair.base, pair.wide, clipped, step)


@situation(Exact())
def clipped_before_growth() -> Pair:
    """`clip_before_step_` on the base is carried."""
    run = trained()
    mu.clip_before_step_(run.optimizer, run, max_norm=0.05)
    return grown(after(run))


@situation(Exact())
def values_clipped_before_growth() -> Pair:
    run = trained()
    mu.clip_before_step_(run.optimizer, run, max_value=1e-3)
    return grown(after(run))


def by_closure(run: mu.Run, number: int) -> Tensor:
    """The loss is computed inside the step."""

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        found = loss(run.model, number)
        backward(found)
        return found

    found: Any = run.optimizer.step(closure)  # type: ignore[arg-type]
    return cast(Tensor, found.detach())


@situation(Exact())
def step_with_a_closure() -> Pair:
    return grown(trained(step=by_closure), step=by_closure)


@situation(Exact(), "S3")
def clipped_with_a_closure() -> Pair:
    """The base is clipped by hand, by torch's own function inside the closure."""

    def by_hand(run: mu.Run, number: int) -> Tensor:
        found = loss(run.model, number)
        stepped(run, found, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
        return found.detach()

    pair = grown(trained(optimizer=sgd, step=by_hand))
    mu.clip_before_step_(pair.wide.optimizer, pair.wide, max_norm=0.01)
    return Pair(pair.base, pair.wide, by_hand, by_closure)


def halves(model: nn.Module) -> list[Optimizer]:
    """Two optimizers of different kinds, as with Muon next to AdamW."""
    first = [*model.inp.parameters(), *model.norm.parameters()]  # type: ignore[union-attr]
    second = [*model.mid.parameters(), *model.head.parameters()]  # type: ignore[union-attr]
    return [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second, lr=1e-2)]


@situation(Exact())
def two_optimizers() -> Pair:
    return grown(trained(optimizer=halves))


def in_turn(run: mu.Run, number: int) -> Tensor:
    """One optimizer steps on even batches and the other on odd ones, as in adversarial training."""
    found = loss(run.model, number)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    backward(found)
    run.optimizers[number % 2].step()
    return found.detach()


def in_turn_by_hand(run: mu.Run, number: int) -> Tensor:
    """The same, clipped by hand: by one norm in the first step, before it is seen that they step in turn."""
    found = loss(run.model, number)
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    backward(found)
    stepping = run.optimizers[number % 2]
    own = [p for group in stepping.param_groups for p in group["params"]]
    nn.utils.clip_grad_norm_(own if number else run.model.parameters(), 0.01)
    stepping.step()
    return found.detach()


@situation(Exact(), "S3")
def clipped_optimizers_that_step_in_turn() -> Pair:
    base = trained(optimizer=halves, step=in_turn_by_hand)
    torch.manual_seed(0)
    model = Net(BASE)
    run = mu.Run(model, halves(model))
    mu.clip_before_step_(run.optimizers, run, max_norm=0.01)
    return Pair(base, grown(after(run, in_turn)).wide, in_turn_by_hand, in_turn)


@situation(Exact())
def groups_by_name() -> Pair:
    """No decay of biases and norms, and a smaller rate for the first layer."""

    def grouped(model: nn.Module) -> Optimizer:
        named = dict(model.named_parameters())
        plain = [p for n, p in named.items() if n.endswith("bias") or n.startswith("norm")]
        first, rest = [named["inp.weight"]], [named["mid.weight"], named["head.weight"]]
        return torch.optim.AdamW(
            [
                {"params": rest, "weight_decay": 0.1},
                {"params": plain, "weight_decay": 0.0},
                {"params": first, "lr": 3e-3, "weight_decay": 0.1},
            ],
            lr=1e-2,
        )

    return grown(trained(optimizer=grouped))


@situation(Refused("optimizer.unknown_setting", "declare_neutral"))
def group_with_a_key_of_ones_own() -> Pair:
    return grown(trained(optimizer=layered))


def layered(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([{"params": list(model.parameters()), "shrink": 0.9}], lr=1e-2)


@group_with_a_key_of_ones_own.remedy
def _() -> Pair:
    mu.rules.declare_neutral("shrink")
    return grown(trained(optimizer=layered))


@situation(Exact())
def rare_settings_of_optimizers() -> Pair:
    """Coupled decay, nesterov, amsgrad and maximize in one run."""

    def several(model: nn.Module) -> list[Optimizer]:
        first, second = list(model.inp.parameters()), list(model.norm.parameters())  # type: ignore[union-attr]
        rest = [*model.mid.parameters(), *model.head.parameters()]  # type: ignore[union-attr]
        return [
            torch.optim.SGD(first, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1, dampening=0.0),
            torch.optim.Adam(second, lr=1e-2, amsgrad=True, weight_decay=0.1),
            torch.optim.RMSprop(rest, lr=1e-3, centered=True, momentum=0.5),
        ]

    return grown(trained(optimizer=several))


@situation(Exact())
def rate_in_a_tensor() -> Pair:
    def tensor_rate(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    return grown(trained(optimizer=tensor_rate))


def average_of(run: mu.Run, number: int) -> Tensor:
    """The average is updated after every step, and its loss is watched too."""
    found = step(run, number)
    assert isinstance(run.ema, AveragedModel)
    run.ema.update_parameters(run.model)
    with torch.no_grad():
        return found + loss(run.ema, number)


def averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]


@situation(Exact())
def average_of_the_weights() -> Pair:
    run = trained()
    averaging = mu.Run(run.model, run.optimizer, ema=averaged(run.model))
    return grown(after(averaging, average_of), step=average_of)


@situation(Exact())
def average_in_a_dict() -> Pair:
    def followed(run: mu.Run, number: int) -> Tensor:
        found, average = step(run, number), dict(cast(dict[str, Tensor], run.ema))
        x, y = regression(number)
        with torch.no_grad():
            for name, parameter in run.model.named_parameters():
                average[name].lerp_(parameter, 0.1)
            return found + F.mse_loss(torch.func.functional_call(run.model, average, (x,)), y)

    run = trained()
    average = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return grown(after(mu.Run(run.model, run.optimizer, ema=average), followed), step=followed)


@situation(Exact())
def evaluation_between_steps() -> Pair:
    def watched(run: mu.Run, number: int) -> Tensor:
        run.model.eval()
        with torch.inference_mode():
            seen = loss(run.model, 900).clone()
        run.model.train()
        return step(run, number) + seen

    return grown(trained(step=watched), step=watched)


@situation(Exact())
def gradient_penalty() -> Pair:
    """Backward through backward."""

    def penalised(model: nn.Module, number: int = 5000) -> Tensor:
        x, y = regression(number)
        x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + 0.1 * slope.square().mean()

    def smooth(run: mu.Run, number: int) -> Tensor:
        found = penalised(run.model, number)
        stepped(run, found)
        return found.detach()

    class Smooth(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.norm(self.inp(x)).tanh()).tanh())  # type: ignore[no-any-return]

    return grown(trained(Smooth, step=smooth), Smooth, smooth, loss=penalised)


@situation(Exact())
def meta_learning_step() -> Pair:
    """One inner step by functional_call; the outer loss goes through it."""

    def meta_loss(model: nn.Module, number: int = 5000) -> Tensor:
        (x, y), (u, v) = regression(number), regression(number + 1)
        named: dict[str, Tensor] = dict(model.named_parameters())
        (slope,) = torch.autograd.grad(
            F.mse_loss(torch.func.functional_call(model, named, (x,)), y),
            named["head.bias"],
            create_graph=True,
        )
        moved = {**named, "head.bias": named["head.bias"] - 0.1 * slope}
        return F.mse_loss(torch.func.functional_call(model, moved, (u,)), v)

    def outer(run: mu.Run, number: int) -> Tensor:
        found = meta_loss(run.model, number)
        stepped(run, found)
        return found.detach()

    return grown(trained(step=outer), step=outer, loss=meta_loss)


@situation(Exact())
def resumed_before_growth() -> Pair:
    """The base comes from state dicts, as after a restart."""
    run = trained()
    model = Net(BASE)
    model.load_state_dict(run.model.state_dict())
    optimizer = adamw(model)
    optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return grown(mu.Run(model, optimizer))


@situation(Exact())
def resumed_after_growth() -> Pair:
    """The wide run is saved and loaded into a model and an optimizer that are built again."""
    pair = grown(trained())
    model = Net(WIDE)
    model.load_state_dict(pair.wide.model.state_dict())
    saved = copy.deepcopy(pair.wide.optimizer.state_dict())
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(model, saved))
    optimizer.load_state_dict(saved)
    return Pair(pair.base, mu.Run(model, optimizer), step)


@situation(Exact())
def state_dicts_alone() -> Pair:
    """For a loop that never makes a run: two state dicts in, two out."""
    run = trained(optimizer=lambda model: torch.optim.AdamW(model.named_parameters(), lr=1e-2))
    plan = mu.infer_plan(run.model, lambda: Net(WIDE), loss=loss)
    model = Net(WIDE)
    model.load_state_dict(mu.trainers.grow_state_dict(run.model.state_dict(), plan))
    saved = mu.trainers.grow_optimizer_state_dict(run.optimizer.state_dict(), plan, torch.optim.AdamW)
    optimizer = torch.optim.AdamW(mu.trainers.groups_for(model, saved))
    optimizer.load_state_dict(saved)
    return Pair(run, mu.Run(model, optimizer), step)


@situation(Refused("optimizer.foreign_parameters"))
def criterion_with_weights_of_its_own() -> Pair:
    """The optimizer trains a parameter that the model does not have."""
    scale = nn.Parameter(torch.ones(3))

    def weighed(run: mu.Run, number: int) -> Tensor:
        x, y = regression(number)
        found: Tensor = ((run.model(x) - y).square() * scale).mean()
        stepped(run, found)
        return found.detach()

    def both(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW([*model.parameters(), scale], lr=1e-2)

    return grown(trained(optimizer=both, step=weighed), step=weighed)


@criterion_with_weights_of_its_own.remedy
def _() -> Pair:
    class Weighed(Net):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    return grown(trained(Weighed), Weighed)
