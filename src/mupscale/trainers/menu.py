"""Every name of the Hugging Face Trainer's `optim=`: the class and the settings it stands for, or why it is refused.

Knows: names. The rows of the classes are in the registry; nothing is imported before a name is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from torch.optim import Optimizer

from ..errors import MupscaleError
from ..rules.refused import why_refused


@dataclass(frozen=True)
class Named:
    """What the Trainer makes of a name."""

    kind: str
    """The class, by the name of its row."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What the Trainer passes besides rates, betas and decay."""
    quantised: bool = False
    """True if the state of large tensors has 8 or 4 bits, so that a run follows its base up to rounding and not exactly."""


def _bitsandbytes(kind: str, bits: int, paged: bool = False) -> Named:
    pages = {} if kind == "RMSprop" else {"is_paged": paged}
    return Named(f"bitsandbytes.optim.{kind}", {"optim_bits": bits, **pages}, bits == 8)


MENU: dict[str, Named] = {
    "adamw_torch": Named("torch.optim.AdamW"),
    "adamw_torch_fused": Named("torch.optim.AdamW", {"fused": True}),
    "adamw_torch_xla": Named("torch_xla.amp.syncfree.AdamW"),
    "adamw_anyprecision": Named("torchdistx.optimizers.AnyPrecisionAdamW"),
    "adamw_torch_4bit": Named("torchao.optim.AdamW4bit", quantised=True),
    "adamw_torch_8bit": Named("torchao.optim.AdamW8bit", quantised=True),
    "adafactor": Named("transformers.Adafactor", {"scale_parameter": False, "relative_step": False}),
    "sgd": Named("torch.optim.SGD"),
    "adagrad": Named("torch.optim.Adagrad"),
    "rmsprop": Named("torch.optim.RMSprop"),
    "adamw_bnb_8bit": _bitsandbytes("AdamW", 8),
    "adamw_8bit": _bitsandbytes("AdamW", 8),
    "paged_adamw_32bit": _bitsandbytes("AdamW", 32, paged=True),
    "paged_adamw_8bit": _bitsandbytes("AdamW", 8, paged=True),
    "ademamix": _bitsandbytes("AdEMAMix", 32),
    "ademamix_8bit": _bitsandbytes("AdEMAMix", 8),
    "paged_ademamix_32bit": _bitsandbytes("AdEMAMix", 32, paged=True),
    "paged_ademamix_8bit": _bitsandbytes("AdEMAMix", 8, paged=True),
    "lion_32bit": _bitsandbytes("Lion", 32),
    "lion_8bit": _bitsandbytes("Lion", 8),
    "paged_lion_32bit": _bitsandbytes("Lion", 32, paged=True),
    "paged_lion_8bit": _bitsandbytes("Lion", 8, paged=True),
    "rmsprop_bnb": _bitsandbytes("RMSprop", 32),
    "rmsprop_bnb_8bit": _bitsandbytes("RMSprop", 8),
    "rmsprop_bnb_32bit": _bitsandbytes("RMSprop", 32),
    "schedule_free_radam": Named("schedulefree.RAdamScheduleFree"),
    "schedule_free_adamw": Named("schedulefree.AdamWScheduleFree"),
    "schedule_free_sgd": Named("schedulefree.SGDScheduleFree"),
    "stable_adamw": Named("optimi.StableAdamW"),
}
"""Names that have a row."""

REFUSED_NAMES: dict[str, str] = {
    "adamw_torch_npu_fused": "NpuFusedAdamW",
    "galore_adamw": "GaLoreAdamW",
    "galore_adamw_8bit": "GaLoreAdamW8bit",
    "galore_adafactor": "GaLoreAdafactor",
    "galore_adamw_layerwise": "GaLoreAdamW",
    "galore_adamw_8bit_layerwise": "GaLoreAdamW8bit",
    "galore_adafactor_layerwise": "GaLoreAdafactor",
    "apollo_adamw": "APOLLOAdamW",
    "apollo_adamw_layerwise": "APOLLOAdamW",
    "lomo": "Lomo",
    "adalomo": "AdaLomo",
    "grokadamw": "GrokAdamW",
}
"""Names that are refused -> the class for which `rules/refused.py` has the reason."""


def named_optimizer(name: str) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class of a name of the Trainer's `optim=`, and the settings that the Trainer gives it.

    >>> kind, settings = named_optimizer("adamw_torch_fused")
    >>> kind.__name__, settings
    ('AdamW', {'fused': True})
    """
    if name in REFUSED_NAMES:
        raise MupscaleError(
            f"{name} cannot be widened exactly: {why_refused(REFUSED_NAMES[name])}",
            code="optimizer.cannot_be_exact",
        )
    if name not in MENU:
        near = get_close_matches(name, [*MENU, *REFUSED_NAMES], 1)
        hint = f"write {near[0]!r}" if near else 'write "adamw_torch", or pass the class'
        raise MupscaleError(
            f"{name!r} is not a name of the Trainer's optim=; {hint}", code="trainer.unknown_optimizer_name"
        )
    chosen = MENU[name]
    module, _, kind = chosen.kind.rpartition(".")
    try:
        return getattr(import_module(module), kind), dict(chosen.settings)
    except ImportError as error:
        raise MupscaleError(
            f"{name} needs {chosen.kind}, which cannot be imported ({error}); install the package that has it",
            code="extra.missing",
        ) from error
