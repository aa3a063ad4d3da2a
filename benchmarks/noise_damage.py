"""What relative noise costs a trained model at once: the loss of a trained Llama on its own text, before and after.

    python benchmarks/noise_damage.py [--seeds 3]

The text is what the base writes from its first token (64 samples of 96 tokens, at temperature 1), so that the base
fits it as well as it fits anything. Each t is added at twice the width, with several seeds of the noise. t = 0, the
exact map, is the control and keeps the loss. The last line is `base=L 0.02=… 0.05=… 0.1=… 0.2=…`, means over seeds; the
exit code is 1 unless the default stays below the jump that `upscale(loss=)` warns of, and t = 0.2 does not. Needs
models/tiny_llama under $MUPSCALE_DATA or ../shared/data; without it the exit code is 2.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

import mupscale as mu
from harness.data import DATA
from harness.program import Outcome, UsageError, option, run
from mupscale.rules.noise_defaults import DEFAULT_T
from mupscale.training.grow.loss_rise import is_jump

MODEL = DATA / "models" / "tiny_llama"
SIZES = (0.0, 0.02, DEFAULT_T, 0.1, 0.2)
SAMPLES, LENGTH, GREEDY = 64, 96, 60


def written(model: Any, samples: int, length: int, greedy: bool = False) -> Tensor:
    torch.manual_seed(0)
    made: Tensor = model.generate(
        torch.ones(samples, 1, dtype=torch.long), max_new_tokens=length, do_sample=not greedy, top_k=0, temperature=1.0,
        eos_token_id=-1, pad_token_id=0,
    )  # fmt: skip
    return made


def measure(options: argparse.Namespace) -> Outcome:
    if not MODEL.is_dir():
        raise UsageError(f"needs models/tiny_llama in {DATA}; set MUPSCALE_DATA")
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    torch.set_num_threads(1)
    stock: Any = AutoModelForCausalLM
    base = stock.from_pretrained(MODEL, attn_implementation="eager").eval()
    config = copy.deepcopy(base.config)
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        setattr(config, name, 2 * getattr(config, name))
    tokens = written(base, SAMPLES, LENGTH)

    def loss(model: nn.Module) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    llama: Any = LlamaForCausalLM
    plan = mu.plans.family_plan(str(MODEL), 2).plan
    first, before, means = written(base, 1, GREEDY, greedy=True), 0.0, {}
    for t in SIZES:
        ends = []
        for seed in range(options.seeds if t else 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the jump is what is measured
                wide = mu.upscale(
                    base, lambda: llama(config), mu.SignalNoise(t), plan=plan, seed=seed, loss=loss
                )
            before = wide.provenance["loss"]["before"]
            ends.append(wide.provenance["loss"]["after"])
        same = int((written(wide.model, 1, GREEDY, greedy=True) == first).sum()) - 1
        means[t] = fmean(ends)
        print(
            f"t = {t:<4}  loss {before:.3f} -> {means[t]:.3f} ({min(ends):.3f} to {max(ends):.3f})  "
            f"{same} of {GREEDY} greedy tokens are the base's{'  jump' if is_jump(before, means[t]) else ''}",
            flush=True,
        )
    bounds = {
        f"the exact map changes the loss to {means[0.0]:.5f}": abs(means[0.0] - before) < 1e-4,
        f"t = {DEFAULT_T}, the default, is a jump": not is_jump(before, means[DEFAULT_T]),
        "t = 0.2 is no jump, so the bound sees nothing": is_jump(before, means[0.2]),
    }
    line = f"base={before:.3f} " + " ".join(f"{t:g}={means[t]:.3f}" for t in SIZES[1:])
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


if __name__ == "__main__":
    sys.exit(run(measure, option("--seeds", type=int, default=3, help="of the noise"), doc=__doc__))
