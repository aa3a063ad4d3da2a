"""The study of directions: what each arm is made of, on weights of known values; its runs are tried by the smoke stage."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from mupscale.training.check.symmetry import awake
from reproduce.growth.methods import grow
from reproduce.growth.page.directions import (
    against_peers,
    directions_table,
    gains,
    mixture_table,
    order_table,
    orders_table,
    over_stack,
    results,
)
from reproduce.growth.questions.directions import (
    DEEP,
    LARGER,
    MIXTURE,
    ORDER,
    QUARTER,
    Sizes,
    arm,
    base,
    missing,
)
from reproduce.growth.settings.stock import setting
from reproduce.growth.spec import Spec

pytestmark = pytest.mark.nightly

BASE = Spec(32, 1000, 2**-7, 0, layers=2)
WIDER: dict[str, dict[str, Any]] = {
    "deeper": {"layers": 4},
    "stacked": {"layers": 4, "method": "copied_readers"},
    "llama_pro": {"layers": 4, "method": "llama_pro"},
    "stack": {"layers": 4, "method": "stack"},
    "stack_third": {"layers": 4, "method": "stack_third"},
    "stack_asleep": {"layers": 4, "method": "stack_asleep"},
    "interposed": {"layers": 4, "method": "interposed"},
    "half_steps": {"layers": 4, "method": "half_steps"},
    "pads": {"width": 48},
    "copies": {"width": 64},
    "experts": {"experts": 8},
    "upcycling": {"experts": 4, "method": "upcycling"},
    "drop_upcycling": {"experts": 4, "method": "drop_upcycling"},
}
SAME_OUTPUTS = WIDER.keys() - {"stack", "stack_third", "interposed", "half_steps", "drop_upcycling"}
"""Upcycled copies too: the weights of a token's experts are divided by their sum."""
WORDS = torch.arange(60).view(2, 30) % 17


def grown(name):
    base = setting(BASE).fresh(32, BASE.lr, 0)
    spec = replace(BASE, start=BASE, **WIDER[name])
    run = grow(setting(spec), base, spec, 10, lambda model: torch.zeros(()))
    return base.model, run


@pytest.mark.parametrize("name", WIDER)
def test_what_keeps_the_outputs_of_the_base_and_what_does_not(name):
    base, run = grown(name)
    with torch.no_grad():
        gap = float((run.model(WORDS).logits - base(WORDS).logits).abs().max())
    assert gap < 1e-5 if name in SAME_OUTPUTS else gap > 1e-3


def test_upcycled_experts_are_the_dense_layer():
    base, run = grown("upcycling")
    dense, routed = base.model.layers[0].mlp, run.model.model.layers[0].mlp
    for expert in range(4):
        assert torch.equal(routed.experts.down_proj[expert], dense.down_proj.weight)
        joined = torch.cat([dense.gate_proj.weight, dense.up_proj.weight])
        assert torch.equal(routed.experts.gate_up_proj[expert], joined)
    assert routed.gate.weight.std() > 0


def test_flops_of_experts_are_those_of_twice_the_dense_layer():
    flops = {e: setting(replace(BASE, experts=e)).flops(32) for e in (0, 4, 8)}
    assert flops[4] == flops[8]
    ffn = (
        6 * 2 * 3 * 32 * 96 * 8 * 64
    )  # layers, matrices, and positions of a batch, six FLOPs for each weight
    assert flops[8] - flops[0] == ffn


def invented(spec):
    """A loss that falls with the rate to 2^-9, and with width, depth and experts."""
    from math import log2

    loss = 4.0 + 0.01 * (log2(spec.lr) + 9) ** 2 - 0.1 * (spec.shape != BASE.shape) + 0.001 * spec.seed
    loss += 0.0 if spec.start else 0.3
    rises = {"before": {"choose": 4.0}, "after": {"choose": 4.5 if spec.method == "stack" else 4.0}}
    return {"choose": loss, "held": loss, "noise": rises}


def test_the_runs_end_and_the_table_says_what_they_say():
    stored: dict[Spec, dict[str, float]] = {}
    sizes = Sizes()
    assert directions_table(stored.get, sizes).count("\n") == 1, "a head and no row"
    while (spec := missing(stored.get, sizes)) is not None:
        stored[spec] = invented(spec)
    found = results(stored.get, sizes)
    assert {name for name, seen in found.items() if seen is not None} == set(sizes.arms)
    on = arm(stored.get, sizes, "goes on").chosen
    assert on is not None
    assert on.lr == 2**-9
    gain = gains(found)["depth"]
    assert gain is not None
    assert gain[0] == pytest.approx(0.1)
    peers = against_peers(found)["depth"]
    assert peers is not None
    assert peers[0] == pytest.approx(0.0)
    assert not peers[1]
    assert "| depth | the better of going on and starting anew minus our plans | +0.1000 nats |" in (
        directions_table(stored.get, sizes)
    )
    copies = arm(stored.get, sizes, "copies").chosen
    assert copies is not None
    assert copies.noise in sizes.noises


def test_depth_on_two_sizes_counts_every_seed():
    stored: dict[Spec, dict[str, float]] = {}
    for sizes in (Sizes(), LARGER):
        while (spec := missing(stored.get, sizes)) is not None:
            stored[spec] = invented(spec)
            if spec.method == "copied_readers" and spec.width == LARGER.width:
                stored[spec]["held"] += 0.003
    for name in DEEP:
        chosen, started = (made.chosen for made in (arm(stored.get, LARGER, name), base(stored.get, LARGER)))
        assert chosen is not None
        assert started is not None
        assert chosen.lr == QUARTER * started.lr
        assert all(chosen.with_seed(seed) in stored for seed in (0, 1, 2))
    assert list(over_stack(stored.get, LARGER).values()) == pytest.approx([0.003] * 3)
    parts = (Sizes(), LARGER)
    assert "| 0.5000 | " in order_table(stored.get, parts)
    assert order_table(stored.get, parts).endswith("|  | +0.0030, +0.0030, +0.0030 |")
    for spec in [spec for spec in stored if spec.seed == 2 and spec.method == "copied_readers"]:
        del stored[spec]
    assert list(over_stack(stored.get, LARGER)) == [0, 1], "every seed that all of them have"
    assert orders_table(stored.get, ORDER) == ""


def test_a_mixture_and_other_orders_are_listed_by_seed():
    stored: dict[Spec, dict[str, Any]] = {}
    for sizes in (Sizes(), ORDER, MIXTURE):
        while (spec := missing(stored.get, sizes)) is not None:
            stored[spec] = {**invented(spec), "steps": 1000}
    assert orders_table(stored.get, ORDER).count("\n") == 1 + 1 + len(ORDER.arms)
    assert mixture_table(stored.get, MIXTURE).count("\n") == 1 + len(MIXTURE.arms)


def test_noise_goes_to_copies_alone():
    base = setting(BASE).fresh(32, BASE.lr, 0)
    spec = replace(BASE, start=BASE, noise=0.1, layers=4)
    run = grow(setting(spec), base, spec, 10, lambda model: torch.zeros(()))
    with torch.no_grad():
        assert float((run.model(WORDS).logits - base.model(WORDS).logits).abs().max()) < 1e-5
    assert min(awake(run).values()) >= 0
