"""The verdict of a study: chance seldom fools it, it says what to type next, and what it says to type works."""

import random
import shlex
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from harness.refusals import refused
from harness.verdicts import SPREADS, naive, worth
from mupscale.cli.main import main
from mupscale.studies.agenda.grid import Point
from mupscale.studies.agenda.status import Equality, Stay, study_status
from mupscale.studies.command import Command
from mupscale.studies.engine import open_storage
from mupscale.studies.ledger import Ledger
from mupscale.studies.report.held_out import Gains, chosen, gains
from mupscale.studies.report.known import Known, know
from mupscale.studies.report.page import Gallery
from mupscale.studies.report.report import write_report
from mupscale.studies.report.verdict import Verdict, beside, verdicts
from mupscale.studies.settings import Settings
from tests.studies.test_report import PROXY as COUNTED

DRAWS = 450


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_chance_seldom_makes_noise_worth_it(seeds):
    """Control: the best of many points against the best control is called worth it far too often."""
    assert worth(gains, seeds, DRAWS) <= 4.5  # 2.5 % and two standard errors more, above and below
    assert worth(naive, seeds, DRAWS) > 10


def test_a_gain_of_two_spreads_is_found_by_five_seeds():
    assert worth(gains, 5, DRAWS, gain=SPREADS) > 70
    assert worth(gains, 3, DRAWS, gain=-SPREADS) == 0
    assert worth(gains, 3, DRAWS, halved=True) <= 4.5


def test_a_seed_is_judged_by_the_seeds_before_it_alone():
    """What a seed found itself, and what later ones found, does not change where it is judged."""
    noisy = [{Point(1, 0.1): a, Point(1, 0.2): b} for a, b in ((0.9, 1.0), (1.1, 0.7), (1.0, 0.8))]
    plain = [{Point(1, 0.0): 1.0}] * 3
    assert gains(noisy, plain).each[0] == pytest.approx(-0.1)
    noisy[1][Point(1, 0.2)] = noisy[2][Point(1, 0.2)] = 0.0
    assert gains(noisy, plain).each[0] == pytest.approx(-0.1)
    noisy[0][Point(1, 0.2)] = 0.0
    assert gains(noisy, plain).each[0] == 1.0


def test_noises_that_one_seed_has_not_tried_are_not_chosen():
    noisy = [{Point(1, 0.1): 0.9, Point(1, 0.8): 0.1}, {Point(2, 0.1): 0.9}]
    assert chosen(noisy[:1]).noise == 0.8
    assert chosen(noisy).noise == 0.1


def test_a_run_that_diverged_is_no_gain_and_no_crash():
    noisy, plain = [{Point(1, 0.1): 0.5}] * 2 + [{Point(1, 0.1): inf}], [{Point(1, 0.0): 1.0}] * 3
    assert gains(noisy, plain).worth is None
    assert Gains((0.1, 0.1)).worth is None, "without a spread nothing is decided"


Loss = Callable[[Point, int], float]


def made(
    folder: Path, loss: Loss, seed: int = 0, legs: int = 10**6, typed: bool = True, **given: Any
) -> Known:
    """A study without training, as the command would have left it."""
    line = {
        "lrs": (0.01, 0.02),
        "noises": (0.1, 0.2, 0.4),
        "factors": (1.0, 2.0),
        "extend": 0,
        "halving": False,
    }
    settings = Settings(**{"width": 64, "k": 2, "steps": 80, **line, **given, "seed": seed})
    ledger = Ledger(open_storage(_place(folder) / "study.journal"), "mupscale", settings)
    for _ in range(legs):
        now = study_status(settings, ledger.results(ledger.trials()))
        if now.done:
            break
        leg = now.open[0]
        trial = ledger.claim(leg)
        assert trial is not None
        point = replace(leg.point, noise=-1.0) if isinstance(leg, Stay) else leg.point
        value = 1e-7 if isinstance(leg, Equality) else loss(point, leg.end)
        curve = [(leg.begin + 5, 5 + (leg.point.noise or 0)), (leg.end, value)]
        ledger.complete(trial, value, {"curve": curve if value < inf else [], "tolerance": 1e-3})
    if typed:
        Command("proxy.py", {"--width": "64"}).save(folder)
    return know(folder)


