"""What an upscaled run holds: its new rate, its provenance, its symmetry, and a report on its noise."""

import io
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import mupscale as mu
from harness.draws import data, seeded
from harness.refusals import refusal, refused
from harness.runs import drift, train
from mupscale.training.check.symmetry import noise_shares, symmetry

SILENT = mu.MupNoise(0.0)
X, Y = data(16, 3), data(16, 2, seed=2)


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def loss(model: Any) -> Tensor:
    dtype = next(model.parameters()).dtype
    found: Tensor = (model(X.to(dtype)) - Y.to(dtype)).square().mean()
    return found


def trained(make: Any = net, n: int = 4, steps: int = 5) -> mu.Run:
    model = seeded(make, n)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(run, loss, steps)
    return run


def rates(run: mu.Run) -> dict[str, Any]:
    """lr and initial_lr of every tensor."""
    names = {id(p): name for name, p in run.model.named_parameters()}
    return {
        names[id(p)]: (float(g["lr"]), g.get("initial_lr"))
        for o in run.optimizers
        for g in o.param_groups
        for p in g["params"]
    }


SCHEDULERS: dict[str, Any] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 20),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda i: 1 / (1 + i)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 3), lr_scheduler.StepLR(o, 2, 0.5)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", [None, *SCHEDULERS])
def test_lr_sets_the_reference_rate_and_what_schedulers_remember_of_it(
    kind: str | None, plain: bool, tensor_lr: bool
):
    def run_at(lr: float) -> mu.Run:
        plan = mu.plans.plan_between(net, 8, 4)
        model, rate = seeded(net, 4), torch.tensor(lr, dtype=torch.float64) if tensor_lr else lr
        groups: Any = mu.param_groups(model, plan, torch.optim.SGD, lr=rate)
        optimizer = torch.optim.SGD(model.parameters() if plain else groups, lr=rate)
        schedulers = [SCHEDULERS[kind](optimizer)] if kind else []
        run = mu.Run(model, optimizer, schedulers, since=None if plain else plan)
        for part in [*run.optimizers, *run.schedulers] * 2:
            part.step()
        return run

    slow, fast = run_at(0.01), run_at(0.03)
    now = slow.optimizers[0].param_groups[0]
    factor = 3 * float(now["lr"]) / float(now.get("lr_factor", 1.0))
    found = mu.upscale(slow, lambda: net(12), SILENT, lr=factor)
    want = mu.grow(fast, lambda: net(12))
    for i in range(6):
        for name, (lr, first) in rates(want).items():
            assert rates(found)[name] == (pytest.approx(lr), pytest.approx(first)), f"{name}, step {i}"
        for part in (*found.optimizers, *found.schedulers, *want.optimizers, *want.schedulers):
            part.step()
    kept = mu.upscale(slow, lambda: net(12), SILENT)
    assert kept.optimizers[0].param_groups[0]["lr"] != found.optimizers[0].param_groups[0]["lr"], "control"


def test_lr_is_refused_where_it_would_replace_several_rates_or_none():
    model = seeded(net, 4)
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    several = torch.optim.SGD([{"params": first, "lr": 0.1}, {"params": rest, "lr": 0.2}])
    make = lambda: net(8)  # noqa: E731
    refusal(
        lambda: mu.upscale(mu.Run(model, several), make, SILENT, lr=0.3),
        "rates.no_single_rate",
        where=["0.1", "0.2"],
    )
    assert mu.upscale(mu.Run(model, several), make, SILENT).optimizers, "control: without lr"
    for group in several.param_groups:
        group["initial_lr"], group["lr"] = group["lr"], 0.0
    refusal(
        lambda: mu.upscale(mu.Run(model, several), make, SILENT, lr=0.3),
        "rates.no_single_rate",
        where=["0.1", "0.2"],
    )
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    found = mu.upscale(mu.Run(model, still), make, SILENT, lr=0.3)
    assert mu.diagnostics.reference_lr(found.optimizer) == pytest.approx(0.3), (
        "control: one rate, at zero now"
    )


def test_lr_is_refused_when_two_optimizers_have_two_rates():
    """Muon's rate and AdamW's are two constants; one number cannot replace both."""
    model = seeded(net, 4)
    first, rest = list(model.parameters())[:2], list(model.parameters())[2:]
    two = [torch.optim.SGD(first, lr=0.1), torch.optim.AdamW(rest, lr=0.001)]
    refusal(lambda: mu.upscale(mu.Run(model, two), lambda: net(8), SILENT, lr=0.05), "rates.no_single_rate")


def test_lr_is_refused_for_a_run_without_optimizers():
    refusal(lambda: mu.upscale(seeded(net, 4), lambda: net(8), SILENT, lr=0.05), "rates.no_single_rate")


