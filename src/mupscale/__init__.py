"""Grow trained PyTorch models in width, exactly.

>>> import mupscale as mu, torch
>>> from torch import nn
>>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2))
>>> base = make(8)
>>> run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
>>> wide = mu.widen(run, lambda: make(32))
>>> sum(p.numel() for p in wide.model.parameters())
194
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import Fault, MupscaleError
from .extras import needs
from .plans.build import build as on_meta
from .plans.identity import gradient_identity
from .plans.infer import infer_plan
from .plans.plan import Edit, Plan, TensorPlan
from .proofs.certificate import Certificate
from .rules.axes import Axis, Factor
from .rules.optimizers import Decay, OptimizerRule, State, register_optimizer, rule_for
from .rules.scale import Scale
from .rules.units import FILL, NEUTRAL, Change, G, Units, W
from .runs.run import Run
from .training.clip import clip_, clip_grad_norm_, clip_grad_value_, grad_norm
from .training.groups import param_groups, reference_lr, set_lr_
from .training.init import init_
from .training.noises import MupNoise, PairedNoise, SignalNoise, resolve_noise
from .training.recipe import Recipe
from .training.state_dicts import (
    groups_for,
    narrow_optimizer_state_dict,
    narrow_state_dict,
    widen_optimizer_state_dict,
    widen_state_dict,
)
from .training.stepping import step_in_units_
from .training.symmetry import NoiseReport, noise_report, symmetry
from .training.upscale import upscale
from .training.verify import verify
from .training.widen import narrow, widen
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .checkpoints.weights import read_plan as read_plan
    from .checkpoints.weights import read_provenance as read_provenance
    from .checkpoints.weights import save_weights as save_weights
    from .families.plan import family_plan as family_plan
    from .reports.report import report as report
    from .sharded.load import load_wide as load_wide
    from .sharded.verify import verify_sharded as verify_sharded
    from .trainers.going_on import optimizer_for as optimizer_for
    from .trainers.huggingface import HuggingFaceCallback as HuggingFaceCallback
    from .trainers.lightning import LightningCallback as LightningCallback
    from .trainers.lightning_file import widen_lightning_checkpoint as widen_lightning_checkpoint
    from .training.check_optimizer import check_optimizer as check_optimizer
    from .training.coordinates import Coordinates as Coordinates
    from .training.coordinates import coordinate_check as coordinate_check
    from .tuning.tune import tune as tune

__all__ = [
    "Axis",
    "Certificate",
    "Change",
    "check_optimizer",
    "clip_",
    "clip_grad_norm_",
    "clip_grad_value_",
    "coordinate_check",
    "Coordinates",
    "Decay",
    "Edit",
    "Factor",
    "family_plan",
    "Fault",
    "FILL",
    "G",
    "grad_norm",
    "gradient_identity",
    "groups_for",
    "infer_plan",
    "init_",
    "load_wide",
    "MupNoise",
    "MupscaleError",
    "narrow",
    "narrow_optimizer_state_dict",
    "narrow_state_dict",
    "NEUTRAL",
    "noise_report",
    "NoiseReport",
    "on_meta",
    "optimizer_for",
    "OptimizerRule",
    "PairedNoise",
    "param_groups",
    "Plan",
    "Recipe",
    "read_plan",
    "read_provenance",
    "reference_lr",
    "register_optimizer",
    "report",
    "resolve_noise",
    "rule_for",
    "Run",
    "save_weights",
    "Scale",
    "set_lr_",
    "SignalNoise",
    "State",
    "step_in_units_",
    "symmetry",
    "TensorPlan",
    "Units",
    "tune",
    "upscale",
    "verify",
    "verify_sharded",
    "W",
    "widen",
    "widen_lightning_checkpoint",
    "widen_optimizer_state_dict",
    "widen_state_dict",
]


_LATER = {
    "check_optimizer": ("training.check_optimizer", ""),
    "coordinate_check": ("training.coordinates", ""),
    "Coordinates": ("training.coordinates", ""),
    "read_plan": ("checkpoints.weights", ""),
    "read_provenance": ("checkpoints.weights", ""),
    "save_weights": ("checkpoints.weights", ""),
    "optimizer_for": ("trainers.going_on", ""),
    "widen_lightning_checkpoint": ("trainers.lightning_file", ""),
    "load_wide": ("sharded.load", ""),
    "verify_sharded": ("sharded.verify", ""),
    "tune": ("tuning.tune", "tune"),
    "report": ("reports.report", "tune"),
    "family_plan": ("families.plan", "hf"),
    "HuggingFaceCallback": ("trainers.huggingface", "hf"),
    "LightningCallback": ("trainers.lightning", "lightning"),
}
"""Lazily imported names: (module, extra that provides its packages)."""


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, extra = _LATER[name]
    with needs(f"mupscale.{name}", *((extra,) if extra else ())):
        return getattr(import_module(f".{module}", __name__), name)
