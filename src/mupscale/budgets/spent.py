"""What a directory says about a trained base: parameters from its headers, FLOPs and progress from trainer_state.json.

No weight is read, and transformers is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..files.directory import read_directory
from ..files.strict import parse_json, read_regular
from .law import FLOPS_PER_PARAMETER

STATE = "trainer_state.json"
LIKE = {"llama": "llama"}
"""Kinds of measured models, by model_type."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of names of the tensors that the Trainer does not count."""


@dataclass(frozen=True)
class Spent:
    """Parameters of a base, and what was spent on it; None where no file says it."""

    params: int
    flops: float | None
    finished: bool | None
    """Whether the last step of the schedule was taken."""
    source: str
    """Which numbers of the file the FLOPs come from."""
    like: str | None = None
    """The kind of measured model that it is; None for types that were not measured."""


def read_spent(path: Path) -> Spent:
    """Read a Hugging Face directory, such as a checkpoint of a Trainer.

    FLOPs are 6 for each parameter and token, as in the measured runs. Where `num_input_tokens_seen` is 0, they come from
    `total_flos`, in which the Trainer leaves out embeddings: it is scaled to all parameters, tied or not.
    """
    directory = read_directory(path)
    sizes = {name: prod(place.shape) for name, place in directory.tensors.items()}
    params = sum(sizes.values())
    counted = params - sum(size for name, size in sizes.items() if name.endswith(EMBEDDINGS))
    like = LIKE.get(str(directory.config.get("model_type")))
    if STATE not in directory.trainer:
        return Spent(params, None, None, "", like)
    state = parse_json(read_regular(path / STATE), STATE, infinity=True)
    if not isinstance(state, dict):
        raise MupscaleError(
            f"{STATE} is not valid: it holds a {type(state).__name__}, expected an object",
            code="trainer.state_not_an_object",
        )
    flops, tokens = _number(state, "total_flos"), _number(state, "num_input_tokens_seen")
    step, last = _number(state, "global_step"), _number(state, "max_steps")
    finished = step >= last if step and last else None
    if tokens:
        return Spent(params, FLOPS_PER_PARAMETER * params * tokens, finished, "num_input_tokens_seen", like)
    if flops and counted:
        return Spent(params, flops * params / counted, finished, "total_flos", like)
    return Spent(params, None, finished, "", like)


def _number(state: dict[str, Any], name: str) -> float:
    """A number of the state, 0 where it is missing."""
    value = state.get(name) or 0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value) or value < 0:
        raise MupscaleError(
            f"{STATE}: {name} is {value!r}, expected a number, 0 or more", code="trainer.state_not_a_number"
        )
    return float(value)
