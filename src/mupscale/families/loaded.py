"""Load real weights in a separate process: the loss of a batch, the noise that it allows, and base against wide.

Needs memory for whole models. It is estimated before the start, and the call is refused if there is not enough.
Everything else in this room works on small copies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MupscaleError
from ..plans.plan import Plan
from .process import OFFLINE
from .record import FamilyPlan

_ROOM = 1.3  # activations and the libraries themselves


def free_memory() -> int:
    """Bytes that a new process may take without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_memory(needed: float, what: str) -> None:
    """Raise unless this many bytes, and a margin for activations and libraries, are free."""
    free = free_memory()
    if needed * _ROOM > free:
        raise MupscaleError(
            f"{what} needs about {needed * _ROOM / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; "
            "run it on a larger machine, or leave this level out"
        )


def batch_losses(directories: Sequence[Path], batch: Path | None) -> list[float]:
    """The loss of one batch under the model of each directory, in float32, one after the other.

    Without a batch it is text that the first model writes.
    """
    found = _ask(
        {
            "ask": "losses",
            "directories": [str(d) for d in directories],
            "batch": None if batch is None else str(batch),
        }
    )
    return [float(value) for value in found["losses"]]


def choose_size(
    base: Path, family: FamilyPlan, since: Plan | None, rise: float, seed: int, batch: Path | None
) -> dict[str, Any]:
    """The noise size at which the loss of a batch has risen by a share of what was learned, as `Choice.as_json`."""
    return _ask(
        {
            "ask": "noise",
            "base": str(base),
            "batch": None if batch is None else str(batch),
            "plan": family.plan.as_json(),
            "since": None if since is None else since.as_json(),
            "config": dict(family.wide_config),
            "classes": [family.architecture, family.wide_architecture],
            "exempt": family.exempt.as_json(),
            "rise": rise,
            "seed": seed,
        }
    )


def compare_models(
    base: Path, wide: Path, plan: Mapping[str, Any], architectures: Sequence[str]
) -> dict[str, Any]:
    """Outputs and gradients of the real weights, in float64: the loss gap, and the gradient error of each tensor."""
    return _ask(
        {
            "ask": "compare",
            "base": str(base),
            "wide": str(wide),
            "plan": dict(plan),
            "classes": list(architectures),
        }
    )


def _ask(request: Mapping[str, Any]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(request).encode(),
        env={**os.environ, **OFFLINE},
        capture_output=True,
        check=False,
    )
    lines = done.stdout.decode(errors="replace").splitlines()
    if done.returncode or not lines:
        tail = done.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no output"]
        raise MupscaleError(f"the process that loads the model ended with code {done.returncode}: {tail[0]}")
    found: dict[str, Any] = json.loads(lines[-1])
    if "claim" in found:
        raise MupscaleError(found["claim"])
    return found


def _load(directory: str, dtype: Any, architecture: str | None = None) -> Any:
    from .models import config_from, model_class, quiet, read_config

    config = config_from(read_config(directory))
    with quiet():
        model, info = model_class(config, architecture).from_pretrained(
            directory, dtype=dtype, output_loading_info=True, attn_implementation="eager"
        )
    # Unexpected tensors are left out, as they were when the directory was read; what is missing would be random.
    wrong = {
        key: sorted(map(str, names)) for key, names in info.items() if names and key != "unexpected_keys"
    }
    if wrong:
        lines = "; ".join(f"{key}: {', '.join(names[:4])}" for key, names in wrong.items())
        raise MupscaleError(f"{directory} does not load cleanly: {lines}")
    return model.eval(), config


def _losses(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from .batches import loss_of_batch

    losses, inputs = [], None
    for directory in request["directories"]:
        model, _ = _load(directory, torch.float32)
        inputs = _inputs(request, model) if inputs is None else inputs
        with torch.no_grad():
            losses.append(float(loss_of_batch(inputs)(model)))
        del model
    return {"losses": losses}


def _inputs(request: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """The batch of the request, or text that the model writes."""
    from .batches import drawn_text, read_batch

    return drawn_text(model) if request["batch"] is None else read_batch(Path(request["batch"]))


def _choose(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from ..plans.plan import Plan
    from ..training.auto_noise import AutoNoise, choose_noise
    from ..training.noise_places import Exempt
    from .batches import loss_of_batch
    from .models import config_from, model_class

    base, _ = _load(request["base"], torch.float32, request["classes"][0])
    config = config_from(request["config"])

    def wide() -> Any:
        return model_class(config, request["classes"][1])(config)

    choice = choose_noise(
        base,
        wide,
        AutoNoise(request["rise"]),
        loss_of_batch(_inputs(request, base)),
        plan=Plan.of_json(request["plan"]),
        since=None if request["since"] is None else Plan.of_json(request["since"]),
        seed=request["seed"],
        exempt=Exempt.of_json(request["exempt"]),
    )
    return choice.as_json()


def _compare(request: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    from ..plans.float64 import lifted_casts
    from ..plans.identity import compare_gradients, gradients
    from ..plans.plan import Plan
    from ..tensors.differences import loss_gap
    from .losses import batch_for, loss_for

    plan = Plan.of_json(request["plan"])
    base, config = _load(request["base"], torch.float64, request["classes"][0])
    wide, _ = _load(request["wide"], torch.float64, request["classes"][1])
    with lifted_casts():
        loss = loss_for(base, wide, batch_for(base, config))
        value, base_grads = gradients(base, loss)
        found, wide_grads = gradients(wide, loss)
    identity = compare_gradients(base_grads, wide_grads, plan)
    gap = loss_gap(float(value), float(found))
    return {"gap": gap, "errors": identity.errors, "untested": list(identity.untested)}


def main() -> None:
    """Entry point of the child: a request on standard input, an answer as the last line of standard output."""
    request = json.loads(sys.stdin.read())
    try:
        answer = {"losses": _losses, "noise": _choose, "compare": _compare}[request["ask"]](request)
    except MupscaleError as error:
        answer = {"claim": str(error)}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
