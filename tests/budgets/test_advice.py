"""Advice: choices inside the measured range and none outside, what directories tell, and the fit to stored cases."""

import json
import re
from dataclasses import replace
from math import exp, hypot, log
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import mupscale as mu
from harness import frontier_advice as benchmark
from harness import frontier_store
from harness.frontier_store import cases, fitted, off, on_the_way, parameters
from harness.refusals import refusal, refused
from mupscale.budgets import advice
from mupscale.budgets.law import Law, Measured, Span, Way, law_of, samples, stored
from mupscale.budgets.spent import read_spent
from mupscale.cli.main import main

RESULTS = Path(__file__).resolve().parents[2] / "reproduce" / "results"
BASE, WIDE = 12_000, 36_000
FINISHED, GOING = Span((100, 10_000), (0.2, 0.8)), Span((100, 10_000), (0.25, 0.25))


def way(name: str, kind: Any, offset: float, error: float | None = 0.01, **changed: Any) -> Way:
    made = Way(name, kind, offset, error, 8, (2.9, 3.3), (0.5, 0.5), True, FINISHED, GOING)
    return replace(made, **changed)


WAYS = (
    way("copies", "grow", 0.75),
    way("new units", "grow", 0.7),
    way("scratch", "scratch", 1.4, going=replace(GOING, share=(0.0, 0.0))),
    way(
        "experts",
        "grow",
        0.2,
        None,
        width=False,
        times=(1.3, 1.3),
        finished=Span((900, 1100), (0.5, 0.5)),
        going=None,
    ),
)
LAW = Law(-0.1, -0.2, 0.2, {"mlp": Measured("made-up runs", "per cent", (10_000, 20_000), WAYS)})


@pytest.fixture
def known(monkeypatch):
    """Advice from a law that is known, whatever is stored."""

    def use(law: Law = LAW) -> None:
        monkeypatch.setattr(advice, "stored", lambda: law)

    use()
    return use


def left(per_parameter: float) -> float:
    """FLOPs for so many samples per parameter of the base."""
    return 6 * BASE**2 * per_parameter


def ask(per_parameter: float, had: float | None = None, **asked: Any) -> Any:
    """Advice for so many samples per parameter that are left, and as many that were spent."""
    flops = {"spent": left(per_parameter if had is None else had), "budget": left(per_parameter)}
    return mu.budgets.advise(**{"params": BASE, **flops, "to": WIDE, "like": "mlp", **asked})


# The choice


def test_each_choice_is_made_where_its_arm_is_best(known):
    assert ask(300).choice == "stay"
    grown = ask(2000)
    assert (grown.choice, grown.after) == ("grow", 0.0)
    assert grown.arm is not None
    assert grown.arm.way == "new units"
    assert ask(9000, 0).choice == "scratch"


def test_the_way_is_the_one_that_ends_lowest(known):
    """The control: with the offsets exchanged the other one is named."""
    copies, units, *others = WAYS
    ways = (replace(copies, offset=units.offset), replace(units, offset=copies.offset), *others)
    known(replace(LAW, kinds={"mlp": replace(LAW.kinds["mlp"], ways=ways)}))
    arm = ask(2000).arm
    assert arm is not None
    assert arm.way == "copies"


def test_differences_are_in_per_cent_or_nats_with_an_interval(known):
    def grown() -> Any:
        return next(arm for arm in ask(2000).arms if arm.way == "new units")

    expected = 0.7 - 0.1 * log(2000)
    within = (2 + 4 / 8) * 0.01
    assert log(1 + grown().difference / 100) == pytest.approx(expected)
    assert [log(1 + end / 100) for end in grown().between] == pytest.approx(
        [expected - within, expected + within]
    )
    known(replace(LAW, kinds={"mlp": replace(LAW.kinds["mlp"], unit="nats")}))
    assert grown().difference == pytest.approx(expected)
    assert "nats" in str(ask(2000))


def test_how_sure_it_is_depends_on_the_errors(known):
    grown, new = 0.7 - 0.1 * log(2000), 1.4 - 0.2 * log(2000) + 0.2 * 0.5
    said = []
    for share in (0.9, 1.1, 2.1):
        error = share * (new - grown) / hypot(2.5, 2.5)
        ways = tuple(replace(each, error=error) if each.error else each for each in WAYS)
        known(replace(LAW, kinds={"mlp": replace(LAW.kinds["mlp"], unit="nats", ways=ways)}))
        said.append(ask(2000).sure)
    assert said == ["sure", "leaning", "open"]


