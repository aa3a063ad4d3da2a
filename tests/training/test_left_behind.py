"""What hangs on a run and is no tensor: carried, named in the provenance, warned of where training changes, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, SequentialLR

import mupscale as mu
from harness.refusals import refusal, refused

EXACT, SEEN = 1e-6, 1e-4
"""Losses of a float32 run and of its wide one agree to the first; what is left behind changes them by more than the second."""


class Net(nn.Module):
    def __init__(self, n: int, p: float = 0.0, eps: float = 1e-5) -> None:
        super().__init__()
        self.inside, self.norm, self.drop = nn.Linear(6, n), nn.LayerNorm(n, eps=eps), nn.Dropout(p)
        self.middle, self.out = nn.Linear(n, n), nn.Linear(n, 3)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.middle(self.drop(self.norm(self.inside(x)).relu())).relu())


def loss(model: nn.Module, seed: int = 99) -> Tensor:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(seed))
    return F.mse_loss(model(x), torch.stack([x[:, 0] * x[:, 1], x.sum(1).tanh(), x[:, 2] ** 2], 1))


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def step(run: mu.Run, i: int) -> float:
    run.optimizer.zero_grad()
    value = loss(run.model, i)
    value.backward()
    run.optimizer.step()
    for scheduler in run.schedulers:
        scheduler.step()
    return float(value.detach())


def trained(make: Callable[[int], nn.Module] = Net, steps: int = 4, optimizer: Any = adamw) -> mu.Run:
    torch.manual_seed(0)
    model = make(4)
    run = mu.Run(model, optimizer(model))
    for i in range(steps):
        step(run, i)
    return run


def widened(run: mu.Run, make: Callable[[int], nn.Module] = Net) -> mu.Run:
    return mu.grow(run, lambda: make(8), loss=loss)


def gap(run: mu.Run, wide: mu.Run, steps: int = 8) -> float:
    return max(abs(step(run, i) - step(wide, i)) for i in range(100, 100 + steps))


@contextmanager
def warned(*places: str) -> Iterator[None]:
    """One warning that names every place."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    [one] = caught
    assert all(place in str(one.message) for place in places), one.message
    assert one.filename == __file__, "it points at the user's line"


def counting(kind: str) -> Callable[[int], nn.Module]:
    """A model whose forward changes after 60 calls, which it counts in one way."""

    class Counting(Net):
        def __init__(self, n: int) -> None:
            super().__init__(n)
            self.t: Any = {"zero": 0, "one": 1, "dict": {"t": 0}, "space": SimpleNamespace(t=0)}[kind]

        def forward(self, x: Tensor) -> Any:
            if kind == "dict":
                self.t["t"] += self.training
                count = self.t["t"]
            elif kind == "space":
                self.t.t += self.training
                count = self.t.t
            else:
                self.t += self.training
                count = self.t
            return super().forward(x) * (0.5 if count > 12 else 1)

    return Counting


@pytest.mark.parametrize("kind", ["zero", "one", "dict", "space"])
def test_counters_of_a_forward_go_on(kind: str):
    make = counting(kind)
    run = trained(make, 8)
    wide = widened(run, make)
    assert ("t" if kind in ("zero", "one") else "t.t") in wide.provenance["carried"]
    other = widened(run, make)
    other.model.t = make(4).t
    torch.testing.assert_close(step(other, 100), step(wide, 100))
    control = [step(other, i) for i in range(101, 106)]
    assert (
        max(abs(a - b) for a, b in zip(control, [step(wide, i) for i in range(101, 106)], strict=True)) > SEEN
    )
    assert gap(trained(make, 8), widened(trained(make, 8), make)) < EXACT


