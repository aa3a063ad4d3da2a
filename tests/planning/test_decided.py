"""Plans that torch's own modules decide, and the code that nothing but a measurement can decide."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.closeness import EXACT, assert_close
from harness.refusals import refusal
from mupscale.proofs.identity import gradient_identity

X = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(0))

DECIDED: dict[str, tuple[Callable[[int], nn.Module], torch.Tensor]] = {
    "mlp": (lambda n: nn.Sequential(nn.Linear(8, n), nn.GELU(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2)), X),
    "norms": (lambda n: nn.Sequential(nn.Linear(8, n), nn.LayerNorm(n), nn.Linear(n, n), nn.RMSNorm(n, 1e-5), nn.Linear(n, 2)), X),
    "batch norm": (lambda n: nn.Sequential(nn.Linear(8, n), nn.BatchNorm1d(n), nn.ReLU(), nn.Linear(n, 2)), X[:, 0]),
    "convolutions": (
        lambda n: nn.Sequential(
            nn.Conv2d(3, n, 3), nn.BatchNorm2d(n), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(n, 2 * n, 2),
            nn.GroupNorm(2, 2 * n), nn.Flatten(), nn.Linear(8 * n, n), nn.ReLU(), nn.Linear(n, 2),
        ),
        IMAGES,
    ),
    "pooled": (lambda n: nn.Sequential(nn.Conv2d(3, n, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 2)), IMAGES),
    "nested": (lambda n: nn.Sequential(nn.Sequential(nn.Linear(8, n), nn.ReLU()), nn.Sequential(nn.Linear(n, 2))), X),
    "encoder": (
        lambda n: nn.Sequential(
            nn.Linear(8, n),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(n, 2, 3 * n, 0.0, batch_first=True), 2, enable_nested_tensor=False),
            nn.Linear(n, 2),
        ),
        X,
    ),
}  # fmt: skip

LAYOUTS: dict[str, Any] = {"convolutions": {"7.weight": {1: 4}}}


@pytest.mark.parametrize("name", DECIDED)
def test_what_modules_decide_is_exact_in_outputs_and_gradients(name: str):
    make, x = DECIDED[name]
    torch.manual_seed(0)
    base: Any = make(4).double()
    plan = mu.plans.plan_between(make, 4, 8, declared=mu.Declared(layouts=LAYOUTS.get(name, {})))
    assert plan.proof == "modules"
    wide: Any = mu.grow(base, lambda: make(8), plan=plan).model
    assert_close(wide(x.double()), base(x.double()), EXACT)
    measured = gradient_identity(base, wide, loss=lambda m: m(x.double()).square().mean(), plan=plan)
    assert measured.worst[1] < 1e-9


class Own(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, n), nn.Linear(n, 2)

    def forward(self, features: torch.Tensor) -> Any:
        return self.out(self.inside(features).relu())


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) / self.in_features**0.5


def hooked(n: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, n), nn.Linear(n, 2))
    model[0].register_forward_hook(lambda module, args, out: out / n)
    return model


def with_gradient_hook(n: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, n), nn.Linear(n, 2))
    model.get_parameter("0.weight").register_hook(lambda gradient: gradient / gradient.norm())
    return model


def with_own_forward(n: int) -> nn.Module:
    model: Any = nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 2))
    model[1].forward = lambda x: x.softmax(-1)
    return model  # type: ignore[no-any-return]


def encoder(n: int, **changes: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        n, 2, 3 * n, 0.0, batch_first=True, activation=changes.pop("activation", "relu")
    )
    stack = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False, **changes)
    return nn.Sequential(nn.Linear(8, n), stack, nn.Linear(n, 2))


UNDECIDED: dict[str, Callable[[int], nn.Module]] = {
    "an eps of the width": lambda n: nn.Sequential(nn.Linear(8, n), nn.LayerNorm(n, 1 / n), nn.Linear(n, 2)),
    "a slope of the width": lambda n: nn.Sequential(nn.Linear(8, n), nn.LeakyReLU(1 / n), nn.Linear(n, 2)),
    "a dilation of the width": lambda n: nn.Sequential(
        nn.Conv1d(3, n, 1), nn.Conv1d(n, 2, 2, dilation=n // 4), nn.AdaptiveAvgPool1d(1)
    ),
    "another activation of an encoder": lambda n: encoder(n, activation="relu" if n == 4 else "gelu"),
    "pooling as the norm of an encoder": lambda n: encoder(n, norm=nn.AvgPool1d(3, 1, 1)),
    "a gradient hook": with_gradient_hook,
    "a forward of one object": with_own_forward,
    "pooling of another rank": lambda n: nn.Sequential(nn.Conv1d(3, n, 3), nn.Tanh(), nn.AdaptiveMaxPool2d((4, 1))),
    "an output that grows": lambda n: nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, n)),
    "a forward of its own": Own,
    "a subclass with a forward": lambda n: nn.Sequential(nn.Linear(8, n), Scaled(n, 2)),
    "a hook": hooked,
    "softmax over the width": lambda n: nn.Sequential(nn.Linear(8, n), nn.Softmax(-1), nn.Linear(n, 2)),
    "a convolution along the width": lambda n: nn.Sequential(nn.Linear(8, n), nn.Conv1d(3, 3, 3)),
    "pooling along the width": lambda n: nn.Sequential(nn.Linear(8, n), nn.AdaptiveAvgPool1d(4), nn.Linear(4, 2)),
    "a list": lambda n: nn.ModuleList([nn.Linear(8, n), nn.Linear(n, 2)]),
    "hidden size equal to a flattened one": lambda n: nn.Sequential(
        nn.Conv2d(3, n, 8), nn.Flatten(), nn.Linear(4 * n, 4 * n), nn.ReLU(), nn.Linear(4 * n, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_modules_do_not_decide_is_refused_without_a_proof(name: str):
    make = UNDECIDED[name]
    error = refusal(lambda: mu.grow(make(4), lambda: make(8)))
    assert error.codes in (("proof.missing",), ("plan.mixes_channels",))
    codes: tuple[str, ...] = ()
    try:
        assert not mu.plans.plan_between(make, 4, 8).proved
    except mu.MupscaleError as unplanned:
        codes = unplanned.codes
    assert {*codes} <= {"plan.mixes_channels", "layout.read_but_not_written"}


def test_another_activation_in_the_wide_model_is_not_decided():
    base, wide = (
        nn.Sequential(nn.Linear(8, n), f(), nn.Linear(n, 2)) for n, f in ((4, nn.ReLU), (8, nn.GELU))
    )
    refusal(lambda: mu.grow(base, wide), "proof.missing", where="ReLU (1)")


def test_the_refusal_names_the_arguments_of_forward_and_the_line_works():
    refusal(
        lambda: mu.grow(Own(4), lambda: Own(8)), "proof.missing", where=["Own", "example_inputs=(features,)"]
    )
    features = X
    assert mu.grow(Own(4), lambda: Own(8), example_inputs=(features,)).provenance["proof"]["by"] == "outputs"
    assert mu.grow(Own(4), lambda: Own(8), example_inputs={"features": X}).plan.proof == "outputs"  # type: ignore[union-attr]


def test_folds_that_were_declared_are_not_decided():
    make = lambda n: nn.Sequential(nn.Linear(8, n), nn.Tanh(), nn.Linear(n, 2))  # noqa: E731
    assert mu.plans.plan_between(make, 4, 8).proved
    assert not mu.plans.plan_between(make, 4, 8, declared=mu.Declared(folds={"2.weight": 2})).proved


def test_zeros_of_a_padded_axis_pass_only_through_functions_that_keep_them():
    make = lambda n, low: nn.Sequential(nn.Linear(8, n), nn.Hardtanh(low, 2.0), nn.Linear(n, 2))  # noqa: E731
    assert mu.plans.plan_between(lambda n: make(n, -1.0), 4, 6, by="padded").proved
    assert not mu.plans.plan_between(lambda n: make(n, 0.5), 4, 6, by="padded").proved
