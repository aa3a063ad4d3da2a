"""What a proof covers: both modes, the model that it is given, and the code that it was measured on."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mupscale as mu
from harness.refusals import refusal
from mupscale.models.fingerprint import code_fingerprint
from mupscale.proofs.modes import ModeProof
from mupscale.training.check import verify
from mupscale.training.grow import prove

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.stack([X[:, 0] * X[:, 1], X.sum(1).tanh(), X[:, 2] ** 2], 1)


class Net(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.norm = nn.Linear(6, n), nn.LayerNorm(n)
        self.middle, self.head = nn.Linear(n, n), nn.Linear(n, 3)
        self.double()

    def hidden(self, x: Tensor) -> Any:
        return self.middle(self.norm(self.inside(x)).relu()).relu()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


class Dropping(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(F.dropout(self.hidden(x), 0.3, self.training))


class Noisy(Net):
    """Noise as wide as the model, in train mode only."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden + 0.3 * torch.randn_like(hidden) if self.training else hidden)


class Penalised(Net):
    """A sum over the width, in train mode only."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + (self.inside(x).square().sum(1, True) if self.training else 0)


class PenalisedGradient(torch.autograd.Function):
    """Adds the gradient of a penalty and not its value, as DeepSeek's mixtures of experts do in train mode."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, penalty: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones((), dtype=grad.dtype)


class PenalisedBackward(Net):
    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return PenalisedGradient.apply(found, self.inside(x).square().sum()) if self.training else found


class Counting(Net):
    """A buffer that train mode alone writes, wrongly for another width; no loss of this call reads it."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(n, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.mean.copy_(self.inside(x).detach().mean(0) / self.mean.numel())
        return super().forward(x)


class NeedsTargets(Net):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            raise KeyError("targets")
        return super().forward(x)


class EvaluatedOtherwise(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + (0 if self.training else self.inside(x).square().sum(1, True))


def loss(model: nn.Module) -> Tensor:
    return F.mse_loss(model(X), Y)


def base(kind: Callable[[int], nn.Module], training: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return kind(4).train(training)


@cache
def proved(kind: Callable[[int], nn.Module]) -> mu.Plan:
    return mu.infer_plan(base(kind, training=False), kind(8), loss=loss)


def widened(
    kind: Callable[[int], nn.Module], training: bool, path: str, of: Any = loss
) -> tuple[mu.Run, list[str]]:
    """A run that was widened with a loss on one of the three ways of a proof, and the warnings."""
    plan = None if path == "search" else proved(Counting if kind is Counting else Net)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if path == "large":
            patch.setattr(prove, "FLOAT64_BYTES", 0)
        wide = mu.grow(base(kind, training), lambda: kind(8), plan=plan, loss=of)
    return wide, [str(warning.message) for warning in caught]


def kinds(wide: mu.Run) -> dict[str, str]:
    """By mode what the proof of a run says of it."""
    return {name: mode["kind"] for name, mode in wide.provenance["proof"]["modes"].items()}


PATHS = ("search", "given", "large")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("training", [True, False])
def test_both_modes_are_measured_and_exact_ones_raise_no_alarm(training: bool, path: str):
    wide, caught = widened(Net, training, path)
    exact = {"kind": "exact", "what": ""}
    assert wide.provenance["proof"]["modes"] == {"train": exact, "eval": exact}
    assert not caught
    assert wide.plan is not None
    assert not wide.plan.needs
    assert wide.model.training is training


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_noted_in_either_mode(training: bool, path: str):
    wide, caught = widened(Dropping, training, path)
    assert wide.plan is not None
    assert any("no dropout" in need for need in wide.plan.needs)
    assert len(caught) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", [Noisy, Penalised, PenalisedBackward, Counting, NeedsTargets])
def test_what_train_mode_alone_does_is_named_when_growing_in_eval_mode(kind: type[nn.Module], path: str):
    wide, caught = widened(kind, False, path)
    assert kinds(wide) == {"eval": "exact", "train": "unmeasured" if kind is NeedsTargets else "deviates"}
    assert len(caught) == 1
    assert wide.plan is not None
    assert [need.kind for need in wide.plan.needs] == ["eval mode"]
    assert wide.provenance["proof"]["modes"]["train"]["what"] in next(iter(wide.plan.needs))
    assert mu.Plan.from_json(wide.plan.to_json()).needs == wide.plan.needs


def test_the_same_is_refused_when_growing_in_train_mode():
    for kind in (Noisy, Penalised, PenalisedBackward):
        refusal(lambda: widened(kind, True, "given"), "proof.run_deviates")  # noqa: B023


@pytest.mark.parametrize("path", PATHS)
def test_what_eval_mode_alone_does_is_in_the_record_and_no_alarm(path: str):
    wide, caught = widened(EvaluatedOtherwise, True, path)
    assert kinds(wide) == {"train": "exact", "eval": "deviates"}
    assert not caught


def evaluated(model: nn.Module) -> Tensor:
    return loss(model.eval())


def evaluated_and_put_back(model: nn.Module) -> Tensor:
    try:
        return loss(model.eval())
    finally:
        model.train()


def evaluated_by_a_part(model: Any) -> Tensor:
    """Through another method than forward, and with its mode put back."""
    before = model.training
    try:
        return F.mse_loss(model.eval().head(model.hidden(X)), Y)
    finally:
        model.train(before)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("of", [evaluated, evaluated_and_put_back, evaluated_by_a_part])
def test_a_loss_that_sets_the_mode_covers_that_mode_alone(of: Any, training: bool, path: str):
    wide, caught = widened(Noisy, training, path, of=of)
    assert kinds(wide) == {"eval": "exact", "train": "unmeasured"}
    assert len(caught) == 1
    assert wide.model.training is training


def test_a_loss_that_evaluates_beside_it_covers_train_mode():
    def with_a_look(model: nn.Module) -> Tensor:
        with torch.no_grad():
            evaluated_and_put_back(model)
        return loss(model)

    wide, caught = widened(Net, True, "given", of=with_a_look)
    assert kinds(wide)["train"] == "exact"
    assert not caught


class FrozenNorm(Net):
    """A batch norm that fine-tuning keeps in eval mode; its statistics in train mode are those of no batch at all."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.frozen = nn.BatchNorm1d(n).double()

    def forward(self, x: Tensor) -> Any:
        if self.frozen.training:
            raise RuntimeError("the norm is frozen")
        return self.head(self.frozen(self.hidden(x)))


