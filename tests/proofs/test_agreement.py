"""`verify` on copies and `verify_sharded` in place give one verdict on the same pair of runs, right or wrong."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.proofs.certificate import Certificate
from mupscale.sharded.verify import verify_sharded

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STEPS = 3
Pair = tuple[mu.Run, mu.Run]
Loss = Callable[[nn.Module], torch.Tensor]


def mlp(width):
    layers = (nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    return nn.Sequential(*layers).double()


class Block(nn.Module):
    """A layer, and next to it a branch that sleeps: it is zero, and so are its gradients."""

    def __init__(self, sleeping):
        super().__init__()
        self.a, self.o = nn.Linear(3, 4).double(), nn.Linear(4, 1).double()
        if sleeping:
            self.up = nn.Linear(4, 4, bias=False).double()
            self.down = nn.Linear(4, 4, bias=False).double()
        self.sleeping = sleeping

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.o(h + self.down(torch.tanh(self.up(h))) if self.sleeping else h)


def square(model):
    return (model(X) - 1).square().mean()


def step_of(loss: Loss) -> Callable[[mu.Run, int], Any]:
    def step(run: mu.Run, i: int) -> torch.Tensor:
        run.optimizers[0].zero_grad()
        value = loss(run.model)
        value.backward()
        run.optimizers[0].step()
        return value

    return step


def verdicts(pair: Pair, loss: Loss = square) -> tuple[Certificate, Certificate]:
    base, wide = pair
    step = step_of(loss)
    one = mu.verify(base, wide, step=step, steps=STEPS)
    return one, verify_sharded(base, wide, step=step, steps=STEPS)


def agree(pair: Pair, loss: Loss = square) -> bool:
    """The common verdict, with every number of it, or a failed assertion."""
    one, other = verdicts(pair, loss)
    for certificate in (one, other):
        assert not certificate.holds or certificate.worst <= certificate.tolerance
    assert one.holds == other.holds, (one.failure, other.failure)
    assert one.base_losses == pytest.approx(other.base_losses, rel=1e-12, abs=1e-15)
    assert {t.name: t.silent for t in one.tensors} == {t.name: t.silent for t in other.tensors}
    if one.failure is not None and other.failure is not None:
        assert one.failure.step == other.failure.step
    return one.holds


def started(width=4):
    """A base whose AdamW has state: eps and decay matter."""
    torch.manual_seed(0)
    model = mlp(width)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1))
    for i in range(3):
        step_of(square)(run, i)
    return run


def loaded(base, units):
    """A wide run filled by `load_grown_`: its optimizer is stepped in units, or built from groups."""
    plan, wide = mu.plans.plan_between(mlp, 4, 8), mlp(8)
    settings: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
    if units:
        optimizer = torch.optim.AdamW(wide.parameters(), **settings)
        mu.step_in_units_(optimizer, plan, model=wide)
    else:
        groups = mu.param_groups(wide, plan, torch.optim.AdamW, **settings)
        optimizer = torch.optim.AdamW(groups)
    return mu.load_grown_(base, mu.Run(wide, optimizer), plan=plan)


@pytest.mark.parametrize("units", [True, False])
def test_a_run_that_load_wide_filled(units):
    base = started()
    assert agree((base, loaded(base, units)))


@pytest.mark.parametrize("setting", ["lr", "eps", "weight_decay"])
def test_a_wrong_setting_under_step_in_units(setting):
    """Control: the settings in the groups count, in the units in which they are stepped."""
    base = started()
    wide = loaded(base, units=True)
    wide.optimizers[0].param_groups[0][setting] *= 2
    assert not agree((base, wide))
    for certificate in verdicts((base, wide)):
        assert certificate.failure is not None
        assert certificate.failure.what.startswith(f"{setting} is ")


def test_stepping_in_plain_units_is_seen():
    """Control: the same run without its units."""
    base = started()
    wide = loaded(base, units=True)
    for hook in list(wide.optimizers[0]._optimizer_step_pre_hooks.values()):
        hook.__self__.remove()
    assert not agree((base, wide))


def plain_sgd() -> Pair:
    torch.manual_seed(0)
    model = mlp(4)
    twin = copy.deepcopy(model)
    plan = mu.infer_plan(model, twin)
    runs = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    return mu.Run(model, runs[0]), mu.Run(twin, runs[1], plan=plan)


def test_plain_sgd():
    assert agree(plain_sgd())
    base, wide = plain_sgd()
    wide.optimizers[0].param_groups[0]["lr"] = 0.2
    assert not agree((base, wide)), "control: another learning rate"
    base, wide = plain_sgd()
    with torch.no_grad():
        wide.model.get_parameter("2.weight")[0, 0] += 1e-3
    assert not agree((base, wide)), "control: another weight"


def with_new_tensors() -> Pair:
    """A base, and the same with a sleeping branch that the plan knows as new tensors."""
    torch.manual_seed(0)
    base, wide = Block(False), Block(True)
    wide.load_state_dict(base.state_dict(), strict=False)
    with torch.no_grad():
        wide.up.weight.zero_()
        wide.down.weight.zero_()
    axes = (mu.rules.Axis.fixed(4), mu.rules.Axis.fixed(4))
    new = {f"{name}.weight": mu.plans.TensorPlan((), axes) for name in ("up", "down")}
    plan = mu.infer_plan(base, Block(False)).with_tensors(new)
    runs = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (base, wide)]
    return mu.Run(base, runs[0]), mu.Run(wide, runs[1], plan=plan)


def test_new_tensors_whose_gradient_is_zero():
    assert agree(with_new_tensors())
    base, wide = with_new_tensors()
    with torch.no_grad():
        wide.model.get_parameter("up.weight").fill_(0.1)
    assert not agree((base, wide)), "control: one of the two is awake, so the other one learns"
    for certificate in verdicts((base, wide)):
        assert certificate.failure is not None
        assert certificate.failure.where == "down.weight"


def test_a_loss_of_zero():
    base = started()
    start = float(base.model(X).mean().detach())

    def from_zero(model: nn.Module) -> torch.Tensor:
        value: torch.Tensor = model(X).mean() - start
        return value

    wide = loaded(base, units=False)
    one = verdicts((base, wide), from_zero)[0]
    assert abs(one.base_losses[0]) < 1e-15, "the loss is rounding at the first step"
    assert one.base_losses != one.wide_losses, "and its two roundings differ"
    assert agree((base, wide), from_zero)
    with torch.no_grad():
        wide.model.get_parameter("0.bias")[0] += 1e-6
    assert not agree((base, wide), from_zero), "control: a loss of zero that is wrong by little"


def cut_off(leak: float) -> Pair:
    """Twins whose readout ignores its second input; in the wide one it passes `leak` of its gradient, and no value."""

    class Net(nn.Module):
        def __init__(self, leak):
            super().__init__()
            self.seen, self.unseen = nn.Linear(3, 1).double(), nn.Linear(3, 1).double()
            self.leak = leak

        def forward(self, x):
            other = self.unseen(x)
            return self.seen(x) + 0 * other + self.leak * (other - other.detach())

    torch.manual_seed(0)
    base, wide = Net(0.0), Net(leak)
    wide.load_state_dict(base.state_dict())
    runs = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (base, wide)]
    return mu.Run(base, runs[0]), mu.Run(wide, runs[1], plan=mu.infer_plan(base, wide))


def test_a_gradient_where_the_base_has_none():
    """A wide gradient that is not zero where the base's is: the tensor is not silent, it is wrong."""
    assert agree(cut_off(0.0))
    assert not agree(cut_off(0.5)), "the losses agree at the first step, the gradients do not"
    for certificate in verdicts(cut_off(0.5)):
        assert certificate.failure is not None
        assert certificate.failure.where.startswith("unseen")


def test_hooks_of_the_wide_run_are_refused_by_copies():
    """A copy leaves hooks behind, so that `verify` would certify another training."""
    base, wide = plain_sgd()
    wide.optimizers[0].register_step_pre_hook(lambda *_: None)
    with refused("run.has_step_hooks"):
        mu.verify(base, wide, step=step_of(square))
