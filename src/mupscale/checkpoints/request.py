"""What a user asks for, as a value: together with the base it decides every byte of the result.

Knows how requests are written on a command line and in a record. Acts on nothing and needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from ..errors import Fault, MupscaleError, raise_faults
from ..families.config.goal import Goal
from ..families.types.declarations import Declarations
from ..files.floats import FLOATS, TORCH_NAMES
from .noise_words import AUTO, READERS

if TYPE_CHECKING:
    from ..files.directory import Directory
    from ..training.recipe import Recipe

SHARD_BYTES = 5_000_000_000  # the largest file that transformers 4 writes by default


@dataclass(frozen=True)
class Request:
    """What a user asks for: together with the base, this decides every byte of the result."""

    goal: Goal
    noise: tuple[str, float] | None = None
    """Noise scheme (a key of `SCHEMES`) and size, "auto" and a share, or what new units read and the size of their noise; None
    for the exact map alone."""
    seed: int = 0
    dtype: str | None = None
    """Dtype of the floating weights ("BF16"); None keeps that of each tensor."""
    shard_bytes: int = SHARD_BYTES
    export: str | None = None
    state: bool = True
    """Whether optimizer state next to the weights is carried."""
    optimizer: str | None = None
    """Which optimizer left it, where the file does not tell."""
    recipe: Recipe | None = None
    """What tuning found, in place of `noise`."""
    trust_base: bool = False
    """Whether the base is not read once more before the result is published."""
    declared: Declarations | None = None
    """What the user declared about the model."""

    @property
    def adds_noise(self) -> bool:
        return self.noise is not None or self.recipe is not None

    @property
    def wakes(self) -> bool:
        """Whether new units wake and copies part without a change of the loss.

        >>> Request(Goal.parse(2, by="units"), noise=("copied", 1.0)).wakes, Request(Goal.parse(2), noise=("t", 0.1)).wakes
        (True, False)
        """
        if self.recipe is not None:
            return self.recipe.by == "units"
        return self.noise is not None and self.noise[0] in READERS

    @property
    def centred(self) -> bool:
        """Whether new channels of a stream behind LayerNorm may carry the mean of the others: training is not the base's then.

        >>> goal = Goal.parse(2, by="units")
        >>> Request(goal, noise=("copied", 1.0)).centred, Request(goal).centred
        (True, False)
        """
        return self.wakes and self.goal.by == "units"

    @property
    def rise(self) -> float | None:
        """The share of what was learned by which the loss may rise, where the size of the noise is to be measured.

        >>> Request(Goal.parse(2), noise=("auto", 0.1)).rise, Request(Goal.parse(2), noise=("t", 0.1)).rise
        (0.1, None)
        """
        if self.recipe is not None:
            return self.recipe.rise
        return self.noise[1] if self.noise is not None and self.noise[0] == AUTO else None

    def as_json(self) -> dict[str, Any]:
        """As a record stores it: the goal as it is written on a command line.

        >>> Request(Goal.parse(2, "layers=8")).as_json()["to"]
        'layers=8'
        """
        kept = {field.name: getattr(self, field.name) for field in fields(self)[1:8]}
        unusual = {
            "recipe": None if self.recipe is None else self.recipe.to_json(),
            "trust_base": self.trust_base or None,
            "declared": None
            if self.declared is None
            else json.dumps(self.declared.as_json(), sort_keys=True),
            "to": self.goal.to_text,
            "by": None if self.goal.by == "copies" else self.goal.by,
        }
        kept["noise"] = None if self.noise is None else list(self.noise)
        given = {key: value for key, value in unusual.items() if value is not None}
        return {"multipliers": self.goal.k_text, **kept, **given}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Request:
        """What `as_json` wrote, and what 0.2.0 wrote.

        >>> request = Request(Goal.parse("ffn=2", "layers=8"), noise=("t", 0.1), dtype="BF16")
        >>> Request.from_json(request.as_json()) == request
        True
        """
        try:
            values = dict(entry)
            goal = Goal.parse(values.pop("multipliers"), values.pop("to", None), values.pop("by", "copies"))
            noise, recipe, declared = (values.pop(key, None) for key in ("noise", "recipe", "declared"))
            return Request(
                goal,
                noise=None if noise is None else (str(noise[0]), float(noise[1])),
                recipe=None if recipe is None else _recipe(recipe),
                declared=None if declared is None else Declarations.of_json(json.loads(declared)),
                **values,
            )
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise MupscaleError(
                f"the record's request cannot be read: {error}", code="growth.request_malformed"
            ) from None


def _recipe(text: str) -> Recipe:
    from ..training.recipe import Recipe  # imports torch

    return Recipe.from_json(text)


def refuse_unmeasurable(directory: Directory) -> None:
    """Raise for a model of images whose loss is asked for without a batch: seen in its configuration, before planning.

    Every other model is asked for text first.
    """
    config = directory.config
    channels, size = config.get("num_channels"), config.get("image_size", 224)
    if not isinstance(channels, int) or any(
        "vocab_size" in part for part in (config, *config.values()) if isinstance(part, dict)
    ):
        return
    height, width = size if isinstance(size, list) and len(size) == 2 else (size, size)
    labelled = str((config.get("architectures") or [""])[0]).endswith("ForImageClassification")
    labels = ', "labels": labels' if labelled else ""
    raise_faults(
        "the noise is chosen by a loss, and a model of images writes no text to measure it on",
        [
            Fault(
                "data.batch_needed",
                "--inputs",
                f"images of shape [n, {channels}, {height}, {width}], as the image processor of the base returns them"
                + (", and labels [n]" if labelled else ""),
                f'write them by safetensors.torch.save_file({{"pixel_values": images{labels}}}, "images.safetensors") and add '
                "--inputs images.safetensors",
            )
        ],
    )


def parse_dtype(text: str) -> str:
    """A floating dtype by torch's or safetensors' name.

    >>> parse_dtype("bfloat16"), parse_dtype("F32")
    ('BF16', 'F32')
    """
    found = text.upper() if text.upper() in FLOATS else TORCH_NAMES.get(text)
    if found is None:
        raise MupscaleError(
            f"--dtype {text}: expected float32, bfloat16, float16 or float64", code="option.unknown_dtype"
        )
    return found
