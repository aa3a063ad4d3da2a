"""The proxy of a Hugging Face directory: its own stock class, narrower, trained on text as a usual trainer would.

AdamW with weight decay on matrices, gradients clipped at 1, a linear warm-up and a linear decay to zero, no dropout: what
the `train.py` next to a grown directory does. The weights of the directory are not read.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...budgets.stock_flops import counted_step
from ...errors import Fault, raise_faults
from ...families.batches import loss_of_batch
from ...families.config.goal import Goal, Way
from ...families.config.grown import grown
from ...families.config.multipliers import EVERY
from ...families.config.narrow import divisors, hidden_size, narrowed
from ...families.models import Config, as_data, config_from, model_class, on_meta, quiet, read_config
from ...families.plan import family_plan
from ...models.names import pattern_of
from ...plans.backward import backward
from ...plans.plan import Plan
from ...runs.run import Run
from ...training.units.clip import clip_grad_norm_
from ..proxy import Proxy, ReportLoss
from .text import TextData

WEIGHT_DECAY, CLIP, WARM_UP = 0.1, 1.0, 0.05
"""As `train.py` trains a grown directory; warm-up is a share of the steps."""
CONTEXT, BATCH = 256, 16
"""Tokens of a sequence and sequences of a step, unless others are given or the model holds fewer tokens."""
_FILE = "write a Python file with build(width) and train(run, steps, report), and name that"


class StockFamily:
    """A stock language model at any width that its configuration can be divided into.

    >>> sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 4, "num_hidden_layers": 1}
    >>> family = StockFamily({"model_type": "llama", "vocab_size": 97, **sizes})
    >>> family.width, family.config_at(96).num_attention_heads, family.build(32).config.intermediate_size
    (64, 6, 86)
    """

    def __init__(self, source: Mapping[str, Any] | str | Path) -> None:
        self.config = config_from(read_config(source))
        self.cls = model_class(self.config)
        self.width = hidden_size(self.config)
        raise_faults("this model cannot be tuned on text", self._faults())

    def _faults(self) -> list[Fault]:
        name = self.cls.__name__
        if not name.endswith(("ForCausalLM", "LMHeadModel")) or getattr(
            self.config, "is_encoder_decoder", False
        ):
            what = f"{name} does not predict the next token of a text"
            return [Fault("proxy.not_a_language_model", self.config.model_type, what, _FILE)]
        if self._looks_ahead():
            what = f"{name} is an encoder here: a later token changes what it says of earlier ones"
            return [Fault("proxy.looks_ahead", self.config.model_type, what, _FILE)]
        return []

    def _looks_ahead(self) -> bool:
        """Whether outputs depend on later tokens, measured on the narrowest model with random weights."""
        model = self.build(self.width // divisors(self.config)[-1])
        tokens = torch.arange(8).remainder(self.words).repeat(2, 1)
        tokens[1, -1] = (tokens[1, -1] + 1) % self.words
        with torch.no_grad(), quiet():
            first, second = model(input_ids=tokens).logits[:, :-1]
        return not torch.allclose(first, second, rtol=1e-4, atol=1e-6)

    @property
    def words(self) -> int:
        """The size of the vocabulary."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def longest(self) -> int:
        """The tokens of a sequence by default."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return min(CONTEXT, longest) if type(longest) is int else CONTEXT

    def config_at(self, width: int) -> Config:
        """The configuration at a width: divided, then grown."""
        ratio = Fraction(width, self.width)
        known = divisors(self.config)
        if ratio.denominator not in known:
            able = ", ".join(str(self.width // n) for n in reversed(known))
            what = f"{width}: its widths cannot be divided by {ratio.denominator} together"
            raise_faults(
                f"{self.config.model_type} has no such width",
                [Fault("proxy.no_such_width", "--width", what, f"write one of {able}")],
            )
        small = narrowed(self.config, ratio.denominator)
        return grown(small, Goal({EVERY: ratio.numerator})) if ratio.numerator > 1 else small

    def build(self, width: int) -> nn.Module:
        """The model with the random weights of its class, without dropout."""
        with quiet():
            model: nn.Module = self.cls(self.config_at(width))
        return model.eval()

    def plan(self, base: int, wide: int, by: Way = "copies") -> Plan:
        """The plan between two widths, proved on a small copy; from a wider to a narrower one it holds constants only."""
        if base > wide:
            return backward(self.plan(wide, base))
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            config = as_data(self.config_at(base))
            return family_plan(config, wide // base, by=by, architecture=self.cls.__name__).plan
        finally:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Trained:
    """How a stock model is trained: the text, and how much of it in a step."""

    family: StockFamily
    data: TextData
    batch: int = BATCH
    device: str | None = None

    @cached_property
    def proxy(self) -> Proxy:
        """What a study trains."""
        identity = (as_data(self.family.config), self.data.digest, self.batch, WEIGHT_DECAY, CLIP, WARM_UP)
        model = on_meta(self.family.config, self.family.cls)
        vectors = dict.fromkeys(pattern_of(name) for name, p in model.named_parameters() if p.dim() < 2)
        return Proxy(
            build=self.family.build,
            train=self.train,
            optimizer=torch.optim.AdamW,
            settings={"weight_decay": WEIGHT_DECAY, "no_decay": tuple(vectors)},
            schedule=schedule,
            loss=self.loss,
            device=self.device,
            batch=self.batch,
            digest=hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16],
            plan=self.family.plan,
            flops=self.flops,
        )

    def loss(self, model: nn.Module) -> Tensor:
        """The loss of the sequences that are held out."""
        return _loss(model, self.data.held)

    def flops(self, width: int) -> int:
        """FLOPs of one step at a width, counted."""
        return counted_step(self.family.config_at(width), self.batch, self.data.train.shape[1])

    def train(self, run: Run, steps: int, report: ReportLoss) -> None:
        """Train from the run's step on; every batch is a function of the step."""
        for step in range(run.steps, steps):
            loss = _loss(run.model, self.data.batch(step, self.batch))
            run.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(run.model, run, max_norm=CLIP)
            run.optimizer.step()
            run.scheduler.step()
            report(step, loss)


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    inputs: dict[str, Any] = {"input_ids": tokens.to(next(model.parameters()).device)}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return loss_of_batch(inputs)(model)


def schedule(optimizer: Optimizer, steps: int) -> Any:
    """A linear warm-up, then a linear decay to zero."""
    warm = max(1, round(WARM_UP * steps))
    return LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, max(0, steps - step) / max(1, steps - warm))
    )
