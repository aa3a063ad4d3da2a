"""What is kept of a point while it is trained: weights, optimizer, scheduler, losses, random numbers, in one file.

Written whole or not at all, read without running anything. Knows nothing of studies.
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


@dataclass
class Kept:
    """A point after `step` steps of its sweep, with the loss of each."""

    step: int
    losses: list[float]
    parts: dict[str, Any]
    random: dict[str, Any]


def keep(path: Path, run: Run, losses: list[float]) -> None:
    """Write a checkpoint; whoever reads at the same time sees the old one or the new one."""
    told = {
        "step": len(losses),
        "losses": torch.tensor(losses, dtype=torch.float64),
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
            torch.save(told, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def kept(path: Path) -> Kept | None:
    """The checkpoint of a point, or None when there is none yet."""
    if not path.exists():
        return None
    try:
        told = torch.load(path, map_location="cpu", weights_only=True)
        return Kept(int(told["step"]), told["losses"].tolist(), told["parts"], told["random"])
    except (pickle.UnpicklingError, RuntimeError, KeyError, EOFError) as error:
        raise MupscaleError(
            f"{path} is no checkpoint of a point: {error}; remove it to train the point anew"
        ) from None


def restore_(run: Run, parts: dict[str, Any]) -> None:
    """Put a checkpoint into a run that was made like the one that wrote it."""
    run.model.load_state_dict(parts["model"])
    for optimizer, state in zip(run.optimizers, parts["optimizers"], strict=True):
        optimizer.load_state_dict(
            copy.deepcopy(state)
        )  # torch takes tensors as they are, and steps them in place
    for scheduler, state in zip(run.schedulers, parts["schedulers"], strict=True):
        scheduler.load_state_dict(state)


def seed_(seed: int) -> None:
    """Start every generator of random numbers from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, Any]:
    """Where every generator of random numbers stands, as plain values."""
    name, words, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": [name, [int(w) for w in words], *rest],
    }


def set_random_state_(state: dict[str, Any]) -> None:
    """Put every generator of random numbers where it stood.

    >>> before = random_state(); first = torch.rand(1), random.random(), np.random.rand()
    >>> set_random_state_(before); first == (torch.rand(1), random.random(), np.random.rand())
    True
    """
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    name, words, *rest = state["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
