"""Tuning: sweeps that find what they should, the same from anybody, and continue where somebody stopped."""

import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refusal, refused
from mupscale import MupscaleError
from mupscale.cli.main import main
from mupscale.cli.options.tune import _HELP
from mupscale.studies import engine
from mupscale.studies.agenda.grid import Point
from mupscale.studies.agenda.halving import Ladder, Leg, climb, grid_agenda
from mupscale.studies.agenda.status import base_agenda
from mupscale.studies.checkpoint import kept
from mupscale.studies.engine import Flock, open_storage
from mupscale.studies.ledger import Ledger, Owner
from mupscale.studies.leg import train_leg
from mupscale.studies.proxy import Proxy
from mupscale.studies.settings import Settings, check_same
from mupscale.studies.tune import tune

SMALL: dict[str, Any] = {
    "width": 6, "k": 2, "steps": 16, "lrs": [0.004, 0.008], "noises": [0.1], "factors": [1.0], "extend": 0,
}  # fmt: skip


def build(width):
    return nn.Sequential(
        nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def train(run, steps, report):
    for step in range(run.steps, steps):
        x = torch.randn(16, 4)
        loss = (run.model(x) - (2 * x[:, :1]).sin() * x[:, 1:2]).square().mean()
        run.model.zero_grad()
        loss.backward()
        for part in (*run.optimizers, *run.schedulers):
            part.step()
        report(step, loss)


@pytest.fixture(scope="module")
def by_units(tmp_path_factory):
    """A study without noises or a scheme, at a reference that is wider than its proxy."""
    given = {key: value for key, value in SMALL.items() if key != "noises"}
    settings = Settings(**{**given, "factors": [0.5, 1.0], "reference": 12})
    return tune(Proxy(build, train), settings, folder=tmp_path_factory.mktemp("units"))


def test_new_units_have_rates_to_tune_and_no_noise(by_units):
    """Control: with sizes of noise the proxy grows by copies."""
    assert (by_units.by, by_units.sigma, by_units.rise, by_units.noise) == (
        "units",
        None,
        None,
        mu.NewUnits(),
    )
    wide = [row for row in by_units.tried if row["sweep"] == "wide"]
    assert {row["noise"] for row in wide} == {0.0, 1.0}
    ended = {(row["noise"], row["lr"]): row["loss"] for row in wide if row["steps"] == 16}
    assert by_units.loss == ended[1.0, by_units.lr] == min(v for (noise, _), v in ended.items() if noise)
    assert by_units.control == min(loss for (noise, _), loss in ended.items() if not noise)
    assert mu.studies.Recipe.from_json(by_units.to_json()) == by_units
    assert Settings(6, 2, 16).by_units
    assert not Settings(6, 2, 16, noises=[0.1]).by_units
    assert "units" not in json.dumps(Settings(6, 2, 16, scheme="t").as_json())
    with refused("study.units_without_noise"):
        Settings(6, 2, 16, noises=[0.1], scheme="units")


def test_a_recipe_of_new_units_grows_a_base_without_a_jump(by_units):
    torch.manual_seed(0)
    model, x = build(12), torch.randn(64, 4)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    grow = partial(mu.upscale, run, lambda: build(24), recipe=by_units, loss=lambda m: m(x).square().mean())
    with pytest.warns(UserWarning, match="units"):
        wide = grow()
    assert wide.provenance["loss"]["after"] == pytest.approx(wide.provenance["loss"]["before"], rel=1e-5)
    assert wide.provenance["noise"]["kind"] == "NewUnits"
    assert mu.diagnostics.reference_lr(wide.optimizer) == pytest.approx(by_units.lr)
    with refused("recipe.other_growth"):
        grow(by="copies")


def test_the_base_that_is_trained_on_is_never_the_best_of_new_units():
    """Control: of sizes of noise, none may be the best."""
    results = {f"wide-noise={noise}-lr={lr} to step 9": noise + lr for noise in (0, 1) for lr in (1, 2)}
    found = [
        grid_agenda([1, 2], [0.0, 1.0], results, Ladder((9,)), 0, growing=growing).best
        for growing in (True, False)
    ]
    assert found == [Point(1.0, 1.0), Point(1.0, 0.0)]


def interrupted(after):
    """The loop of `train`, broken off by an error after some calls in all."""
    left = [after]

    def broken(run, steps, report):
        def counting(step, loss):
            report(step, loss)
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("the power went")

        train(run, steps, counting)

    return broken


def rows(recipe, sweep):
    return [row for row in recipe.tried if row["sweep"] == sweep]


def test_halving_compares_rates_at_equal_noise_and_noises_at_the_end():
    points = [Point(lr, noise) for noise in (0.0, 0.1) for lr in (1.0, 2.0)]
    ladder = Ladder((5, 10))
    losses = dict(zip(points, (9.0, 8.0, 1.0, 2.0), strict=True))
    results = {Leg(p, 0, 5).key: loss for p, loss in losses.items()}
    chosen = {s.point for s in climb(points, results, ladder)[0]}
    assert chosen == {Point(1.0, 0.1), Point(2.0, 0.0)}
    # Control: in one ranking of all, the noise that costs first would never be seen to pay.
    assert sorted(points, key=losses.__getitem__)[:2] == [Point(1.0, 0.1), Point(2.0, 0.1)]
    diverged = results | {Leg(Point(1.0, 0.1), 0, 5).key: math.inf}
    assert Point(1.0, 0.1) not in {s.point for s in climb(points, diverged, ladder)[0]}


def test_later_points_go_on_only_where_they_beat_one_that_went_on():
    ladder, old = Ladder((5, 10)), [Point(1.0, 0.1), Point(2.0, 0.1)]
    results = {Leg(old[0], 0, 5).key: 1.0, Leg(old[1], 0, 5).key: 2.0, Leg(old[0], 5, 10).key: 0.5}
    for loss, goes_on in ((0.9, True), (1.5, False)):
        seen = results | {Leg(Point(4.0, 0.1), 0, 5).key: loss}
        assert bool(climb([Point(4.0, 0.1)], seen, ladder, earlier=old)[0]) == goes_on
        assert climb([Point(4.0, 0.1)], seen, ladder)[0]  # with none before it continues either way


def test_a_point_that_diverges_late_makes_room_for_the_next():
    ladder, points = Ladder((10, 50, 100)), [Point(lr) for lr in (0.5, 1.0, 2.0, 4.0, 8.0)]

    def loss(leg):
        if leg.point.lr >= 2 and leg.end > 10:
            return math.inf
        return 1 / leg.point.lr if leg.end == 10 else 1.0

    results: dict[str, float] = {}
    while (now := climb(points, results, ladder))[0]:
        results |= {leg.key: loss(leg) for leg in now[0]}
    assert set(now[1]) <= {Point(0.5), Point(1.0)}
    assert now[1]
    # Control: the three that were ahead at the first comparison all diverged.
    assert [p.lr for p in points if results[Leg(p, 10, 50).key] == math.inf] == [2.0, 4.0, 8.0]


def test_nobody_is_compared_before_the_rates_can_differ():
    assert Ladder.of(16, (0.0625, 0.5), 0.5).rungs == (10, 16)


def test_less_noise_is_tried_where_none_is_best():
    results: dict[str, float] = {}
    loss: dict[float | None, float] = {0.0: 1.0, 0.1: 2.0, 0.2: 3.0, 0.05: 0.5, 0.025: 0.7}
    while (agenda := grid_agenda([1.0], [0.0, 0.1, 0.2], results, Ladder((9,)), 2)).open:
        results |= {s.key: loss[s.point.noise] + abs(math.log(s.point.lr)) for s in agenda.open}
    assert agenda.best == Point(1.0, 0.05)


@pytest.mark.parametrize(("largest", "reached"), [(1.0, 0.8), (math.inf, 3.2)])
def test_noise_is_not_extended_above_the_largest_size_of_its_scheme(largest: float, reached: float):
    """Control: without a bound, a loss that falls with noise extends the grid each time it may."""
    results: dict[str, float] = {}
    while (agenda := grid_agenda([1.0], [0.0, 0.4, 0.8], results, Ladder((9,)), 2, largest)).open:
        results |= {s.key: -(s.point.noise or 0.0) + abs(math.log(s.point.lr)) for s in agenda.open}
    assert max(point.noise or 0.0 for point in agenda.points) == reached


def test_a_study_refuses_noise_above_the_largest_size_of_its_scheme():
    with refused("study.noise_above_scheme", where="noises"):
        Settings(width=8, k=2, steps=10, noises=(0.2, 1.6))
    assert Settings(width=8, k=2, steps=10, noises=(0.2, 1.6), scheme="sigma").noises == (0.2, 1.6)


def test_an_unfinished_rung_lets_nobody_go_on():
    points = [Point(1.0), Point(2.0)]
    results = {Leg(points[0], 0, 5).key: 1.0}
    assert [s.key for s in climb(points, results, Ladder((5, 10)))[0]] == [Leg(points[1], 0, 5).key]


def test_the_grid_goes_on_beyond_its_edges_and_says_when_it_may_not():
    def run(extend):
        results: dict[str, float] = {}
        while (agenda := grid_agenda([1, 2], [0, 0.1, 0.2], results, Ladder((9,)), extend)).open:
            for leg in agenda.open:
                p = leg.point
                results[leg.key] = abs(math.log(p.lr / 4)) + abs((p.noise or 1.0) - 0.05)
        return agenda

    found = run(5)
    assert (found.best, found.on_edge) == (Point(4.0, 0.05), False)
    stopped = run(0)
    assert stopped.best is not None
    assert stopped.on_edge, "control: a grid that may not grow says that its best lies on an edge"


def test_a_study_gives_the_same_recipe_every_time_and_knows_its_cost(tmp_path):
    first = tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path / "a")
    again = tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path / "b")
    assert first == again
    assert (tmp_path / "a" / "recipe.json").read_bytes() == (tmp_path / "b" / "recipe.json").read_bytes()
    other = tune(Proxy(build, train), Settings(**SMALL, seed=1), folder=tmp_path / "c")
    assert other.loss != first.loss, "control: the seed matters"
    assert {row["noise"] for row in rows(first, "wide")} == {0.0, 0.1}
    narrow = [row["steps"] for row in first.tried if row["sweep"] == "base" or row["noise"] == 0]
    wide = sum(row["steps"] for row in first.tried) - sum(narrow)
    assert first.cost == {"base_width_steps": sum(narrow) + 8, "wide_steps": wide + 8}, (
        "8 to measure the theorem"
    )


