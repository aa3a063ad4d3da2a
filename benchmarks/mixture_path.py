"""A trained dense Llama becomes a mixture, deeper, wider, with more experts: the loss of its text at each step.

    python benchmarks/mixture_path.py

Every step is a command of `mupscale`, on the result of the step before. The text is what the base writes from its first token.
Beside each step stands what people report who did it by hand, as far as they do. The last line is
`steps=N jump=J kept=K`: the largest change of the loss over the steps that are exact in it, in nats, and the share of tokens that
keep their experts in the last step, which is not exact. The exit code is 1 unless J is below 1e-5 and K above 0.9. Needs
models/tiny_llama under $MUPSCALE_DATA or ../shared/data; without it the exit code is 2.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from benchmarks.noise_damage import LENGTH, MODEL, SAMPLES, written
from harness.data import DATA
from harness.program import Outcome, UsageError, run
from mupscale.runs.growth_record import read_about


class Step(NamedTuple):
    name: str
    options: str
    by_hand: str
    """What the loss rises by, in nats, as reported where it is done by hand on a model of 70 M parameters
    (github.com/The-School-of-AI/LLM, experiments/11_growth_and_weight_transfer/README.md)."""


STEPS = (
    Step("experts beside the dense layer", "--experts 4 --top-k 2 --expert-ffn 64", "+0.25"),
    Step("twice the layers", "--layers 8", "+0.09 with the next"),
    Step("twice every width", "-k 2", "at first +4.67 and +1.6"),
    Step("twice the experts and top-k", "-k experts=2", ""),
    Step("twice the experts, top-k as before", "--experts 16", "+0.12"),
)
EXACT = len(STEPS) - 1


def loss_of(folder: Path, tokens: torch.Tensor) -> float:
    from transformers import AutoModelForCausalLM

    stock: Any = AutoModelForCausalLM
    model = stock.from_pretrained(folder, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


def measure(_: argparse.Namespace) -> Outcome:
    if not MODEL.is_dir():
        raise UsageError(f"needs models/tiny_llama in {DATA}; set MUPSCALE_DATA")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    stock: Any = AutoModelForCausalLM
    tokens = written(stock.from_pretrained(MODEL).eval(), SAMPLES, LENGTH)
    before, jumps, kept = loss_of(MODEL, tokens), [], 0.0
    print(f"{'the base':40} {before:.6f}", flush=True)
    with TemporaryDirectory() as room:
        here = MODEL
        for number, step in enumerate(STEPS):
            there = Path(room) / str(number)
            words = [
                sys.executable,
                "-m",
                "mupscale",
                "upscale",
                str(here),
                str(there),
                *step.options.split(),
                "--quiet",
            ]
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
            after = loss_of(there, tokens)
            jumps.append(abs(after - before))
            about = read_about(there)
            assert about is not None
            kept = (about.get("losses") or {}).get("kept", 0.0)
            print(
                f"{step.name:40} {after:.6f}  {after - before:+.1e}  by hand {step.by_hand or 'not reported'}",
                flush=True,
            )
            here, before = there, after
    jump = max(jumps[:EXACT])
    bounds = {
        f"an exact step moves the loss by {jump:.1e}": jump < 1e-5,
        f"{kept} of tokens keep their experts": kept > 0.9,
    }
    line = f"steps={len(STEPS)} jump={jump:.1e} kept={kept:.3f}"
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


if __name__ == "__main__":
    sys.exit(run(measure, doc=__doc__))