def test_what_was_measured_once_is_shown_and_never_chosen(known):
    told = ask(1000)
    once = next(arm for arm in told.arms if arm.way == "experts")
    assert once.difference is not None
    assert once.between is None
    assert told.arm is not None
    assert once.difference < (told.arm.difference or 0)
    assert "measured once" in str(told)
    assert not [arm for arm in ask(2000).arms if arm.way == "experts"]


# Outside


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"params": 9_000, "to": 27_000}, "parameters of the base: 9e\\+03, measured from"),
        ({"to": 48_000}, "new units: parameters over the base's: 4, measured from"),
        ({"budget": left(20_000), "spent": left(20_000)}, "new units: samples left per parameter"),
        ({"spent": left(100_000)}, "share of all FLOPs that the base has had"),
        ({"decayed": False}, "share of all FLOPs that the base has had: 0.5, measured at 0.25"),
        ({"like": None}, "no kind of model is named"),
    ],
)
def test_outside_the_measured_range_there_is_arithmetic_only(known, asked, said):
    assert ask(2000).choice != "not measured"
    told = ask(2000, **asked)
    assert (told.choice, told.sure, told.arm, told.after) == ("not measured", "not measured", None, None)
    assert re.search(said, str(told))
    assert all(arm.samples_per_parameter > 0 and arm.memory == 16 * arm.params for arm in told.arms)
    assert "is not known" in str(told)


def test_rounded_sizes_at_the_edge_are_inside(known):
    def choice(params: float) -> Any:
        return ask(
            2000, params=params, to=3 * params, budget=6 * params**2 * 500, spent=6 * params**2 * 500
        ).choice

    assert choice(10_000 / 1.04) != "not measured"
    assert choice(10_000 / 1.06) == "not measured"


def test_every_arm_spends_the_budget(known):
    for spent, decayed in ((0, True), (100, False), (1000, True)):
        told = ask(1000, spent, to=[WIDE, 2 * WIDE], decayed=decayed, batch=512, context=2)
        for arm in told.arms:
            assert sum(phase.flops for phase in arm.phases) == pytest.approx(left(1000))
            for phase in arm.phases:
                assert 6 * phase.params * phase.samples == pytest.approx(phase.flops)
                assert phase.steps == round(phase.samples / 1024)


def test_a_base_on_its_way_grows_at_a_quarter_and_a_finished_one_now(known):
    def moment(**asked) -> Any:
        return next(arm.after for arm in ask(1000, **asked).arms if arm.kind == "grow")

    assert moment(had=0) == pytest.approx(left(250))
    assert moment(had=200, decayed=False) == pytest.approx(left(100))
    assert moment(had=200) == 0


def test_what_cannot_be_compared_is_refused_at_once():
    found = refusal(
        lambda: mu.budgets.advise(-1, spent=-1, budget=0, to=[], like="gpt2"),
        "argument.not_a_number",
        "advice.no_wider_size",
        "advice.unknown_kind",
    )
    assert [fault.where for fault in found.faults] == ["params", "spent", "budget", "to", "like"]
    with refused("advice.not_wider_than_base", where="to"):
        mu.budgets.advise(1e6, spent=0, budget=1e15, to=2)


def test_the_stored_fit_comes_with_the_package():
    found = stored()
    assert found.to_json() == (Path(advice.__file__).parent / "law.json").read_text("utf-8")
    assert law_of(json.loads(found.to_json())) == found
    assert mu.budgets.advise(1e9, spent=1e20, budget=1e20, to=2e9, like="mlp").choice == "not measured"


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
    assert (found.params, found.flops, found.source) == (1240, 6 * 1240 * 7, "num_input_tokens_seen")
    found = read_spent(directory(total_flos=5e12, global_step=10, max_steps=10))
    assert (found.flops, found.finished, found.source) == (5e12, True, "total_flos")
    found = read_spent(directory(total_flos=0, num_input_tokens_seen=100, global_step=9, max_steps=10))
    assert (found.flops, found.finished) == (6 * 1240 * 100, False)
    found = read_spent(directory())
    assert (found.flops, found.finished) == (None, None)
    with refused("trainer.state_not_a_number", where=["trainer_state.json", "total_flos"]):
        read_spent(directory(total_flos=-1))


