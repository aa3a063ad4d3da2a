"""The study of a Hugging Face directory: a proxy and settings that follow from its configuration and from a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...budgets.stock_flops import counted_step
from ...errors import Fault, raise_faults
from ...families.config.narrow import proxy_width
from ...families.models import on_meta
from ...machine import free_memory
from ...rules.schemes import RISE, UNITS
from ...runs.growth_record import read_about
from ..proxy import Proxy
from ..settings import Settings
from .proxy import BATCH, StockFamily, Trained
from .text import TextData, check_enough, read_text

DEFAULTS: Mapping[str, Any] = {
    "k": 2,
    "steps": 200,
    "lrs": tuple(1 / n for n in (2048, 1024, 512, 256, 128, 64)),
    "rungs": (0.5,),
    "factors": (0.5, 1.0, 2.0),
    "extend": 1,
}
"""Settings of a study whose proxy is made from a directory, unless others are given. Rates are compared at half of the steps
and not earlier: the rate has decayed to zero before growth, so in the first steps after it the lowest rate always looks
best."""
NOISE: Mapping[str, Any] = {"scheme": RISE.name, "noises": (0.05, 0.1, 0.2)}
"""More of them where noise is tuned. It is a rise of the loss, because the weights of a base that was trained elsewhere need not
have the sizes that the proxy's weights have."""


@dataclass(frozen=True)
class DirectoryStudy:
    """What `tune` needs, and what a dry run prints."""

    proxy: Proxy
    settings: Settings
    family: StockFamily
    data: TextData

    def __str__(self) -> str:
        rows, length = self.data.train.shape
        return (
            f"{self.family.cls.__name__} of width {self.family.width:,}; {rows * length:,} tokens to train on, in sequences of "
            f"{length}, {self.proxy.batch} in a step"
        )

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return int(self.proxy.batch or 0) * int(self.data.train.shape[1])


def directory_study(
    directory: Path,
    data: Path,
    given: Mapping[str, Any],
    *,
    context: int | None = None,
    batch: int | None = None,
    device: str | None = None,
) -> DirectoryStudy:
    """Read the configuration and the text, and refuse what cannot be trained; `given` are settings by name."""
    if read_about(directory) is not None:
        what = "it was grown itself, so its constants are written at the width of another base"
        remedy = "tune the base that it was grown from: the recipe applies to both"
        raise_faults(
            "this directory is not its own reference",
            [Fault("proxy.directory_was_grown", str(directory), what, remedy)],
        )
    family = StockFamily(directory)
    length, size = context or family.longest, batch or BATCH
    limit = getattr(family.config.get_text_config(), "max_position_embeddings", None)
    if type(limit) is int and length > limit:
        what = f"{length} tokens, and this configuration holds {limit}"
        raise_faults(
            "these sequences are too long",
            [Fault("data.sequences_too_long", "--context", what, f"write {limit} or less")],
        )
    usual = (
        DEFAULTS
        if given.get("scheme", UNITS.name) == UNITS.name and "noises" not in given
        else {**DEFAULTS, **NOISE}
    )
    chosen = {"width": proxy_width(family.config), "reference": family.width, **usual, **given}
    settings = Settings(**chosen)
    widths = (settings.width, settings.k * settings.width)
    _check_memory(family)
    flops = tuple(counted_step(family.config_at(width), size, length) for width in widths)
    settings = replace(settings, flops=flops)
    needed = size * (settings.steps + max(settings.after, settings.stay_steps or 0))
    text = read_text(data, directory, words=family.words, length=length, most=needed)
    check_enough(text, data, needed)
    return DirectoryStudy(Trained(family, text, size, device).proxy, settings, family, text)


def _check_memory(family: StockFamily) -> None:
    """Raise unless a model of the base's size fits: the proxy is initialised with the sizes of such a one."""
    needed = 4 * sum(p.numel() for p in on_meta(family.config, family.cls).parameters())
    if needed > free_memory():
        what = f"a model of its size, with random weights, takes {needed / 1e9:.1f} GB, and {free_memory() / 1e9:.1f} GB are free"
        raise_faults(
            "the proxy cannot be initialised",
            [Fault("proxy.not_enough_memory", family.config.model_type, what, "use a larger machine")],
        )