@pytest.mark.parametrize("plain", [False, True])
def test_lr_can_be_set_at_every_growth(plain: bool):
    model = seeded(net, 4)
    plan = mu.plans.plan_between(net, 4, 4)
    groups: Any = model.parameters() if plain else mu.param_groups(model, plan, torch.optim.AdamW, lr=0.01)
    once = mu.upscale(mu.Run(model, torch.optim.AdamW(groups, lr=0.01)), lambda: net(8), SILENT, lr=0.02)
    twice = mu.upscale(once, lambda: net(16), SILENT, lr=0.04)
    assert {name: lr for name, (lr, _) in rates(twice).items()} == pytest.approx(
        {"0.weight": 0.04, "0.bias": 0.04, "2.weight": 0.01, "2.bias": 0.04, "4.weight": 0.01, "4.bias": 0.04}
    )


def test_provenance_says_how_a_run_was_made_all_the_way_back():
    run = trained()
    once = mu.upscale(run, lambda: net(8), mu.SignalNoise(0.1), seed=3, lr=0.02)
    twice = mu.upscale(once, lambda: net(16), mu.PairedNoise(0.2), seed=4)
    told, (early, latest) = twice.provenance, twice.provenance.growths
    assert twice.plan is not None
    assert once.plan is not None
    assert once.since is not None
    assert (told["mupscale"], told["torch"]) == (mu.__version__, torch.__version__)
    assert (told["plan"], told["reference"]) == (twice.plan.hash, once.since.hash)
    assert (told["seed"], told["noise"]["kind"], latest.lr) == (4, "PairedNoise", None)
    assert "lr" not in told
    assert told["noise"]["sigmas"] == {"2.weight": 0.2, "4.weight": 0.2}
    assert early.noise is not None
    assert (early.plan, early.noise["seed"], early.noise["kind"]) == (once.plan.hash, 3, "SignalNoise")
    assert early.noise["sigmas"].keys() == {"0.weight", "2.weight", "4.weight"}
    assert (early.lr, early.reference) == (0.02, "the base itself")
    assert json.loads(json.dumps(told.as_json())) == told.as_json()
    held = io.BytesIO()
    torch.save(told.as_json(), held)
    held.seek(0)
    saved = torch.load(held, weights_only=True)
    assert mu.Run(twice.model, provenance=saved).provenance == told, "plain values, saved next to the weights"
    assert mu.grow(twice, lambda: net(32)).provenance.growths[:2] == told.growths


def shares(dtype: torch.dtype, sigma: float) -> dict[str, Any]:
    base = mu.Run(seeded(net, 32).to(dtype))
    wide = mu.upscale(base, lambda: net(64), mu.MupNoise(sigma))
    found = noise_shares(base, wide)
    assert list(found) == ["0.weight", "2.weight", "4.weight"]
    return found


def test_shares_of_noise_say_what_rounding_took():
    exact = shares(torch.float64, 0.1)
    assert max(found.lost for found in exact.values()) <= 1e-12
    large, small = shares(torch.bfloat16, 0.1), shares(torch.bfloat16, 1e-3)
    for big, little, none in zip(large.values(), small.values(), exact.values(), strict=True):
        assert 1e-4 < big.lost < little.lost, "smaller noise loses more"
        assert little.lost > 0.1
        assert big.share == pytest.approx(none.share, rel=0.05)


def test_shares_leave_out_tensors_without_noise_and_ask_for_an_upscaled_run():
    base = trained()
    wide = mu.upscale(base, lambda: net(8), mu.PairedNoise(0.1), loss=loss)
    assert "0.weight" not in noise_shares(base, wide)
    assert wide.provenance["loss"]["after"] == pytest.approx(wide.provenance["loss"]["before"], rel=1e-12)
    refusal(lambda: noise_shares(base, mu.grow(base, lambda: net(8))), "noise.no_record")


def test_shares_after_two_growths_counts_from_the_first_reference():
    once = mu.upscale(trained(), lambda: net(8), mu.MupNoise(0.1))
    twice = mu.upscale(once, lambda: net(32), mu.SignalNoise(0.1, vectors=False), seed=5)
    assert max(found.lost for found in noise_shares(once, twice).values()) <= 1e-12


COPIED = {"0.weight", "0.bias", "2.weight", "2.bias", "4.weight"}


@pytest.mark.parametrize("k", [2, 3])
def test_the_meter_reads_zero_after_widening_and_stays_there_without_noise(k: int):
    wide = mu.grow(trained(), lambda: net(4 * k))
    assert wide.plan is not None
    found = symmetry(wide)
    assert found.keys() == COPIED, "the last bias has no copies"
    assert max(found.values()) == 0.0
    train(wide, loss, 20)
    assert max(symmetry(wide).values()) <= 1e-12


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("noise", [mu.PairedNoise(0.1), mu.MupNoise(0.1)], ids=["paired", "mup"])
def test_noise_parts_the_copies_of_every_layer_within_twenty_steps(noise: Any, k: int):
    base = trained()
    wide = mu.upscale(base, lambda: net(4 * k), noise)
    assert wide.plan is not None
    if isinstance(noise, mu.PairedNoise):
        assert symmetry(wide)["0.weight"] == 0.0, "no in axis, no noise"
        assert abs(float(loss(wide.model).detach() / loss(base.model).detach()) - 1) <= 1e-12
    train(wide, loss, 20)
    found = symmetry(wide)
    assert found.keys() == COPIED
    assert min(found.values()) > 1e-3, found
    assert drift(base, wide, loss, 5) > 1e-6, "control: it is another run now"


