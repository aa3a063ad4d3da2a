"""Models that cannot be widened exactly: each is refused with the reason and the line to write."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import mupscale as mu
from harness.draws import data
from harness.refusals import refusal


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def loss(model: Any) -> Any:
    return (model(data(6, 3)) - data(6, 2)).square().mean()


def two(make: Callable[[int], Any], base: int = 4, wide: int = 8, **options: Any) -> Callable[[], mu.Plan]:
    return lambda: mu.plan_between(make, base, wide, **options)


def between(*middle: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda n: nn.Sequential(nn.Linear(3, n), *(make(n) for make in middle), nn.Linear(n, 2))


class Tied(nn.Module):
    def __init__(self, n: int, norm: bool = False):
        super().__init__()
        self.embed = nn.Embedding(5, n)
        self.mix = nn.Linear(n, n)
        self.norm = nn.LayerNorm(n) if norm else nn.Identity()
        self.head = nn.Linear(n, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.norm(self.mix(self.embed(x)).tanh()))


class Raw(nn.Module):
    def __init__(self, n: int, dtype: torch.dtype | None = None):
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, n))
        self.head = nn.Linear(n, 2)
        if dtype is not None:
            self.register_buffer("order", torch.arange(n, dtype=dtype))

    def forward(self, x):
        return self.head(x.mean() * self.token)


class Heads(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.num_heads = n // 4
        self.q_proj, self.o_proj = nn.Linear(8, n), nn.Linear(n, 8)


def spectral_normed(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), parametrizations.spectral_norm(nn.Linear(n, 2)))


def tied_loss(model: Any) -> Any:
    return model(torch.arange(5)).square().mean()


PAD = [(4, 1, 4)]  # zeros, although 8 is a whole multiple of 4
UNUSED = "argument.pattern_matches_nothing"
MODELS: dict[str, Any] = {
    "fraction": (two(mlp, 4, 10, loss=loss), "axis.not_whole_copies", "2.weight", "8 (x2)", "12 (x3)", "pad=True"),
    "tie with nowhere to fold": (two(Tied, loss=tied_loss), "search.factor_not_absorbed", "embed.weight = head.weight"),
    "tie without a loss": (two(Tied), "plan.tied_readout", "embed.weight = head.weight"),
    "spectral_norm": (two(spectral_normed), "model.parametrized_weight", "1.parametrizations.weight.original", "SpectralNorm"),
    "max_norm": (two(lambda n: nn.Embedding(5, n, max_norm=1.0)), "model.embedding_max_norm", "max_norm=1.0"),
    "groups": (two(between(lambda n: nn.GroupNorm(n // 2, n))), "model.norm_groups_grow", "num_groups=2"),
    "groups, no gain": (two(between(lambda n: nn.GroupNorm(n // 2, n, affine=False))), "model.norm_groups_grow", "num_groups=2"),
    "local response": (two(between(lambda n: nn.LocalResponseNorm(2))), "plan.mixes_channels", "LocalResponseNorm"),
    "padded LayerNorm": (two(between(nn.LayerNorm), 4, 6, pad=True), "axis.padding_changes_mean", "4 (x1)", "8 (x2)"),
    "padded LayerNorm, no gain": (
        two(between(lambda n: nn.LayerNorm(n, elementwise_affine=False)), 4, 6, pad=True),
        "axis.padding_changes_mean",
    ),
    "declared pads": (
        two(between(nn.LayerNorm), layouts={"0.*": {0: PAD}, "1.*": {0: PAD}, "2.weight": {1: PAD}}),
        "axis.padding_changes_mean",
    ),
    "padded RMSNorm": (two(between(nn.RMSNorm), 4, 6, pad=True), "axis.padding_without_eps", "RMSNorm"),
    "layout": (two(Heads, 8, 16), "layout.undeclared", "q_proj.weight, axis 0"),
    "raw": (two(Raw), "plan.unknown_role", "token"),
    "blind loss": (two(Raw, loss=lambda m: m.head.bias.square().sum()), "search.tensor_undecided", "token"),
    "integers": (
        two(lambda n: Raw(n, torch.int64), roles={"token": "out"}),
        "model.growing_integer_buffer",
        "int64",
        'layouts={"order": 1}',
    ),
    "unused roles": (two(mlp, roles={"body.*": "out"}), UNUSED, "body.*", "roles"),
    "unused layouts": (two(mlp, layouts={"body.*": 2}), UNUSED, "body.*", "layouts"),
    "unused folds": (two(mlp, folds={"body.*": 2}), UNUSED, "body.*", "folds"),
    "unused plus_one": (two(mlp, plus_one=["body.*"]), UNUSED, "body.*", "plus_one"),
    "role": (two(mlp, roles={"0.bias": "sideways"}), "plan.wrong_roles", "0.bias", "'sideways'"),
    "inexact fold": (two(mlp, folds={"0.bias": 0.1}), "scale.inexact_float", "0.bias", "0.1"),
    "unmatched": (
        lambda: mu.infer_plan(mlp(4), nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))),
        "model.tensor_only_in_base",
        "4.weight",
        "2.bias",
    ),
    "unmatched, wide": (lambda: mu.infer_plan(mlp(4)[:3], mlp(8)), "model.tensor_only_in_wide", "4.weight"),
    "vocabulary": (two(lambda n: nn.Embedding(n, 3)), "plan.rows_grow", "weight"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_planned_is_refused(name):
    action, code, *where = MODELS[name]
    refusal(action, code, where=where)


def test_a_fraction_is_refused_when_the_plan_is_used():
    plan = mu.plan_between(mlp, 4, 10)
    assert plan["2.weight"].axes[0].k == Fraction(5, 2), "control: sizes and groups accept it"
    refusal(
        lambda: mu.widen(mlp(4), lambda: mlp(10), plan=plan),
        "axis.not_whole_copies",
        where=["8 (x2)", "pad=True"],
    )


def test_pads_declared_where_copies_would_fit_still_edit_the_eps_of_rmsnorm():
    make = between(lambda n: nn.RMSNorm(n, eps=0.1))
    plan = mu.plan_between(make, 4, 8, layouts={"0.*": {0: PAD}, "1.*": {0: PAD}, "2.weight": {1: PAD}})
    assert [(edit.path, str(edit.scale)) for edit in plan.edits] == [("1.eps", "1/2")]
    assert str(plan["1.weight"].fold) == "2^(-1/2)"


@pytest.mark.parametrize("tied", ["base", "wide"])
def test_models_that_tie_different_tensors_are_refused(tied):
    models = [Tied(4, norm=True), Tied(8, norm=True)]
    models[tied == "base"].head.weight = nn.Parameter(models[tied == "base"].head.weight.detach().clone())
    refusal(
        lambda: mu.infer_plan(*models, folds={"norm.*": "1/2"}),
        "model.tied_once",
        where=["head.weight", "embed.weight"],
    )
