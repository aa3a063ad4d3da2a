"""Every optimizer of the registry in its variants, with settings under which a wrong factor shows.

Epsilons are large, bounds bite and decay is on, because a factor on a number that does not matter cannot
be tested. Learning rates are such that every model moves, and that 200 steps stay out of chaos.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim
from transformers.optimization import Adafactor

from harness import published
from harness.models import Case
from harness.muons import MUON_ROWS, MoonlightMuon, MuonWithAuxAdam, NanochatMuonAdamW
from mupscale.rules import register_optimizer
from mupscale.rules.matrices import short_dimension
from mupscale.rules.optimizers import RULES


@dataclass(frozen=True)
class Setup:
    """An optimizer class with its settings."""

    name: str
    optimizer: type[optim.Optimizer]
    settings: Mapping[str, Any]
    warm: int = 5
    """Steps of the base before it is widened."""
    sparse: bool = False
    padding: bool = True
    """False for a row that refuses padded tensors."""
    groups: Callable[[nn.Module], list[optim.Optimizer]] | None = None
    """How the optimizers of a model are built, for a class that holds several."""

    @property
    def sign(self) -> int:
        """The loss is negated for an optimizer that maximizes, so that it also learns."""
        return -1 if self.settings.get("maximize") else 1

    def accepts(self, case: Case) -> bool:
        if self.optimizer is NanochatMuonAdamW and not _one_shorter_side(case):
            return False
        return self.sparse == case.sparse and (self.padding or case.by != "padded")

    def build(self, model: nn.Module) -> list[optim.Optimizer]:
        """The optimizers of a model: this one, or Muon for its matrices and AdamW for the rest."""
        if self.groups is not None:
            return self.groups(model)
        parameters = list(model.parameters())
        if self.optimizer is not optim.Muon:
            return [self.optimizer(parameters, **self.settings)]
        matrices = [p for p in parameters if p.dim() == 2]
        rest = [p for p in parameters if p.dim() != 2]
        return [optim.Muon(matrices, **self.settings), optim.AdamW(rest, **_ADAMW)]


_ADAM = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.01}
_ADAMW: dict[str, Any] = {"lr": 0.01, "eps": 1e-2, "weight_decay": 0.1}
_SGD = {"lr": 0.1, "weight_decay": 0.01}
_HEAVY = {"lr": 0.02, "weight_decay": 0.01, "momentum": 0.9}
_MUON = {"lr": 0.02, "eps": 1e-1, "weight_decay": 0.1}
_DECOUPLED = {"decoupled_weight_decay": True}


def _apart(model: nn.Module, dimensions: tuple[int, ...]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters with these numbers of dimensions, and the rest."""
    own = list(model.parameters())
    return [p for p in own if p.dim() in dimensions], [p for p in own if p.dim() not in dimensions]


