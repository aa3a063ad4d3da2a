"""What a user asks for, as a value: together with the base it decides every byte of the result.

Knows how requests are written on a command line and in a record. Acts on nothing and needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import MupscaleError
from ..files.floats import FLOATS, TORCH_NAMES
from .noise_words import AUTO

SHARD_BYTES = 5_000_000_000  # the largest file that transformers 4 writes by default


@dataclass(frozen=True)
class Request:
    """What a user asks for: together with the base, this decides every byte of the result."""

    multipliers: str
    noise: tuple[str, float] | None = None
    """Noise scheme (a key of `SCHEMES`) and size, or "auto" and a share; None for the exact map alone."""
    seed: int = 0
    dtype: str | None = None
    """Dtype of the floating weights ("BF16"); None keeps that of each tensor."""
    shard_bytes: int = SHARD_BYTES
    export: str | None = None
    state: bool = True
    """Whether optimizer state next to the weights is carried."""
    optimizer: str | None = None
    """Which optimizer left it, where the file does not tell."""
    recipe: str | None = None
    """What tuning found, as JSON, in place of `noise`."""
    trust_base: bool = False
    """Whether the base is not read once more before the result is published."""

    declared: str | None = None
    """What the user declared about the model, as JSON."""
    to: str | None = None
    """How deep the result is, as `--to` says it; None for the depth of the base."""

    @property
    def goal(self) -> str:
        """What grows, as it is written on a command line.

        >>> Request("2").goal, Request("1", to="layers=8").goal
        ('-k 2', '--to layers=8')
        """
        width = [f"-k {self.multipliers}"] if self.to is None or self.multipliers != "1" else []
        return " ".join([*width, *([] if self.to is None else [f"--to {self.to}"])])

    @property
    def adds_noise(self) -> bool:
        return self.noise is not None or self.recipe is not None

    @property
    def rise(self) -> float | None:
        """The share of what was learned by which the loss may rise, where the size of the noise is to be measured.

        >>> Request("2", noise=("auto", 0.1)).rise, Request("2", recipe='{"rise": 0.2}').rise, Request("2", noise=("t", 0.1)).rise
        (0.1, 0.2, None)
        """
        if self.recipe is not None:
            found = json.loads(self.recipe).get("rise")
            return None if found is None else float(found)
        return self.noise[1] if self.noise is not None and self.noise[0] == AUTO else None

    def as_json(self) -> dict[str, Any]:
        usual = {"recipe": None, "trust_base": False, "declared": None, "to": None}
        return {key: value for key, value in asdict(self).items() if key not in usual or value != usual[key]}

    @staticmethod
    def from_json(entry: Mapping[str, Any]) -> Request:
        try:
            noise = entry["noise"]
            return Request(**{**entry, "noise": None if noise is None else (str(noise[0]), float(noise[1]))})
        except (TypeError, ValueError, KeyError, IndexError) as error:
            raise MupscaleError(
                f"the record's request cannot be read: {error}", code="growth.request_malformed"
            ) from None


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
