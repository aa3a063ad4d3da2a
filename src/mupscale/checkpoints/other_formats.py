"""Checkpoints that are no Hugging Face directories: which format one has, and who grows it.

The formats themselves are in `formats/`. They do not describe the model, so a plan comes from its two ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ..errors import Fault, raise_faults
from ..files.dcp.metadata import METADATA
from ..files.directory import CONFIG
from ..files.elsewhere import megatron_faults
from ..files.strict import printable
from ..formats.deepspeed.universal import is_universal
from ..noise.auto import AutoNoise
from ..noise.kinds import Noise, wrong_noise
from ..plans.plan import Plan
from ..rules.noise_defaults import DEFAULT_T
from ..storage.location import Location
from ..storage.looking import exists

Format = Literal["huggingface", "lightning", "megatron", "deepspeed", "dcp"]
_NAMES = {"lightning": "Lightning", "megatron": "Megatron", "deepspeed": "DeepSpeed"}


def format_of(base: Location) -> Format:
    """What a checkpoint is. A directory with a configuration may hold the state of a Trainer or of DeepSpeed too.

    >>> format_of(Path("nothing/here"))              # whoever reads the directory says what is missing
    'huggingface'
    """
    if isinstance(base, Path) and base.is_file():
        return "lightning"
    if exists(base / CONFIG):
        return "huggingface"
    if megatron_faults(base):
        return "megatron"
    if is_universal(base):
        return "deepspeed"
    return "dcp" if exists(base / METADATA) else "huggingface"


def grow_other_format(
    kind: Format,
    base: Location,
    out: Location,
    plan: Plan | None,
    noise: Noise | AutoNoise | None,
    seed: int,
    optimizer_class: str | None,
) -> dict[str, str]:
    """Grow a checkpoint of another format by a plan, and return what was not carried, with reasons.

    Raises where there is no plan, or where the format cannot be grown.
    """
    where, faults = printable(str(base)), []
    if kind == "dcp":
        what = "a checkpoint of torch.distributed, which grows while a wide job loads it"
        faults.append(Fault("checkpoint.grows_while_loading", where, what, "call mu.load_grown_ in that job"))
    elif plan is None:
        what = f"a checkpoint of {_NAMES[kind]}, which does not describe its model"
        faults.append(
            Fault("checkpoint.needs_plan", where, what, "pass plan=mu.infer_plan(base_model, wide_model)")
        )
    if kind == "lightning" and noise is not None:
        what = "noise is not added to the files of Lightning"
        faults.append(Fault("noise.not_in_format", "noise", what, "leave it out"))
    elif isinstance(noise, AutoNoise):
        what = "its size is chosen by a loss, and the model is not here to measure one"
        faults.append(
            Fault("noise.needs_loss", "AutoNoise", what, f"write noise=mu.SignalNoise({DEFAULT_T})")
        )
    elif noise is not None:
        faults += wrong_noise(noise)
    raise_faults("this checkpoint cannot be grown like that", faults)
    assert plan is not None
    assert not isinstance(noise, AutoNoise)
    # Imported here, as a Hugging Face directory needs none of them.
    if kind == "lightning":
        from ..formats.lightning import grow_lightning_checkpoint

        classes = None if optimizer_class is None else [optimizer_class]
        grow_lightning_checkpoint(Path(str(base)), Path(str(out)), plan=plan, optimizer_classes=classes)
        return {}
    grow: Callable[..., dict[str, str]]
    if kind == "megatron":
        from ..formats.megatron.grow import grow_megatron_checkpoint

        grow = grow_megatron_checkpoint
    else:
        from ..formats.deepspeed.grow import grow_universal_checkpoint

        grow = grow_universal_checkpoint
    return grow(base, out, plan=plan, noise=noise, seed=seed, optimizer_class=optimizer_class)
