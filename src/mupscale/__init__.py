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

from .errors import Fault, MupscaleError
from .plans.infer import infer_plan
from .plans.plan import Edit, Plan, TensorPlan
from .plans.selftest import gradient_identity
from .rules.axes import Axis, Factor
from .rules.optimizers import Decay, OptimizerRule, State, register_optimizer, rule_for
from .rules.scale import Scale
from .rules.units import FILL, NEUTRAL, Change, G, Units, W
from .training.certificate import Certificate
from .training.proof import check_optimizer
from .training.run import Run
from .training.state_dicts import (
    groups_for,
    narrow_optimizer_state_dict,
    narrow_state_dict,
    widen_optimizer_state_dict,
    widen_state_dict,
)
from .training.verify import verify
from .training.widen import narrow, widen

__version__ = "0.1.0"

__all__ = [
    "Axis",
    "Certificate",
    "Change",
    "check_optimizer",
    "Decay",
    "Edit",
    "Factor",
    "Fault",
    "FILL",
    "G",
    "gradient_identity",
    "groups_for",
    "infer_plan",
    "MupscaleError",
    "narrow",
    "narrow_optimizer_state_dict",
    "narrow_state_dict",
    "NEUTRAL",
    "OptimizerRule",
    "Plan",
    "register_optimizer",
    "rule_for",
    "Run",
    "Scale",
    "State",
    "TensorPlan",
    "Units",
    "verify",
    "W",
    "widen",
    "widen_optimizer_state_dict",
    "widen_state_dict",
]