def test_a_jump_of_the_loss_is_warned_of_with_the_next_smaller_size():
    run = trained(steps=200)
    modes = [module.training for module in run.model.modules()]
    state = torch.get_rng_state()
    with pytest.warns(UserWarning, match=r"SignalNoise\(0\.5\)"):
        wide = mu.upscale(run, lambda: net(8), mu.SignalNoise(1.0), loss=lambda m: 100 * loss(m))
    told = wide.provenance["loss"]
    assert told["before"] == pytest.approx(100 * float(loss(run.model).detach()), rel=1e-6)
    assert told["after"] == pytest.approx(100 * float(loss(wide.model).detach()), rel=1e-6)
    json.dumps(wide.provenance.as_json())
    assert [module.training for module in run.model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # control: noise that changes nothing is not warned of
        quiet = mu.upscale(run, lambda: net(8), mu.SignalNoise(0.0), loss=loss)
    assert quiet.provenance["loss"]["after"] == pytest.approx(quiet.provenance["loss"]["before"], rel=1e-5)
    assert "loss" not in mu.upscale(run, lambda: net(8), mu.SignalNoise(1.0)).provenance


def decayed(to: float, steps: int = 10) -> mu.Run:
    """A run in μP groups whose schedule has brought its rate from 1e-2 to `to` times that."""
    since = mu.plans.plan_between(net, 4, 8)
    model = seeded(net, 8)
    optimizer = torch.optim.AdamW(mu.param_groups(model, since, torch.optim.AdamW, lr=1e-2))
    falling = lr_scheduler.LambdaLR(optimizer, lambda i: max(to, 1 - i / steps))
    run = mu.Run(model, optimizer, falling, since=since)
    train(run, loss, steps)
    return run


NEW: dict[str, Any] = {
    **SCHEDULERS,
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 1.0, 3), lr_scheduler.CosineAnnealingLR(o, 10)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
}


@pytest.mark.parametrize("to", [0.0, 0.1])
@pytest.mark.parametrize("kind", NEW)
def test_a_new_scheduler_starts_at_the_rate_that_was_asked_for(kind, to):
    run = decayed(to)
    start = mu.Run(run.model, run.optimizers, since=run.since)
    asked = mu.upscale(start, lambda: net(16), SILENT, lr=5e-3).optimizers[0]
    with pytest.warns(
        UserWarning, match="optimizer, scheduler"
    ):  # and none with lr=, which asks for a new rate
        later, kept = (mu.grow(start, lambda: net(16)).optimizers[0] for _ in range(2))
    mu.set_lr_(later, 5e-3)
    mu.set_lr_(run.optimizers[0], 5e-3)
    for optimizer in (asked, later, run.optimizers[0]):
        NEW[kind](optimizer)
        assert mu.diagnostics.reference_lr(optimizer) == pytest.approx(5e-3, rel=1e-12)
    NEW[kind](kept)
    assert mu.diagnostics.reference_lr(kept) == pytest.approx(1e-2 * to, rel=1e-12), (
        "the rate at which the base stands"
    )


def test_a_scheduler_that_is_carried_keeps_the_rate_it_started_from():
    run = decayed(0.1)
    wide = mu.grow(run, lambda: net(16))
    factors = [group["lr_factor"] for group in wide.optimizers[0].param_groups]
    assert [group["initial_lr"] for group in wide.optimizers[0].param_groups] == [1e-2 * f for f in factors]
    stock = run.optimizers[0]
    lr_scheduler.LambdaLR(stock, lambda i: 1.0)
    assert mu.diagnostics.reference_lr(stock) == pytest.approx(1e-2), (
        "control: torch itself starts a new one at the old rate"
    )


def test_a_running_one_cycle_keeps_its_own_start_when_the_rate_is_set():
    """OneCycleLR reads initial_lr at every step. Control: without the scheduler's mark it would follow the new rate."""
    model = nn.Linear(4, 4)
    plan = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
    optimizer = torch.optim.AdamW(mu.param_groups(model, plan, torch.optim.AdamW, lr=1e-2))
    rates = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=100)
    start = [group["initial_lr"] for group in optimizer.param_groups]
    mu.set_lr_(optimizer, 0.1)
    assert [group["initial_lr"] for group in optimizer.param_groups] == start
    optimizer.step()
    scheduler.step()
    assert all(group["lr"] <= rate for group, rate in zip(optimizer.param_groups, rates, strict=True))
    for group in optimizer.param_groups:
        del group["max_lr"]
    mu.set_lr_(optimizer, 0.1)
    assert [group["initial_lr"] for group in optimizer.param_groups] != start


@pytest.mark.parametrize(
    ("loss", "found"), [(lambda model: model(torch.ones(2, 4)), "(2, "), (lambda model: None, "None")]
)
def test_a_loss_that_is_not_one_number_is_refused(loss, found):
    with refused("argument.loss_not_one_number", where=found):
        mu.upscale(nn.Linear(4, 4), lambda: nn.Linear(4, 4), mu.MupNoise(0.1), loss=loss)