def test_halving_costs_less_than_the_full_grid(tmp_path):
    wide = {**SMALL, "lrs": [0.002, 0.004, 0.008, 0.016]}
    half = tune(Proxy(build, train), Settings(**wide), folder=tmp_path / "half")
    full = tune(Proxy(build, train), Settings(**wide, halving=False), folder=tmp_path / "full")
    assert half.cost["base_width_steps"] < full.cost["base_width_steps"]
    assert all(row["steps"] == 16 for row in full.tried)


def test_zero_noise_at_the_base_is_zero_noise_at_the_wide(tmp_path):
    narrow = tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path / "narrow")
    wide = tune(Proxy(build, train), Settings(**SMALL, control_at_base=False), folder=tmp_path / "wide")
    assert narrow.control == pytest.approx(wide.control, rel=1e-3)
    assert narrow.cost["wide_steps"] < wide.cost["wide_steps"]


@pytest.mark.filterwarnings("ignore:growing is exact")
def test_a_loop_in_which_zero_noise_is_not_the_base_is_refused(tmp_path):
    """Control of the equality: dropout draws by shape, so the two widths part."""

    def dropped(width):
        return nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.Tanh(), nn.Linear(width, 1))

    with refused("study.control_differs", where="proxy"):
        tune(Proxy(dropped, train), Settings(**SMALL), folder=tmp_path)
    assert tune(Proxy(dropped, train), Settings(**SMALL, control_at_base=False), folder=tmp_path / "wide")