@pytest.mark.parametrize("path", ["search", "large"])
def test_modules_in_a_mode_of_their_own_stay_in_it(path: str, monkeypatch: pytest.MonkeyPatch):
    if path == "large":
        monkeypatch.setattr(prove, "FLOAT64_BYTES", 0)
    model: Any = base(FrozenNorm)
    model.frozen.eval()
    wide = mu.grow(model, lambda: FrozenNorm(8), loss=loss)
    assert kinds(wide) == {"train": "exact", "eval": "exact"}
    modes = wide.provenance["proof"]["modes"]
    assert modes["train"]["what"], "it names the modules in another mode"
    assert not modes["eval"]["what"]
    grown: Any
    for grown in (model, wide.model):
        assert (grown.training, grown.frozen.training) == (True, False)


def test_verify_says_which_modes_it_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "_SEARCHED", 0)  # no search after the failure below
    both = mu.verify(base(Net, False), lambda: Net(8), loss=loss)
    assert both.modes == {"eval": ModeProof("exact"), "train": ModeProof("exact")}
    one = mu.verify(base(Penalised, False), lambda: Penalised(8), loss=loss)
    assert one.holds
    assert one.modes["train"].kind == "deviates"
    assert str(one.modes["train"]) in str(one)
    assert not mu.verify(base(Penalised), lambda: Penalised(8), loss=loss).holds


def step(run: mu.Run, i: int) -> Tensor:
    found = loss(run.model)
    run.optimizer.zero_grad()
    found.backward()
    run.optimizer.step()
    return found


def evaluated_step(run: mu.Run, i: int) -> Tensor:
    run.model.eval()
    try:
        return step(run, i)
    finally:
        run.model.train()


