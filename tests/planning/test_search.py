"""The search finds what is one power of k, in code that shapes do not show, and says where it finds nothing."""

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.planning.search.absorb import _together
from mupscale.planning.search.not_found import NoPlanError
from mupscale.plans.direction import Direction
from mupscale.plans.wide_model import fill_model_
from mupscale.proofs.identity import gradient_identity
from mupscale.rules import Scale

Q, IQ, H, IH = "2^(-1/4)", "2^(1/4)", "2^(-1/2)", "2^(1/2)"


class Net(nn.Module):
    """Modules by name, and a forward."""

    def __init__(self, forward: Callable[..., Any], **modules: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.go = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.go(self, x)


def heads(t: torch.Tensor, n: int) -> Any:
    return t.unflatten(-1, (n, -1)).transpose(1, 2)


def joined(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(1, 2).flatten(2)


def fused(n: int) -> nn.Module:
    """minGPT's attention with two heads."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.e(x)
        q, k, v = (heads(t, 2) for t in m.qkv(x).chunk(3, -1))
        return m.o(x + m.proj(joined(F.scaled_dot_product_attention(q, k, v))))

    layers = {"qkv": nn.Linear(n, 3 * n), "proj": nn.Linear(n, n), "o": nn.Linear(n, 3)}
    return Net(forward, e=nn.Linear(4, n), **layers)


def separate(n: int) -> nn.Module:
    """Attention by hand with one head and 1/sqrt(width)."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.e(x)
        return m.o((m.q(x) @ m.k(x).mT / math.sqrt(n)).softmax(-1) @ m.v(x))

    layers = {name: nn.Linear(n, n) for name in "qkv"}
    return Net(forward, e=nn.Linear(4, n), **layers, o=nn.Linear(n, 3))


def normed(n: int) -> nn.Module:
    """Attention with normalised queries and keys, head size without an attribute."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.e(x)
        q, k, v = m.qn(heads(m.q(x), 2)), m.kn(heads(m.k(x), 2)), heads(m.v(x), 2)
        return m.o(joined(F.scaled_dot_product_attention(q, k, v)))

    layers = {name: nn.Linear(n, n) for name in "qkv"}
    norms = {name: nn.RMSNorm(n // 2, eps=1e-6) for name in ("qn", "kn")}
    return Net(forward, e=nn.Linear(4, n), **layers, **norms, o=nn.Linear(n, 3))


def fixed_size(n: int) -> nn.Module:
    """Heads of four that grow in number, without an attribute."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.e(x)
        q, k, v = (heads(layer(x), n // 4) for layer in (m.q, m.k, m.v))
        return m.o(m.p(joined(F.scaled_dot_product_attention(q, k, v))))

    layers = {name: nn.Linear(n, n) for name in "qkvp"}
    return Net(forward, e=nn.Linear(4, n), **layers, o=nn.Linear(n, 3))


def towers(n: int) -> nn.Module:
    def tower() -> nn.Module:
        return nn.Sequential(nn.Linear(4, n), nn.GELU(), nn.Linear(n, n))

    return Net(lambda m, x: m.a(x) @ m.b(x.flip(-1)).mT, a=tower(), b=tower())


def functional_tie(n: int) -> nn.Module:
    """Logits are h @ embedding.weight.T, and embeddings are multiplied by sqrt(d)."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        ids = x[..., 0].abs().mul(3).long() % 5
        return m.n(F.gelu(m.l(m.e(ids) * n**0.5 + m.p(ids)))) @ m.e.weight.t()

    tables = {name: nn.Embedding(5, n) for name in "ep"}
    return Net(forward, **tables, l=nn.Linear(n, n), n=nn.LayerNorm(n))


class Equalised(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight / math.sqrt(self.in_features), self.bias)


def generator(n: int) -> nn.Module:
    """DCGAN: a linear layer, read as channels of 2 x 2 pixels; then a pixel shuffle."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.o(F.pixel_shuffle(m.c(m.f(x[:, 0]).view(-1, n, 2, 2)), 2).tanh())

    return Net(forward, f=nn.Linear(4, 4 * n), c=nn.Conv2d(n, 4 * n, 1), o=nn.Conv2d(n, 2, 1))


def flat(n: int) -> nn.Module:
    """The flattened size is also the hidden size: two tensors write one size in two layouts."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        return m.o(F.relu(m.h(F.relu(m.c(x[:, None])).flatten(1))))

    return Net(forward, c=nn.Conv2d(1, n, 3), h=nn.Linear(6 * n, 6 * n), o=nn.Linear(6 * n, 3))


def shuffled(n: int) -> nn.Module:
    """Channel shuffle between two grouped layers."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = m.a(F.relu(m.c(x.mT)))
        x = x.view(len(x), 2, n // 2, -1).transpose(1, 2).reshape(len(x), n, -1)
        return m.o(F.relu(m.b(x)).mean(-1))

    grouped = {name: nn.Conv1d(n, n, 1, groups=2) for name in "ab"}
    return Net(forward, c=nn.Conv1d(4, n, 1), **grouped, o=nn.Linear(n, 3))


def transform(n: int) -> nn.Module:
    """PointNet's feature transform: a layer writes a matrix, the identity is added, the features are multiplied."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        x = F.relu(m.a(x))
        t = m.t(x.amax(1)).view(-1, n, n) + torch.eye(n, dtype=x.dtype)
        return m.o(x @ t)

    return Net(forward, a=nn.Linear(4, n), t=nn.Linear(n, n * n), o=nn.Linear(n, 3))


def sparse(n: int) -> nn.Module:
    """A penalty that sums over the width, which the first layer absorbs and the second makes up for."""

    def forward(m: Any, x: torch.Tensor) -> Any:
        h = F.relu(m.a(x))
        return m.o(h).square().mean() + 0.1 * h.abs().sum(-1).mean()

    return Net(forward, a=nn.Linear(4, n), o=nn.Linear(n, 3))


class Adapted(nn.Linear):
    """LoRA: two parameters that nn.Linear does not have."""

    def __init__(self, n: int, m: int) -> None:
        super().__init__(n, m)
        self.A, self.B = nn.Parameter(torch.randn(2, n)), nn.Parameter(torch.randn(m, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x @ self.A.t() @ self.B.t()


def named_like_a_norm(n: int) -> nn.Module:
    """weight_v and weight_g are ordinary parameters here."""
    raw = {f"weight_{name}": nn.Parameter(torch.randn(n, n)) for name in "gv"}
    return Net(
        lambda m, x: m.o(torch.tanh(m.e(x) @ m.weight_v) @ m.weight_g),
        e=nn.Linear(4, n),
        **raw,
        o=nn.Linear(n, 3),
    )


def normed_weights(norm: Callable[[nn.Module], nn.Module]) -> Callable[[int], nn.Module]:
    def make(n: int) -> nn.Module:
        return nn.Sequential(
            norm(nn.Linear(4, n)), nn.Tanh(), norm(nn.Linear(n, n)), nn.Tanh(), nn.Linear(n, 3)
        )

    return make


MODELS: dict[str, tuple[Callable[[int], nn.Module], dict[str, str]]] = {
    "fused heads": (fused, {"qkv.weight": Q, "qkv.bias": Q, "proj.weight": IQ}),
    "one head": (separate, {f"{n}.{leaf}": Q for n in "qk" for leaf in ("weight", "bias")}),
    "normed heads": (normed, {"qn.weight": Q, "kn.weight": Q}),
    "heads without an attribute": (fixed_size, {}),
    "two towers": (towers, {f"{n}.2.{leaf}": H for n in "ab" for leaf in ("weight", "bias")}),
    "functional tie": (functional_tie, {"e.weight": H, "n.weight": H, "n.bias": H}),
    "equalised rate": (
        lambda n: nn.Sequential(Equalised(4, n), nn.ReLU(), Equalised(n, n), nn.ReLU(), Equalised(n, 3)),
        {"2.weight": IH, "4.weight": IH},
    ),
    "linear, view, pixel shuffle": (generator, {}),
    "maxout": (
        lambda n: Net(
            lambda m, x: m.o(m.a(x).unflatten(-1, (n, 2)).amax(-1)), a=nn.Linear(4, 2 * n), o=nn.Linear(n, 3)
        ),
        {},
    ),
    "flattened to the hidden size": (flat, {}),
    "channel shuffle": (shuffled, {}),
    "feature transform": (transform, {"t.weight": "1/2", "t.bias": "1/2"}),
    "adapters": (lambda n: nn.Sequential(nn.Linear(4, n), nn.GELU(), Adapted(n, n), nn.Linear(n, 3)), {}),
    "names of weight_norm": (named_like_a_norm, {}),
    "weight_norm": (normed_weights(nn.utils.parametrizations.weight_norm), {"2.parametrizations.weight.original0": H}),
    "softmax of the classes": (lambda n: nn.Sequential(nn.Linear(4, n), nn.Tanh(), nn.Linear(n, 3), nn.Softmax(-1)), {}),
    "penalty": (sparse, {"a.weight": "1/2", "a.bias": "1/2", "o.weight": "2"}),
}  # fmt: skip
X = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def loss(model: nn.Module) -> Any:
    return model(X).tanh().square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_needs_powers_of_k_or_layouts_gets_an_exact_plan(name):
    make, folds = MODELS[name]
    plan = mu.plans.plan_between(make, 8, 16, loss=loss)
    assert {n: str(t.fold) for n, t in plan.tensors.items() if not t.fold.is_one} == folds
    torch.manual_seed(3)
    base, wide = make(8).double(), make(16).double()
    fill_model_(wide, base, Direction(plan), in_place=True)
    assert gradient_identity(base, wide, loss=loss, plan=plan).worst[1] < 1e-11
    grown = [n for n, t in plan.tensors.items() if t.grows]
    wrong = plan.fold(grown[-1], "2^(1/4)")
    fill_model_(wide, base, Direction(wrong), in_place=True)
    assert gradient_identity(base, wide, loss=loss, plan=wrong).worst[1] > 1e-5, (
        "control: another power fails"
    )


def test_a_search_without_a_plan_names_the_call_and_its_factor():
    def tied(n: int) -> nn.Module:
        return Net(
            lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight.t(), m.b),
            a=nn.Linear(4, n),
            b=nn.Parameter(torch.zeros(4)),
        )

    with refused("search.no_exact_plan", "search.factor_not_absorbed") as caught:
        mu.plans.plan_between(tied, 8, 16, loss=lambda m: (m(X) - X).square().mean())
    (fault,) = [fault for fault in caught.value.faults if fault.code == "search.factor_not_absorbed"]
    assert "test_search.py:" in fault.where
    assert " 2" in fault.what
    assert isinstance(caught.value, NoPlanError)
    assert caught.value.sizes == {(8, 16)}


def test_the_pieces_of_a_stack_are_joined_one_by_one():
    """60 pieces with two ways each have 2^60 combinations: whoever tries them all does not return."""
    half, third = Scale.of("1/2"), Scale.of("1/3")
    ways = _together([[{"a": half}, {"b": half}]] * 60)
    assert ways == [{"a": half}, {"a": half, "b": half}, {"b": half}]
    assert _together([[{"a": half}], [{"a": third}, {"b": third}]]) == [{"a": half, "b": third}]
    assert _together([[{"a": half}], [{"a": third}]]) == []


def test_a_search_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr("mupscale.planning.search.search.SECONDS", 0.0)
    with refused("search.no_exact_plan", "search.ended_at_limit"):
        mu.plans.plan_between(fused, 8, 16, loss=loss)


def test_a_search_tells_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr("mupscale.planning.search.search._REPORT", 0.0)
    with caplog.at_level(logging.INFO, logger="mupscale"):
        mu.plans.plan_between(fused, 8, 16, loss=loss)
    assert "searching for an exact plan" in caplog.text
    assert "nearest: the loss differs" in caplog.text
