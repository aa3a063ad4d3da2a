"""Every optimizer of another package that has a row: the class that is installed, and the one written from its description.

`CASES` builds each with settings under which a wrong factor shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from harness import muons, published
from mupscale.rules.muon_rows import muon_row
from mupscale.rules.optimizer_rule import OptimizerRule
from mupscale.rules.optimizers import RULES, qualified_name

Make = Callable[[list[nn.Parameter]], Optimizer]
WRITTEN_RULES: Mapping[str, OptimizerRule] = {
    **RULES,
    **{qualified_name(kind): RULES[row] for kind, row in published.ROWS.items()},
    **{qualified_name(kind): muon_row(version) for kind, version in muons.MUON_ROWS.items()},
}
"""The registry, with rows for the classes of the harness."""
_DECAY = {"lr": 0.1, "weight_decay": 0.5}


@dataclass(frozen=True)
class Known:
    """One row of the registry with the settings of a trial."""

    row: str
    """The name of a class that has a row, or of a version of Muon."""
    settings: Mapping[str, Any]
    written: type[Optimizer] | None = None
    """The class of the harness; None where the package is a dependency of the tests."""
    original: Mapping[str, Any] = field(default_factory=dict)
    """Settings that the class of the package spells in another way."""
    single: bool = False
    """True for a package that computes in float32, whatever the dtype of its parameters."""
    group: bool = False
    """True for a class that takes groups and no settings."""

    @property
    def installed(self) -> bool:
        package, _, name = self.row.partition(".")
        return bool(name) and find_spec(package) is not None

    def make_original(self, params: list[nn.Parameter]) -> Optimizer:
        module, _, name = self.row.rpartition(".")
        made = getattr(import_module(module), name)(params, **{**self.settings, **self.original})
        if hasattr(made, "train"):
            made.train()  # schedule-free classes start in eval mode
        return made  # type: ignore[no-any-return]

    def make_written(self, params: list[nn.Parameter]) -> Optimizer:
        if self.written is None:
            return self.make_original(params)
        if self.group:
            return self.written([{"params": params, **self.settings}])  # type: ignore[call-arg]
        return self.written(params, **self.settings)


_EPS = {**_DECAY, "eps": 0.1}
_ADOPT = {**_EPS, "eps": 1.0, "betas": (0.9, 0.9)}
_NANOCHAT = {**_DECAY, "kind": "muon", "momentum": 0.95, "ns_steps": 3, "beta2": 0.9}


def _written(kind: type[Optimizer], settings: Mapping[str, Any], **more: Any) -> Known:
    """The case of a class of the harness, by the row that it stands for."""
    return Known(published.ROWS[kind], settings, kind, **more)


def _muon(kind: type[Optimizer], settings: Mapping[str, Any]) -> Known:
    return Known(muons.MUON_ROWS[kind], settings, kind, group=True)


def _adafactor(**settings: Any) -> Known:
    return Known("transformers.Adafactor", {**_DECAY, "relative_step": False, **settings})


_STABLE = {**_EPS, "weight_decay": 1e-4, "decouple_lr": True, "max_lr": 0.2}
CASES = {
    "Lion": _written(published.Lion, _DECAY),
    "AdEMAMix": _written(published.AdEMAMix, _EPS),
    "ADOPT": _written(published.ADOPT, _ADOPT),
    "ADOPT decoupled": _written(published.ADOPT, {**_ADOPT, "weight_decouple": True}),
    "StableAdamW": _written(published.StableAdamW, _EPS),
    "StableAdamW decouple_lr": _written(published.StableAdamW, _STABLE),
    "schedule-free SGD": _written(published.SGDScheduleFree, {**_DECAY, "warmup_steps": 3}),
    "schedule-free AdamW": _written(published.AdamWScheduleFree, {**_EPS, "warmup_steps": 3}),
    "schedule-free AdamW, equal weights": _written(
        published.AdamWScheduleFree, {**_EPS, "weight_lr_power": 0.0}
    ),
    "schedule-free RAdam": _written(published.RAdamScheduleFree, _EPS),
    "CAME": _written(published.CAME, _DECAY),
    "AnyPrecision": _written(published.AnyPrecisionAdamW, {**_EPS, "use_kahan_summation": True}),
    "Transformer Engine": _written(published.FusedAdam, _EPS),
    "bitsandbytes AdamW": _written(published.BnbAdamW, _EPS, single=True),
    "bitsandbytes AdEMAMix": _written(published.BnbAdEMAMix, _EPS, single=True),
    "bitsandbytes Lion": _written(published.BnbLion, _DECAY, single=True),
    "bitsandbytes RMSprop": _written(published.BnbRMSprop, _EPS, single=True),
    "torchao AdamW": _written(published.TorchaoAdamW, _EPS, single=True),
    "Adafactor": _adafactor(scale_parameter=False, beta1=0.9),
    "Adafactor by size": _adafactor(scale_parameter=True, eps=(1e-30, 0.1)),
    "Adafactor absolute": _adafactor(lr=0.003, scale_parameter=True, eps=(1e-30, 10.0)),
    "Adafactor relative": Known("transformers.Adafactor", {"weight_decay": 0.5}),
    "Muon, Keller Jordan": _muon(muons.MuonWithAuxAdam, {**_DECAY, "use_muon": True}),
    "Muon, Keller Jordan, its Adam": _muon(muons.MuonWithAuxAdam, {**_EPS, "use_muon": False}),
    "Muon, nanochat": _muon(muons.NanochatMuonAdamW, _NANOCHAT),
    "Muon, nanochat, its AdamW": _muon(
        muons.NanochatMuonAdamW, {**_EPS, "kind": "adamw", "betas": (0.9, 0.99)}
    ),
}


def stand_ins() -> dict[str, ModuleType]:
    """Modules with the classes of the harness, by name, for the packages that are not installed."""
    made: dict[str, ModuleType] = {}
    for kind, row in published.ROWS.items():
        module, _, name = row.rpartition(".")
        package = module.partition(".")[0]
        if find_spec(package) is None:
            for path in {package, module}:
                made.setdefault(path, ModuleType(path))
            setattr(made[module], name, kind)
    for path in ("torchao.optim",):
        if path in made:
            made[path].AdamW4bit = published.TorchaoAdamW  # type: ignore[attr-defined]
    return made


def make_moonlight(params: list[nn.Parameter], matrices: bool = True) -> Optimizer:
    """Moonlight's Muon, which takes matrices and the rest as two arguments."""
    if matrices:
        return muons.MoonlightMuon(lr=0.1, wd=0.5, muon_params=params)
    return muons.MoonlightMuon(lr=0.1, wd=0.5, adamw_params=params, adamw_eps=0.1)
