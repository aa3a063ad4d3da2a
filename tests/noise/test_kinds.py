"""Sizes by name pattern, relative paired noise, noise that is added to a run that is wide already, and new units that wake."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.refusals import refusal
from mupscale.noise.resolve import norms_wanted
from mupscale.noise.resolved import restore_noise
from mupscale.plans.direction import Direction
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.plans.wide_model import fill_model_
from mupscale.rules import Axis, Scale
from mupscale.tensors.spectral import spectral_norms
from mupscale.training.check.symmetry import noise_shares

X = torch.randn(32, 6, generator=torch.Generator().manual_seed(0))


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
    )


@pytest.fixture
def base() -> nn.Sequential:
    torch.manual_seed(0)
    return mlp(8)


def moved(noisy: nn.Module, exact: nn.Module, name: str) -> float:
    """The spectral norm of the noise over that of the weight."""
    a, b = noisy.get_parameter(name), exact.get_parameter(name)
    return float(spectral_norms((a - b).detach(), False) / spectral_norms(b.detach(), False))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).detach().norm() / wanted.detach().norm())


def test_sizes_by_pattern_are_those_of_the_first_that_matches(base):
    exact = mu.grow(base, lambda: mlp(64)).model
    run = mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"2.*": 0.2, "[0-2].*": 0.05}))
    assert moved(run.model, exact, "2.weight") == pytest.approx(0.2, rel=0.15)
    assert moved(run.model, exact, "0.weight") == pytest.approx(0.05, rel=0.3)
    assert torch.equal(run.model.get_parameter("4.weight"), exact.get_parameter("4.weight")), (
        "no pattern matches"
    )
    assert "4.weight" in run.provenance["noise"]["without"]
    plain = mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"*": 0.05}))
    one = mu.upscale(base, lambda: mlp(64), mu.SignalNoise(0.05))
    for name, parameter in one.model.named_parameters():
        assert torch.equal(parameter, plain.model.get_parameter(name))


def test_wrong_sizes_by_pattern_are_refused(base):
    refusal(
        lambda: mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"5.*": 0.1})),
        "noise.pattern_matches_nothing",
        where=["5.*", "0.weight"],
    )
    refusal(
        lambda: mu.upscale(base, lambda: mlp(64), mu.SignalNoise({"0.*": 1.5})),
        "noise.above_norm",
        where="0.*",
    )
    refusal(lambda: mu.upscale(base, lambda: mlp(64), mu.PairedNoise()), "noise.sigma_or_t")
    refusal(lambda: mu.upscale(base, lambda: mlp(64), mu.PairedNoise(1.0, t=0.1)), "noise.sigma_or_t")


def test_paired_noise_has_a_relative_size_and_moves_outputs_by_rounding_only(base):
    exact = mu.grow(base, lambda: mlp(64)).model
    run = mu.upscale(base, lambda: mlp(64), mu.PairedNoise(t=0.2))
    assert moved(run.model, exact, "2.weight") == pytest.approx(0.2, rel=0.2)
    assert torch.allclose(run.model(X), base(X), atol=1e-5)
    plain = mu.upscale(base, lambda: mlp(64), mu.SignalNoise(0.2)).model
    change = relative(plain(X), base(X))
    assert change > 0.05, "control: plain noise of the same size moves them"
    half = mu.upscale(base.bfloat16(), lambda: mlp(64).bfloat16(), mu.PairedNoise(t=0.2)).model
    low = relative(half(X.bfloat16()), base(X.bfloat16()))
    assert 1e-4 < low < 0.05, "in bfloat16 by its rounding"


def test_noise_can_be_added_to_a_run_that_is_wide(base):
    optimizer = torch.optim.AdamW(base.parameters(), lr=1e-2)
    run = mu.Run(base, optimizer)
    base(X).square().mean().backward()
    optimizer.step()
    exact = mu.grow(run, lambda: mlp(64))
    noisy = mu.add_noise(exact, mu.SignalNoise(0.1), seed=3)
    assert moved(noisy.model, exact.model, "2.weight") == pytest.approx(0.1, rel=0.15)
    at_once = mu.upscale(run, lambda: mlp(64), mu.SignalNoise(0.1), seed=3)
    for name, parameter in at_once.model.named_parameters():
        assert torch.allclose(parameter, noisy.model.get_parameter(name), atol=1e-6), "as if added by upscale"
    assert noisy.plan == exact.plan
    assert noisy.since == exact.since
    for old, new in zip(exact.optimizer.param_groups, noisy.optimizer.param_groups, strict=True):
        assert old["lr"] == new["lr"]
        for p, q in zip(old["params"], new["params"], strict=True):
            assert torch.equal(exact.optimizer.state[p]["exp_avg"], noisy.optimizer.state[q]["exp_avg"])
    for late in (mu.PairedNoise(t=0.1), mu.SplitNoise(), mu.NewUnits()):
        refusal(partial(mu.add_noise, exact, late), "noise.only_at_growth")


def test_a_run_that_never_grew_gets_none(base):
    refusal(lambda: mu.add_noise(mu.Run(base), mu.SignalNoise(0.1)), "plan.not_given")


WORDS, HEAD, GROUP = 7, 4, 2
WORDS_READ = torch.randint(WORDS, (3, 5), generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Grouped attention and a feed-forward layer on a stream behind one kind of norm."""

    def __init__(self, norm: Any, stream: int, kv_heads: int, units: int) -> None:
        super().__init__()
        self.norm, self.last = (norm(stream, eps=0.0) for _ in range(2))
        self.table, self.head = nn.Embedding(WORDS, stream), nn.Linear(stream, WORDS)
        self.q = nn.Linear(stream, kv_heads * GROUP * HEAD)
        self.k, self.v = (nn.Linear(stream, kv_heads * HEAD, bias=False) for _ in range(2))
        self.o = nn.Linear(kv_heads * GROUP * HEAD, stream)
        self.up, self.down = nn.Linear(stream, units), nn.Linear(units, stream)
        with torch.no_grad():
            for one in (self.norm, self.last):
                one.weight.uniform_(0.5, 1.5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.table(words)
        read = self.norm(x)
        q, k, v = (
            layer(read).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(nn.functional.silu(self.up(self.last(x))))
        out: Tensor = self.head(self.last(x))
        return out


def block_plan(stream: str, folded: bool) -> mu.Plan:
    """Twice the heads and the units, as zeros, on a stream that grows by zeros (with a fold) or by copies."""
    wide, read = Axis.parse(f"out: {stream}"), Axis.parse(f"in: {stream}")
    fold = Scale.of("1/2") ** Fraction(1, 2) if folded else Scale.of(1)
    cut = (0,) if folded else ()
    heads, keys, units = (f"{n}+{n}" for n in (2 * GROUP * HEAD, 2 * HEAD, 12))
    grown: dict[str, TensorPlan] = {}

    def add(name: str, *axes: Axis | str, **options: Any) -> None:
        parsed = tuple(axis if isinstance(axis, Axis) else Axis.parse(axis) for axis in axes)
        grown[name] = TensorPlan((name,), parsed, **options)

    add("table.weight", str(WORDS), wide, cut=(1,) if folded else ())
    add("head.weight", str(WORDS), read)
    add("head.bias", str(WORDS))
    for norm in ("norm", "last"):
        add(f"{norm}.weight", wide, fold=fold, gain=folded)
    if not folded:
        add("norm.bias", wide)
        add("last.bias", wide)
    add("q.weight", f"out: {heads}", read)
    add("q.bias", f"out: {heads}")
    for name in ("k.weight", "v.weight"):
        add(name, f"out: {keys}", read)
    add("o.weight", wide, f"in: {heads}", cut=(*cut, 1))
    add("o.bias", wide, cut=cut)
    add("up.weight", f"out: {units}", read)
    add("up.bias", f"out: {units}")
    add("down.weight", wide, f"in: {units}", cut=(*cut, 1))
    add("down.bias", wide, cut=cut)
    return mu.Plan(grown)


BLOCKS = {"zeros": (nn.RMSNorm, "8+8", True), "copies": (nn.LayerNorm, "8x2", False)}
"""The stream behind each norm: how it grows."""
KINDS = [mu.NewUnits(), mu.NewUnits("random"), mu.NewUnits("random", 0.5), mu.SplitNoise()]


def woken_block(stream: str, noise: Any, plan: mu.Plan | None = None) -> tuple[Any, Any, mu.Plan]:
    norm, axis, folded = BLOCKS[stream]
    torch.manual_seed(2)
    base = Block(norm, 8, 2, 12).double()
    plan = plan or block_plan(axis, folded)
    wide = mu.upscale(base, lambda: Block(norm, 16, 4, 24).double(), noise, plan=plan, seed=5, prove=False)
    return base, wide, plan


@torch.no_grad()
def furthest(wide: nn.Module, base: nn.Module) -> float:
    """By how much an output moves."""
    return float((wide(WORDS_READ) - base(WORDS_READ)).abs().max())


@pytest.mark.parametrize("noise", KINDS, ids=str)
@pytest.mark.parametrize("stream", BLOCKS)
def test_new_units_wake_without_a_jump_and_their_record_restores_them(stream: str, noise: Any):
    base, wide, plan = woken_block(stream, noise)
    assert furthest(wide.model, base) <= 1e-12
    quiet = {"o.weight", "down.weight", "table.weight"}
    for name, entry in plan.tensors.items():
        new = [torch.tensor([axis.source(i) is None for i in range(axis.wide)]) for axis in entry.axes]
        for dim, zeros in enumerate(new):
            found = wide.model.get_parameter(name).detach().transpose(0, dim)[zeros]
            if dim in entry.cut:
                assert not bool(found.any()), f"{name}: cut"
            elif name not in quiet and len(new) > 1 and len(found):
                assert bool((found != 0).all()), f"{name}: awake"
    record = json.loads(json.dumps(dict(wide.provenance["noise"]), default=list))
    restored = fill_model_(
        copy.deepcopy(wide.model), base, Direction(plan, noise=restore_noise(record, plan))
    ).state_dict()
    for key, value in wide.model.state_dict().items():
        assert torch.equal(value, restored[key]), key
    shares = noise_shares(mu.Run(base), wide)
    assert all(share.lost <= 1e-9 for share in shares.values())
    assert shares["up.weight"].share > 0.3
    bare = replace(plan, tensors={name: replace(entry, cut=()) for name, entry in plan.tensors.items()})
    _, moved_by, _ = woken_block(stream, noise, bare)
    assert furthest(moved_by.model, base) > 1e-3, "control: nothing is cut"


@pytest.mark.parametrize("readers", ["copied", "random"])
def test_a_new_reader_has_the_size_of_the_trained_one(readers: Any):
    base, wide, _ = woken_block("zeros", mu.NewUnits(readers, 0.5))
    trained, found = base.up.weight.detach(), wide.model.up.weight.detach()
    rms = float(trained.square().mean().sqrt())
    new = found[12:, :8] - (trained if readers == "copied" else 0)
    error = 5 / (2 * new.numel()) ** 0.5
    assert float(new.square().mean().sqrt()) == pytest.approx(0.5 * rms, rel=error)
    gain, wide_gain = base.norm.weight.detach() / 2**0.5, wide.model.norm.weight.detach()
    assert torch.allclose(wide_gain[:8], gain, rtol=1e-15)
    level = gain if readers == "copied" else torch.full_like(gain, 0.5**0.5)
    assert torch.allclose(wide_gain[8:], level, rtol=1e-15)
    biases = wide.model.q.bias.detach()[16:]
    assert torch.equal(biases, base.q.bias if readers == "copied" else torch.zeros_like(biases))
    assert not bool(wide.model.o.bias[8:].any()), "it writes into the stream"


def test_every_expert_has_readers_of_its_own_size():
    axes = tuple(map(Axis.parse, ("2", "out: 300+300", "in: 50+50")))
    plan = mu.Plan({"w": TensorPlan(("w",), axes, cut=(2,))})
    weight = torch.randn(2, 300, 50).double() * torch.tensor([1.0, 100.0]).view(2, 1, 1)
    noise = mu.diagnostics.resolve_noise({"w": weight}, mu.NewUnits("random"), plan=plan).tensors["w"]
    assert noise.zeros is not None
    assert noise.zeros.std == pytest.approx(weight.square().mean((1, 2)).sqrt().tolist(), rel=1e-6)
    assert norms_wanted(mu.NewUnits("random"), plan=plan) == {("w", "each_rms"): 2}


def test_a_split_halves_nothing_and_leaves_what_only_writes_copies(base):
    wide: Any = mu.upscale(base, lambda: mlp(16), mu.SplitNoise(), seed=1)
    assert wide.provenance["noise"]["without"] == ("0.weight",)
    assert torch.equal(wide.model[4].weight.view(2, 8, 2).sum(2), base[4].weight)
    rows = wide.model[2].weight.view(8, 2, 8, 2)
    assert torch.equal(rows.sum(3), base[2].weight[:, None].expand(8, 2, 8))
    assert not torch.equal(rows[:, 0], rows[:, 1]), "rows part"
    again: Any = mu.upscale(base, lambda: mlp(16), mu.SplitNoise(), seed=2)
    assert not torch.equal(again.model[2].weight, wide.model[2].weight), "control: another seed"


@pytest.mark.parametrize("noise", KINDS, ids=str)
def test_what_is_loaded_in_parts_has_the_bits_of_a_live_model(base, noise):
    width = 16 if isinstance(noise, mu.SplitNoise) else 12
    plan = mu.infer_plan(base, lambda: mlp(width), by="units" if width < 16 else "copies")
    found = mu.load_grown_(mu.Run(base), mlp(width), plan=plan, noise=noise, seed=3, prove=False)
    live: Any = mu.upscale(base, lambda: mlp(width), noise, plan=plan, seed=3)
    for name, parameter in live.model.named_parameters():
        assert torch.equal(parameter, found.model.get_parameter(name)), name


def test_wrong_new_units_are_refused(base):
    refusal(lambda: mu.upscale(base, lambda: mlp(16), mu.NewUnits("new")), "noise.unknown_readers")  # type: ignore[arg-type]
    refusal(lambda: mu.upscale(base, lambda: mlp(16), mu.NewUnits(size=-1.0)), "argument.not_a_number")