def test_divergence_is_a_result(tmp_path):
    recipe = tune(
        Proxy(build, train, torch.optim.SGD),
        Settings(**{**SMALL, "lrs": [0.05, 1e4], "rungs": [0.25]}),
        folder=tmp_path,
    )
    assert [(row["lr"], row["diverged"]) for row in rows(recipe, "base")] == [(0.05, False), (1e4, True)]
    assert recipe.base_lr == 0.05
    with refused("study.base_diverged"):
        tune(
            Proxy(build, train, torch.optim.SGD), Settings(**{**SMALL, "lrs": [1e4]}), folder=tmp_path / "all"
        )


@pytest.mark.parametrize("after", [1, 7, 33])
def test_a_study_that_broke_off_goes_on_to_the_same_recipe(tmp_path, caplog, after):
    whole = tune(Proxy(build, train, digest="one"), Settings(**SMALL), folder=tmp_path / "whole")
    with pytest.raises(RuntimeError, match="power"):
        tune(
            Proxy(build, interrupted(after), digest="one"),
            Settings(**SMALL),
            folder=tmp_path / "broken",
            every=0.0,
        )
    caplog.set_level("INFO", logger="mupscale")
    assert (
        tune(Proxy(build, train, digest="one"), Settings(**SMALL), folder=tmp_path / "broken", every=0.0)
        == whole
    )
    assert len(caplog.messages) >= 1


