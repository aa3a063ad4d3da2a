"""Batches of what few types read: videos, series, latents, and the whole of what a part of a larger model gets.

Each rule goes by the name of an argument, not by the type. What a rule gives is tried, and left out if the model refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..config.fields import first
from .images import Batch, randoms

_EMBEDDED = ("inputs_embeds", "hidden_states")
_FRAMES = 4
_LENGTH = 11
_WAVE = 6400


def videos(
    accepted: set[str], merged: Mapping[str, Any], number: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Arguments that hold `number` videos of a few frames, as pixels; models that read patches see them as images."""
    if "pixel_values_videos" not in accepted or "video_grid_thw" in accepted:
        return
    channels = next((merged[n] for n in ("num_channels", "in_chans") if type(merged.get(n)) is int), 3)
    sizes = [merged[n] for n in ("image_size", "crop_size") if type(merged.get(n)) is int]
    for side in dict.fromkeys((*(min(size, 64) for size in sizes[:1]), *sizes[:1], 224)):
        shape = (number, _FRAMES, channels, side, side)
        yield {"pixel_values_videos": randoms(shape, generator)}


def series(
    accepted: set[str], merged: Mapping[str, Any], number: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Arguments that hold `number` series of numbers."""
    length = merged.get("context_length")
    if "past_values" not in accepted or type(length) is not int:
        return
    whole: Batch = {"past_values": randoms((number, length), generator)}
    if "past_values_padding" in accepted:
        whole["past_values_padding"] = torch.zeros(number, length, dtype=torch.long)
    if "freq" in accepted:
        whole["freq"] = torch.arange(number)[:, None] % int(merged.get("freq_size", 1))
    yield whole


def parts(
    accepted: set[str], merged: Mapping[str, Any], main: str, number: int, generator: torch.Generator
) -> Iterator[Batch]:
    """What a part of a larger model gets from another part: embeddings, latents, or sound under another name."""
    needed = next((name for name in _EMBEDDED if name in accepted), None)
    if needed == "hidden_states" and main == "input_values":
        yield {needed: randoms((number, 1, _WAVE), generator)}
    stream = first(merged, "hidden")
    if needed is not None and stream is not None:
        yield {needed: randoms((number, _LENGTH, stream), generator)}
    for size in (merged.get("latent_dim"), stream) if "latents" in accepted else ():
        if type(size) is int:
            yield {"latents": randoms((number, size, _LENGTH), generator)}
            yield {"latents": randoms((number, _LENGTH, size), generator)}


def entities(accepted: set[str], ids: Tensor) -> Batch:
    """Two entities in each text of `ids`, of one word each, where a model reads entities."""
    if not {"entity_ids", "entity_position_ids"} <= accepted:
        return {}
    places = torch.full((len(ids), 2, ids.shape[1]), -1)
    places[:, :, 0] = torch.tensor([1, 3])
    found: Batch = {"entity_ids": ids[:, :2].contiguous(), "entity_position_ids": places}
    return {**found, "entity_attention_mask": torch.ones(len(ids), 2, dtype=torch.long)}
