"""Laws on random architectures: the gradient identity, the way back, and composition of plans."""

from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mupscale as mu
from harness.closeness import assert_close, assert_same_model
from harness.draws import data, seeded
from harness.oracle import identity_error
from harness.profiles import examples
from harness.runs import gradients, train
from harness.wrong import mistaken, other_power

ACTIVATIONS: dict[str, Any] = {
    "leaky": F.leaky_relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sigmoid": torch.sigmoid,
}  # fmt: skip
ZERO_TO_ZERO = ["leaky", "gelu", "silu", "tanh"]
EPS = 0.1  # large, so that a norm does not hide a wrong scale before it
VOCABULARY, BATCH = 5, 7
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Architecture:
    """A random network; `sizes` are its widths, `hidden` that of the matrices used as W and as Wᵀ."""

    sizes: Sizes
    hidden: int
    norms: tuple[str, ...]
    activation: str
    bias: bool
    mirror: bool
    tie: bool
    divides: bool

    def at(self, sizes: Sizes, hidden: int) -> Any:
        return Net(self, sizes, hidden)


class Net(nn.Module):
    def __init__(self, spec: Architecture, sizes: Sizes, hidden: int):
        super().__init__()
        self.spec, self.width = spec, sizes[-1]
        self.embed = nn.Embedding(VOCABULARY, sizes[0])
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=spec.bias) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(
            norm_of(kind, n, width)
            for kind, n, width in zip(spec.norms, spec.sizes[1:], sizes[1:], strict=True)
        )
        self.mirror = nn.Linear(sizes[-1], hidden, bias=False) if spec.mirror else None
        self.final = norm_of("rms" if spec.tie else "none", spec.sizes[-1], sizes[-1])
        self.head = nn.Linear(sizes[-1], VOCABULARY, bias=False)
        if spec.tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        act = ACTIVATIONS[self.spec.activation]
        h = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = act(norm(layer(h)))
        if self.mirror is not None:
            h = h + F.linear(act(self.mirror(h)), self.mirror.weight.t())
        logits = self.head(self.final(h))
        return logits * 8 / self.width if self.spec.divides else logits


def norm_of(kind: str, base: int, width: int) -> Any:
    if kind == "layer":
        return nn.LayerNorm(width, eps=EPS)
    if kind == "rms":
        return nn.RMSNorm(width, eps=EPS)
    if kind == "batch":
        return nn.BatchNorm1d(width, eps=EPS)
    if kind == "group":
        return nn.GroupNorm(2 if base % 2 == 0 else 1, width, eps=EPS)
    return nn.Identity()


@st.composite
def architectures(draw, pads: bool = False, plain: bool = False) -> Architecture:
    depth = draw(st.integers(1, 4))
    # What a tied readout's norm reads is no weight's output, so zeros cannot be made up for there.
    tie = not plain and not pads and draw(st.booleans())
    sizes = draw(st.lists(st.integers(3, 6), min_size=depth + 1, max_size=depth + 1))
    if tie:
        sizes[-1] = sizes[0]
    kinds = ["none", "rms", "batch"] if pads else ["none", "layer", "rms", "batch", "group"]
    return Architecture(
        sizes=tuple(sizes),
        hidden=draw(st.integers(3, 6)),
        norms=tuple(draw(st.lists(st.sampled_from(kinds), min_size=depth, max_size=depth))),
        activation=draw(st.sampled_from(ZERO_TO_ZERO if pads else list(ACTIVATIONS))),
        bias=draw(st.booleans()),
        mirror=draw(st.booleans()),
        tie=tie,
        divides=not plain and not pads and draw(st.booleans()),
    )


@st.composite
def growths(draw, spec: Architecture, ks: tuple[int, ...] = (1, 2, 3, 4), pads: bool = False):
    """(wide sizes, wide hidden): a whole k for every width, and with pads a remainder below one more copy."""

    def wide(n: int, k: int) -> int:
        return k * n + (draw(st.integers(0, n - 1)) if pads else 0)

    multipliers = [draw(st.sampled_from(ks)) for _ in spec.sizes]
    if not any(k > 1 for k in multipliers[1:]):
        multipliers[-1] = max(ks)
    sizes = [wide(n, k) for n, k in zip(spec.sizes, multipliers, strict=True)]
    if spec.tie:
        sizes[0] = sizes[-1]
    return tuple(sizes), wide(spec.hidden, multipliers[-1])


