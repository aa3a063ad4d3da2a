"""Advice: the law and what a base is worth, choices inside the measured range and none outside, what directories tell."""

import json
import re
from dataclasses import replace
from math import inf, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mupscale as mu
from harness import frontier_advice as benchmark
from harness.frontier_store import NOTHING, cases, fitted, parameters, predicted, read
from harness.refusals import refusal, refused
from mupscale.budgets import advice
from mupscale.budgets.law import Finished, GrowthWorth, Law, StoredLaw, fit, stored
from mupscale.budgets.spent import read_spent
from mupscale.cli.main import main

LAW = Law(0.1, 50, 0.6, 200, 0.5, spread=0.01, runs=12, params=(4e3, 2e5), flops=(1e10, 1e13))
GROWTH = GrowthWorth(
    0.6, 0.0, 0.5, 0.01, 0.01, 0.01, 10, times=12.0, more=(0.25, 4.0), shares=(0.1, 0.5), noise=(0.05, 0.2),
    peak=(0.5, 1),
)  # fmt: skip
BASE, WIDE = 12_000, 40_000


@pytest.fixture
def known(monkeypatch):
    """Advice from a law that is known, whatever is stored."""

    def use(law: Law = LAW, growth: GrowthWorth = GROWTH) -> None:
        monkeypatch.setattr(advice, "stored", lambda: StoredLaw("made-up runs", law, growth))

    use()
    return use


def runs_of(law: Law, budgets=(1e11, 4e11, 1.6e12, 6.4e12), sizes=(4e3, 1.2e4, 4e4)) -> list[Finished]:
    return [Finished(n, c, law.loss(n, c)) for n in sizes for c in budgets]


# The law


def test_a_fit_finds_the_law_that_made_the_losses():
    found = fit(runs_of(LAW))
    assert found.spread < 1e-3
    for params, flops in ((2e4, 1e12), (1.2e4, 3e11)):
        assert found.loss(params, flops) == pytest.approx(LAW.loss(params, flops), rel=1e-3)
    other = fit(runs_of(replace(LAW, size=500.0)))
    assert other.loss(2e4, 1e12) != pytest.approx(LAW.loss(2e4, 1e12), rel=0.1)


def test_one_wrong_loss_widens_the_spread():
    runs = runs_of(LAW)
    runs[5] = runs[5]._replace(loss=1.3 * runs[5].loss)
    assert fit(runs).spread > 0.03


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        (runs_of(LAW)[:5], "advice.too_few_runs"),
        (runs_of(LAW, sizes=(4e3, 4e4)), "advice.too_few_sizes"),
        ([Finished(n, c, c) for n in (1e3, 2e3, 4e3) for c in (1e9, 1e10)], "advice.loss_does_not_fall"),
    ],
)
def test_runs_that_determine_no_law_are_refused(runs, code):
    with refused(code, where="losses"):
        fit(runs)


def test_flops_to_a_loss_is_the_inverse_of_the_law():
    assert LAW.flops_to(WIDE, LAW.loss(WIDE, 3e11)) == pytest.approx(3e11)
    assert LAW.flops_to(WIDE, 0.05) == inf


def test_a_base_is_worth_nothing_or_all_of_itself():
    base = (BASE, 2e12)
    nothing, everything = replace(GROWTH, worth=0.0), replace(GROWTH, worth=1.0)
    assert nothing.grown(LAW, base, WIDE, 1e12) == LAW.loss(WIDE, 1e12)
    assert everything.grown(LAW, base, WIDE, 1e-6) == pytest.approx(LAW.loss(*base))
    assert (
        LAW.loss(WIDE, 1e12) > GROWTH.grown(LAW, base, WIDE, 1e12) > everything.grown(LAW, base, WIDE, 1e12)
    )
    assert GROWTH.grown(LAW, (BASE, 0.0), WIDE, 1e12) == LAW.loss(WIDE, 1e12)


def test_what_fades_is_worth_less_in_a_long_run():
    fading = replace(GROWTH, fades=1.0)
    short, long = (fading.grown(LAW, (BASE, 2e12), WIDE, c) / LAW.loss(WIDE, c) for c in (1e11, 1e13))
    assert short < long < 1


# The choice


