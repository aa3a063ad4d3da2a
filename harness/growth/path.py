"""A dense Llama becomes a mixture, deeper, wider, with more experts: what each step of the command line does to the loss.

A Llama of two layers learns a chain of words. Each step is one command of `mupscale upscale`, on the directory that the step
before left, and the model trains between the steps, so that what one step wakes is in use when the next begins. The text of the
loss is not trained on.

Beside each step stands a control, which scripts do that grow such models by hand, on the same trained model:

    experts   the dense layer m times behind a new router, with the last matrix of every copy divided by m
    layers    every block twice
    width     zeros behind every tensor, and as many zeros more in every head
    twice     every expert and its row of the router twice, twice the top-k, the last matrix divided by 2
    more      every expert and its row twice, with noise of a thousandth that parts them, log 2 taken from the scores, the same top-k
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.program import Outcome
from harness.tiny_llama import SIZES, saved
from mupscale.runs.growth_record import NAME, read_about

BASE = {**SIZES, "intermediate_size": 24}
LEARN, BETWEEN = 150, 80
_WORDS = 24
MOST, PARTED, KEPT, LEAST = 1e-5, 0.05, 0.9, 1e-2
"""Bounds: of the steps that do not move the loss, of the one that parts tokens, of tokens that keep their experts, of controls."""


class Step(NamedTuple):
    name: str
    options: str
    by_hand: Callable[[Any], Any]
    """What takes the model before the step, and returns the one that is made by hand."""


def words(seed: int, texts: int = 32, length: int = 32) -> Tensor:
    """Texts in which the two words before a word decide it four times out of five."""
    rule = torch.randint(_WORDS, (_WORDS, _WORDS), generator=torch.Generator().manual_seed(0))
    draws = torch.Generator().manual_seed(seed)
    found = list(torch.randint(_WORDS, (2, texts), generator=draws))
    for _ in range(length - 2):
        ruled = torch.rand(texts, generator=draws) < 0.8
        found.append(
            torch.where(ruled, rule[found[-2], found[-1]], torch.randint(_WORDS, (texts,), generator=draws))
        )
    return torch.stack(found, 1)


def loaded(folder: Path) -> Any:
    import transformers

    stock: Any = transformers.AutoModelForCausalLM
    return stock.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").eval()


@torch.no_grad()
def loss_of(model: Any) -> float:
    """The loss of a text that no step trains on."""
    held = words(10**6, 64)
    return float(model.eval()(input_ids=held, labels=held).loss)


def train(model: Any, steps: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.train()
    for i in range(steps):
        batch = words(seed + i)
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


def built(model: Any, kind: str = "", **fields: Any) -> Any:
    """A model of the same class, or of another one, in which some fields are others."""
    import transformers

    known = {
        name: value
        for name, value in model.config.to_dict().items()
        if name not in ("model_type", "architectures")
    }
    cls = getattr(transformers, f"{kind}ForCausalLM") if kind else type(model)
    made = cls(cls.config_class(**{**known, **fields, "_attn_implementation": "eager"}))
    made.config._experts_implementation = "eager"
    return made.eval()


@torch.no_grad()
def copied_layers(dense: Any) -> Any:
    """The dense layer four times, each with a quarter of its last matrix, behind a router that is new."""
    made, old = (
        built(dense, "Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
        dense.state_dict(),
    )
    torch.manual_seed(1)
    for name, tensor in made.state_dict().items():
        layer, _, part = name.partition(".mlp.")
        if name in old:
            tensor.copy_(old[name])
        elif part == "experts.gate_up_proj":
            tensor.copy_(torch.cat([old[f"{layer}.mlp.{one}_proj.weight"] for one in ("gate", "up")]))
        elif part == "experts.down_proj":
            tensor.copy_(old[f"{layer}.mlp.down_proj.weight"] / 4)
        else:
            tensor.normal_(std=0.02)
    return made


@torch.no_grad()
def every_block_twice(model: Any) -> Any:
    made = built(model, num_hidden_layers=2 * model.config.num_hidden_layers)
    for i, layer in enumerate(made.model.layers):
        layer.load_state_dict(model.model.layers[i // 2].state_dict())
    for name in ("embed_tokens", "norm"):
        getattr(made.model, name).load_state_dict(getattr(model.model, name).state_dict())
    made.lm_head.load_state_dict(model.lm_head.state_dict())
    return made


@torch.no_grad()
def with_zeros(model: Any) -> Any:
    """Every tensor in a corner of one that is twice as large, its heads twice as wide."""
    config = model.config
    sizes = ("hidden_size", "intermediate_size", "shared_intermediate_size")
    made, heads = (
        built(model, **{name: 2 * getattr(config, name) for name in sizes}),
        config.num_attention_heads,
    )
    old = model.state_dict()
    for name, tensor in made.state_dict().items():
        here, there = old[name], tensor.zero_()
        if "gate_up_proj" in name or "input_linear" in name:  # gates, then ups
            here, there = here.unflatten(-2, (2, -1)), there.unflatten(-2, (2, -1))
        elif "self_attn" in name:
            many = heads if name.split(".")[-2] in ("q_proj", "o_proj") else config.num_key_value_heads
            dim = 1 if "o_proj" in name else 0
            here, there = here.unflatten(dim, (many, -1)), there.unflatten(dim, (many, -1))
        there[tuple(map(slice, here.shape))] = here
    return made


@torch.no_grad()
def experts_twice(model: Any, per_token: int, share: float) -> Any:
    """Every expert and its row of the router twice."""
    config = model.config
    fields = {"num_local_experts": 2 * config.num_local_experts, "num_experts_per_tok": per_token}
    made, old = built(model, **fields), model.state_dict()
    for name, tensor in made.state_dict().items():
        twice = tensor.shape != old[name].shape
        tensor.copy_(old[name].repeat_interleave(2, 0) if twice else old[name])
        if name.endswith("experts.down_proj"):
            tensor.mul_(share)
    return made


def twice_as_many(model: Any) -> Any:
    return experts_twice(model, 2 * model.config.num_experts_per_tok, 0.5)


@torch.no_grad()
def less_their_logarithm(model: Any) -> Any:
    made = experts_twice(model, model.config.num_experts_per_tok, 1.0)
    torch.manual_seed(1)
    for name, module in made.named_modules():
        if name.endswith("router.layer"):
            module.weight.add_(1e-3 * module.weight.std() * torch.randn_like(module.weight))
            module.register_forward_hook(lambda _, __, scores: scores - math.log(2))
    return made


STEPS = (
    Step("experts", "--experts 4 --top-k 2 --expert-ffn 32", copied_layers),
    Step("layers", "--layers 4", every_block_twice),
    Step("width", "-k 2", with_zeros),
    Step("twice", "-k experts=2", twice_as_many),
    Step("more", "--experts 16", less_their_logarithm),
)


def report(_: bool) -> Outcome:
    jumps: dict[str, float] = {}
    hands: dict[str, float] = {}
    with TemporaryDirectory() as room:
        here = Path(room) / "base"
        model = saved(here, **BASE)
        train(model, LEARN, 0)
        model.save_pretrained(here)
        for number, step in enumerate(STEPS, 1):
            before, there = loss_of(loaded(here)), Path(room) / step.name
            command = [
                sys.executable,
                "-m",
                "mupscale",
                "upscale",
                str(here),
                str(there),
                *step.options.split(),
                "--quiet",
            ]
            subprocess.run(command, check=True)
            model = loaded(there)
            jumps[step.name] = loss_of(model) - before
            hands[step.name] = loss_of(step.by_hand(loaded(here))) - before
            about = read_about(there)
            kept = ((about or {}).get("losses") or {}).get("kept") or 0.0
            train(model, BETWEEN, LEARN + BETWEEN * number)
            here = Path(room) / f"{step.name} trained"
            model.save_pretrained(here)
            shutil.copy(there / NAME, here / NAME)
            print(
                f"{step.name:8} {step.options:38} {before:.6f}  jump {jumps[step.name]:+.1e}  by hand {hands[step.name]:+.2f}  "
                f"{BETWEEN} steps later {loss_of(model):.4f}",
                flush=True,
            )
    jump = max(abs(jumps[step.name]) for step in STEPS[:-1])
    worst, control = abs(jumps["more"]), min(hands.values())
    bounds = {
        f"an exact step moves the loss by {jump:.1e}": jump <= MOST,
        f"the step that parts tokens moves it by {worst:.1e}": worst <= PARTED,
        f"{kept:.2f} of the tokens keep their experts": kept >= KEPT,
        f"a step by hand moves it by {control:.1e} only": control >= LEAST,
    }
    by_hand = " ".join(f"{name}={value:.2f}" for name, value in hands.items())
    line = f"steps={len(STEPS)} jump={jump:.1e} worst={worst:.1e} kept={kept:.3f} control={control:.1e} {by_hand}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])