def test_gradients_of_micro_batches_go_on():
    run = trained()
    for parameter in run.model.parameters():
        parameter.grad = None
    loss(run.model, 50).backward()
    wide, control = widened(run), widened(run)
    assert wide.provenance["carried"] == {"gradients": 8}
    control.optimizer.zero_grad()
    ends = []
    for one in (run, wide, control):
        loss(one.model, 51).backward()
        one.optimizer.step()
        ends.append(float(loss(one.model).detach()))
    assert abs(ends[0] - ends[1]) < EXACT < SEEN < abs(ends[0] - ends[2])
    back = mu.narrow(wide, lambda: Net(4))
    for mine, other in zip(run.model.parameters(), back.model.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_setting_of_the_factory_is_kept_and_said():
    with warned("drop.p"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "growing is exact with no dropout")
        wide = mu.grow(Net(4, 0.1), lambda: Net(8, 0.2), loss=loss)
    assert wide.model.drop.p == 0.2  # type: ignore[union-attr]
    assert list(wide.provenance["named"]) == ["drop.p"]
    refusal(
        lambda: mu.grow(Net(4, eps=0.3), lambda: Net(8), loss=loss),
        "search.no_exact_plan",
        "proof.attribute_not_carried",
        where="norm.eps",
    )
    assert mu.grow(Net(4, eps=0.3), lambda: Net(8, eps=0.3), loss=loss), "the remedy"


def test_a_scheduler_that_is_not_part_of_the_run_is_said():
    run = trained()
    scheduler = CosineAnnealingLR(run.optimizer, 12)
    with warned("optimizer, scheduler"):
        wide = widened(run)
    assert "initial_lr" not in wide.optimizer.param_groups[0], "a new scheduler starts from the rate of now"
    given = mu.Run(run.model, run.optimizer, scheduler)
    assert gap(given, widened(given)) < EXACT, "the remedy, which says nothing"


def test_a_method_that_was_replaced_on_the_optimizer_is_said_and_not_verified():
    def every_second_(optimizer: Optimizer) -> None:
        plain, calls = optimizer.step, iter(range(100))

        def patched(self: Optimizer, *args: Any) -> Any:
            return plain(*args) if next(calls) % 2 else None

        optimizer.step = MethodType(patched, optimizer)  # type: ignore[method-assign]

    def unproved(run: mu.Run) -> None:
        mu.verify(run, lambda: Net(8), step=lambda r, i: step(r, i), steps=2)

    for scheduled in (False, True):
        run = trained()
        every_second_(run.optimizer)
        if scheduled:  # torch's scheduler wraps the patched step
            run = mu.Run(run.model, run.optimizer, LambdaLR(run.optimizer, lambda i: 0.9**i))
        refusal(partial(unproved, run), "run.has_patched_methods", where="step")
        with warned("optimizer.step"):
            wide = widened(run)
        every_second_(wide.optimizer)
        assert gap(run, wide) < EXACT, "the remedy"
    run = trained()
    run = mu.Run(run.model, run.optimizer, LambdaLR(run.optimizer, lambda i: 0.9**i))
    assert gap(run, widened(run)) < EXACT, "control: a scheduler's own wrapper is no patch"


def test_step_hooks_are_said_and_work_on_the_wide_optimizer():
    def hook(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    run = trained(optimizer=lambda model: SGD(model.parameters(), lr=0.1))
    run.optimizer.register_step_post_hook(hook)
    with warned("optimizer, step hooks"):
        wide = widened(run)
    with warned("optimizer, step hooks"):
        control = widened(run)
    wide.optimizer.register_step_post_hook(hook)
    assert gap(run, wide, 4) < EXACT, "the remedy"
    assert gap(wide, control, 4) > SEEN, "control"


READ: dict[str, Any] = {}


def test_a_function_of_a_schedule_that_reads_the_base_is_refused():
    def at(run: mu.Run, function: Callable[[int], float]) -> mu.Run:
        return mu.Run(run.model, run.optimizer, LambdaLR(run.optimizer, function))

    class Held:
        def __init__(self, run: mu.Run) -> None:
            self.groups = run.optimizer.param_groups

        def __call__(self, i: int) -> float:
            return 0.5 if self.groups[0]["lr"] > 6e-3 else 1.0

    run = trained()
    READ["optimizer"] = run.optimizer
    functions: list[Any] = [
        lambda i, o=run.optimizer: 0.5 if o.param_groups[0]["lr"] > 6e-3 else 1.0,
        lambda i: 1 / (1 + float(run.model.out.weight.detach().norm())),  # type: ignore[operator, union-attr]
        lambda i: 0.5 if READ["optimizer"].param_groups[0]["lr"] > 6e-3 else 1.0,
        Held(run),
    ]
    for function in functions:
        with refused("schedule.reads_base", where="LambdaLR"):
            widened(at(run, function))
    plain = at(trained(), lambda i: 0.9**i)
    assert gap(plain, widened(plain)) < EXACT, "the remedy: a function of the step alone"


def test_hooks_and_methods_of_modules_are_measured_and_named():
    seen: list[int] = []
    run = trained()
    run.model.middle.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[union-attr]
    wide = widened(run)
    assert list(wide.provenance["named"]) == ["middle._forward_hooks"], "it looks on only: no warning"
    plain = run.model.forward
    run.model.forward = lambda x: plain(x).sin()
    refusal(lambda: widened(run), "proof.attribute_not_carried", where="forward")

    def factory(n: int) -> nn.Module:
        model = Net(n)
        own = model.forward
        model.middle.register_forward_hook(lambda *_: seen.append(1))
        model.forward = lambda x: own(x).sin()  # type: ignore[method-assign]
        return model

    assert not widened(run, factory).provenance.get("named"), "the remedy"
    with warned("middle._forward_hooks", "forward"):
        mu.grow(run, lambda: Net(8), plan=wide.plan, prove=False)


def softsign(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, n), nn.Softsign(), nn.Linear(n, 3))


def test_patched_classes_of_torch_and_hooks_of_all_modules_decide_nothing(monkeypatch: pytest.MonkeyPatch):
    base, make = softsign(4), lambda: softsign(8)
    assert mu.grow(base, make).provenance["proof"]["by"] == "modules", "control"
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        refusal(lambda: mu.grow(base, make), "proof.missing")
    finally:
        handle.remove()
    monkeypatch.setattr(nn.Softsign, "forward", lambda self, x: F.softsign(x) / x.shape[-1] ** 0.5)
    refusal(lambda: mu.grow(base, make), "proof.missing", where="Softsign")
    wide = mu.grow(base, make, loss=loss)
    torch.testing.assert_close(loss(wide.model), loss(base), msg="the remedy: it is measured")


class Counting(Net):
    """Counts its calls, and keeps a log of dicts."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.calls, self.log = 0, list[dict[str, float]]()

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


@pytest.mark.parametrize("largest", [2**28, 0])
def test_a_proof_leaves_counts_of_calls_alone_and_logs_go_along(largest, monkeypatch):
    monkeypatch.setattr("mupscale.training.grow.prove.FLOAT64_BYTES", largest)
    base = Counting(4)
    loss(base)
    base.log.append({"step": 1, "loss": 0.5})
    wide: Any = mu.upscale(base, lambda: Counting(8), mu.SignalNoise(0.1), loss=loss).model
    assert (base.calls, wide.calls) == (1, 1)
    assert wide.log == base.log
    wide.log.clear()
    assert base.log, "control: it is a copy"


def test_a_generator_that_modules_share_is_shared_in_the_wide_model():
    def make(n: int) -> nn.Module:
        model: Any = nn.Sequential(nn.Linear(6, n), nn.Linear(n, 3))
        model[0].source = model[1].source = torch.Generator().manual_seed(0)
        return model  # type: ignore[no-any-return]

    base: Any = make(4)
    torch.rand(3, generator=base[0].source)
    wide: Any = mu.grow(base, lambda: make(8), loss=loss).model
    assert wide[0].source is wide[1].source
    assert wide[0].source is not base[0].source
    assert torch.equal(torch.rand(2, generator=wide[0].source), torch.rand(2, generator=base[0].source))


def test_a_lambda_that_asks_the_trainer_for_a_number_is_carried_and_one_that_asks_for_the_optimizer_is_refused():
    class Trainer:
        def __init__(self, key: str) -> None:
            self.model = Net(4)
            self.opt = adamw(self.model)
            self.warmup = 10
            asked = {
                "warmup": lambda t: min(1.0, (t + 1) / self.warmup),
                "opt": lambda t: 1 / (1 + len(self.opt.state)),
            }
            self.scheduler = LambdaLR(self.opt, asked[key])

        @property
        def run(self) -> mu.Run:
            return mu.Run(self.model, self.opt, self.scheduler)

    mu.grow(Trainer("warmup").run, lambda: Net(8), loss=loss)
    refusal(lambda: mu.grow(Trainer("opt").run, lambda: Net(8), loss=loss), "schedule.reads_base")


def test_a_cosine_of_ones_own_stays_one_in_units():
    class Warm(CosineAnnealingLR):
        def get_lr(self) -> list[float]:  # type: ignore[override]
            return [base * min(1, (self.last_epoch + 1) / 50) for base in self.base_lrs]  # type: ignore[misc]

    model = Net(4)
    optimizer = adamw(model)
    mu.step_in_units_(optimizer, mu.Run(model))
    run = mu.Run(model, optimizer, Warm(optimizer, 10, eta_min=1e-4))
    wide = mu.grow(run, lambda: Net(8), loss=loss)
    assert type(wide.scheduler) is Warm
    for part in (*run.optimizers, *run.schedulers, *wide.optimizers, *wide.schedulers):
        part.step()
    assert set(wide.scheduler.get_last_lr()) == set(run.scheduler.get_last_lr())


def test_a_cosine_inside_of_a_sequence_is_resumed_with_its_floors():
    def schedule(optimizer: Optimizer) -> Any:
        parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 9, eta_min=1e-3)]
        return SequentialLR(optimizer, parts, milestones=[3])

    run = trained(steps=0)
    wide = mu.grow(mu.Run(run.model, run.optimizer, schedule(run.optimizer)), lambda: Net(8), loss=loss)
    saved = wide.optimizer.state_dict(), wide.scheduler.state_dict()
    optimizer = AdamW(mu.trainers.groups_for(wide.model, saved[0]))
    scheduler = mu.trainers.load_scheduler_(schedule(optimizer), saved[1])
    optimizer.load_state_dict(saved[0])
    for _ in range(8):
        for part in (optimizer, scheduler, wide.optimizer, wide.scheduler):
            part.step()
        assert scheduler.get_last_lr() == wide.scheduler.get_last_lr()


def calls_of(model: Any, of: Callable[[nn.Module], Tensor]) -> int:
    """How often one training step computes the first block's feed-forward layer."""
    calls: list[int] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    of(model).backward()
    handle.remove()
    return len(calls)


@pytest.mark.filterwarnings("ignore:.*checkpointing.*:FutureWarning")
def test_gradient_checkpointing_of_transformers_is_carried_or_named():
    transformers = pytest.importorskip("transformers")
    ids = torch.arange(16).view(2, 8)

    def make(n: int) -> Any:
        sizes = {"hidden_size": n, "intermediate_size": 2 * n, "num_attention_heads": n // 8, "head_dim": 8}
        config = transformers.LlamaConfig(
            **sizes, num_key_value_heads=n // 8, num_hidden_layers=2, vocab_size=16
        )
        return transformers.LlamaForCausalLM(config)

    def of(model: Any) -> Any:
        return model(input_ids=ids, labels=ids, use_cache=False).loss

    def own(function: Any, *args: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    on, off, ones_own = make(16), make(16), make(16)
    on.gradient_checkpointing_enable()
    ones_own._set_gradient_checkpointing(gradient_checkpointing_func=own)
    plan = mu.plans.plan_between(make, 16, 32, loss=of)
    for model, carried, named, calls in (
        (on, {"gradient_checkpointing"}, set(), 2),
        (ones_own, set(), {"gradient_checkpointing"}, 1),
        (off, set(), set(), 1),
    ):
        for given in ({"loss": of}, {"plan": plan}):
            with warnings.catch_warnings(action="error"):
                wide = mu.grow(model, lambda: make(32), **given)
            assert set(wide.provenance.get("carried", {})) == carried
            assert set(wide.provenance.get("named", {})) == named
            assert calls_of(wide.model, of) == calls
    grown: Any = wide.model
    grown.gradient_checkpointing_enable()
    assert calls_of(grown, of) == 2


class Normed(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.norm, self.out = nn.Linear(3, n), nn.RMSNorm(n), nn.Linear(n, 1)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.norm(self.inside(x)))


@pytest.mark.parametrize(
    ("dtype", "times", "warned"), [("bfloat16", 2, True), ("bfloat16", 4, False), ("float32", 2, False)]
)
def test_weights_of_16_bits_times_an_irrational_factor_are_warned_of(dtype: str, times: int, warned: bool):
    kind = getattr(torch, dtype)
    base, x = Normed(8).to(kind), torch.randn(16, 3)

    def loss(model: nn.Module) -> Any:
        return (model(x.to(next(model.parameters()).dtype)) - 1).square().mean()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wide = mu.upscale(base, lambda: Normed(8 * times).to(kind), loss=loss)
    assert any("inside.weight" in str(warning.message) for warning in caught) == warned
    same = torch.equal(loss(wide.model), loss(base))
    assert same or dtype == "float32" or warned, "without a warning the loss stays"