def test_a_run_goes_on_from_its_checkpoint_with_its_random_numbers_and_schedule(tmp_path):
    def schedule(optimizer, steps):
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    from mupscale.studies.runs import Runs

    settings = Settings(width=6, k=2, steps=20, lrs=(0.01,))
    losses = {}
    for name, stops in {"whole": [20], "parts": [3, 11, 20]}.items():
        proxy = Proxy(build, train, schedule=schedule)
        begin = 0
        for end in stops:
            leg = Leg(Point(0.01), begin, end)
            made = partial(Runs(proxy, settings).base, 0.01)
            outcome = train_leg(proxy, made, leg, tmp_path / name, total=20)
            assert (outcome.resumed_at, outcome.steps) == (begin, end - begin)
            begin = end
        found = kept(tmp_path / name)
        assert found is not None
        losses[name] = found.losses
    assert losses["whole"] == losses["parts"]


@pytest.mark.parametrize(
    ("loop", "code"),
    [
        (lambda run, steps, report: report(run.steps, 1.0), "proxy.reported_before_step"),
        (lambda run, steps, report: None, "proxy.loop_ended_early"),
        (lambda run, steps, report: (run.optimizers[0].step(), report(5, 1.0)), "proxy.step_out_of_order"),
    ],
)
def test_loops_that_cannot_be_resumed_are_refused(tmp_path, loop, code):
    with refused(code):
        tune(Proxy(build, loop), Settings(**SMALL), folder=tmp_path)


def test_other_settings_do_not_join_a_study(tmp_path):
    tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path)
    other = Settings(**{**SMALL, "steps": 17})
    found = refusal(lambda: tune(Proxy(build, train), other, folder=tmp_path), "study.other_settings")
    assert [fault.where for fault in found.faults] == ["steps"]


def test_a_study_of_a_sampler_is_refused_by_name_and_one_of_the_grid_is_read():
    """0.2.0 wrote both settings into every study."""
    ours = Settings(**SMALL)
    check_same(ours, {**ours.as_json(), "sampler": "grid", "generations": 3})
    with refused("study.sampled"):
        check_same(ours, {**ours.as_json(), "sampler": "tpe", "generations": 3})


def test_nonsense_is_refused_at_once():
    with refused("study.not_positive_numbers", "study.not_noise_sizes", "study.not_fractions") as caught:
        Settings(width=0, k=1, steps=5, lrs=(), noises=(0.0,), keep=2.0)
    assert {f.where for f in caught.value.faults} >= {"width", "k", "lrs", "noises", "halving"}
    with refused("study.not_numbers", where="lrs"):
        Settings(width=4, k=2, steps=5, lrs=0.1)  # type: ignore[arg-type]
    with refused("study.rates_not_chosen"):
        base_agenda(Settings(width=4, k=2, steps=5), {})


def test_every_setting_that_the_proxy_does_not_decide_is_an_option():
    """Control: what a proxy decides is what differs once it is known."""
    plain = Settings(**SMALL)
    filled = plain.for_proxy(Proxy(build, train, batch=3, flops=lambda width: width, digest="1"))
    decided = {name for name, value in vars(plain).items() if getattr(filled, name) != value}
    assert {field.name for field in fields(Settings)} - _HELP.keys() == decided
    assert decided == {"batch", "optimizer", "constants", "proxy", "flops"}


def test_settings_stand_in_the_call_as_a_value(tmp_path):
    with refused("argument.wrong_type", where="settings"):
        tune(Proxy(build, train), 8, folder=tmp_path)  # type: ignore[arg-type]


def ledger(path, settings=None):
    return Ledger(open_storage(path), "s", settings or Settings(width=4, k=2, steps=4, lrs=(0.1,)), beat=1.0)