def test_flops_of_a_trainer_count_embeddings_too(directory, tmp_path):
    """Its own counter leaves them out, and the measured runs do not."""
    path = directory(total_flos=6.0 * 40 * 100)
    tensors = {"model.embed_tokens.weight": torch.zeros(30, 40), "b": torch.zeros(40)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read_spent(path).flops == pytest.approx(6 * 1240 * 100)


def test_steps_need_the_tokens_of_a_sequence(capsys):
    asked = [
        "cost",
        "--budget",
        "1e12",
        "--like",
        "llama",
        "--params",
        "59552",
        "--spent",
        "1e12",
        "--wide-params",
        "172352",
    ]
    for option in (["--batch", "8"], ["--context", "64"]):
        assert main([*asked, *option]) == 2
        assert "option.not_given" in capsys.readouterr().err
    assert main([*asked, "--batch", "8", "--context", "64"]) == 0


def test_runs_from_bases_of_different_rates_are_different_settings(tmp_path):
    """The control is the choice: the lowest loss of the tuning seed, with the peak of its own key."""

    def line(start_lr: float, held: float) -> str:
        start = {"width": 32, "budget": 100, "lr": start_lr, "seed": 0}
        key = {"width": 64, "budget": 100, "lr": 0.5, "seed": 0, "start": start, "at": 0.25, "noise": 0.1}
        return json.dumps({"key": key, "result": {"choose": held, "held": held, "flops": 1, "samples": 1}})

    (tmp_path / "frontier.jsonl").write_text(line(0.25, 0.4) + "\n" + line(0.5, 0.3) + "\n")
    [point] = frontier_store._points(tmp_path, frontier_store.KINDS["mlp"])
    assert (point.loss, point.key["start"]["lr"]) == (0.3, 0.5)


def test_the_command_reads_the_directory(directory, capsys, known):
    known(replace(LAW, kinds={"mlp": replace(LAW.kinds["mlp"], params=(1e3, 1e4))}))
    asked = ["--budget", "1e10", "--wide-params", "3720", "--batch", "512", "--like", "mlp"]
    assert main(["cost", str(directory(total_flos=1e10, global_step=10, max_steps=10)), *asked]) == 0
    finished = capsys.readouterr().out
    assert "1,240 parameters, 1e+10 FLOPs spent (total_flos of trainer_state.json), 1e+10 left" in finished
    assert "grow to 3,720 by new units now " in finished
    assert "after" not in finished
    assert " steps" in finished
    assert main(["cost", str(directory(total_flos=1e9, global_step=1, max_steps=10)), *asked]) == 0
    assert "grow to 3,720 by new units after" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "like"), [("llama", "llama"), ("gpt2", None)])
def test_a_directory_tells_whether_its_kind_was_measured(directory, tmp_path, kind, like):
    directory()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert read_spent(tmp_path).like == like


def test_the_kinds_of_the_command_are_those_that_were_measured(capsys):
    asked = ["--params", "4103", "--spent", "1e11", "--budget", "1e11", "--wide-params", "12295"]
    for kind in stored().kinds:
        assert main(["cost", *asked, "--like", kind]) == 0
        assert f"measured on {stored().kinds[kind].about}" in capsys.readouterr().out


# The benchmark


def line(
    width: int, budget: int, held: float, *, seed: int = 0, start: tuple[int, int] | None = None, **more: Any
) -> str:
    key = {"width": width, "budget": budget, "lr": 0.01, "seed": seed, **more}
    choose = key.pop("choose", held)
    if start is not None:
        key["start"] = {"width": start[0], "budget": start[1], "lr": 0.01, "seed": seed}
    result = {
        "held": held,
        "choose": choose,
        "flops": budget,
        "samples": budget / (6 * parameters("mlp", width, 4)),
    }
    return json.dumps({"key": key, "result": result})


