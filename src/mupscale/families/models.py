"""Stock transformers models from configurations: their class, how they are built, and their tensors.

Knows how to get a class by name, a model on the meta device or with random weights, and its tensors by name.
Never runs code that comes with a checkpoint, and never uses the network.
"""

from __future__ import annotations

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError
from ..files.strict import parse_json, printable, raise_few, read_regular
from ..files.typed import named
from ..models.kinds import is_batch_norm, is_norm
from ..models.names import name_in
from ..storage.location import Location, Url, location
from ..storage.looking import is_dir
from ..tensors.random_states import forked
from .config.fields import FIELDS
from .config.nested import nested_configs
from .types.rows import row_for
from .types.symbols import evaluate

Config = Any
"""A transformers configuration; its package is imported only where it is used."""

# Where transformers lists its classes, in the order of preference; the bare model, which has no loss of its
# own, is last. Used when a configuration names no architecture.
_HEADS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_PRETRAINING_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
_LARGEST_CONFIG = (
    4 << 20
)  # bytes; label names of a classifier make the largest ones, and a thousand take 0.1 MB
_WHOLE_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers")
_MOST_LAYERS = 10_000  # the deepest that are trained have a few hundred
_SILENT = 50  # logging.CRITICAL, which transformers takes as a number


def read_config(source: Mapping[str, Any] | str | Location) -> dict[str, Any]:
    """A configuration as plain data: a mapping as it is, or the config.json of a directory."""
    if isinstance(source, Mapping):
        return dict(source)
    path = location(source)
    path = path / "config.json" if is_dir(path) else path
    if isinstance(path, Url):
        return dict(named(parse_json(read_regular(path, _LARGEST_CONFIG), str(path), infinity=True)))
    try:
        if path.stat().st_size > _LARGEST_CONFIG:
            raise MupscaleError(
                f"{path.name} has {path.stat().st_size} bytes, which no configuration has",
                code="file.too_long",
            )
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        remedy = "name a directory that save_pretrained has written, or its config.json"
        raise MupscaleError(
            f"no configuration can be read from {path}: {reason}; {remedy}", code="config.not_readable"
        ) from None
    if not isinstance(found, dict):
        raise MupscaleError(
            f"{path} holds a {type(found).__name__}, expected an object with a model_type",
            code="config.not_an_object",
        )
    return found


