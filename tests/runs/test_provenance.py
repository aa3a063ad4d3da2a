"""The history of a run's growths is right after any of them, cannot be changed, is stored, and reads what 0.2.0 stored."""

import copy
import io
import json
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.draws import seeded
from harness.refusals import refusal
from mupscale.diagnostics import Growth, Provenance
from mupscale.training.check.symmetry import noise_shares
from mupscale.training.recipe import Recipe

MUP = mu.MupNoise(0.1)
X = torch.ones(2, 3, dtype=torch.float64)


def net(n: int) -> nn.Module:
    return nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 2))


def base() -> mu.Run:
    return mu.Run(seeded(net, 4).double())


def grow(run: mu.Run, n: int, noise: Any = None, seed: int = 0) -> mu.Run:
    return (
        mu.grow(run, lambda: net(n)) if noise is None else mu.upscale(run, lambda: net(n), noise, seed=seed)
    )


def hashes(provenance: Provenance) -> list[str | None]:
    return [growth.plan for growth in provenance.growths]


def plan_of(run: mu.Run) -> mu.Plan:
    assert run.plan is not None
    return run.plan


def test_after_upscale_and_widen_it_names_the_plan_and_the_noise_of_each():
    start = base()
    once = grow(start, 8, MUP, seed=3)
    wide = grow(once, 16)
    assert wide.provenance["plan"] == plan_of(wide).hash
    assert wide.provenance["reference"] == plan_of(once).hash
    assert not {"noise", "seed"} & wide.provenance.keys()
    assert hashes(wide.provenance) == [plan_of(once).hash, plan_of(wide).hash]
    assert wide.provenance.growths[0] == once.provenance.growths[0]
    # Control: a flat copy of what the base says, with the new proof, names the growth before.
    assert {**once.provenance, "proof": wide.provenance["proof"]}["plan"] != plan_of(wide).hash
    refusal(lambda: noise_shares(once, wide), "noise.no_record")
    assert max(found.lost for found in noise_shares(start, once).values()) <= 1e-12


def test_a_run_that_was_only_widened_says_how():
    wide = grow(base(), 8)
    found = wide.provenance
    assert (found["plan"], found["reference"]) == (plan_of(wide).hash, "the base itself")
    assert (found["mupscale"], found["torch"]) == (mu.__version__, str(torch.__version__))
    assert found["proof"]["by"] == plan_of(wide).proof
    assert not base().provenance, "control: a run that has not grown has no history"


def test_several_growths_are_in_order_and_narrow_takes_them_back():
    runs = [base()]
    for n, noise in ((8, MUP), (16, None), (32, mu.SignalNoise(0.1))):
        runs.append(grow(runs[-1], n, noise))
    last = runs[-1].provenance
    assert hashes(last) == [plan_of(run).hash for run in runs[1:]]
    assert [growth.noise is not None for growth in last.growths] == [True, False, True]
    back = mu.narrow(runs[-1], lambda: net(16))
    assert back.provenance.growths == runs[2].provenance.growths
    assert back.provenance.undone == last.growths[-1:]
    further = mu.narrow(back, lambda: net(8))
    assert further.provenance.growths == runs[1].provenance.growths
    assert further.provenance.undone == last.growths[:0:-1]
    assert further.provenance["plan"] == plan_of(further).hash
    whole = mu.narrow(runs[-1], lambda: net(4), plan=runs[-1].since)
    assert not whole.provenance.growths, "all three at once"
    assert whole.provenance.undone == last.growths[::-1]


