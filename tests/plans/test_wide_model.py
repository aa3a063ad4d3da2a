"""One way to make a wide model: what trains, modes and hooks are the same in proofs, in the search and in what grows."""

import copy
import logging
import threading
import warnings
from fractions import Fraction

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refusal
from mupscale.models.names import named_tensors
from mupscale.plans import wide_model
from mupscale.plans.direction import Direction
from mupscale.plans.wide_model import fill_model_
from mupscale.training.grow import prove

X, Y = torch.linspace(-1, 1, 48, dtype=torch.float64).view(8, 6).sin(), torch.arange(8) % 3


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(6, width), nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.inp(x))))


def loss(model):
    return nn.functional.cross_entropy(model(X), Y)


def step(run, i):
    run.optimizer.zero_grad()
    value = loss(run.model)
    value.backward()
    run.optimizer.step()
    return value


def started(make=Net, width=4):
    torch.manual_seed(0)
    model = make(width).double()
    run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for i in range(3):
        step(run, i)
    return run


def apart(base, wide, steps=4):
    """The largest difference of losses while both train."""
    return max(abs(step(base, i).item() - step(wide, i).item()) for i in range(steps))


def frozen(width):
    model = Net(width)
    model.inp.requires_grad_(False)
    return model


def train_all(name, tensors, direction):
    return True


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "as it is"])
@pytest.mark.parametrize("unfreeze", [False, True])
@pytest.mark.parametrize("given", [{"loss": loss}, {"example_inputs": (X,)}], ids=["loss", "inputs"])
def test_what_was_frozen_after_building_is_frozen_in_proofs(given, unfreeze, copies, monkeypatch):
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 2**28 if copies else 0)
    make = frozen if unfreeze else Net
    run = started()
    run.model.inp.requires_grad_(unfreeze)
    wide = mu.grow(run, lambda: make(8), **given)
    assert {p.requires_grad for p in wide.model.inp.parameters()} == {unfreeze}  # type: ignore[union-attr]
    assert apart(run, wide) < 1e-12
    if not unfreeze:
        monkeypatch.setattr(wide_model, "_trains", train_all)
        refusal(lambda: mu.grow(run, lambda: Net(8), plan=wide.plan, **given))


class Padded(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(6, width), nn.RMSNorm(width, eps=1e-3), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.norm(self.inp(x)))


def test_a_plan_with_zeros_in_a_norm_is_proved_by_the_loss_that_found_it():
    run = started(Padded)
    plan = mu.infer_plan(run.model, lambda: Padded(6), by="padded", loss=loss)
    assert (
        plan["inp.bias"].fold == plan["norm.weight"].fold ** -1 == mu.rules.Scale.of("3/2") ** Fraction(1, 2)
    )
    wide = mu.grow(run, lambda: Padded(6), plan=plan, loss=loss)
    assert wide.model.norm.eps == run.model.norm.eps  # type: ignore[union-attr]
    assert mu.verify(run, lambda: Padded(6), step=step, plan=plan).holds
    assert apart(run, wide) < 1e-12
    mu.upscale(run, lambda: Padded(6), mu.AutoNoise(rise=0.1), plan=plan, loss=loss)
    refusal(lambda: mu.grow(run, lambda: Padded(6), plan=plan.fold("inp.bias", 2), loss=loss))


class Tied(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table, self.norm = nn.Embedding(5, width), nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 5)
        self.again = self.head


def test_written_in_place_is_what_is_made_new():
    base, wide = Tied(4).eval(), Tied(8)
    base.norm.train()
    base.norm.running_mean.uniform_()  # type: ignore[union-attr]
    base.table.requires_grad_(False)
    direction = Direction(mu.infer_plan(base, wide))
    new = fill_model_(Tied(8), base, direction)
    places = [tensor.data_ptr() for _, _, tensor in named_tensors(wide)]
    fill_model_(wide, base, direction, in_place=True)
    assert [tensor.data_ptr() for _, _, tensor in named_tensors(wide)] == places
    for (name, _, a), (_, _, b) in zip(named_tensors(new), named_tensors(wide), strict=True):
        assert torch.equal(a, b), name
        assert a.requires_grad == b.requires_grad, name
    modes = [[module.training for module in model.modules()] for model in (base, new, wide)]
    assert modes[0] == modes[1] == modes[2]
    assert set(modes[0]) == {True, False}
    assert new.head is new.again
    assert not new.table.weight.requires_grad  # type: ignore[union-attr]


