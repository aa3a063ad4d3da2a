"""What the process that loads real weights does; its other end is `loaded.py`, which says what the requests are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import MupscaleError
from ..files.floats import refuse_not_finite
from ..files.places import torch_dtype
from ..models.float64 import lifted_casts
from ..noise.apart import share_kept
from ..noise.auto import AutoNoise
from ..noise.resolved import restore_noise
from ..noise.where import Exempt
from ..plans.direction import Direction
from ..plans.plan import Plan
from ..plans.rows import old_words
from ..plans.wide_model import fill_model_
from ..proofs.identity import Loss, compared
from ..training.grow.auto_noise import choose_noise
from ..training.grow.loss_rise import measured
from .copy.losses import batch_for, loss_for
from .measures import Measure, measure_for
from .models import config_from, model_class, quiet, read_config
from .word_losses import over_words, word_losses


def _load(directory: str, dtype: Any, architecture: str | None = None, absent: Collection[str] = ()) -> Any:
    """The model of a directory, which must load cleanly but for tensors that are known to be absent from it."""
    torch.manual_seed(0)  # what is absent is drawn, and every process draws the same
    config = config_from(read_config(directory))
    with quiet():
        model, info = model_class(config, architecture).from_pretrained(
            directory,
            config=config,  # a class may stand for several types, and would read the fields of its own
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
        raise MupscaleError(
            f"{directory} does not load cleanly: {lines}", code="directory.does_not_load_cleanly"
        )
    refuse_not_finite([name for name, p in model.named_parameters() if not bool(p.isfinite().all())])
    return model.eval(), config


def _stored(request: Mapping[str, Any]) -> dict[str, Any]:
    base, wide = request["directories"]
    model, _ = _load(base, torch.float32)
    measure = _measure(request, model)
    before, words = measured(measure.of, model), getattr(model.config.get_text_config(), "vocab_size", None)
    del model
    loss = measure.of if words is None else over_words(measure.of, words)
    after = measured(loss, _load(wide, torch.float32)[0])
    return {"before": before, "after": after, "kind": measure.kind, "text": measure.text}


def _planned(request: Mapping[str, Any]) -> dict[str, Any]:
    base, _ = _load(request["base"], torch.float32, request["classes"][0], request["absent"])
    measure = _measure(request, base)
    plan, since = Plan.of_json(request["plan"]), _since(request)
    noise = None if request["noise"] is None else restore_noise(request["noise"], plan, since)
    wide = fill_model_(_wide(request)(), base, Direction(plan, noise=noise))
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.copy_(parameter.to(torch_dtype(request["dtype"])))
    words = old_words(plan)
    found = None if words is None else word_losses(base, wide, measure, words)
    return {
        "before": measured(measure.of, base),
        "after": measured(_loss(measure, plan), wide),
        "kind": measure.kind,
        "text": measure.text,
        "words": None if found is None else asdict(found),
        "kept": share_kept(plan, base, wide, measure.of),
    }


def _measure(request: Mapping[str, Any], model: Any) -> Measure:
    return measure_for(model, None if request["batch"] is None else Path(request["batch"]))


def _loss(measure: Measure, plan: Plan) -> Loss:
    """What noise is judged by: new words, which cost something without any noise, do not count."""
    words = old_words(plan)
    return measure.of if words is None else over_words(measure.of, words[0])


def _since(request: Mapping[str, Any]) -> Plan | None:
    return None if request["since"] is None else Plan.of_json(request["since"])


def _wide(request: Mapping[str, Any]) -> Callable[[], Any]:
    config = config_from(request["config"])
    return lambda: model_class(config, request["classes"][1])(config)


def _choose(request: Mapping[str, Any]) -> dict[str, Any]:
    base, _ = _load(request["base"], torch.float32, request["classes"][0], request["absent"])
    measure, plan = _measure(request, base), Plan.of_json(request["plan"])
    choice = choose_noise(
        base,
        _wide(request),
        AutoNoise(request["rise"]),
        _loss(measure, plan),
        plan=plan,
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
        loss = loss_for(base, wide, batch_for(base, config), old_words(plan))
        found = compared(base, wide, plan, loss)
    identity = found.identity
    return {"gap": found.gap, "errors": identity.errors, "untested": list(identity.untested)}


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The task "load" of a child: what a request asks for."""
    asked = {"stored": _stored, "planned": _planned, "noise": _choose, "compare": _compare}[request["ask"]]
    return asked(request)