TOKENS = torch.arange(BATCH) % VOCABULARY


def loss(model: Any) -> Any:
    return (model(TOKENS) - data(BATCH, VOCABULARY)).square().mean()


def planned(
    spec: Architecture, sizes: Sizes, hidden: int, pad: bool = False, search: bool = False
) -> mu.Plan:
    def make(size):
        return spec.at(*size)

    needed = search or spec.tie or spec.divides or averages_zeros(spec, pad)
    return mu.plans.plan_between(
        make,
        (spec.sizes, spec.hidden),
        (sizes, hidden),
        by="padded" if pad else "copies",
        loss=loss if needed else None,
    )


def averages_zeros(spec: Architecture, pads: bool) -> bool:
    return pads and "rms" in spec.norms


def check_identity(draw, pads: bool) -> None:
    spec = draw(architectures(pads=pads))
    sizes, hidden = draw(growths(spec, pads=pads))
    search, pick = draw(st.booleans()), draw(st.integers(0, 10**6))
    plan = planned(spec, sizes, hidden, pads, search)
    base = seeded(spec.at, spec.sizes, spec.hidden)
    wide = mu.grow(base, lambda: spec.at(sizes, hidden), plan=plan, prove=False).model
    assert_close(wide(TOKENS), base(TOKENS), 1e-9, "logits")
    grads = gradients(base, loss), gradients(wide, loss)
    assert identity_error(*grads, plan) <= 1e-9

    copied = [n for n, t in plan.tensors.items() if t.kind == "parameter" and t.change.c > 1]
    live = [n for n in copied if not n.endswith("bias")]
    name = live[pick % len(live)]
    assert identity_error(*grads, other_power(plan, name), name) > 1e-6, f"{name}: power of k"
    wrong = mistaken(plan, name)
    broken = mu.grow(base, lambda: spec.at(sizes, hidden), plan=wrong, prove=False).model
    assert identity_error(grads[0], gradients(broken, loss), wrong) > 1e-6, f"{name}: in for out"


@examples(80)
@given(st.data())
def test_gradients_of_a_widened_network_are_r_times_the_copied_gradients(cases):
    check_identity(cases.draw, pads=False)


@examples(60)
@given(st.data())
def test_the_gradient_identity_holds_with_zero_padded_widths(cases):
    check_identity(cases.draw, pads=True)


@examples(60)
@given(st.data())
def test_narrow_undoes_widen_bit_for_bit_when_scales_are_powers_of_two(cases):
    spec = cases.draw(architectures())
    sizes, hidden = cases.draw(growths(spec, ks=(1, 2, 4)))
    plan = planned(spec, sizes, hidden)
    dtype = cases.draw(st.sampled_from([torch.float32, torch.float64]))
    model = seeded(spec.at, spec.sizes, spec.hidden).to(dtype)
    kind = cases.draw(st.sampled_from([torch.optim.AdamW, torch.optim.SGD]))
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {"amsgrad": cases.draw(st.booleans())}
    run = mu.Run(model, kind(model.parameters(), lr=1e-2, weight_decay=0.1, **settings))
    train(run, lambda m: (m(TOKENS) - data(BATCH, VOCABULARY).to(dtype)).square().mean(), 2)
    wide = mu.grow(run, lambda: spec.at(sizes, hidden).to(dtype), plan=plan, prove=False)
    back = mu.narrow(wide, lambda: spec.at(spec.sizes, spec.hidden).to(dtype))
    assert_same_model(back.model, model)
    states = by_name(back), by_name(run)
    assert states[0].keys() == states[1].keys()
    assert states[1]
    for name, state in states[1].items():
        assert state.keys() == states[0][name].keys()
        assert all(torch.equal(states[0][name][key], value) for key, value in state.items()), name


def by_name(run: mu.Run) -> dict[str, dict[str, torch.Tensor]]:
    return {n: run.optimizers[0].state[p] for n, p in run.model.named_parameters()}