def config_from(raw: Mapping[str, Any]) -> Config:
    """The stock configuration object of plain data; raises an error that says what is missing."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise MupscaleError(
            _no_type(kind, bool(raw.get("auto_map")), list(CONFIG_MAPPING)),
            code="config.unknown_model_type" if isinstance(kind, str) else "config.no_model_type",
        )
    if raw.get("quantization_config"):
        raise MupscaleError(
            "a quantised checkpoint holds no weights that could be copied; grow the original one",
            code="checkpoint.quantised_weights",
        )
    _refuse_layers(raw)
    try:
        config = CONFIG_MAPPING[kind].from_dict(_plain({k: v for k, v in raw.items() if k != "auto_map"}))
    except Exception as error:
        raise MupscaleError(
            f"transformers refuses this configuration of {kind}: {_first_line(error)}",
            code="config.refused_by_transformers",
        ) from None
    for name, text in row_for(kind).defaults.items():
        if getattr(config, name, 0) is None:
            setattr(config, name, evaluate(text, config.to_dict()))
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    return config


def _refuse_layers(raw: Mapping[str, Any]) -> None:
    """Refuse numbers of layers that no model has, before a model of so many is described."""
    faults = []
    for path, part in nested_configs(raw):
        for field, value in part.items():
            if not FIELDS["layers"].has(field) or type(value) is not int:
                continue
            least = 1 if field in _WHOLE_DEPTHS else 0  # a model of two towers may be without one of them
            if not least <= value <= _MOST_LAYERS:
                what = f"{printable(str(value))} layers, expected {least} to {_MOST_LAYERS:,}"
                remedy = "write the number of layers of the weights into config.json"
                faults.append(
                    Fault("config.number_of_layers", ".".join([*map(str, path), field]), what, remedy)
                )
    raise_few("no model has so many layers", faults)


def _no_type(kind: Any, remote: bool, known: list[str]) -> str:
    what = f"model_type {kind!r} is not a type of this version of transformers"
    if remote:
        what += " (auto_map names code that comes with the checkpoint, which is never run)"
    if not isinstance(kind, str):
        return f"{what}; write the name of one into config.json, such as 'llama'"
    near = get_close_matches(kind, known, n=1)
    return f"{what}; install a version that has it{f', or did you mean {near[0]!r}?' if near else ''}"


def as_data(config: Config) -> dict[str, Any]:
    """A configuration object as plain data, nested ones included."""
    found = _plain(config.to_dict())
    assert isinstance(found, dict)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        # config.json spells numbers that JSON lacks as {"__float__": "Infinity"}.
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(v) for v in value]
    return (
        value
        if value is None or isinstance(value, (bool, int, float, str))
        else str(value).removeprefix("torch.")
    )


def model_class(config: Config, architecture: str | None = None) -> Any:
    """The stock class that holds this configuration: the one it names, or the usual one of its type."""
    import transformers

    kind, usual = config.model_type, _usual_classes(config)
    named = architecture or next(iter(getattr(config, "architectures", None) or usual), None)
    if named is None or not named.isidentifier():
        raise MupscaleError(
            f"no class is known for model_type {kind!r}; name it with architecture= (--architecture)",
            code="family.no_class_known",
        )
    cls = getattr(transformers, named, None)
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise MupscaleError(
            f"{named} is not a model class of this version of transformers; name one that is",
            code="family.unknown_class",
        )
    expected = getattr(cls, "config_class", None)
    if expected is not None and not isinstance(config, expected) and named not in usual:
        what = f"{named} is built from {expected.__name__}, found {type(config).__name__}"
        raise MupscaleError(f"{what}; name a class of model_type {kind!r}", code="family.class_of_other_type")
    return cls


def _usual_classes(config: Config) -> list[str]:
    """The names of the stock classes of a type, likeliest first; some types have no class of their own.

    >>> from transformers import CONFIG_MAPPING
    >>> _usual_classes(CONFIG_MAPPING["internlm3"]())[0]
    'LlamaForCausalLM'
    """
    from transformers.models.auto import modeling_auto

    # Decoders of encoder-decoder types have a class of their own; the whole model is meant.
    whole = bool(getattr(config, "is_encoder_decoder", False))
    tables = sorted(_HEADS, key=lambda table: whole and "CAUSAL_LM" in table and "SEQ" not in table)
    found = [getattr(modeling_auto, table, {}).get(config.model_type) or () for table in tables]
    return [name for names in found for name in ((names,) if isinstance(names, str) else names)]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings of model code; only its result and its errors matter here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(_SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def construct(config: Config, cls: Any) -> nn.Module:
    """A model of the stock class on the current default device, with tied and uninitialised weights.

    If it cannot be built, one readable error is raised.
    """
    from transformers.initialization import no_init_weights

    try:
        with no_init_weights():
            model = cls(copy.deepcopy(config))
        model.tie_weights()
    except MupscaleError:
        raise
    except Exception as error:
        raise MupscaleError(
            f"{cls.__name__} cannot be built from this configuration",
            [Fault("model.cannot_be_built", config.model_type, _first_line(error))],
        ) from error
    assert isinstance(model, nn.Module)
    return model


def fresh(config: Config, cls: Any) -> nn.Module:
    """A model as its class initialises it; random numbers are drawn from a fork."""
    with quiet(), forked():
        model: nn.Module = cls(copy.deepcopy(config))
        return model


def on_meta(config: Config, cls: Any) -> nn.Module:
    """The model on the meta device, which takes no memory at any size."""
    with quiet(), torch.device("meta"):
        return construct(config, cls)


def factory(cls: Any, seed: int = 0) -> Any:
    """A function from configurations to models in the mode in which they are tested.

    Dropout and layer drop are off (eval), batch statistics are on, and weights that exist are random of order
    one, so that no gain, bias, scale or statistic hides a mistake by being zero or one.
    """

    def make(config: Config) -> nn.Module:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)  # constants such as sqrt(width) must not be rounded to float32
        try:
            with quiet():
                model = construct(config, cls).eval()
        finally:
            torch.set_default_dtype(before)
        for module in model.modules():
            if is_batch_norm(module):
                module.train()
        if not any(p.is_meta for p in model.parameters()):
            randomise_(model, seed)
        return model

    return make


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> None:
    """Random values of order one for every parameter and statistic, in place."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        embeds = isinstance(module, nn.Embedding)
        norm = is_norm(module)
        for leaf, p in module.named_parameters(recurse=False):
            if not p.is_floating_point():
                continue
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu")
            if p.dim() <= 1 or norm:
                p.copy_(noise * 0.3 + (0.0 if "bias" in leaf else 0.8))
            elif embeds:
                p.copy_(noise * 0.7)
            else:
                fan = p[0].numel() if p.dim() != 3 else max(p.shape[1:])
                p.copy_(noise * (1.2 / max(fan, 1) ** 0.5) if p.numel() else noise)
        for leaf, b in module.named_buffers(recurse=False):
            if leaf == "running_mean":
                b.copy_(torch.randn(b.shape, generator=generator, dtype=b.dtype, device="cpu") * 0.3)
            elif leaf == "running_var":
                b.copy_(torch.rand(b.shape, generator=generator, dtype=b.dtype, device="cpu") + 0.5)


def not_stored(model: nn.Module) -> list[str]:
    """Tensors that a checkpoint does not hold: the model computes them when it is built."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        found += [name_in(path, leaf) for leaf in module._non_persistent_buffers_set]
    left_out = getattr(model, "_keys_to_ignore_on_save", None) or ()
    found += [n for n, _ in model.named_parameters() if any(re.search(pattern, n) for pattern in left_out)]
    return sorted(set(found))


def _first_line(error: BaseException) -> str:
    """What an error says: its first line, and the next one where the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {text[:300]}"
