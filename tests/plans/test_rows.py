"""More words and positions: rows of zeros at the end of tables, whose run is the base's for a loss over the base's words."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.noise.kinds import MupNoise
from mupscale.noise.resolve import resolve_noise
from mupscale.noise.resolved import restore_noise
from mupscale.plans import TensorPlan
from mupscale.plans.plan import Plan
from mupscale.plans.rows import old_words, row_plan, without_rows
from mupscale.rules import Axis
from mupscale.tensors.noise import TensorNoise, Waking
from mupscale.tensors.philox import Stream

OLD, NEW, WIDTH = 7, 12, 4


class Words(nn.Module):
    """An embedding, a norm, a layer and a readout with a bias, tied or not."""

    def __init__(self, words: int, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.norm(torch.tanh(self.mid(self.embed(ids)))))


def pair(tied: bool):
    torch.manual_seed(0)
    base = Words(OLD, tied).double()
    return base, Words(NEW, tied).double()


IDS = torch.arange(OLD).repeat(2)


def step(words):
    def one(run, i):
        run.optimizer.zero_grad()
        loss = F.cross_entropy(run.model(IDS)[:, :words], IDS.roll(i + 1))
        loss.backward()
        run.optimizer.step()
        return float(loss.detach())

    return one


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_the_run_is_the_bases_for_a_loss_over_its_words(tied, kind):
    """Control: a loss over all words is another one, and leaves the base in the first step."""
    base, wide = pair(tied)
    plan = row_plan(base, wide, "words", NEW - OLD)
    run = mu.Run(base, kind(base.parameters(), lr=1e-2, weight_decay=0.1))
    for i in range(3):
        step(OLD)(run, i)
    make = lambda: Words(NEW, tied).double()  # noqa: E731
    certificate = mu.verify(run, make, step=step(OLD), plan=plan, steps=5)
    assert certificate.worst == 0.0
    wide_run = mu.grow(run, make, plan=plan, prove=False)
    for name, parameter in wide_run.model.named_parameters():
        state = {key: v for key, v in wide_run.optimizer.state[parameter].items() if torch.is_tensor(v)}
        old = dict(base.named_parameters())[name]
        for key, value in state.items():
            was = run.optimizer.state[old][key]
            if value.dim() and plan[name].rows:
                assert torch.equal(value[:OLD], was)
                assert not bool(value[OLD:].any())
            else:
                assert torch.equal(value, was)
    broken = mu.verify(run, make, step=step(NEW), plan=plan, steps=5)
    assert broken.worst > 1e-3
    assert "the loss counts words that the base does not have" in str(broken)


@pytest.mark.parametrize("tied", [False, True])
def test_new_words_raise_the_loss_by_what_the_theorem_says(tied):
    base, _ = pair(tied)
    with torch.no_grad():
        base.head.bias.normal_(-9.0)  # all logits far below 0
    plan = row_plan(base, Words(NEW, tied), "words", NEW - OLD)
    make = lambda: Words(NEW, tied).double()  # noqa: E731
    asleep: Any = mu.grow(base, make, plan=plan, prove=False).model
    awake: Any = mu.upscale(base, make, mu.SignalNoise(0.1), plan=plan, prove=False).model
    base.requires_grad_(False), asleep.requires_grad_(False), awake.requires_grad_(False)
    logits, added = base(IDS), NEW - OLD
    before = F.cross_entropy(logits, IDS)
    rise = F.cross_entropy(asleep(IDS), IDS) - before
    expected = torch.log1p(added / logits.exp().sum(-1)).mean()
    assert float(rise - expected) == pytest.approx(0.0, abs=1e-12)
    assert float(rise) > 3, "control: zeros cost much where logits are far below 0"
    woken = F.cross_entropy(awake(IDS), IDS) - before
    assert 0 < float(woken) <= math.log(NEW / OLD), "by Jensen's inequality"
    assert torch.equal(awake(IDS)[:, :OLD], logits)


def test_a_new_word_wakes_as_the_mean_and_its_first_gradient_is_of_usual_size():
    """Control: behind a norm, the gradient of a row of zeros is far above that of any trained row."""
    torch.manual_seed(0)

    class Normed(Words):
        def forward(self, ids):
            return self.head(self.mid(self.norm(self.embed(ids))))

    def make(words: int = NEW) -> Normed:
        model = Normed(words).double()
        model.norm.eps = 1e-8
        return model

    base = make(OLD)
    plan = row_plan(base, make(), "words", NEW - OLD)
    ids = torch.arange(NEW)

    def size(model):
        F.cross_entropy(model(ids), ids.roll(1)).backward()
        assert bool((model.embed.weight.grad != 0).all())
        assert bool((model.head.weight.grad[OLD:] != 0).all())
        rows = model.embed.weight.grad.norm(dim=1)
        return float(rows[OLD:].max() / rows[:OLD].max())

    awake: Any = mu.upscale(base, make, mu.SignalNoise(0.1), plan=plan, prove=False).model
    want = base.embed.weight.mean(0)
    torch.testing.assert_close(awake.embed.weight[OLD:], want.expand(NEW - OLD, -1), rtol=1e-6, atol=0)
    torch.testing.assert_close(awake.head.bias[OLD:], base.head.bias.mean().expand(NEW - OLD))
    assert size(awake) < 10
    assert size(mu.grow(base, make, plan=plan, prove=False).model) > 100


def test_a_row_in_slices_is_the_slice_of_the_row():
    axes = (Axis.parse("5+4"), Axis.parse("out: 3x2+2"))
    row = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0)
    noise = TensorNoise(Stream(0, "w"), 0.1, zeros=Waking(0.2, (1,), 0.0, row))
    whole = noise.add_(torch.zeros(9, 8), axes, [0, 0])
    assert torch.equal(whole[5:], torch.tensor(row).expand(4, -1))
    assert not bool(whole[:, 6:].any()), "what is cut stays zero"
    for start, stop in ((0, 3), (4, 7), (6, 9)):
        part = noise.add_(torch.zeros(stop - start, 5), axes, [start, 2])
        assert torch.equal(part, whole[start:stop, 2:7])
    uncut = TensorNoise(Stream(0, "w"), 0.1, zeros=Waking(0.2, (), 0.0, row))
    assert bool(uncut.add_(torch.zeros(9, 8), axes, [0, 0])[5:, 6:].all()), (
        "control: new units of new words wake"
    )


def test_the_record_of_noise_holds_the_mean():
    base, wide = pair(tied=False)
    plan = row_plan(base, wide, "words", NEW - OLD)
    noise = resolve_noise(dict(base.named_parameters()), MupNoise(0.1), plan=plan)
    assert {name for name, one in noise.tensors.items() if one.mean} == {
        "embed.weight",
        "head.weight",
        "head.bias",
    }
    assert restore_noise(noise.as_json(), plan) == noise
    assert not resolve_noise(dict(base.named_parameters()), MupNoise(0.0), plan=plan).tensors, (
        "silent noise wakes none"
    )


def test_noise_that_is_added_later_leaves_words_as_they_are():
    base, _ = pair(tied=True)
    plan = row_plan(base, Words(NEW, True), "words", NEW - OLD)
    awake: Any = mu.upscale(
        mu.Run(base), lambda: Words(NEW, True).double(), mu.SignalNoise(0.1), plan=plan, prove=False
    )
    again: Any = mu.add_noise(awake, mu.SignalNoise(0.1), seed=1)
    assert torch.equal(again.model.embed.weight, awake.model.embed.weight)


def test_plans_with_rows_compose_and_are_read_back():
    base, wide = pair(tied=True)
    plan = row_plan(base, wide, "words", NEW - OLD)
    assert old_words(plan) == (OLD, NEW)
    assert Plan.from_json(plan.to_json()) == plan
    more = plan.then(row_plan(wide, Words(20, True), "words", 8))
    assert str(more["embed.weight"].axes[0]) == "7+13"
    wider = TensorPlan(("w",), (Axis.fixed(NEW), Axis.parse("out: 4x2")))
    joint = plan["embed.weight"].then(wider)
    assert ([str(axis) for axis in joint.axes], joint.rows) == (["7+5", "out: 4x2"], "words")
    assert [str(axis) for axis in without_rows(joint).axes] == ["12", "out: 4x2"]


class Positions(nn.Module):
    def __init__(self, positions: int, also: int = 3) -> None:
        super().__init__()
        self.table = nn.Embedding(positions, 2)
        self.other = nn.Linear(also, 2)
        self.register_buffer("numbers", torch.arange(positions))


def test_positions_stay_zero_and_their_numbers_are_the_models_own():
    plan = row_plan(Positions(5), Positions(9), "positions", 4)
    assert (plan["table.weight"].cut, plan["numbers"].fill) == ((0,), "own")
    base = Positions(5)
    wide: Any = mu.upscale(base, lambda: Positions(9), mu.SignalNoise(0.1), plan=plan, prove=False).model
    assert torch.equal(wide.table.weight[:5], base.table.weight)
    assert not bool(wide.table.weight[5:].any())
    assert torch.equal(wide.numbers, torch.arange(9))


def test_a_model_that_changes_otherwise_is_refused():
    with refused("model.not_just_rows", where="other.weight"):
        row_plan(Positions(5), Positions(9, also=4), "positions", 4)
