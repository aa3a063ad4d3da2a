"""A run's weights as one safetensors file that carries how it was made.

Plan, reference, seed, noise and versions stand in the file's own header, so they cannot be lost beside it.
Pickle is neither written nor read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..errors import MupscaleError
from ..plans.names import named_tensors, unwrap
from ..plans.plan import Plan
from ..runs.run import Run

_KEY = "mupscale"


def save_weights(run: Run, path: Path | str) -> None:
    """Write the model's state dict, tied tensors once, with plan and provenance in the header.

    >>> import tempfile
    >>> from torch import nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(Run(nn.Linear(2, 2), provenance={"note": 1}), f"{folder}/model.safetensors")
    ...     read_provenance(f"{folder}/model.safetensors")["provenance"]
    {'note': 1}
    """
    persistent = set(unwrap(run.model).state_dict())
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, _, tensor in named_tensors(run.model):
        if name not in persistent:
            continue
        if id(tensor) in first:
            ties[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        tensors[name] = tensor.detach().contiguous()
    about = {
        "provenance": dict(run.provenance),
        "plan": None if run.plan is None else run.plan.as_json(),
        "since_reference": None if run.since is None else run.since.as_json(),
        "ties": ties,
        "step": run.steps,
    }
    save_file(tensors, str(path), metadata={_KEY: json.dumps(about, sort_keys=True), "format": "pt"})


def read_provenance(path: Path | str) -> dict[str, Any]:
    """What `save_weights` wrote about a file: provenance, plan, reference, ties, step.

    >>> import tempfile
    >>> from torch import nn
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(Run(nn.Linear(2, 2), steps=300), f"{folder}/model.safetensors")
    ...     read_provenance(f"{folder}/model.safetensors")["step"]
    300
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
    except Exception as error:  # the reader's own errors are many, and all mean this
        raise MupscaleError(f"{path} cannot be read as safetensors: {error}") from None
    if _KEY not in metadata:
        raise MupscaleError(f"{path} says nothing about how it was made; it was not written by save_weights")
    about: dict[str, Any] = json.loads(metadata[_KEY])
    return about


def read_plan(path: Path | str) -> Plan | None:
    """The plan by which the saved run was widened, or None.

    >>> import tempfile, mupscale as mu
    >>> from torch import nn
    >>> wide = mu.widen(nn.Linear(2, 2), lambda: nn.Linear(4, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_weights(wide, f"{folder}/model.safetensors")
    ...     read_plan(f"{folder}/model.safetensors") == wide.plan
    True
    """
    told = read_provenance(path)["plan"]
    return None if told is None else Plan.from_json(json.dumps(told))