def test_verify_with_steps_names_the_mode_of_the_steps():
    for training, of, measured, other in (
        (True, step, "train", "eval"),
        (False, step, "eval", "train"),
        (True, evaluated_step, "eval", "train"),
    ):
        model = base(Net, training)
        run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.01))
        modes = mu.verify(run, lambda: Net(8), step=of, steps=2).modes
        assert {name: mode.kind for name, mode in modes.items()} == {measured: "exact", other: "unmeasured"}


class Later(Net):
    """A sum over the width from the 30th call on."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x) + (self.inside(x).square().sum(1, True) if self.calls > 30 else 0)


def test_what_begins_later_is_seen_by_steps_that_reach_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verify, "_SEARCHED", 0)
    model: Any = base(Later)
    run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert mu.grow(run, lambda: Later(8), loss=loss)
    model.calls = 0
    for steps, holds in ((5, True), (35, False)):
        assert mu.verify(run, lambda: Later(8), step=step, steps=steps).holds is holds


class Rooted(nn.Module):
    """Multiplies by the root of its width, so that shapes suggest a wrong plan."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.out, self.n = nn.Linear(6, n).double(), nn.Linear(n, 3).double(), n

    def forward(self, x: Tensor) -> Any:
        return self.out((self.inside(x) * self.n**0.5).tanh())


def test_a_loss_of_another_model_is_refused_by_a_search_and_with_a_plan():
    model = base(Rooted)
    for plan in (None, proved(Rooted)):
        refusal(
            lambda: mu.grow(model, lambda: Rooted(8), plan=plan, loss=lambda other: loss(model)),  # noqa: B023
            "argument.loss_without_gradient",
        )
        assert mu.grow(model, lambda: Rooted(8), plan=plan, loss=lambda other: loss(other))


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.norm(self.inside(x))
        return self.head(checkpoint(self.middle, hidden, use_reentrant=True).relu())


class CheckpointedCast(Net):
    """A norm in float32 inside a checkpoint, as large language models have it."""

    def forward(self, x: Tensor) -> Any:
        def normed(hidden: Tensor) -> Any:
            return self.norm(hidden.float().square()).to(hidden.dtype)

        return self.head(self.middle(checkpoint(normed, self.inside(x), use_reentrant=False)).relu())


@pytest.mark.parametrize("path", ["search", "given"])
def test_casts_are_lifted_where_a_checkpoint_computes_again(path: str):
    autograd: Any = torch.autograd
    run_backward = autograd._engine_run_backward
    wide, _ = widened(CheckpointedCast, True, path)
    assert wide.provenance["proof"]["worst"] < 1e-12
    assert autograd._engine_run_backward is run_backward
    model = base(CheckpointedCast)
    run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert mu.verify(run, lambda: CheckpointedCast(8), step=step, steps=2).worst < 1e-12
    # The nearest wrong thing: a factor inside the checkpoint.
    plan = proved(Net).fold("norm.weight", "101/100")
    refusal(lambda: mu.grow(model, lambda: CheckpointedCast(8), plan=plan, loss=loss), "proof.run_deviates")


@pytest.mark.parametrize("path", PATHS)
def test_reentrant_checkpoints_are_measured(path: str):
    stock = torch.utils.checkpoint.CheckpointFunction
    wide, _ = widened(Checkpointed, True, path)
    assert wide.provenance["proof"]["worst"] < 1e-12
    assert torch.utils.checkpoint.CheckpointFunction is stock
    loss(wide.model).backward()
    narrow: Any = base(Checkpointed)
    loss(narrow).backward()
    grown: Any = wide.model
    expected = narrow.middle.weight.grad.repeat_interleave(2, 0).repeat_interleave(2, 1) / 2
    assert torch.allclose(grown.middle.weight.grad, expected, rtol=1e-9)


def test_a_wrong_factor_behind_a_reentrant_checkpoint_is_seen():
    plan = proved(Net).fold("middle.weight", "101/100")
    refusal(
        lambda: mu.grow(base(Checkpointed), lambda: Checkpointed(8), plan=plan, loss=loss),
        "proof.run_deviates",
    )