def store_of(law: Law) -> list[str]:
    """A store that follows a law exactly: finished bases of three budgets, each with three times more to spend."""
    copies, units, scratch = law.kinds["mlp"].ways[:3]
    base = parameters("mlp", 32, 4)
    lines = []
    for spent in (4 * 10**10, 16 * 10**10, 64 * 10**10):
        for more in (4 * 10**10, 16 * 10**10, 64 * 10**10):
            per, share = samples(base, more) / base, spent / (spent + more)
            new = 0.3 * (more / 1e12) ** -0.1
            stays = new / exp(law.difference(scratch, per, share))
            told: dict[str, Any] = {"start": (32, spent)}
            lines.append(line(32, more, stays, **told))
            lines.append(line(64, more, new))
            by_units = {**told, "method": "copied_readers", "state": "empty"}
            for each, fields in ((copies, told), (units, by_units)):
                lines.append(line(64, more, stays * exp(law.difference(each, per, share)), **fields))
    return lines


def write(folder: Path, lines: list[str]) -> Path:
    (folder / "frontier.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def test_rates_are_chosen_at_the_tuning_seed_and_other_seeds_are_reported(tmp_path):
    start: dict[str, Any] = {"start": (32, 10**11)}
    lines = [
        line(32, 10**11, 1.0, **start),
        line(64, 10**11, 0.5, choose=0.30, **start),
        line(64, 10**11, 0.1, choose=0.31, lr=0.02, **start),
        line(64, 10**11, 0.40, seed=1, choose=0.9, **start),
        line(64, 10**11, 0.42, seed=2, choose=0.9, **start),
        line(64, 10**11, 0.01, method="split", **start),
        line(64, 10**11, 0.01, by_rule=True, **start),
    ]
    (case,) = cases(write(tmp_path, lines))
    (answer,) = case.answers
    assert answer.way == "copies"
    assert answer.difference == pytest.approx(log(0.41))


def test_a_store_that_follows_the_law_gives_it_back_and_is_advised_rightly(tmp_path):
    known = cases(write(tmp_path, store_of(LAW)))
    found = benchmark.whole(known)
    assert (found.grow, found.scratch, found.share) == pytest.approx((LAW.grow, LAW.scratch, LAW.share))
    assert all(way.error is not None and way.error < 1e-9 for way in found.kinds["mlp"].ways)
    told = dict(word.split("=") for word in benchmark.judged(tmp_path).line.split())
    assert (told["cases"], told["right"], told["share"], told["score"]) == ("9", "9", "1.00", "0.0000")
    assert min(float(told[kind]) for kind in ("stay", "grow", "scratch")) > 0.01


def test_a_case_that_is_left_out_is_not_looked_at(tmp_path):
    """The control: with the case in the fit, a planted loss moves what is said of it."""
    known = cases(write(tmp_path, store_of(LAW)))
    planted = [
        replace(known[0], answers=tuple(replace(a, difference=9.0) for a in known[0].answers)),
        *known[1:],
    ]
    without = [dict(off(fitted(told[1:], told), known[0])) for told in (known, planted)]
    assert without[0] == without[1]
    assert dict(off(fitted(planted), known[0]))["copies"] != pytest.approx(without[0]["copies"], abs=0.1)


def test_outcomes_of_other_cases_advise_worse(tmp_path):
    known = cases(write(tmp_path, store_of(LAW)))
    law = benchmark.whole(known)
    assert benchmark.shuffled(known, law) > 0.01


def test_the_benchmark_fails_without_a_store_and_with_a_law_of_another(tmp_path):
    assert benchmark.judged(tmp_path).failed
    write(tmp_path, store_of(LAW))
    assert not benchmark.judged(tmp_path).failed
    assert benchmark.judged(tmp_path, Path(advice.__file__).parent / "law.json").failed


def test_the_stored_law_is_the_fit_of_the_stored_runs():
    """After new runs: `python benchmarks/advise.py --fit`."""
    assert benchmark.whole(cases(RESULTS)).to_json() == stored().to_json()


def test_a_new_model_beside_a_run_on_its_way_follows_the_law():
    """These pairs are in no fit. The control: without the share of FLOPs that the base has had, the law is further off."""
    law = stored()
    pairs = benchmark.inside_of(law, on_the_way(RESULTS))
    assert len(pairs) >= 5
    errors = [
        [abs(error) for case in pairs for _, error in off(told, case)]
        for told in (law, replace(law, share=0.0))
    ]
    assert max(errors[0]) < 0.1 < max(errors[1])