def _keller_jordan(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = _apart(model, (2, 4))
    muon = {"params": matrices, "use_muon": True, "lr": 0.02, "weight_decay": 0.1}
    return [MuonWithAuxAdam([muon, {"params": rest, "use_muon": False, **_ADAMW}])]


def _moonlight(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = _apart(model, (2,))
    return [MoonlightMuon(0.01, 0.1, matrices, adamw_params=rest, adamw_eps=1e-2)]


def _nanochat(model: nn.Module) -> list[optim.Optimizer]:
    matrices, rest = _apart(model, (2,))
    shapes: dict[Any, list[nn.Parameter]] = {}
    for p in matrices:
        shapes.setdefault(p.shape, []).append(p)
    muon = {"kind": "muon", "lr": 0.02, "momentum": 0.9, "ns_steps": 3, "beta2": 0.9, "weight_decay": 0.1}
    groups = [{"params": of, **muon} for of in shapes.values()]
    return [NanochatMuonAdamW([*groups, {"params": rest, "kind": "adamw", "betas": (0.9, 0.99), **_ADAMW}])]


def _one_shorter_side(case: Case) -> bool:
    """Whether every matrix of a model has the same shorter side at both widths."""
    return all(
        short_dimension(entry.base_shape) == short_dimension(entry.wide_shape)
        for entry in case.plan.tensors.values()
        if len(entry.axes) == 2
    )


for _kind, _row in published.ROWS.items():
    register_optimizer(_kind, RULES[_row])
for _kind, _version in MUON_ROWS.items():
    register_optimizer(_kind, _version)

SETUPS = {
    setup.name: setup
    for setup in (
        Setup("SGD", optim.SGD, _SGD),
        Setup("SGD momentum", optim.SGD, _HEAVY),
        Setup("SGD nesterov", optim.SGD, {**_HEAVY, "nesterov": True}),
        Setup("SGD dampening", optim.SGD, {**_HEAVY, "lr": 0.05, "dampening": 0.5}),
        Setup("SGD maximize", optim.SGD, {**_HEAVY, "maximize": True}),
        Setup("SGD sparse", optim.SGD, {"lr": 0.5}, sparse=True),
        Setup("Adam", optim.Adam, _ADAM),
        Setup("Adam amsgrad", optim.Adam, {**_ADAM, "amsgrad": True}),
        Setup("Adam decoupled", optim.Adam, {**_ADAMW, **_DECOUPLED}),
        Setup("AdamW", optim.AdamW, _ADAMW),
        Setup("AdamW amsgrad", optim.AdamW, {**_ADAMW, "amsgrad": True}),
        Setup("AdamW maximize", optim.AdamW, {**_ADAMW, "maximize": True}),
        Setup("Adamax", optim.Adamax, _ADAM),
        Setup("NAdam", optim.NAdam, _ADAM),
        Setup("NAdam decoupled", optim.NAdam, {**_ADAMW, **_DECOUPLED}),
        Setup("RAdam", optim.RAdam, {**_ADAM, "lr": 0.03}, warm=8),
        Setup("RAdam decoupled", optim.RAdam, {**_ADAMW, **_DECOUPLED, "lr": 0.03}, warm=8),
        Setup("RMSprop", optim.RMSprop, {**_ADAM, "lr": 0.005}),
        Setup("RMSprop centered", optim.RMSprop, {**_ADAM, "lr": 0.001, "centered": True, "momentum": 0.9}),
        Setup(
            "Adagrad",
            optim.Adagrad,
            {**_ADAM, "lr": 0.05, "lr_decay": 0.01, "initial_accumulator_value": 1e-3},
        ),
        Setup(
            "Adagrad sparse",
            optim.Adagrad,
            {"lr": 0.05, "eps": 1e-2, "initial_accumulator_value": 1e-3},
            sparse=True,
        ),
        Setup("Adadelta", optim.Adadelta, {"lr": 0.5, "eps": 1e-4, "weight_decay": 0.01}),
        Setup("ASGD", optim.ASGD, {"lr": 0.1, "lambd": 0.01, "t0": 3, "weight_decay": 0.01}),
        Setup("Rprop", optim.Rprop, {"lr": 0.002, "step_sizes": (1e-3, 4e-3)}),
        Setup("SparseAdam", optim.SparseAdam, {"lr": 0.01, "eps": 1e-2}, sparse=True),
        Setup("Adafactor", optim.Adafactor, {"lr": 0.02, "eps": (1e-12, 1e-3), "weight_decay": 0.1}),
        Setup("Adafactor absolute", optim.Adafactor, {"lr": 0.01, "eps": (1e-12, 1.0), "weight_decay": 0.1}),
        Setup("Muon original", optim.Muon, _MUON),
        Setup("Muon match_rms", optim.Muon, {**_MUON, "adjust_lr_fn": "match_rms_adamw"}),
        Setup("Lion", published.Lion, {"lr": 0.002, "weight_decay": 0.1}),
        Setup("AdEMAMix", published.AdEMAMix, {**_ADAM, "lr": 0.005}),
        Setup("AdEMAMix decoupled", published.AdEMAMix, {**_ADAMW, "lr": 0.005, "weight_decouple": True}),
        Setup("ADOPT", published.ADOPT, {**_ADAM, "betas": (0.9, 0.95)}),
        Setup("ADOPT decoupled", published.ADOPT, {**_ADAMW, "betas": (0.9, 0.95), "weight_decouple": True}),
        Setup("StableAdamW", published.StableAdamW, _ADAMW, padding=False),
        Setup(
            "StableAdamW fully decoupled",
            published.StableAdamW,
            {**_ADAMW, "weight_decay": 1e-3, "decouple_lr": True, "max_lr": 0.02},
            padding=False,
        ),
        Setup("Schedule-free SGD", published.SGDScheduleFree, {"lr": 0.2, "weight_decay": 0.01}),
        Setup("Schedule-free AdamW", published.AdamWScheduleFree, {**_ADAMW, "warmup_steps": 3}),
        Setup("Schedule-free RAdam", published.RAdamScheduleFree, {**_ADAMW, "lr": 0.03}, warm=8),
        Setup("CAME", published.CAME, {"lr": 0.005, "weight_decay": 0.1}),
        Setup(
            "HF Adafactor",
            Adafactor,
            {
                "lr": 0.005,
                "weight_decay": 0.1,
                "scale_parameter": False,
                "relative_step": False,
                "beta1": 0.9,
            },
        ),
        Setup(
            "HF Adafactor by size",
            Adafactor,
            {"lr": 0.02, "weight_decay": 0.1, "scale_parameter": True, "relative_step": False},
        ),
        Setup(
            "HF Adafactor absolute",
            Adafactor,
            {"lr": 0.005, "eps": (1e-30, 1.0), "weight_decay": 0.1, "relative_step": False},
        ),
        Setup("AnyPrecision", published.AnyPrecisionAdamW, {**_ADAMW, "use_kahan_summation": True}),
        Setup("Transformer Engine", published.FusedAdam, _ADAMW),
        Setup("bitsandbytes AdamW", published.BnbAdamW, _ADAMW),
        Setup("bitsandbytes AdEMAMix", published.BnbAdEMAMix, {**_ADAMW, "lr": 0.005}),
        Setup("bitsandbytes Lion", published.BnbLion, {"lr": 0.002, "weight_decay": 0.1}),
        Setup("bitsandbytes RMSprop", published.BnbRMSprop, {**_ADAM, "lr": 0.005}),
        Setup("torchao AdamW", published.TorchaoAdamW, _ADAMW),
        Setup("Keller Jordan's Muon", MuonWithAuxAdam, {}, groups=_keller_jordan),
        Setup("Moonlight's Muon", MoonlightMuon, {}, groups=_moonlight),
        Setup("nanochat's Muon", NanochatMuonAdamW, {}, groups=_nanochat),
    )
}


def newton_schulz(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's iteration in the dtype of its gradient; torch's own always rounds to bfloat16."""
    a, b, c = coefficients
    x: Tensor = grad / grad.norm().clamp(min=eps)
    x = x.T if grad.shape[0] > grad.shape[1] else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x
