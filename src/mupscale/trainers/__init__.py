"""Stock trainers that continue from a grown checkpoint: an optimizer in units, callbacks, Lightning files."""

from typing import TYPE_CHECKING

from ..lazy import exported

if TYPE_CHECKING:
    from ..formats.deepspeed.engine import load_universal_ as load_universal_
    from ..formats.megatron.overrides import megatron_overrides as megatron_overrides
    from ..optimizers.schedulers import load_scheduler_ as load_scheduler_
    from ..training.grow.state_dicts import groups_for as groups_for
    from ..training.grow.state_dicts import grow_optimizer_state_dict as grow_optimizer_state_dict
    from ..training.grow.state_dicts import grow_state_dict as grow_state_dict
    from ..training.units.clip import clip_grad_norm_ as clip_grad_norm_
    from .going_on import optimizer_in_units as optimizer_in_units
    from .huggingface import HuggingFaceCallback as HuggingFaceCallback
    from .lightning import LightningCallback as LightningCallback
    from .torchtitan import GrowingCheckpointManager as GrowingCheckpointManager

__getattr__ = exported(__name__, {"HuggingFaceCallback": "hf", "LightningCallback": "lightning"})
