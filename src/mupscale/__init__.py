"""Grow trained PyTorch models in width, depth, experts and words, exactly.

>>> import mupscale as mu, torch
>>> from torch import nn
>>> make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 2))
>>> base = make(8)
>>> run = mu.Run(base, torch.optim.AdamW(base.parameters(), lr=1e-2))
>>> wide = mu.grow(run, lambda: make(32))
>>> sum(p.numel() for p in wide.model.parameters())
194
"""

import typing as _typing

from .lazy import exported as _exported
from .version import __version__ as __version__

if _typing.TYPE_CHECKING:
    from . import budgets as budgets
    from . import diagnostics as diagnostics
    from . import errors as errors
    from . import plans as plans
    from . import rules as rules
    from . import studies as studies
    from . import trainers as trainers
    from .checkpoints.grow_checkpoint import grow_checkpoint as grow_checkpoint
    from .errors import MupscaleError as MupscaleError
    from .noise.auto import AutoNoise as AutoNoise
    from .noise.kinds import MupNoise as MupNoise
    from .noise.kinds import NewUnits as NewUnits
    from .noise.kinds import PairedNoise as PairedNoise
    from .noise.kinds import SignalNoise as SignalNoise
    from .noise.kinds import SplitNoise as SplitNoise
    from .planning.declare import Declared as Declared
    from .planning.infer import infer_plan as infer_plan
    from .plans.plan import Plan as Plan
    from .runs.run import Run as Run
    from .sameness.same import same as same
    from .sharded.load import load_grown_ as load_grown_
    from .studies.tune import tune as tune
    from .training.check.verify import verify as verify
    from .training.grow.add_noise import add_noise as add_noise
    from .training.grow.grow import grow as grow
    from .training.grow.grow import narrow as narrow
    from .training.grow.upscale import upscale as upscale
    from .training.rates.reference import set_lr_ as set_lr_
    from .training.rates.rewarm import rewarm_ as rewarm_
    from .training.rates.schedules import GrowthSchedule as GrowthSchedule
    from .training.start.init import init_weights_ as init_weights_
    from .training.units.clip import clip_before_step_ as clip_before_step_
    from .training.units.groups import param_groups as param_groups
    from .training.units.stepping import step_in_units_ as step_in_units_

__getattr__ = _exported(__name__, {"tune": "tune"})
