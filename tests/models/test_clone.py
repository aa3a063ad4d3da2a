"""Copies of a model use their own modules, also in functions that the model holds."""

import copy
import functools
import threading
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused
from mupscale.models.clone import copied
from mupscale.models.float64 import lifted_casts

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))


class Closed(nn.Module):
    """A block that is called through functions which hold its modules; `kind` says how."""

    def __init__(self, width, kind):
        super().__init__()
        self.first, self.out = nn.Linear(6, width), nn.Linear(width, 3)
        self.mlp = nn.ModuleDict({"a": nn.Linear(width, width), "b": nn.Linear(width, width)})
        m: Any = self.mlp
        weight = m["b"].weight
        calls: dict[str, Any] = {
            "lambda": lambda x: m["b"](F.gelu(m["a"](x))),
            "default": lambda x, inner=m: inner["b"](F.gelu(inner["a"](x))),
            "partial": functools.partial(self.twofold, m),
            "method": self.through,
            "tensor": lambda x: F.linear(F.gelu(m["a"](x)), weight, m["b"].bias),
            "nested": functools.partial(lambda f, x: f(x), lambda x: m["b"](F.gelu(m["a"](x)))),
        }
        self.call = calls[kind]
        self.called = [self.call]

    @staticmethod
    def twofold(inner, x):
        return inner["b"](F.gelu(inner["a"](x)))

    def through(self, x):
        return self.twofold(self.mlp, x)

    def forward(self, x):
        h = self.first(x)
        return self.out(h + self.call(h) + self.called[0](h))


KINDS = ["lambda", "default", "partial", "method", "tensor", "nested"]


def loss(model):
    return model(X.to(model.first.weight)).square().mean()


def step(run, i):
    run.optimizer.zero_grad()
    value = loss(run.model)
    value.backward()
    run.optimizer.step()
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_computes_with_its_own_modules(kind):
    model = Closed(8, kind)
    twin = copied(model)
    loss(twin).backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in twin.parameters())
    assert torch.equal(loss(model), loss(twin))


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_closures_are_searched_widened_and_verified(kind):
    model = Closed(8, kind)
    model.eval()
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    random, hooks = torch.get_rng_state(), len(model._forward_pre_hooks)
    certificate = mu.verify(run, lambda: Closed(16, kind), step=step, steps=3)
    assert certificate.holds
    plan = mu.infer_plan(model, lambda: Closed(16, kind), loss=loss)
    assert plan.hash == certificate.plan_hash
    assert all(p.grad is None for p in model.parameters()), "nothing is left on the user's model"
    assert not any(m.training for m in model.modules())
    assert torch.equal(random, torch.get_rng_state())
    assert hooks == len(model._forward_pre_hooks)
    assert not run.optimizer.state
    wide = mu.grow(run, lambda: Closed(16, kind), prove=False).model
    assert float((loss(wide) - loss(model)).detach().abs()) < 1e-6


def test_functions_that_hold_nothing_of_the_model_are_shared():
    model = cast(Any, nn.Linear(2, 2))
    model.act = torch.tanh
    model.own = lambda x: x + 1
    assert copied(model).own is model.own


def test_values_kept_from_a_forward_and_generators_are_copied():
    model = cast(Any, nn.Linear(2, 2))
    model.last = model(torch.ones(1, 2))
    model.dice = torch.Generator().manual_seed(3)
    twin = cast(Any, copied(model))
    assert torch.equal(twin.last, model.last)
    assert twin.dice is not model.dice
    drawn = [torch.rand(1, generator=m.dice) for m in (model, twin)]
    assert torch.equal(*drawn)


def test_what_cannot_be_copied_is_refused():
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()  # type: ignore[assignment]
    with refused("model.cannot_be_copied"):
        copied(model)


def test_connections_between_ranks_are_shared_wherever_a_model_keeps_them():
    """Control: a connection by itself cannot be copied."""

    @dataclass
    class Groups:
        tensor: object

    make: Any = torch.distributed.ProcessGroup
    connection = make(0, 1)
    model: Any = nn.Linear(2, 2)
    model.groups = [Groups(connection)]
    twin: Any = copied(model)
    assert twin.groups[0] is not model.groups[0]
    assert twin.groups[0].tensor is connection
    with pytest.raises(TypeError):
        copy.deepcopy(connection)


@dataclass
class Sizes:
    """A configuration that refuses to name one size for all layers, as those of transformers with layers of unlike sizes do."""

    head: int = 8

    def __getattribute__(self, name):
        if name == "head":
            raise RuntimeError("it differs from layer to layer")
        return super().__getattribute__(name)


def test_a_copy_where_casts_are_lifted_looks_at_nothing_that_was_copied_before():
    model = nn.Sequential(nn.Linear(6, 2), nn.BatchNorm1d(2)).double()
    vars(model[0])["sizes"] = Sizes()
    with lifted_casts(model):
        twin: Any = copied(model)
    assert "head" in vars(twin[0].sizes)
    assert twin[1].running_mean is not model[1].running_mean
