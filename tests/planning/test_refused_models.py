"""Models that cannot be widened exactly: each is refused with the reason and the line to write."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import mupscale as mu
from harness.draws import data
from harness.refusals import refusal
from mupscale.proofs.causes import NOISE
from mupscale.rules.optimizer_rule import UNIVERSAL


def mlp(n: int) -> Any:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def loss(model: Any) -> Any:
    return (model(data(6, 3)) - data(6, 2)).square().mean()


def two(make: Callable[[int], Any], base: int = 4, wide: int = 8, **options: Any) -> Callable[[], mu.Plan]:
    return lambda: mu.plans.plan_between(make, base, wide, **options)


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
        return self.head(self.norm(self.mix(self.embed(x).tanh()).tanh()))


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
    "fraction": (two(mlp, 4, 10, loss=loss), "axis.not_whole_copies", "2.weight", "8 (x2)", "12 (x3)", 'by="units"'),
    "tie with nowhere to fold": (two(Tied, loss=tied_loss), "search.factor_not_absorbed", "embed.weight = head.weight"),
    "tie without a loss": (two(Tied), "plan.tied_readout", "embed.weight = head.weight"),
    "spectral_norm": (two(spectral_normed), "model.parametrized_weight", "1.parametrizations.weight.original", "SpectralNorm"),
    "max_norm": (two(lambda n: nn.Embedding(5, n, max_norm=1.0)), "model.embedding_max_norm", "max_norm=1.0"),
    "groups": (two(between(lambda n: nn.GroupNorm(n // 2, n))), "model.norm_groups_grow", "num_groups=2"),
    "groups, no gain": (two(between(lambda n: nn.GroupNorm(n // 2, n, affine=False))), "model.norm_groups_grow", "num_groups=2"),
    "local response": (two(between(lambda n: nn.LocalResponseNorm(2))), "plan.mixes_channels", "LocalResponseNorm"),
    "padded LayerNorm": (two(between(nn.LayerNorm), 4, 6, by="padded"), "axis.padding_changes_mean", "8 (x2)"),
    "padded LayerNorm, no gain": (
        two(between(lambda n: nn.LayerNorm(n, elementwise_affine=False)), 4, 6, by="padded"),
        "axis.padding_changes_mean",
    ),
    "declared pads": (
        two(between(nn.LayerNorm), declared=mu.Declared(layouts={"0.*": {0: PAD}, "1.*": {0: PAD}, "2.weight": {1: PAD}})),
        "axis.padding_changes_mean",
    ),
    "padded RMSNorm without a loss": (two(between(nn.RMSNorm), 4, 6, by="padded"), "axis.padding_of_norm", "RMSNorm"),
    "padded RMSNorm, no gain": (
        two(between(lambda n: nn.RMSNorm(n, elementwise_affine=False)), 4, 6, by="padded", loss=loss),
        "axis.padding_without_gain",
    ),
    "layout": (two(Heads, 8, 16), "layout.undeclared", "q_proj.weight, axis 0"),
    "raw": (two(Raw), "plan.unknown_role", "token"),
    "blind loss": (two(Raw, loss=lambda m: m.head.bias.square().sum()), "search.tensor_undecided", "token"),
    "integers": (
        two(lambda n: Raw(n, torch.int64), declared=mu.Declared(roles={"token": "out"})),
        "model.growing_integer_buffer",
        "int64",
        'layouts={"order": 1}',
    ),
    "unused roles": (two(mlp, declared=mu.Declared(roles={"body.*": "out"})), UNUSED, "body.*", "roles"),
    "unused layouts": (two(mlp, declared=mu.Declared(layouts={"body.*": 2})), UNUSED, "body.*", "layouts"),
    "unused folds": (two(mlp, declared=mu.Declared(folds={"body.*": 2})), UNUSED, "body.*", "folds"),
    "unused plus_one": (two(mlp, declared=mu.Declared(plus_one=["body.*"])), UNUSED, "body.*", "plus_one"),
    "role": (two(mlp, declared=mu.Declared(roles={"0.bias": "sideways"})), "plan.wrong_roles", "0.bias", "'sideways'"),
    "inexact fold": (two(mlp, declared=mu.Declared(folds={"0.bias": 0.1})), "scale.inexact_float", "0.bias", "0.1"),
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
    plan = mu.plans.plan_between(mlp, 4, 10)
    assert plan["2.weight"].axes[0].k == Fraction(5, 2), "control: sizes and groups accept it"
    refusal(
        lambda: mu.grow(mlp(4), lambda: mlp(10), plan=plan),
        "axis.not_whole_copies",
        where=["8 (x2)", 'by="units"'],
    )


@pytest.mark.parametrize("eps", [0.1, None])
def test_pads_declared_where_copies_would_fit_are_folded_into_what_a_norm_reads(eps):
    make = between(lambda n: nn.RMSNorm(n, eps))
    layouts: Any = {"0.*": {0: PAD}, "1.*": {0: PAD}, "2.weight": {1: PAD}}
    plan = mu.plans.plan_between(make, 4, 8, declared=mu.Declared(layouts=layouts), loss=loss)
    assert [str(plan[name].fold) for name in ("0.weight", "0.bias", "1.weight")] == [
        "2^(1/2)",
        "2^(1/2)",
        "2^(-1/2)",
    ]


@pytest.mark.parametrize("tied", ["base", "wide"])
def test_models_that_tie_different_tensors_are_refused(tied):
    models = [Tied(4, norm=True), Tied(8, norm=True)]
    models[tied == "base"].head.weight = nn.Parameter(models[tied == "base"].head.weight.detach().clone())
    refusal(
        lambda: mu.infer_plan(*models, declared=mu.Declared(folds={"norm.*": "1/2"})),
        "model.tied_once",
        where=["head.weight", "embed.weight"],
    )


# Remedies as they are printed: the test types them


class Numbered(Raw):
    """A buffer of whole numbers that grows; copies of them mean the same here."""

    def __init__(self, n: int) -> None:
        super().__init__(n, torch.int64)

    def forward(self, x):
        return self.head(x.mean() * (self.token + (self.order < 9)))  # type: ignore[operator]


def typed(error: mu.MupscaleError, **names: Any) -> dict[str, Any]:
    """The argument of a printed remedy, with the reader's own base, wide and loss."""
    remedies = r"(plan)=(mu\.infer_plan\(.*?loss=loss\))|(declared)=(mu\.Declared\([^)]*\))"
    ((*found,),) = set(re.findall(remedies, str(error)))
    name, call = filter(None, found)
    return {name: eval(call, {"mu": mu, "loss": loss, **names})}


