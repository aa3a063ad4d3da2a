"""FLOPs of a stock transformers language model at any width, from its configuration alone.

Knows which models read plain text, what the paper's formula needs from their configuration, and how to compute widths
that are not a multiple of the base. Never reads weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import Fault, MupscaleError, raise_faults
from ..families.config.fields import FIELDS
from ..families.config.goal import Goal
from ..families.config.grown import grown
from ..families.config.multipliers import EVERY
from ..families.config.narrow import proxy_width
from ..families.models import Config, as_data, config_from, model_class, on_meta, quiet, read_config
from ..families.types.symbols import symbols
from .flops import Step, count, quadratic, transformer_flops

_OTHER_INPUTS = ("pixel_values", "input_values", "input_features", "decoder_input_ids")
_FILE = "write a Python file with build(width) and inputs(), and name that"


class StockModel:
    """A stock language model whose width may change, and its training step on `batch` sequences.

    FLOPs and parameters are polynomials of degree two in the width: three sizes that the class can hold fix them,
    a fourth proves them, and so does the wide one.

    >>> tiny = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    >>> model = StockModel(tiny, k=2, batch=1, context=16)
    >>> model.width, model.at(64).parameters, model.at(16).parameters
    (32, 105216, 7872)
    """

    def __init__(self, source: Mapping[str, Any] | str | Path, k: int, batch: int, context: int) -> None:
        self.batch, self.context = batch, context
        config = config_from(read_config(source))
        self.width = _check(config, batch, context)
        self.proxy = proxy_width(config)
        """The width of the proxy that `mupscale tune` makes of this configuration."""
        multiples = list(dict.fromkeys((1, 2, 3, 4, k)))
        known = [
            self._step(config if m == 1 else grown(config, Goal({EVERY: m})), m * self.width)
            for m in multiples
        ]
        self._known = {step.width: step for step in known}
        self._curves = {
            name: quadratic([(step.width, getattr(step, name)) for step in known])
            for name in ("parameters", "formula", "counted")
        }
        odd = [name for name, curve in self._curves.items() if curve is None]
        raise_faults(
            f"{config.model_type} at other widths cannot be computed from its multiples",
            [
                Fault("cost.not_quadratic_in_width", name, "no polynomial of degree two in the width", _FILE)
                for name in odd
            ],
        )

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.context

    def at(self, width: int) -> Step:
        """The training step at a hidden size, including sizes that the class cannot build."""
        if width not in self._known:
            values = {name: round(curve(width)) for name, curve in self._curves.items() if curve is not None}
            self._known[width] = Step(width, **values)
        return self._known[width]

    def _step(self, config: Config, width: int) -> Step:
        counted = counted_step(config, self.batch, self.context)
        model = on_meta(config, model_class(config)).eval()
        parameters = sum(p.numel() for p in model.parameters())
        return Step(width, parameters, self.tokens * _formula(model, config, self.context), counted)


def counted_step(config: Config, batch: int, context: int) -> int:
    """FLOPs of one training step on `batch` sequences, counted on the meta device."""
    # The implementation that routes tokens without reading values.
    config._experts_implementation = "batched_mm"
    model = on_meta(config, model_class(config)).eval()
    with quiet():
        return _counted(model, batch, context)


def _counted(model: nn.Module, batch: int, context: int) -> int:
    """Try the masks that classes accept on the meta device; the mask does not change the FLOPs."""
    accepted = inspect.signature(model.forward).parameters
    words = torch.zeros(batch, context, dtype=torch.long, device="meta")
    whole = torch.ones(batch, 1, context, context, dtype=torch.bool, device="meta")
    inputs: dict[str, Any] = {"input_ids": words}
    inputs |= {"use_cache": False} if "use_cache" in accepted else {}
    for mask in (whole, torch.ones_like(words)) if "attention_mask" in accepted else ():
        with suppress(MupscaleError):
            return count(model, {**inputs, "attention_mask": mask})[1]
    return count(model, inputs)[1]


def _check(config: Config, batch: int, context: int) -> int:
    names = symbols(as_data(config))
    model = on_meta(config, model_class(config))
    faults = []
    if "E" not in names:
        faults.append(
            Fault(
                "cost.hidden_size_unknown",
                config.model_type,
                "its hidden size is not known by any usual name",
                _FILE,
            )
        )
    other = [name for name in _OTHER_INPUTS if name in inspect.signature(model.forward).parameters]
    if other:
        faults.append(
            Fault(
                "cost.other_inputs",
                config.model_type,
                f"it reads {', '.join(other)}, and the cost depends on their sizes",
                _FILE,
            )
        )
    longest = getattr(config, "max_position_embeddings", None)
    if type(longest) is int and context > longest:
        what = f"{context} tokens, and this configuration holds {longest}"
        faults.append(Fault("data.sequences_too_long", "--context", what, f"write {longest} or less"))
    faults += [
        Fault("option.below_one", name, f"{value}, expected a whole number, 1 or more", "write 1 or more")
        for name, value in (("--context", context), ("--batch", batch))
        if value < 1
    ]
    raise_faults("this configuration cannot be counted", faults)
    return int(names["E"])


def _formula(model: nn.Module, config: Config, context: int) -> int:
    """6N + 12 L H Q T per token. N leaves out tables that are only looked up, and experts that a token does not use."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    multiplied = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    names = symbols(as_data(config))
    experts = next((names[n] for n in FIELDS["experts"].main if type(names.get(n)) is int), None)
    used = names.get("num_experts_per_tok")
    share = Fraction(used, experts) if experts and type(used) is int else Fraction(1)
    total = Fraction(0)
    for name, parameter in model.named_parameters():
        if id(parameter) in looked_up - multiplied:
            continue
        total += parameter.numel() * (share if ".experts." in name else 1)
    layers = getattr(config, "num_hidden_layers", None)
    if type(layers) is not int:
        raise MupscaleError(
            f"{config.model_type}: how many layers it has is not known by any usual name; {_FILE}",
            code="cost.layer_count_unknown",
        )
    return transformer_flops(total, layers, names.get("H", 0) * names.get("D", 0), context)
