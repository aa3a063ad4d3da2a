"""The checkpoint of a point during training: weights, optimizer, scheduler, losses and random state in one file.

Written atomically, read without executing anything. Knows nothing about studies.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..errors import MupscaleError
from ..runs.run import Run
from ..tensors.random_states import accelerator_states, set_accelerator_states_


@dataclass
class KeptPoint:
    """A point after `step` steps of its sweep, with the loss of each."""

    step: int
    losses: list[float]
    parts: dict[str, Any]
    random: dict[str, Any]


def keep(path: Path, run: Run, losses: list[float]) -> None:
    """Write a checkpoint; a concurrent reader sees the old one or the new one."""
    content = {
        "step": len(losses),
        "losses": torch.tensor(losses, dtype=torch.float64, device="cpu"),
        "parts": {
            "model": run.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "schedulers": [scheduler.state_dict() for scheduler in run.schedulers],
        },
        "random": random_state(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def kept(path: Path) -> KeptPoint | None:
    """The checkpoint of a point, or None when there is none yet."""
    if not path.exists():
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return KeptPoint(
            int(content["step"]), content["losses"].tolist(), content["parts"], content["random"]
        )
    except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        raise MupscaleError(
            f"{path} is not a checkpoint of a point: {error}; remove it to train the point again",
            code="study.checkpoint_damaged",
        ) from None


def restore_(run: Run, parts: dict[str, Any]) -> None:
    """Load a checkpoint into a run that was built like the one that wrote it."""
    run.model.load_state_dict(parts["model"])
    for optimizer, state in zip(run.optimizers, parts["optimizers"], strict=True):
        optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps these tensors and updates them in place
    for scheduler, state in zip(run.schedulers, parts["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def seed_(seed: int) -> None:
    """Seed every random number generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """The state of every random number generator, as plain values."""
    name, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "devices": accelerator_states(),
        "python": random.getstate(),
        "numpy": [name, [int(w) for w in words], *rest],
    }


def set_random_state_(state: dict[str, Any]) -> None:
    """Restore the state of every random number generator.

    >>> before = random_state(); first = torch.rand(1), random.random(), np.random.rand()
    >>> set_random_state_(before); first == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    torch.set_rng_state(state["torch"])
    # A checkpoint of version 0.2 has the states of CUDA alone.
    set_accelerator_states_(state["devices"] if "devices" in state else {"cuda": state["cuda"]})
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