def scale(gradient):
    return gradient * 0.1


def scale_accumulated(parameter):
    parameter.grad.mul_(0.1)


def mask_input(gradient):
    """The input does not grow."""
    return gradient * torch.tensor([1, 1, 0, 1, 0, 1.0])


EXACT = {
    "scale": ("head.weight", "register_hook", scale),
    "scale the accumulated": ("head.weight", "register_post_accumulate_grad_hook", scale_accumulated),
    "mask an axis that stays": ("inp.weight", "register_hook", mask_input),
    "replace what is not a number": ("head.weight", "register_hook", torch.nan_to_num),
}


@pytest.mark.parametrize("case", EXACT)
def test_hooks_on_gradients_are_carried(case, monkeypatch):
    name, method, hook = EXACT[case]
    run = started()
    getattr(run.model.get_parameter(name), method)(hook)
    with monkeypatch.context() as large:
        large.setattr(prove, "FLOAT64_BYTES", 0)
        assert apart(copied_run(run), mu.grow(run, lambda: Net(8), loss=loss)) < 1e-12
    wide = mu.grow(run, lambda: Net(8), loss=loss)
    assert wide.provenance["carried"][f"{name}.hooks"] == 1
    assert mu.verify(run, lambda: Net(8), step=step, loss=loss).holds
    assert mu.verify(run, wide, step=step).holds
    back = mu.narrow(wide, lambda: Net(4))
    assert apart(copied_run(run), back) < 1e-12
    assert apart(copied_run(run), wide) < 1e-12
    if case != "replace what is not a number":
        wide = mu.grow(run, lambda: Net(8), loss=loss)
        for parameter in wide.model.parameters():
            for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
                (hooks or {}).clear()
        assert apart(run, wide) > 1e-6, "control: without the hook"


def copied_run(run):
    """The run again: an exact growth by nothing, which carries its hooks."""
    return mu.grow(run, lambda: Net(4), loss=loss)


def mask_rows(gradient):
    return gradient * torch.tensor([1.0, 0, 1, 0])[: gradient.shape[0], None]


def mask_first(gradient):
    gradient = gradient.clone()
    gradient[0] = 0
    return gradient


def decay(parameter):
    parameter.grad.add_(parameter, alpha=0.1)


def sgd(parameter):
    parameter.data.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


INEXACT = {
    "mask of the base's shape": ("inp.weight", "register_hook", mask_rows),
    "mask one unit": ("inp.weight", "register_hook", mask_first),
    "clip by value": ("inp.weight", "register_hook", lambda gradient: gradient.clamp(-1, 1)),
    "clip by norm": ("inp.weight", "register_hook", lambda g: g / g.norm().clamp(min=1e-2)),
    "noise": ("inp.weight", "register_hook", lambda g: g + torch.randn_like(g)),
    "decay": ("inp.weight", "register_post_accumulate_grad_hook", decay),
    "step": ("inp.weight", "register_post_accumulate_grad_hook", sgd),
}


