"""Batches with images: pixels in the forms that model types ask for, and texts with room for what they become.

A model that reads images or sound next to text replaces special tokens of its text by their features. How many there are is
asked of the model itself, so no processor is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..models import quiet

Batch = dict[str, Any]
GRID = "grid_thw"
"""The argument of an encoder of images that runs alone: how many patches each image has."""
SIDE = 4
"""Patches along each side of an image that is given as patches: two merged ones for models that merge 2 x 2."""


def images(
    accepted: set[str], merged: Mapping[str, Any], number: int, generator: torch.Generator
) -> Iterator[Batch]:
    """Arguments that hold `number` images, likeliest first; `merged` are the fields of all nested configurations."""
    channels = merged.get("num_channels", merged.get("in_channels", merged.get("in_chans", 3)))
    channels = channels if type(channels) is int else 3
    patch = merged.get("patch_size")
    grid = next((name for name in ("image_grid_thw", GRID) if name in accepted), None)
    if type(patch) is int and grid is not None:
        entries = channels * int(merged.get("temporal_patch_size", 1)) * patch * patch
        pixels = randoms((number * SIDE * SIDE, entries), generator)
        name = "pixel_values" if "pixel_values" in accepted else "hidden_states"
        given: Batch = {grid: torch.tensor([[1, SIDE, SIDE]] * number)}
        if "image_merge_sizes" in accepted:
            given["image_merge_sizes"] = torch.tensor([2] * number)
        yield {name: pixels, **given}
        yield {name: torch.cat([pixels, pixels.flip(0)], dim=1), **given}  # of two frames, whatever says so
        yield {name: pixels[:, : channels * patch * patch].reshape(-1, channels, patch, patch), **given}
        return
    if type(patch) is int and "target_sizes" in accepted:  # the patches of all images in one row
        row = randoms((1, channels, patch, number * SIDE * SIDE * patch), generator)
        yield {"pixel_values": row, "target_sizes": torch.tensor([[SIDE, SIDE]] * number)}
    if type(patch) is int and "spatial_shapes" in accepted:
        yield {
            "pixel_values": randoms((number, SIDE * SIDE, channels * patch * patch), generator),
            "pixel_attention_mask": torch.ones(number, SIDE * SIDE, dtype=torch.long),
            "spatial_shapes": torch.tensor([[SIDE, SIDE]] * number),
        }
        return
    size = merged.get("image_size", merged.get("input_size"))
    known = tuple(size) if isinstance(size, (list, tuple)) else (size, size) if type(size) is int else None
    small = known if known and max(known) < 64 else (64, 64)
    if known and merged.get("image_grid_pinpoints") and "image_sizes" in accepted:
        height, width = sorted(merged["image_grid_pinpoints"], key=sum)[0]
        tiles = 1 + (height // known[0]) * (width // known[1])
        yield {
            "pixel_values": randoms((number, tiles, channels, *known), generator),
            "image_sizes": torch.tensor([[height, width]] * number),
        }
    prompts = [name for name in ("prompt_pixel_values", "prompt_masks") if name in accepted]
    halves = [(known[0] // 2, known[1])] if known and prompts else []  # a prompt stands above each image
    for height, width in dict.fromkeys((*halves, small, known or small, (224, 224))):
        shape = (number, channels, height, width)
        yield {name: randoms(shape, generator) for name in ("pixel_values", *prompts)}
    if "pixel_attention_mask" in accepted:  # several images for each text
        yield {"pixel_values": randoms((number, 1, channels, *(known or small)), generator)}


def beside_text(model: nn.Module, given: Batch, ids: Tensor, token: int, kind: str = "image") -> Batch | None:
    """The images with texts of `ids` that hold one image each; None if the model does not take them. So for audio.

    `token` marks the places of features. They stand behind the first word:

    >>> _inserted(torch.tensor([[5, 6, 7]]), 9, 2)
    tensor([[5, 9, 9, 6, 7]])
    """
    parts = (model, getattr(model, "model", None))
    features = next((f for part in parts for f in [getattr(part, f"get_{kind}_features", None)] if f), None)
    if features is None:
        return None
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    try:
        with torch.no_grad(), quiet():
            found = features(**{k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()})
        found = getattr(found, "pooler_output", found)
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        rows = sum(one.numel() // one.shape[-1] for one in found)
    except Exception:
        return None
    texts = _inserted(ids, token, rows // len(ids))
    return {**given, "input_ids": texts, "mm_token_type_ids": (texts == token).long()}


def _inserted(ids: Tensor, token: int, number: int) -> Tensor:
    return torch.cat([ids[:, :1], torch.full((len(ids), number), token), ids[:, 1:]], dim=1)


def randoms(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random numbers of order one, in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