@pytest.mark.parametrize(
    ("make", "sizes", "code"),
    [
        (lambda n: mlp(n)[:3:2], (4, 6), "axis.not_whole_copies"),
        (Numbered, (4, 8), "model.growing_integer_buffer"),
    ],
)
@pytest.mark.parametrize("grow", [mu.grow, partial(mu.upscale, noise=mu.MupNoise(1e-3)), mu.verify])
def test_a_printed_argument_is_accepted_by_the_function_that_printed_it(
    grow: Any, make: Any, sizes: Any, code: str
):
    def squares(model: Any) -> Any:
        return model(data(6, 3)).square().mean()

    base, wide = make(sizes[0]).double(), lambda: make(sizes[1]).double()
    error = refusal(lambda: grow(base, wide, loss=squares), code)
    found = grow(base, wide, loss=squares, **typed(error, base=base, wide=wide, loss=squares))
    assert not isinstance(found, mu.diagnostics.Certificate) or found


@pytest.mark.parametrize(
    "grow", [mu.infer_plan, mu.grow, partial(mu.upscale, noise=mu.MupNoise(1e-3)), mu.verify]
)
def test_declarations_are_taken_by_every_function_that_plans(grow: Any):
    """What is declared is followed where no search is made, and by one; next to a plan it is refused."""

    def squares(model: Any) -> Any:
        return model(data(6, 3)).square().mean()

    base, wide = mlp(4).double(), lambda: mlp(8).double()
    told = mu.Declared(layouts={"0.weight": 2, "2.weight": {0: 2, 1: 2}, "4.weight": 2})
    usual, found = grow(base, wide, loss=squares), grow(base, wide, loss=squares, declared=told)
    if isinstance(found, mu.Plan | mu.Run):
        plans: list[Any] = [one if isinstance(one, mu.Plan) else one.plan for one in (usual, found)]
        assert [str(plan["2.weight"].axes[0]) for plan in plans] == ["out: 4x2", "out: 2x2 * 2"]
    refusal(lambda: grow(base, wide, loss=squares, declared={"layouts": {}}), "argument.wrong_type")
    refusal(
        lambda: grow(base, wide, loss=squares, declared=mu.Declared(layouts={"typo": 2})),
        "argument.pattern_matches_nothing",
    )
    if grow is not mu.infer_plan:
        plan = mu.infer_plan(base, wide)
        both = {"loss": squares, "plan": plan, "declared": told}
        refusal(lambda: grow(base, wide, **both), "argument.plan_and_declared")


@pytest.mark.parametrize(
    "grow", [mu.grow, partial(mu.upscale, noise=mu.MupNoise(1e-3)), mu.infer_plan, mu.verify]
)
def test_a_factory_with_an_argument_is_refused_with_a_factory_to_write(grow: Any):
    error = refusal(lambda: grow(Raw(4), Raw, loss=loss), "argument.wrong_signature")
    (written,) = re.findall(r"write (lambda: Raw\()…\)", str(error))
    assert grow(Raw(4), eval(f"{written}8)", {"Raw": Raw}), loss=loss)


class Beside(nn.Module):
    """[growing | fixed] into one layer, as in NeRF's skip or a neural ODE with time; split, two layers read the parts."""

    def __init__(self, n: int, split: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, n), nn.Linear(n + 3 * (not split), 2)
        self.fixed = nn.Linear(3, 2) if split else None

    def forward(self, x):
        hidden = self.a(x).relu()
        if self.fixed is not None:
            return self.b(hidden) + self.fixed(x)
        return self.b(torch.cat([hidden, x], -1))


