"""More words and positions in stock models: rows of `benchmarks/growth.py`.

Each row is a stock model in float64 with the model's own casts lifted: a few steps before growing, twelve after, by a loss over
the base's words and at lengths that the base has. The control of new words is the cross entropy over all words, that of new
positions the linear rope that is usually written with them; tables of positions have none, because nothing reads the new rows.

Then noise wakes the new words. `jump` is the largest change of the loss over the base's words, without copies 0. `asleep` is how
far the rise of the cross entropy over all words is from the mean of log(1 + new/Z) while the new words are zero. `awake` is the
largest share of its bound, log(1 + new/old), that the rise takes once they are the mean word, and `woken` the smallest share of
the entries of new words and positions that a batch has seen that have a gradient in the first step. `alone` is the largest error
of rows that get nothing but words and positions: 0 but for readouts with a bias, whose gradient is summed in another order.
"""

from __future__ import annotations

import copy
from math import log
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu
from harness.growth.rows import AFTER, BARELY, BEFORE, SIZES, WITH_BIASES, Figures, Row, summed_up, trial
from harness.program import Outcome
from mupscale.families.models import config_from, factory
from mupscale.families.record import FamilyPlan
from mupscale.models.float64 import cast_, lifted_casts
from mupscale.plans.ends import identity_plan
from mupscale.tensors.differences import curve_gap, loss_gap

MOST = {"worst": 1e-11, "alone": 1e-15, "jump": 1e-10, "asleep": 1e-10, "awake": 1.0}
LEAST = {"control": 1e-3, "woken": 1.0}
WORDS, LONGER, BOTH = "vocab=+64", "positions=128", "vocab=+64,positions=128"
ALL = "vocab=+64,positions=128,layers=3,after=0,hidden=48"
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


def rows(quick: bool = False) -> list[Row]:
    if quick:
        return [Row("llama", "AdamW", BOTH, tied=True)]
    found = [Row("llama", "AdamW", WORDS, tied=tied) for tied in (False, True)]
    found += [Row(kind, "AdamW", WORDS) for kind in ("qwen3", "gemma2", "phi", "bloom")]
    found += [Row("llama", "SGD", WORDS), Row("qwen2", "AdamW", LONGER)]
    found += [Row(kind, "AdamW", BOTH) for kind in ("gpt2", "opt")]
    found += [Row("llama", "AdamW", ALL, "ffn=2", tied=True), Row("gemma", "AdamW", WORDS, "2", tied=True)]
    return found


def entropy(model: nn.Module, batch: dict[str, Any], words: int | None = None) -> Tensor:
    """The cross entropy of the next word, over the first words or all of them."""
    logits = model(**batch).logits[:, :-1, :words].double()
    return F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten())


def measure(row: Row) -> Figures:
    with lifted_casts():
        tried = trial(row, WITH_BIASES.get(row.kind, {**SIZES, "tie_word_embeddings": row.tied}))
        run, make, family = tried.run, tried.make, tried.family
        model, plan, batch = run.model, family.plan, tried.batches[BEFORE]
        config: Any = model.config
        old, every = family.new_words or (97, 97)
        certificate = tried.verify()

        def curve(run: mu.Run, words: int | None) -> list[float]:
            return [
                tried.step(run, i, lambda m, i=i: entropy(m, tried.batches[BEFORE + i], words))  # type: ignore[misc]
                for i in range(AFTER)
            ]

        asleep = mu.grow(run, make, plan=plan)
        awake = mu.upscale(run, make, BARELY, plan=plan)
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].double()
            expected = float(torch.log1p((every - old) * torch.exp(-logits.logsumexp(-1))).mean())
            before = float(entropy(model, batch))
            rise = float(entropy(asleep.model, batch)) - before
            jump = loss_gap(before, float(entropy(awake.model, batch, old)))
            share = (float(entropy(awake.model, batch)) - before) / log(every / old) if every > old else 0.0
        woken = seen(awake.model, family, batch, old)
        control = None
        if every > old:
            same = mu.grow(run, lambda: copy.deepcopy(model), plan=identity_plan(model), prove=False)
            control = curve_gap(curve(same, old), curve(asleep, None))
        elif "rope_parameters" in config.to_dict():
            stretched = config_from({**family.wide_config, "rope_parameters": LINEAR})
            other = cast_(factory(type(model))(stretched), torch.float64)
            other.load_state_dict(asleep.model.state_dict())
            control = loss_gap(before, float(entropy(other, batch).detach()))
    figures = {"worst": certificate.worst, "jump": jump, "asleep": abs(rise - expected)}
    if row.k == "1" and "layers" not in row.to:
        figures["alone"] = certificate.worst
    if control is not None:
        figures["control"] = control
    return {**figures, "awake": share, "woken": woken}


def seen(model: nn.Module, family: FamilyPlan, batch: dict[str, Any], old: int) -> float:
    """The smallest share of the entries of new rows that have a gradient, over rows that a longer text with new words reads."""
    tables = {n: t for n, t in family.plan.tensors.items() if t.rows and t.kind == "parameter"}
    if not tables:
        return 1.0
    length = 80 if any(t.rows == "positions" for t in tables.values()) else 11
    words = family.new_words or (old, old + 1)
    low = words[0] if family.new_words else old - 8
    ids = torch.arange(length).remainder(8).add(low).repeat(2, 1)
    model.zero_grad()
    entropy(model, {**batch, "input_ids": ids}).backward()  # type: ignore[no-untyped-call]
    grads = {n: p.grad for n, p in model.named_parameters()}
    shares = []
    for name, entry in tables.items():
        grad = grads[name]
        assert grad is not None
        new = grad[entry.axes[0].base :]
        read = new[:8] if entry.rows == "words" else new[new.flatten(1).abs().sum(1) > 0]
        shares.append(float((read != 0).double().mean()))
    return min(shares)


def report(quick: bool) -> Outcome:
    return summed_up(rows(quick), measure, "worst alone control jump asleep awake woken", MOST, LEAST)