class Counted:
    """A loss that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model):
        self.calls += 1
        return loss(model)


@pytest.mark.parametrize("case", INEXACT)
def test_hooks_that_do_not_commute_with_growing_are_refused(case):
    name, method, hook = INEXACT[case]
    run, counted = started(), Counted()
    handle = getattr(run.model.get_parameter(name), method)(hook)
    error = refusal(lambda: mu.grow(run, lambda: Net(8), loss=counted), "model.hook_not_exact", where=name)
    assert f".{method}(" in error.faults[0].remedy
    # Before the proof; those two would be exact if the gradients of the weight had one unit at both widths.
    assert (counted.calls > 0) == (case in ("clip by value", "decay"))
    plan, counted = mu.infer_plan(run.model, lambda: Net(8)), Counted()
    refusal(lambda: mu.grow(run, lambda: Net(8), plan=plan, loss=counted), "model.hook_not_exact")
    assert counted.calls == 0, "a plan that is given shows them all"
    refusal(lambda: mu.verify(run, lambda: Net(8), step=step), "model.hook_not_exact", where=name)
    refusal(lambda: mu.upscale(run, lambda: Net(8), mu.SignalNoise(0.05), loss=loss), "model.hook_not_exact")
    handle.remove()  # what the refusal asks for
    wide = mu.grow(run, lambda: Net(8), loss=counted)
    assert counted.calls > 0, "control: the proof calls it"
    wide.model.get_parameter(name).register_hook(lambda gradient: gradient * 0)
    before = wide.model.get_parameter(name).detach().clone()
    step(wide, 0)
    assert torch.equal(wide.model.get_parameter(name), before)


STEPPED = []


def step_all(parameter):
    for optimizer in STEPPED:
        optimizer.step()


class Stepping:
    """Steps in a hook, as an object."""

    def __init__(self, optimizer):
        self.state = {"optimizers": [optimizer]}

    def __call__(self, parameter):
        self.state["optimizers"][0].step()

    def method(self, parameter):
        self(parameter)


HOLDING = {
    "weight": lambda run: lambda parameter: parameter.grad.add_(run.model.head.weight.sum() * 0),
    "its memory": lambda run: (lambda view: lambda p: p.grad.add_(0 * view.sum()))(
        run.model.inp.weight.detach()[0]
    ),
    "optimizer": lambda run: (lambda optimizer: lambda parameter: optimizer.step())(run.optimizer),
    "object": lambda run: Stepping(run.optimizer),
    "method": lambda run: Stepping(run.optimizer).method,
    "optimizers by parameter": lambda run: (lambda by: lambda parameter: by[parameter].step())(
        {p: torch.optim.SGD([p], lr=0.1) for p in run.model.parameters()}
    ),
    "global": lambda run: STEPPED.append(run.optimizer) or step_all,  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("case", HOLDING)
def test_hooks_that_hold_the_base_are_refused(case):
    run = started()
    weights = copy.deepcopy(run.model.state_dict())
    try:
        handle = run.model.head.bias.register_post_accumulate_grad_hook(HOLDING[case](run))
        counted = Counted()
        refusal(
            lambda: mu.grow(run, lambda: Net(8), loss=counted), "model.hook_holds_base", where="head.bias"
        )
        assert counted.calls == 0, "before the proof"
        if case != "its memory":  # a copy of the run has a copy of that
            refusal(
                lambda: mu.verify(run, lambda: Net(8), loss=loss), "model.hook_holds_base", where="head.bias"
            )
    finally:
        STEPPED.clear()
    assert all(torch.equal(weights[name], tensor) for name, tensor in run.model.state_dict().items())
    handle.remove()
    assert apart(run, mu.grow(run, lambda: Net(8), loss=loss)) < 1e-12


class Masked(Net):
    """Registers a hook on itself, which uses a mask that grows with it."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("mask", (torch.arange(width) % 2).double())
        self.inp.weight.register_hook(lambda gradient: gradient * self.mask[:, None])  # type: ignore[index]


def test_a_hook_that_the_factory_makes_is_the_factorys():
    torch.manual_seed(0)
    base = Masked(4).double()
    base.mask.copy_(torch.tensor([0, 1, 1, 0]))  # type: ignore[operator]
    run = mu.Run(base, torch.optim.SGD(base.parameters(), lr=0.5))
    wide = mu.grow(run, lambda: Masked(8), loss=loss)
    assert mu.verify(run, lambda: Masked(8), step=step).holds
    assert apart(run, wide) < 1e-12
    wide.model.mask.fill_(1)  # type: ignore[operator]
    assert apart(run, wide) > 1e-4, "control: the hook uses the mask of the wide model"
    base.inp.weight._backward_hooks.clear()  # type: ignore[union-attr]
    refusal(lambda: mu.grow(run, lambda: Masked(8), loss=loss), "model.hook_not_exact", where="inp.weight")


NORMS: list[float] = []


def note(gradient):
    NORMS.append(float(gradient.norm()))


def loud(gradient):
    print("printed")
    logging.getLogger("of a hook").error("logged")
    warnings.warn("warned", stacklevel=1)