CHANGES: dict[str, Callable[[mu.Run], Any]] = {
    "a growth's field": lambda run: setattr(run.provenance.growths[0], "seed", 4),
    "the history": lambda run: setattr(run.provenance, "growths", ()),
    "an entry": lambda run: cast(Any, run.provenance).__setitem__("seed", 4),
    "noise": lambda run: run.provenance["noise"].__setitem__("seed", 4),
    "a size": lambda run: run.provenance["noise"]["sigmas"].update({"0.weight": 1.0}),
    "a list": lambda run: run.provenance["noise"]["without"].append("0.weight"),
    "a proof": lambda run: run.provenance["proof"].pop("by"),
    "merged": lambda run: run.provenance.growths[0].proof.__ior__({"by": "loss"}),  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("change", CHANGES)
def test_it_cannot_be_changed(change: str):
    run = grow(base(), 8, MUP)
    before = run.provenance.as_json()
    with pytest.raises((FrozenInstanceError, TypeError, AttributeError)):
        CHANGES[change](run)
    assert run.provenance.as_json() == before


def test_what_as_json_gives_can_be_changed_and_is_a_copy():
    """Control of the test above."""
    run = grow(base(), 8, MUP)
    stored = run.provenance.as_json()
    stored["growths"][0]["noise"]["seed"] = 4
    assert Provenance.from_json(stored) != run.provenance


def torch_saved(value: Provenance) -> Provenance:
    held = io.BytesIO()
    torch.save(value.as_json(), held)
    held.seek(0)
    return Provenance.from_json(torch.load(held, weights_only=True))


STORED: dict[str, Callable[[Provenance], Provenance]] = {
    "json": lambda value: Provenance.from_json(json.loads(json.dumps(value.as_json()))),
    "torch": torch_saved,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "a copy": copy.deepcopy,
    "a run": lambda value: mu.Run(net(4), provenance=value.as_json()).provenance,
    "a record": lambda value: Provenance.from_json({"plan": "unread", "provenance": value.as_json()}),
}


@pytest.mark.parametrize("how", STORED)
def test_it_is_the_same_after_saving_and_loading(how: str):
    once = mu.upscale(
        base(), lambda: net(8), mu.SignalNoise(0.01), loss=lambda m: m(X).square().sum(), seed=2
    )
    wide = mu.add_noise(grow(mu.narrow(grow(once, 16), lambda: net(8)), 32), mu.SignalNoise(0.1))
    assert STORED[how](wide.provenance) == wide.provenance
    assert STORED[how](Provenance()) == Provenance() or how == "a record"
    assert STORED[how](once.provenance) != wide.provenance, "control"


def test_a_later_form_and_what_is_none_are_refused():
    stored = grow(base(), 8).provenance.as_json()
    refusal(lambda: Provenance.from_json({**stored, "version": 2}), "growth.other_provenance_version")
    for wrong in ({**stored, "growths": 1}, {**stored, "growths": [{"colour": "red"}]}, {"noise": [1]}):
        refusal(partial(Provenance.from_json, wrong), "growth.malformed_provenance")
    assert Provenance.from_json(stored).growths, "control"


NOISE = {"kind": "MupNoise", "seed": 3, "sigmas": {"w": 0.1}, "paired": {}, "without": ["v"], "rows": {}}
PLAN = mu.plans.plan_between(lambda n: nn.Linear(n, n), 2, 4)
LIVE = {
    "version": "0.2.0", "torch": "2.9.0", "plan": "aa", "proof": {"by": "loss", "worst": 1e-16}, "reference": "the base itself",
    "noise": NOISE, "seed": 3, "lr": 0.02, "loss": {"before": 1.0, "after": 1.1}, "grown_from": {},
}  # fmt: skip
FIRST = Growth(
    plan="aa", proof={"by": "loss", "worst": 1e-16}, seed=3, noise=NOISE, lr=0.02, loss={"before": 1.0, "after": 1.1},
    mupscale="0.2.0", torch="2.9.0",
)  # fmt: skip
DIRECTORY = {
    "format": "mupscale directory 1", "version": "0.2.0", "torch": "2.9.0", "request": {"multipliers": "2", "seed": 3, "recipe": None},
    "plan_hash": PLAN.hash, "plan": PLAN.as_json(), "since_reference": PLAN.as_json(), "losses": None, "not_carried": {},
    "noise": {**NOISE, "asked": {"t": 0.1}, "auto": {"t": 0.1}}, "grown_from": None,
}  # fmt: skip
GROWN = Growth(
    plan=PLAN.hash, proof={"by": PLAN.proof}, seed=3, noise=NOISE, auto={"t": 0.1}, mupscale="0.2.0", torch="2.9.0"
)  # fmt: skip
UNKNOWN: dict[str, Any] = {"reference": None, "mupscale": None, "torch": None}
OLD: dict[str, tuple[dict[str, Any], tuple[Growth, ...]]] = {
    "never grown": ({}, ()),
    "upscaled": (LIVE, (FIRST,)),
    "upscaled twice": (
        {**LIVE, "plan": "bb", "reference": "aa", "lr": None, "grown_from": LIVE},
        (FIRST, replace(FIRST, plan="bb", reference="aa", lr=None)),
    ),
    "widened only": ({"proof": {"by": "modules"}}, (Growth(plan=None, proof={"by": "modules"}, **UNKNOWN),)),
    "noise added twice": (
        {
            **LIVE,
            "added_noise": {**NOISE, "seed": 5, "added_to": {**LIVE, "added_noise": {**NOISE, "added_to": LIVE}}},
        },
        (replace(FIRST, added_noise=(NOISE, {**NOISE, "seed": 5})),),
    ),
    "loaded": (
        {**LIVE, "noise": None, "seed": 0, "source": "x", "bytes": 8, "messages": 0, "beside": 1, "moments": 2},
        (replace(FIRST, noise=None, seed=None, loaded={"bytes": 8}),),
    ),
    "a directory": (DIRECTORY, (GROWN,)),
    "a directory of a directory": (
        {**DIRECTORY, "since_reference": {}, "noise": None, "grown_from": {"version": "0.1.0", "plan_hash": "cc", "grown_from": None}},
        (
            Growth(plan="cc", mupscale="0.1.0", torch=None),
            replace(GROWN, reference=None, noise=None, seed=None, auto=None),
        ),
    ),
    "a trainer's checkpoint": (
        {"plan": PLAN.as_json(), "since_reference": PLAN.as_json()},
        (Growth(plan=PLAN.hash, proof={"by": PLAN.proof}, mupscale=None, torch=None),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OLD)
def test_what_version_0_2_0_stored_is_read(kind: str):
    stored, want = OLD[kind]
    found = Provenance.from_json(stored)
    assert found == Provenance(want)
    assert Provenance.from_json(found.as_json()) == found
    assert mu.Run(net(4), provenance=stored).provenance == found


def test_a_run_that_0_2_0_widened_after_upscaling_keeps_its_history_when_it_is_narrowed():
    """0.2.0 recorded of a growth without noise only its proof, in the record of the growth before."""
    first = grow(base(), 8, MUP, seed=3)
    last = grow(grow(first, 16), 32)
    live = last.provenance.growths
    told = {**LIVE, "plan": first.plan.hash, "proof": {"by": "modules"}}  # type: ignore[union-attr]
    old = pickle.loads(pickle.dumps(last))
    old.__setstate__({**vars(last), "provenance": told})
    assert (
        mu.Run(last.model, plan=last.plan, since=last.since, earlier=last.earlier, provenance=told).provenance
        == old.provenance
    )
    assert [g.plan for g in old.provenance.growths] == [g.plan for g in live]
    assert [g.reference for g in old.provenance.growths] == [g.reference for g in live]
    assert [g.proof for g in old.provenance.growths] == [{}, {}, {"by": "modules"}]
    assert [g.noise is not None for g in old.provenance.growths] == [True, False, False]
    back = mu.narrow(old, lambda: net(16))
    assert (back.plan, back.provenance.growths) == (last.earlier[-1][0], old.provenance.growths[:2])
    again = mu.narrow(mu.narrow(back, lambda: net(8)), lambda: net(4))
    assert (again.provenance.growths, len(again.provenance.undone)) == ((), 3)
    lost = replace(old, provenance=Provenance.from_json(told))
    assert mu.narrow(lost, lambda: net(16)).provenance.growths == (), "control: as it was stored"
    widened = copy.copy(last)
    widened.__setstate__({**vars(last), "provenance": {"proof": {"by": "loss"}}})
    assert [g.plan for g in widened.provenance.growths] == [g.plan for g in live], "without noise"
    never = copy.copy(last)
    never.__setstate__({**vars(last), "provenance": {}})
    assert not never.provenance.growths, "what says nothing is not completed"


def test_a_recipe_of_version_0_2_0_is_read():
    stored = {
        "format": "mupscale recipe 1", "optimizer": "torch.optim.AdamW", "constants": {"lr": 0.001, "betas": [0.9, 0.999]},
        "sigma": 0.1, "k": 2, "tensors": {"0.weight": {"reference": [4, 3], "axes": ["out x2", "-"], "fold": "1"}}, "paired": False,
        "rise": None, "units": 4, "width": 4, "reference": 4, "plan": PLAN.hash, "steps": 10, "wide_steps": 20, "batch": None,
        "schedule": None, "base_lr": 0.001, "seed": 0, "loss": 1.0, "control": 1.1, "stay": {}, "tried": [], "cost": {}, "remarks": [],
    }  # fmt: skip
    recipe = Recipe.of_json(stored)
    request = {"recipe": recipe.to_json(), "seed": 3}
    found = Provenance.from_json(
        {**DIRECTORY, "request": request, "noise": {**NOISE, "asked": {"lr": recipe.lr}}}
    )
    live = Growth(plan="aa", recipe=recipe.summary(), lr=recipe.lr)
    assert (found["recipe"], found["lr"]) == (live.recipe, live.lr)


def dose(before: mu.Run, after: mu.Run) -> Tensor:
    """What was added to one weight."""
    a, b = (run.model.state_dict()["2.weight"] for run in (before, after))
    assert a.dtype == torch.float64
    found: Tensor = b - a
    return found


@pytest.mark.parametrize("seed", [0, 3])
def test_the_same_seed_adds_other_noise_the_second_time(seed: int):
    exact, first = (grow(base(), 8, noise, seed) for noise in (None, MUP))
    second = mu.add_noise(first, MUP, seed=seed)
    third = mu.add_noise(second, MUP, seed=seed)
    doses = [dose(exact, first), dose(first, second), dose(second, third)]
    cosines = torch.corrcoef(torch.stack([d.flatten() for d in doses])) - torch.eye(3)
    assert float(cosines.abs().max()) < 0.5, "64 numbers; equal ones would have 1"
    assert torch.equal(dose(second, mu.add_noise(second, MUP, seed=seed)), doses[2]), "the same each time"
    assert max(found.lost for found in noise_shares(base(), third).values()) <= 1e-12, (
        "the report knows all three"
    )
    # Control: a run that does not say what was added to it gets the same noise twice.
    silent = mu.add_noise(replace(first, provenance=Provenance()), MUP, seed=seed)
    assert torch.allclose(dose(first, silent), doses[0])
    # Noise after an exact growth is that of upscale: nothing was drawn before.
    assert torch.allclose(dose(exact, mu.add_noise(exact, MUP, seed=seed)), doses[0])


def test_growing_after_narrow_draws_other_noise_for_the_same_seed():
    first = grow(base(), 8, MUP, seed=3)
    back = mu.narrow(first, lambda: net(4))
    again, forgot = (
        dose(grow(run, 8), grow(run, 8, MUP, seed=3))
        for run in (back, replace(back, provenance=Provenance()))
    )
    noise = dose(grow(base(), 8), first)
    assert torch.allclose(forgot, noise), "control: without its history"
    assert float(torch.corrcoef(torch.stack([again.flatten(), noise.flatten()]))[0, 1].abs()) < 0.5


def test_what_a_run_recorded_is_plain_and_makes_the_same_history_again():
    import numpy as np

    make = lambda n: nn.Sequential(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 1))  # noqa: E731
    once = mu.upscale(make(4), lambda: make(8), mu.SignalNoise(0.1), seed=np.int64(3))  # type: ignore[arg-type]
    plain = dict(once.provenance)
    stored = json.loads(json.dumps(plain))
    assert mu.Run(once.model, provenance=stored).provenance == once.provenance
    assert plain["seed"] == 3
    assert mu.Run(once.model, provenance=plain).provenance == once.provenance
    twice = mu.upscale(once, lambda: make(16), mu.SignalNoise(0.1), seed=3)
    assert len(twice.provenance.seeds) == 2, "another stream than the first"
    old = copy.copy(once)
    state = {
        **vars(once),
        "provenance": {"version": "0.2.0", "seed": 3, "noise": {"seed": 3, "kind": "SignalNoise"}},
    }
    old.__setstate__(state)
    assert old.provenance["seed"] == 3
    early = {key: value for key, value in vars(once.plan).items() if key not in ("code", "later")}
    plan = copy.copy(once.plan)
    plan.__dict__.clear()
    plan.__setstate__(early)  # type: ignore[union-attr]
    assert plan == once.plan
