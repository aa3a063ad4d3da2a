"""The process that loads real weights: a request on standard input, an answer as the last line of standard output.

Its other end is `loaded.py`, which says what the requests are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import MupscaleError
from ..files.places import torch_dtype
from ..plans.direction import Direction
from ..plans.float64 import lifted_casts
from ..plans.identity import compare_gradients, gradients
from ..plans.plan import Plan
from ..tensors.differences import loss_gap
from ..training.auto_noise import AutoNoise, choose_noise
from ..training.jump import measured
from ..training.noise_places import Exempt
from ..training.noises import restore_noise
from ..training.widen import fill_
from .losses import batch_for, loss_for
from .measures import Measure, measure_for
from .models import config_from, model_class, quiet, read_config


def _load(directory: str, dtype: Any, architecture: str | None = None, absent: Collection[str] = ()) -> Any:
    """The model of a directory, which must load cleanly but for tensors that are known to be absent from it."""
    torch.manual_seed(0)  # what is absent is drawn, and every process draws the same
    config = config_from(read_config(directory))
    with quiet():
        model, info = model_class(config, architecture).from_pretrained(
            directory,
            dtype=dtype,
            output_loading_info=True,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    # Unexpected tensors are left out, as they were when the directory was read; what is missing would be random.
    odd = {key: sorted({*map(str, names)} - {*absent}) for key, names in info.items()}
    wrong = {key: names for key, names in odd.items() if names and key != "unexpected_keys"}
    if wrong:
        lines = "; ".join(f"{key}: {', '.join(names[:4])}" for key, names in wrong.items())
        raise MupscaleError(f"{directory} does not load cleanly: {lines}")
    return model.eval(), config


def _stored(request: Mapping[str, Any]) -> dict[str, Any]:
    base, wide = request["directories"]
    model, _ = _load(base, torch.float32)
    measure = _measure(request, model)
    before = measured(measure.of, model)
    del model
    after = measured(measure.of, _load(wide, torch.float32)[0])
    return {"before": before, "after": after, "kind": measure.kind, "text": measure.text}


def _planned(request: Mapping[str, Any]) -> dict[str, Any]:
    base, _ = _load(request["base"], torch.float32, request["classes"][0], request["absent"])
    measure = _measure(request, base)
    plan, since = Plan.of_json(request["plan"]), _since(request)
    noise = restore_noise(request["noise"], plan, since)
    wide = fill_(_wide(request)(), base, Direction(plan, noise=noise), True)
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.to(torch_dtype(request["dtype"])))
    after = measured(measure.of, wide)
    return {
        "before": measured(measure.of, base),
        "after": after,
        "kind": measure.kind,
        "text": measure.text,
    }


def _measure(request: Mapping[str, Any], model: Any) -> Measure:
    return measure_for(model, None if request["batch"] is None else Path(request["batch"]))


def _since(request: Mapping[str, Any]) -> Plan | None:
    return None if request["since"] is None else Plan.of_json(request["since"])


def _wide(request: Mapping[str, Any]) -> Callable[[], Any]:
    config = config_from(request["config"])
    return lambda: model_class(config, request["classes"][1])(config)


def _choose(request: Mapping[str, Any]) -> dict[str, Any]:
    base, _ = _load(request["base"], torch.float32, request["classes"][0], request["absent"])
    measure = _measure(request, base)
    choice = choose_noise(
        base,
        _wide(request),
        AutoNoise(request["rise"]),
        measure.of,
        plan=Plan.of_json(request["plan"]),
        since=_since(request),
        seed=request["seed"],
        exempt=Exempt.of_json(request["exempt"]),
    )
    return {**choice.as_json(), "kind": measure.kind, "text": measure.text}


def _compare(request: Mapping[str, Any]) -> dict[str, Any]:
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
        answer = {"stored": _stored, "planned": _planned, "noise": _choose, "compare": _compare}[
            request["ask"]
        ](request)
    except MupscaleError as error:
        answer = {"claim": str(error)}
    print("\n" + json.dumps(answer))


if __name__ == "__main__":
    main()