def test_of_two_claims_one_counts_and_a_failed_trial_cannot_complete(tmp_path):
    one, two = ledger(tmp_path / "j"), ledger(tmp_path / "j")
    leg = Leg(Point(0.1), 0, 4)
    first = one.claim(leg)
    assert first is not None
    assert two.claim(leg) is None
    assert two.fail(first, "silent")
    assert not one.beat(first)
    second = two.claim(leg)
    assert second is not None
    assert not one.complete(first, 1.0, {})
    assert two.complete(second, 2.0, {})
    assert [d.loss for d in two.results(two.trials()).values()] == [2.0]
    assert one.claim(leg) is None, "what is done is not claimed again"


def test_the_silent_are_reaped_and_the_beating_are_not(tmp_path, monkeypatch):
    one, two = ledger(tmp_path / "j"), ledger(tmp_path / "j")
    monkeypatch.setattr(one, "owner", Owner("elsewhere", 1, "1"))
    trial = one.claim(Leg(Point(0.1), 0, 4))
    assert trial is not None
    now = [0.0]
    monkeypatch.setattr("mupscale.studies.ledger.monotonic", lambda: now[0])
    for _ in range(20):
        now[0] += 1.0
        assert one.beat(trial)
        assert two.reap(two.trials()) == 0
    now[0] += 1000.0  # the database was away: a pause of everybody's is nobody's silence
    assert two.reap(two.trials()) == 0
    for _ in range(8):
        now[0] += 1.0
        two.reap(two.trials())
    assert not one.beat(trial)


def test_a_dead_process_is_known_by_its_number_and_its_start():
    here = Owner.this()
    assert not here.is_dead
    assert Owner(here.host, here.pid, "7").is_dead, "another process had this number"
    assert not Owner("elsewhere", here.pid, "7").is_dead


def test_other_databases_are_refused_and_only_a_database_that_is_away_is_waited_for():
    with refused("store.unknown_scheme", where="mysql"):
        open_storage("mysql://somewhere/study")

    def broken():
        raise KeyError("a fault of ours")

    with pytest.raises(KeyError):
        engine.again(broken)


def test_a_line_that_a_killed_writer_left_is_cut_off(tmp_path):
    path = tmp_path / "j"
    path.write_bytes(b'{"a":1}\n{"b"')
    lock = Flock(str(path))
    lock.acquire()
    lock.release()
    assert path.read_bytes() == b'{"a":1}\n'


PROXY = """
import time, torch
from torch import nn
torch.set_num_threads(1)
def build(width):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
def train(run, steps, report):
    for step in range(run.steps, steps):
        x = torch.randn(16, 4)
        loss = (run.model(x) - x[:, :1]).square().mean()
        run.model.zero_grad()
        loss.backward()
        run.optimizers[0].step()
        time.sleep(PAUSE)
        report(step, loss)
"""


def test_a_killed_worker_is_noticed_and_its_run_goes_on(tmp_path):
    (tmp_path / "proxy.py").write_text(PROXY.replace("PAUSE", "0.02"))
    command = [
        "tune", str(tmp_path / "proxy.py"), "--width", "4", "-k", "2", "--steps", "60", "--lrs", "0.01", "--noises", "0.1",
        "--factors", "1", "--extend", "0", "--no-halving", "--every", "0.05",
    ]  # fmt: skip
    code = "import sys; from mupscale.cli.main import main; sys.exit(main(sys.argv[1:]))"
    arguments = [sys.executable, "-c", code, *command, "--folder", str(tmp_path / "killed")]
    worker = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 300  # a start of torch and a few steps: seconds on a machine of one's own
        while not list((tmp_path / "killed").rglob("*.pt")):
            assert worker.poll() is None
            assert time.monotonic() < until, "no checkpoint was written"
            time.sleep(0.02)
    finally:
        worker.kill()
        worker.communicate()
    assert main([*command, "--folder", str(tmp_path / "killed"), "--quiet"]) == 0
    assert main([*command, "--folder", str(tmp_path / "whole"), "--quiet"]) == 0
    recipes = [(tmp_path / name / "recipe.json").read_bytes() for name in ("killed", "whole")]
    assert recipes[0] == recipes[1]
    storage = open_storage(tmp_path / "killed" / "study.journal")
    trials = storage.get_all_trials(storage.get_study_id_from_name("mupscale"))
    states = Counter(t.state.name for t in trials)
    assert states["FAIL"] == 1
    assert states["RUNNING"] == 0
    first = next(t for t in trials if t.state.name == "COMPLETE")
    assert first.user_attrs["told"]["resumed_at"] > 0, "it continued from the checkpoint"