@pytest.mark.parametrize("copies", [True, False], ids=["copies", "as it is"])
def test_what_hooks_print_is_not_seen_while_they_are_tried(copies, monkeypatch, capfd, caplog, recwarn):
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 2**28 if copies else 0)
    run = started()
    run.model.head.weight.register_hook(loud)
    run.model.head.weight.register_post_accumulate_grad_hook(loud)
    wide = mu.grow(run, lambda: Net(8), loss=loss)
    assert (capfd.readouterr().out, caplog.records, recwarn.list) == ("", [], [])
    step(wide, 0)
    assert (capfd.readouterr().out, len(caplog.records), len(recwarn)) == ("printed\n" * 2, 2, 1), "control"


class Locked:
    """Scales gradients and counts them, one thread at a time."""

    def __init__(self, lock, log=None):
        self.lock, self.log, self.count = lock, log, 0

    def __call__(self, gradient):
        with self.lock:
            self.count += 1
            return gradient * 0.1

    def accumulated(self, parameter):
        parameter.grad.copy_(self(parameter.grad))


@pytest.mark.parametrize("make", [threading.Lock, threading.RLock])
@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_holds_a_lock_is_carried(method, make):
    run, hook = started(), Locked(make())
    getattr(run.model.head.weight, method)(hook if method == "register_hook" else hook.accumulated)
    with hook.lock:  # trying it does not wait for a lock that is held
        wide = mu.grow(run, lambda: Net(8), loss=loss)
        assert mu.verify(run, lambda: Net(8), loss=loss).holds
    assert hook.count == 0
    assert apart(copied_run(run), wide) < 1e-12
    assert hook.count == 8, "both runs call it"


@pytest.mark.parametrize("method", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_that_cannot_be_copied_is_refused_for_that(method, tmp_path):
    run, counted = started(), Counted()
    with open(tmp_path / "log", "w") as log:
        hook = Locked(threading.Lock(), log)
        own = hook if method == "register_hook" else hook.accumulated
        handle = getattr(run.model.head.weight, method)(own)
        error = refusal(
            lambda: mu.grow(run, lambda: Net(8), loss=counted),
            "model.hook_cannot_be_tried",
            where="head.weight",
        )
        assert (error.codes, counted.calls) == (("model.hook_cannot_be_tried",), 0)
        assert f".{method}(" in error.faults[0].remedy
        refusal(lambda: mu.verify(run, lambda: Net(8), loss=loss), "model.cannot_be_copied")
        handle.remove()
        wide = mu.grow(run, lambda: Net(8), loss=loss)
        for grown in (run, wide):  # what the refusal asks for
            getattr(grown.model.get_parameter("head.weight"), method)(own)
        assert apart(run, wide) < 1e-12


def test_trying_a_hook_leaves_no_trace():
    run, seen = started(), []
    run.model.head.weight.register_hook(lambda gradient: seen.append(gradient.shape))
    run.model.head.weight.register_hook(seen.append)
    run.model.head.weight.register_hook(note)
    NORMS.clear()
    drawn = torch.get_rng_state()
    wide = mu.grow(run, lambda: Net(8), loss=loss)
    mu.verify(run, lambda: Net(8), step=step, steps=2)
    assert (len(seen), len(NORMS)) == (0, 0)
    assert torch.equal(drawn, torch.get_rng_state())
    for i, run in enumerate([wide, mu.add_noise(wide, mu.SignalNoise(0.01))], 1):
        step(run, 0)
        assert (len(seen), len(NORMS)) == (2 * i, i), "grown models call the hooks themselves"
    NORMS.clear()


def test_hooks_stay_where_no_width_changes():
    run = started()
    run.model.head.weight.register_hook(scale)
    run.model.head.weight.requires_grad_(False)
    wide = mu.grow(run, lambda: Net(8), loss=loss)
    noisy = mu.add_noise(wide, mu.SignalNoise(0.01))
    for grown in (wide, noisy):
        weight = grown.model.head.weight  # type: ignore[union-attr]
        assert not weight.requires_grad
        assert list(weight._backward_hooks.values()) == [scale]  # type: ignore[union-attr]