def _place(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def losses(seed: int, gain: float, stay: float = 3.0, spread: float = 0.05) -> Loss:
    """Noise 0.2 gains so much over no noise, other noises less; `stay` is the loss without growing."""
    source = random.Random(seed)

    def loss(point: Point, end: int) -> float:
        by = {None: 0.0, 0.0: 0.0, 0.1: gain / 2, 0.2: gain, 0.4: gain / 3, -1.0: 2 - stay}[point.noise]
        return 2.0 - by + source.gauss(0, spread) + 1 / end

    return loss


def judged(tmp_path: Path, seeds: int, gain: float, **given: Any) -> Verdict:
    stay = given.pop("stay_loss", 3.0)
    for seed in range(seeds):
        name = "study" if seed == 0 else f"study-seed{seed}"
        made(tmp_path / name, losses(seed, gain, stay), seed, **given)
    [one] = verdicts(beside(know(tmp_path / "study")))
    return one


def test_a_gain_over_five_seeds_is_worth_it_and_the_recipe_is_next(tmp_path):
    one = judged(tmp_path, 5, 0.5, flops=(1, 4))
    assert one.head.startswith("Noise is worth it: noise lowers the loss by 0.")
    assert "times the spread over seeds (0.0" in one.head
    assert "4 of 5 seeds are judged" in one.facts[0]
    assert "choose noise 0.2 and rate" in one.facts[0]
    assert one.facts[1].startswith("Growing is worth it at equal FLOPs: growing lowers the loss by")
    [use] = one.commands
    assert use.startswith("mu.upscale(run, make_wide, recipe=mu.studies.Recipe.read(")
    assert Verdict("a", ["b"], "c:", ["d"]).__str__() == "verdict: a\n  b\nnext: c:\n  d"


def test_a_cost_is_said_and_a_longer_run_is_next(tmp_path):
    one = judged(tmp_path, 5, -0.5)
    assert one.head.startswith("Noise is not worth it here: noise raises the loss by")
    assert "Noise costs at first and may pay later." in one.facts
    [line] = one.commands
    assert (
        line
        == f"mupscale tune proxy.py --width 64 --wide-steps 160 --seed 0 --folder {tmp_path}/study-steps160"
    )


def test_a_gain_that_growing_does_not_pay_for_is_not_applied(tmp_path):
    one = judged(tmp_path, 5, 0.5, flops=(1, 4), stay_loss=1.0)
    assert one.head.startswith("Noise is worth it")
    assert " Growing is not worth it at equal FLOPs: growing raises the loss by 0.4" in one.head
    assert one.step.startswith("Train the base on without growing")
    assert "--wide-steps" in one.commands[0]


def test_what_is_not_decided_asks_for_a_number_of_seeds_first(tmp_path):
    one = judged(tmp_path, 4, 0.0)
    assert one.head.startswith("Not decided: noise")
    assert one.head.endswith("; more than 2.5 times would decide.")
    assert one.step.startswith(
        "Decide now how many more seeds to run: looking after each one gives chance several tries."
    )
    assert [shlex.split(line)[-3] for line in one.commands[:2]] == ["4", "5"]
    assert one.commands[-1].split()[-6:] == [
        str(tmp_path / name)
        for name in ("study", *(f"study-seed{seed}" for seed in range(1, 6)))
    ]  # fmt: skip


def test_fewer_than_three_seeds_say_how_many_to_add(tmp_path):
    one = judged(tmp_path, 2, 5.0)
    assert one.head == "Not decided: two of the three seeds that tell a gain from chance."
    assert one.step == "Run one more seed:"
    assert one.commands[0].endswith(f"--seed 2 --folder {tmp_path}/study-seed2")
    assert "It is the best of 3 noises, so part of it is chance." in one.facts[0]
    (tmp_path / "single" / "study-seed5").mkdir(parents=True)
    (tmp_path / "single" / "study-seed5" / "study.journal").write_text("no journal\n")
    single = judged(tmp_path / "single", 1, 5.0)
    assert single.step == "Run two more seeds:"
    assert len(single.commands) == 3


def test_seeds_are_judged_in_their_order_and_counted_once(tmp_path):
    """Control: other settings are not the same study."""
    studies = [made(tmp_path / f"{seed}", losses(seed, 0.3), seed) for seed in range(4)]
    assert verdicts(studies)[0].head == verdicts(studies[::-1])[0].head
    [twice] = verdicts([*studies, made(tmp_path / "again", losses(9, 5.0), 0)])
    assert twice.head == verdicts(studies)[0].head
    assert f"{tmp_path}/again is not counted: seed 0 is there already." in twice.facts
    both = verdicts([*studies, made(tmp_path / "other", losses(9, 5.0), 7, steps=40)])
    assert [one.head.startswith(str(tmp_path)) for one in both] == [True, True]


def test_unfinished_and_diverged_studies_have_no_verdict_and_say_why(tmp_path):
    total = made(tmp_path / "whole", losses(0, 0.5)).work.counted
    open_ = made(tmp_path / "study", losses(0, 0.5), 0, total - 1)
    [one] = verdicts([open_])
    assert one.head.startswith("None yet: unfinished: sweep 2")
    assert one.step == "Continue it with the command that began it."
    made(tmp_path / "study-seed1", losses(1, 0.5), 1)
    [one] = verdicts(beside(open_))
    assert any("is not counted: unfinished" in fact for fact in one.facts)
    assert one.commands[0].endswith(f"--seed 0 --folder {tmp_path}/study"), "what is begun is ended first"

    def without(point: Point, end: int) -> float:
        return inf if point.noise == 0 else 1.0

    [one] = verdicts([made(tmp_path / "control", without)])
    assert one.head == "None: every run without noise diverged, so there is nothing to compare."
    [one] = verdicts([made(tmp_path / "noisy", lambda point, end: inf if point.noise else 1.0)])
    assert one.head == "Noise is not worth it here: every run with noise diverged."
    with refused("study.base_diverged"):
        made(tmp_path / "all", lambda point, end: inf)
    [one] = verdicts([know(tmp_path / "all")])
    assert (one.head, one.step) == ("None yet: ended: every run of sweep 1 diverged.", "")


def test_a_study_begun_in_python_gets_words_instead_of_a_command(tmp_path):
    [one] = verdicts([made(tmp_path / "study", losses(0, 0.5), typed=False)])
    assert one.commands == []
    assert one.step == (
        f"Run two more seeds: seed 1 in {tmp_path}/study-seed1, seed 2 in {tmp_path}/study-seed2, otherwise with the same "
        "settings."
    )


def test_the_page_begins_with_the_verdict(tmp_path, monkeypatch):
    one = judged(tmp_path, 5, 0.5)
    monkeypatch.setattr(Gallery, "add", lambda *_: "")
    text = write_report(tmp_path / "study").read_text()
    assert text.index("Noise is worth it") < text.index("<table")
    assert text.index(one.facts[0][:40]) < text.index("<table")


PROXY = COUNTED.replace("def inputs():\n    return torch.zeros(16, 4)\n", "")
"""Without an example of its inputs its FLOPs are not counted, and no run stays ungrown."""
GIVEN = "--width 6 -k 2 --steps 12 --lrs 0.004,0.008 --noises 0.1 --factors 1 --extend 0 --no-halving --no-report --quiet"


def next_lines(text: str) -> list[list[str]]:
    """The commands that a verdict prints, as words after `mupscale`."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("  mupscale ")]


def test_what_is_printed_works_as_it_is_typed(tmp_path, monkeypatch, capsys):
    """From the first study on, each verdict's commands are typed, until three seeds are judged, and once more."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Gallery, "add", lambda *_: "")  # pictures are drawn by other tests
    Path("proxy.py").write_text(PROXY)
    assert main(["tune", "proxy.py", *GIVEN.split(), "--folder", "study"]) == 0
    first = capsys.readouterr().out
    assert first.strip().startswith("verdict: Not decided")
    for turn in range(2):
        lines = next_lines(first)
        assert lines, first
        for words in lines:
            assert main(words) == 0
        first = capsys.readouterr().out
        assert turn or "2 of 3 seeds are judged" in first


def test_a_noise_that_one_seed_alone_has_tried_does_not_hide_the_gain_of_others():
    """The grid of seed 0 was extended, and its best noise lies there; the others are judged at what all have tried."""
    rest = [{Point(1, 0.1): 0.5 + 0.01 * seed} for seed in range(1, 6)]
    noisy = [{Point(1, 0.1): 0.5, Point(1, 0.2): 0.4}, *rest]
    plain = [{Point(1, 0.0): 1.0 + 0.001 * seed} for seed in range(6)]
    assert gains(noisy, plain).worth is True


def diverging(kind: bool) -> Loss:
    """Losses of a seed whose runs with noise, or without, all diverge."""

    def loss(point: Point, end: int) -> float:
        return inf if end > 40 and point.noise is not None and (point.noise > 0) is kind else 2.0

    return loss


def test_a_seed_whose_controls_diverged_is_left_out_and_the_others_are_judged(tmp_path):
    for seed in range(6):
        name = "study" if seed == 0 else f"study-seed{seed}"
        made(tmp_path / name, diverging(False) if seed == 3 else losses(seed, 0.5), seed)
    [one] = verdicts(beside(know(tmp_path / "study")))
    assert one.head.startswith("Noise is worth it")
    assert any("study-seed3 is not counted: every run without noise diverged" in fact for fact in one.facts)


def test_a_seed_whose_noisy_runs_all_diverged_is_told_in_words(tmp_path):
    made(tmp_path / "study", diverging(True), 0)
    [one] = verdicts(beside(made(tmp_path / "study-seed1", losses(1, 0.5), 1)))
    assert "Seed 0: every run with noise diverged." in one.facts
    assert "inf" not in str(one)


def test_the_command_of_another_study_in_the_folder_is_not_repeated(tmp_path):
    made(tmp_path / "study", losses(0, 0.5))
    Command("proxy.py", {"--study": "b"}).save(tmp_path / "study")
    [one] = verdicts([know(tmp_path / "study")])
    assert not one.commands
    Command("proxy.py", {}).save(tmp_path / "study")
    assert verdicts([know(tmp_path / "study")])[0].commands
    assert not verdicts([know(tmp_path / "study")], stored_here=False)[0].commands