@pytest.mark.parametrize("scheme", ["t", "sigma", "paired"])
def test_every_kind_of_noise_becomes_a_recipe_that_applies(tmp_path, scheme):
    small = {**SMALL, "noises": [1e-6], "width": 104, "steps": 6}
    recipe = tune(Proxy(build, train), Settings(**small, scheme=scheme), folder=tmp_path)
    if scheme == "t":
        assert isinstance(recipe.sigma, dict)
        assert set(recipe.sigma) == {"0.weight", "2.weight", "4.weight"}
    assert recipe.paired == (scheme == "paired")
    wide = mu.upscale(build(104), lambda: build(208), recipe=recipe)
    assert wide.provenance["recipe"]["k"] == 2


def test_the_reference_may_be_wider_than_the_proxy(tmp_path):
    recipe = tune(Proxy(build, train), Settings(**SMALL, reference=24), folder=tmp_path)
    assert recipe.reference == 24
    assert recipe.tensors["2.weight"].reference == (24, 24)


def test_the_example_is_a_proxy(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "proxy_mlp.py"
    few = ["--lrs", "0.004,0.008", "--noises", "0.1", "--factors", "1", "--extend", "0", "--quiet"]
    done = main(
        ["tune", str(example), "--width", "8", "-k", "2", "--steps", "16", "--folder", str(tmp_path), *few]
    )
    assert done == 0
    told = json.loads((tmp_path / "recipe.json").read_text())
    assert (told["schedule"], told["batch"]) == ("LinearLR", 256)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (Proxy(build, train, torch.optim.AdamW), "optimizer"),
        (Proxy(build, train, torch.optim.SGD, {"weight_decay": 0.5}), "constants"),
        (Proxy(build, lambda run, steps, report: train(run, steps, report), torch.optim.SGD), "proxy"),
    ],
)
def test_a_study_is_not_gone_on_with_by_another_proxy(tmp_path, other, named):
    tune(Proxy(build, train, torch.optim.SGD), Settings(**SMALL), folder=tmp_path)
    tune(Proxy(build, train, torch.optim.SGD), Settings(**SMALL), folder=tmp_path)  # the same one may
    found = refusal(lambda: tune(other, Settings(**SMALL), folder=tmp_path), "study.other_settings")
    assert [fault.where for fault in found.faults] == [named]


def test_the_run_that_does_not_grow_takes_as_many_flops(tmp_path):
    """At equal FLOPs of both widths, continuing is the run without noise, step for step."""
    same = Proxy(build, train, flops=lambda width: 7)
    found = tune(same, Settings(**SMALL), folder=tmp_path / "same")
    assert found.stay["going on"] == found.control
    assert (
        found.cost["base_width_steps"]
        > tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path / "none").cost["base_width_steps"]
    )
    more = tune(Proxy(build, train, flops=lambda width: width), Settings(**SMALL), folder=tmp_path / "more")
    assert more.stay["going on"] != more.control, "control: twice the steps"
    assert (more.loss, more.control, more.base_lr) == (found.loss, found.control, found.base_lr)


def test_the_run_that_does_not_grow_is_left_out_where_flops_are_unknown(tmp_path):
    counted = Proxy(build, train, flops=lambda width: width)
    assert tune(counted, Settings(**SMALL, stay=False), folder=tmp_path / "a").stay == {}
    assert tune(Proxy(build, train), Settings(**SMALL), folder=tmp_path / "b").stay == {}

    def broken(width):
        raise MupscaleError("no FLOPs")

    assert tune(Proxy(build, train, flops=broken), Settings(**SMALL), folder=tmp_path / "c").stay == {}


def test_noise_can_be_tuned_as_a_rise_of_the_loss(tmp_path):
    batch = torch.randn(64, 4, generator=torch.Generator().manual_seed(5))

    def loss(model):
        return (model(batch) - (2 * batch[:, :1]).sin() * batch[:, 1:2]).square().mean()

    settings = Settings(**{**SMALL, "steps": 60, "lrs": [0.02], "scheme": "rise"})
    recipe = tune(Proxy(build, train, loss=loss), settings, folder=tmp_path / "rise")
    assert (recipe.rise, recipe.sigma) in ((0.1, None), (None, 0.0))
    assert {row["noise"] for row in rows(recipe, "wide")} == {0.0, 0.1}
    with refused("proxy.loss_needed_for_noise", where="loss"):
        tune(Proxy(build, train), settings, folder=tmp_path / "none")