def test_each_choice_is_made_where_its_arm_is_best(known):
    saturated = mu.budgets.advise(BASE, spent=4e12, budget=1e12, to=WIDE)
    assert (saturated.choice, saturated.after) == ("grow", 0.0)
    assert mu.budgets.advise(BASE, spent=4e10, budget=1e10, to=WIDE).choice == "stay"
    assert mu.budgets.advise(BASE, spent=0, budget=4e12, to=WIDE).choice == "scratch"


def test_the_choice_turns_with_what_growing_is_worth(known):
    asked: dict[str, Any] = {"spent": 2e12, "budget": 2e12, "to": WIDE}
    assert mu.budgets.advise(BASE, **asked).choice == "grow"
    known(growth=replace(GROWTH, worth=0.0, kept=1.0), law=replace(LAW, size=0.0))
    assert mu.budgets.advise(BASE, **asked).choice == "stay"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"params": 100}, "parameters: 100, measured from"),
        ({"to": 1e6}, "parameters: 1e\\+06, measured from"),
        ({"budget": 1e14}, "FLOPs left: 1e\\+14"),
        ({"spent": 1e9}, "FLOPs spent: 1e\\+09"),
        ({"spent": 1e11}, "FLOPs left over FLOPs spent: 20"),
        ({"params": 5_000, "to": 1e5}, "parameters over the base's: 20"),
    ],
)
def test_outside_the_measured_range_there_is_arithmetic_only(known, asked, said):
    inside: dict[str, Any] = {"params": BASE, "spent": 2e12, "budget": 2e12, "to": WIDE}
    assert mu.budgets.advise(**inside).choice != "not measured at this size"
    told = mu.budgets.advise(**{**inside, **asked})
    assert (told.choice, told.sure, told.arm, told.after) == (
        "not measured at this size",
        "not measured",
        None,
        None,
    )
    assert re.search(said, str(told))
    assert [arm for arm in told.arms if arm.loss is None]
    assert all(arm.samples_per_parameter > 0 for arm in told.arms)


def test_rounded_sizes_at_the_edge_are_inside(known):
    assert (
        mu.budgets.advise(4e3 / 1.04, spent=2e12, budget=2e12, to=WIDE).choice != "not measured at this size"
    )
    assert (
        mu.budgets.advise(4e3 / 1.06, spent=2e12, budget=2e12, to=WIDE).choice == "not measured at this size"
    )


def test_how_sure_it_is_depends_on_how_far_off_the_law_was(known):
    arms = mu.budgets.advise(BASE, spent=4e12, budget=1e12, to=WIDE).arms
    best, second = sorted(arm.loss or inf for arm in arms)[:2]
    ahead = log(second / best)
    said = []
    for error in (ahead / 2.1, ahead / 1.5, ahead / 0.9):
        known(growth=replace(GROWTH, contrast=error))
        told = mu.budgets.advise(BASE, spent=4e12, budget=1e12, to=WIDE)
        assert told.arm is not None
        assert told.arm.between is not None
        assert told.arm.between[0] < best < told.arm.between[1]
        said.append(told.sure)
    assert said == ["sure", "leaning", "open"]


def test_your_own_losses_replace_the_law_and_never_make_it_sure(known):
    asked: dict[str, Any] = {"spent": 4e12, "budget": 1e12, "to": WIDE}
    own = runs_of(replace(LAW, floor=0.2))
    told = mu.budgets.advise(BASE, **asked, losses=own)
    assert told.source.startswith("your losses")
    assert mu.budgets.advise(BASE, **asked).source.endswith("for other models or data pass losses")
    assert told.arm is not None
    assert told.arm.between is not None
    assert told.arm.between[0] > 0.2
    assert (mu.budgets.advise(BASE, **asked).sure, told.sure) == ("sure", "leaning")
    assert (
        mu.budgets.advise(BASE, spent=4e12, budget=8e12, to=WIDE, losses=own).choice
        == "not measured at this size"
    )
    with refused("advice.not_a_finished_run", where="losses[1]"):
        mu.budgets.advise(BASE, **asked, losses=[(1e4, 1e12, 0.3), (1e4, 0, 0.3)])


def test_every_arm_spends_the_budget(known):
    for spent, decayed in ((0, True), (1e11, False), (1e12, True)):
        told = mu.budgets.advise(
            BASE, spent=spent, budget=1e12, to=[WIDE, 8e4], decayed=decayed, batch=512, context=2
        )
        for arm in told.arms:
            assert sum(phase.flops for phase in arm.phases) == pytest.approx(1e12)
            for phase in arm.phases:
                assert 6 * phase.params * phase.samples == pytest.approx(phase.flops)
                assert phase.steps == round(phase.samples / 1024)