@st.composite
def stages(draw, n: int, ks: tuple[int, int], pads: bool) -> Sizes:
    """Sizes n, k1·n + p1, k2·(k1·n + p1) + p2 whose pads stay below one more copy of n."""
    p1 = draw(st.integers(0, (n - 1) // ks[1])) if pads else 0
    p2 = draw(st.integers(0, n - 1 - p1 * ks[1])) if pads else 0
    return n, ks[0] * n + p1, ks[1] * (ks[0] * n + p1) + p2


def declared(spec: Architecture, k: int) -> dict[str, Any]:
    """A tied readout has 1/k folded into its last norm."""
    if not spec.tie:
        return {}
    return {"declared": mu.Declared(folds={"final.weight": f"1/{k}"} if k > 1 else {"embed.weight": 1})}


def exact_part(plan: mu.Plan) -> mu.Plan:
    """A plan without what noise needs to know: shapes alone do not say which zeros a norm averages over."""
    return replace(plan, tensors={name: replace(t, cut=(), gain=False) for name, t in plan.tensors.items()})


@examples(60)
@given(st.data(), st.booleans())
def test_two_plans_in_a_row_are_the_plan_of_the_whole_way(cases, pads):
    draw = cases.draw
    spec = replace(draw(architectures(pads=pads)), divides=False)
    pairs = [(draw(st.sampled_from((1, 2, 3))), draw(st.sampled_from((1, 2, 3)))) for _ in spec.sizes]
    if spec.tie:
        pairs[0] = pairs[-1]
    ways = [draw(stages(n, ks, pads)) for n, ks in zip(spec.sizes, pairs, strict=True)]
    if spec.tie:
        ways[0] = ways[-1]
    hidden = draw(stages(spec.hidden, pairs[-1], pads))
    a, b, c = ((tuple(way[i] for way in ways), hidden[i]) for i in range(3))

    def plan(start, end, k):
        return mu.plans.plan_between(
            lambda size: spec.at(*size),
            start,
            end,
            loss=loss if averages_zeros(spec, pads) else None,
            by="padded" if pads else "copies",
            **declared(spec, k),
        )

    k1, k2 = pairs[-1]
    first, second, whole = plan(a, b, k1), plan(b, c, k2), plan(a, c, k1 * k2)
    composed = first.then(second)
    assert exact_part(composed) == exact_part(whole)
    assert exact_part(composed).hash == exact_part(whole).hash
    assert mu.Plan.from_json(composed.to_json()) == composed
    if b[0] != c[0]:
        assert first.hash != whole.hash, "control: half of the way is not the whole"


class Attention(nn.Module):
    def __init__(self, size: tuple[int, int]):
        super().__init__()
        heads, head_size = size
        self.attention = nn.MultiheadAttention(heads * head_size, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


def test_heads_times_two_then_head_size_times_three_is_both_at_once():
    stream = {"*.in_proj_weight": {1: 1}, "*.out_proj.weight": {0: 1}}
    first = mu.plans.plan_between(Attention, (2, 4), (4, 4), declared=mu.Declared(layouts=stream))
    second = mu.plans.plan_between(Attention, (4, 4), (4, 12), declared=mu.Declared(layouts=stream))
    whole = mu.plans.plan_between(Attention, (2, 4), (4, 12), declared=mu.Declared(layouts=stream))
    assert first.then(second) == whole
    assert first.then(second).hash == whole.hash
    assert str(whole["attention.in_proj_weight"].axes[0]) == "out: 6x2 * 4x3"
    swapped = mu.plans.plan_between(Attention, (2, 4), (2, 12), declared=mu.Declared(layouts=stream))
    assert first.then(second) != swapped, "control"


def test_a_pad_after_copies_keeps_its_folds():
    def make(n: int) -> Any:
        return nn.Sequential(nn.Linear(3, n), nn.RMSNorm(n, eps=0.1), nn.Linear(n, 2))

    def padded(base: int, wide: int) -> mu.Plan:
        return mu.plans.plan_between(make, base, wide, example_inputs=(torch.ones(2, 3),), by="padded")

    first, second, whole = padded(4, 9), padded(9, 11), padded(4, 11)
    assert first.then(second) == whole
    assert whole["0.bias"].fold == whole["1.weight"].fold ** -1 == mu.rules.Scale.of("11/8") ** Fraction(1, 2)
    assert first.then(second).hash == whole.hash != first.hash