def test_a_stream_whose_mean_is_subtracted_is_named_once_and_not_answered_by_new_units():
    make = between(nn.LayerNorm, lambda n: nn.Linear(n, n), nn.LayerNorm)
    (fault,) = refusal(two(make, 4, 6, loss=loss, by="units"), "axis.not_whole_copies").faults
    assert "by=" not in fault.remedy, "by units was asked for"
    assert two(make, 4, 8, loss=loss, by="units")().proved


def test_a_layer_over_growing_and_fixed_units_is_to_be_split():
    (fault,) = refusal(
        lambda: mu.grow(Beside(4, False), Beside(8, False), loss=loss), "axis.not_whole_copies"
    ).faults
    assert (fault.where, "4 growing units" in fault.remedy) == ("b.weight, axis 1", True)
    assert mu.grow(Beside(4, True), Beside(8, True), loss=loss)
    layers, call = re.findall("`([^`]*)`", fault.remedy)
    assert "with 8 for 4" in fault.remedy

    class Printed(Beside):
        """The two lines of the remedy, in place of the layer."""

        def __init__(self, n: int) -> None:
            super().__init__(n, False)
            exec(layers.replace("Linear(4", f"Linear({n}"), {"nn": nn, "self": self})

        def forward(self, x):
            return eval(call, {"self": self, "growing": self.a(x).relu(), "fixed": x})

    assert mu.grow(Printed(4), Printed(8), loss=loss)
    plain = refusal(lambda: mu.grow(mlp(4), mlp(6), loss=loss), "axis.not_whole_copies").faults
    assert not any("growing units" in fault.remedy for fault in plain), (
        "control: nothing here lies next to fixed units"
    )


class Written(nn.Module):
    """One layer writes growing and fixed units, or the layers of a remedy do."""

    def __init__(self, n: int, lines: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.n, self.lines = n, lines
        self.a, self.b, self.c = nn.Linear(3, n + 2), nn.Linear(n, 2), nn.Linear(2, 2)
        if lines:
            exec(lines[0].replace("Linear(3, 4)", f"Linear(3, {n})"), {"nn": nn, "self": self})

    def forward(self, x):
        written = eval(self.lines[1], {"self": self, "torch": torch, "x": x}) if self.lines else self.a(x)
        grown, fixed = written.relu().split([self.n, 2], -1)
        return self.b(grown) + self.c(fixed)


def test_a_layer_that_writes_growing_and_fixed_units_is_to_be_split():
    error = refusal(lambda: mu.grow(Written(4), Written(8), loss=loss), "axis.not_whole_copies")
    (fault,) = [fault for fault in error.faults if fault.where == "a.weight, axis 0"]
    first, second = re.findall("`([^`]*)`", fault.remedy)
    assert mu.grow(Written(4, (first, second)), Written(8, (first, second)), loss=loss)


def test_padding_to_fewer_units_is_refused_as_shrinking():
    error = refusal(lambda: mu.infer_plan(mlp(4), mlp(3), loss=loss, by="padded"), "axis.shrinks_by_copies")
    assert "axis.factor_out_of_range" not in error.codes
    assert mu.infer_plan(mlp(3), mlp(4), loss=loss, by="padded").proved, "the narrower model first"


def test_a_padded_model_without_an_exact_plan_names_what_does_not_map_0_to_0():
    make = between(lambda n: nn.Sigmoid())
    refusal(
        lambda: mu.plans.plan_between(make, 4, 6, loss=loss, by="padded"),
        "search.no_exact_plan",
        "axis.padding_leaks",
    )
    assert mu.plans.plan_between(make, 4, 8, loss=loss, by="padded").proved, "at a whole multiple"
    assert mu.plans.plan_between(between(lambda n: nn.Tanh()), 4, 6, loss=loss, by="padded").proved, "control"


def test_a_key_of_a_group_without_units_is_declared_as_the_message_says():
    base = mlp(4)
    run = mu.Run(base, torch.optim.AdamW([{"params": base.parameters(), "depth": 0.5}]))
    error = refusal(lambda: mu.grow(run, mlp(8), loss=loss), "optimizer.unknown_setting", where="'depth'")
    (call,) = re.findall(r"mu\.rules\.declare_neutral\('depth'\)", str(error))
    try:
        eval(call, {"mu": mu})
        assert mu.grow(run, mlp(8), loss=loss).optimizer.param_groups[0]["depth"] == 0.5
    finally:
        UNIVERSAL.discard("depth")


def test_a_run_with_noise_is_verified_by_its_growth():
    base = mlp(4)
    wide = mu.upscale(base, lambda: mlp(8), mu.MupNoise(0.1))
    certificate = mu.verify(base, wide, loss=loss)
    assert certificate.failure is not None
    assert certificate.failure.cause == NOISE
    assert mu.verify(base, lambda: mlp(8), plan=wide.plan, loss=loss), "as the cause says"
    other = mu.verify(base, mu.Run(mlp(8), plan=wide.plan), loss=loss).failure
    assert other is not None
    assert other.cause != NOISE, "control: other weights, and no noise"