def test_a_base_on_its_way_may_grow_now_or_later_and_a_finished_one_now(known):
    def moments(**asked):
        told = mu.budgets.advise(BASE, budget=1e12, to=WIDE, **asked)
        return [
            arm.phases[0].flops if len(arm.phases) > 1 else 0.0 for arm in told.arms if arm.kind == "grow"
        ]

    assert moments(spent=0) == pytest.approx([1e11, 5e11])
    assert moments(spent=2.5e11, decayed=False) == pytest.approx([0.0, 3.75e11])
    assert moments(spent=2.5e11) == [0.0]


def test_a_finished_base_keeps_less_than_one_that_goes_on(known):
    def stay(decayed):
        return mu.budgets.advise(BASE, spent=1e12, budget=1e12, to=WIDE, decayed=decayed).arms[0].loss

    assert stay(False) == pytest.approx(LAW.loss(BASE, 2e12))
    assert stay(True) == pytest.approx(LAW.loss(BASE, 1.5e12))


def test_what_cannot_be_compared_is_refused_at_once():
    found = refusal(
        lambda: mu.budgets.advise(-1, spent=-1, budget=0, to=[]),
        "argument.not_a_number",
        "advice.no_wider_size",
    )
    assert [fault.where for fault in found.faults] == ["params", "spent", "budget", "to"]
    with refused("advice.not_wider_than_base", where="to"):
        mu.budgets.advise(1e6, spent=0, budget=1e15, to=2)


def test_the_stored_fit_comes_with_the_package():
    found = stored()
    assert found.to_json() == (Path(advice.__file__).parent / "law.json").read_text("utf-8")
    assert mu.budgets.advise(1e9, spent=1e20, budget=1e20, to=2e9).choice == "not measured at this size"


# What a directory tells


@pytest.fixture
def directory(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    save_file({"a": torch.zeros(30, 40), "b": torch.zeros(40)}, tmp_path / "model.safetensors")

    def say(**state) -> Path:
        (tmp_path / "trainer_state.json").write_text(json.dumps(state))
        return tmp_path

    return say


def test_a_directory_tells_parameters_flops_and_whether_it_is_finished(directory):
    found = read_spent(directory(total_flos=5e12, num_input_tokens_seen=7, global_step=10, max_steps=10))
    assert (found.params, found.flops, found.finished, found.source) == (1240, 5e12, True, "total_flos")
    found = read_spent(directory(total_flos=0, num_input_tokens_seen=100, global_step=9, max_steps=10))
    assert (found.flops, found.finished) == (6 * 1240 * 100, False)
    found = read_spent(directory())
    assert (found.flops, found.finished) == (None, None)
    with refused("trainer.state_not_a_number", where=["trainer_state.json", "total_flos"]):
        read_spent(directory(total_flos=-1))


def test_the_command_reads_the_directory(directory, capsys, known):
    known(replace(LAW, params=(1e3, 1e4)))
    asked = ["--budget", "1e12", "--wide-params", "4000", "--batch", "512"]
    assert main(["cost", str(directory(total_flos=1e12, global_step=10, max_steps=10)), *asked]) == 0
    finished = capsys.readouterr().out
    assert "1,240 parameters, 1e+12 FLOPs spent (total_flos of trainer_state.json), 1e+12 left" in finished
    assert "grow to 4,000 now" in finished
    assert "grow to 4,000 after" not in finished
    assert " steps" in finished
    assert main(["cost", str(directory(total_flos=1e11, global_step=1, max_steps=10)), *asked]) == 0
    assert "grow to 4,000 after" in capsys.readouterr().out


def test_the_command_takes_numbers_and_a_file_of_losses(tmp_path, capsys, known):
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([list(run) for run in runs_of(replace(LAW, floor=2.0))]))
    asked = ["--params", str(BASE), "--spent", "1e12", "--budget", "1e12", "--wide-params", str(WIDE)]
    assert main(["cost", *asked, "--losses", str(file)]) == 0
    assert "measured on your losses" in capsys.readouterr().out
    file.write_text("{}")
    assert main(["cost", *asked, "--losses", str(file)]) == 2
    assert "[advice.losses_not_a_list]" in capsys.readouterr().err