def test_a_loss_that_calls_backward_is_refused_before_anything_moves():
    model = base(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def trained(_: nn.Module) -> Tensor:
        found = loss(model)
        found.backward()
        optimizer.step()
        return found

    def returned(other: nn.Module) -> Tensor:
        found = loss(other)
        found.backward()
        return found

    for of in (trained, returned):
        refusal(lambda: mu.grow(model, lambda: Net(8), loss=of), "argument.loss_calls_backward")  # noqa: B023
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert mu.grow(model, lambda: Net(8), loss=lambda model: loss(model))


class Divided(Net):
    """The shapes of `Net` and another constant."""

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x) / self.middle.out_features**0.5)


def test_a_plan_that_was_proved_on_other_code_warns_and_is_proved_again_with_a_loss():
    plan = mu.Plan.from_json(proved(Net).to_json())
    assert plan.code == proved(Net).code
    with pytest.warns(UserWarning, match=r"Net \(.*Divided \(") as caught:
        wide = mu.grow(base(Divided), lambda: Divided(8), plan=plan)
    assert len(caught) == 1
    assert wide.provenance["proof"]["changed"] in str(caught[0].message)
    refusal(lambda: mu.grow(base(Divided), lambda: Divided(8), plan=plan, loss=loss), "proof.run_deviates")
    with warnings.catch_warnings(action="error"):
        again = mu.grow(base(Divided), lambda: Divided(8), loss=loss).plan
        assert again is not None
        mu.grow(base(Divided), lambda: Divided(8), plan=again)
        mu.grow(base(Net), lambda: Net(8), plan=plan)


def test_the_fingerprint_is_no_part_of_a_plan_s_identity_and_old_plans_have_none():
    plan = proved(Net)
    old = mu.Plan.of_json(plan.as_json())
    assert plan.code
    assert not old.code
    assert (old, old.hash) == (plan, plan.hash)
    assert "code" not in plan.as_json(), "which is what jobs and checkpoints hold"
    with warnings.catch_warnings(action="error"):
        mu.grow(base(Divided), lambda: Divided(8), plan=old)
    assert not plan.fold("head.weight", 2).code
    assert plan.then(mu.plans.plan_between(Net, 8, 16, loss=loss)).code == plan.code


SOURCE = """
from torch import nn
LIMIT = 2

def helper(x):
    return x in {"d", "e", "f"} or x * 2

class Net(nn.Module):
    def forward(self, x):
        return helper(x) + 1
"""


def code_in(source: str) -> dict[str, str]:
    made: dict[str, Any] = {"__name__": "x"}
    exec(source, made)
    return code_fingerprint(made["Net"]())


def test_a_fingerprint_follows_what_code_does_and_not_how_it_is_written():
    known = code_in(SOURCE)
    for same in (
        SOURCE.replace("    def forward", "    # why\n\n    def forward"),
        SOURCE.replace("(self, x):\n", '(self, x):\n        """What it does."""\n'),
        SOURCE.replace("return helper", "return  \\\n helper"),
        SOURCE + "\n\nclass Other(nn.Module):\n    pass\n",
    ):
        assert code_in(same) == known
    for other in (
        SOURCE.replace("+ 1", "+ 2"),
        SOURCE.replace("x * 2", "x / 2"),
        SOURCE.replace('"f"', '"g"'),
        SOURCE.replace("forward", "step"),
        SOURCE + "\n    def more(self):\n        return 1\n",
        SOURCE.replace("return helper(x) + 1", "return [helper(y) + 2 for y in x]"),
    ):
        assert code_in(other) != known


def test_a_fingerprint_is_the_same_in_another_process():
    program = f"from mupscale.models.fingerprint import code_fingerprint\nmade = {{'__name__': 'x'}}\nexec({SOURCE!r}, made)\n"
    program += "print(code_fingerprint(made['Net']())['Net'])"
    seeds = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert seeds[0].strip() == seeds[1].strip() == code_in(SOURCE)["Net"]