# The benchmark


def line(width, budget, held, *, seed=0, lr=0.01, choose=None, start=None, before=0, **more) -> str:
    key = {"width": width, "budget": budget, "lr": lr, "seed": seed, **more}
    if start is not None:
        key["start"] = {"width": start[0], "budget": start[1], "lr": 0.01, "seed": seed}
    result = {
        "held": held,
        "choose": held if choose is None else choose,
        "flops": budget,
        "flops_before": before,
    }
    return json.dumps({"key": key, "result": result})


def store_of(law: Law, growth: GrowthWorth) -> list[str]:
    """A store that follows a law exactly: finished bases of three budgets, each with three times more to spend."""
    budgets = [10**11, 4 * 10**11, 16 * 10**11]
    lines = [line(w, c, law.loss(parameters(w), c)) for w in (32, 64, 128) for c in budgets]
    for spent in budgets:
        base = (parameters(32), float(spent))
        for more in budgets:
            told = {"start": (32, spent), "before": spent}
            lines.append(line(32, more, growth.gone_on(law, base, more, decayed=True), **told))
            for width in (64, 128):
                lines.append(
                    line(width, more, growth.grown(law, base, parameters(width), more), noise=0.1, **told)
                )
    return lines


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_rates_are_chosen_at_the_tuning_seed_and_other_seeds_are_reported(tmp_path):
    lines = [
        line(32, 10**11, 0.5, choose=0.30),
        line(32, 10**11, 0.1, choose=0.31, lr=0.02),
        line(32, 10**11, 0.40, seed=1, choose=0.9),
        line(32, 10**11, 0.42, seed=2, choose=0.9),
        line(32, 10**11, 0.01, layers=3),
        json.dumps(
            {"key": {"width": 32, "budget": 5, "lr": 1, "seed": 0}, "result": {"held": None, "choose": None}}
        ),
    ]
    (row,) = read(write(tmp_path / "runs.jsonl", lines))
    assert row.loss == pytest.approx(0.41)


def test_a_store_that_follows_the_law_gives_it_back_and_is_advised_rightly(tmp_path):
    rows = read(write(tmp_path / "runs.jsonl", store_of(LAW, GROWTH)))
    found = benchmark.with_spread(rows)
    assert found.growth.worth == pytest.approx(GROWTH.worth, abs=0.1)
    assert found.growth.kept == pytest.approx(GROWTH.kept, abs=0.1)
    assert len(cases(rows)) == 9
    told = dict(word.split("=") for word in benchmark.judge(rows, found).split())
    assert (told["cases"], told["right"], told["score"]) == ("9", "9", "0.0000")
    assert max(float(told[kind]) for kind in ("stay", "grow", "scratch")) > 0.02


def test_a_budget_that_is_left_out_is_not_looked_at(tmp_path):
    """The control: with its own runs in the fit, a planted loss moves the prediction."""
    rows = read(write(tmp_path / "runs.jsonl", store_of(LAW, GROWTH)))
    planted = [replace(row, loss=3 * row.loss) if row.budget == 10**11 else row for row in rows]
    row = next(row for row in rows if row.budget == 10**11 and row.kind == "grow")
    losses = []
    for known in (rows, planted):
        blind = benchmark.without(known, 10**11)
        assert blind is not None
        losses.append(predicted(blind.growth, blind.law, row))
    assert losses[0] == losses[1]
    assert predicted(fitted(planted).growth, fitted(planted).law, row) != pytest.approx(losses[0], rel=0.05)


def test_the_benchmark_fails_without_a_store_and_not_with_a_small_one(tmp_path):
    """Control: a stored law that is not the fit of the store fails too."""
    assert benchmark.judged(tmp_path / "none.jsonl").failed
    small = write(tmp_path / "small.jsonl", [line(32, 10**11, 0.3)])
    told, failed = benchmark.judged(small)
    assert told.startswith("cases=0 right=0")
    assert not failed
    assert benchmark.judged(small, Path(advice.__file__).parent / "law.json").failed


def test_a_law_from_nothing_measures_nothing(known):
    known(NOTHING.law, NOTHING.growth)
    told = mu.budgets.advise(BASE, spent=1e12, budget=1e12, to=WIDE)
    assert told.choice == "not measured at this size"
    assert "never measured" in str(told)
    assert not [arm for arm in told.arms if arm.loss is not None]
