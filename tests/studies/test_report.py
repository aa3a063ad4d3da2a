"""The report of a study: the star where the recipe is, diverged points empty, the bars of `mupscale cost`, a safe page."""

import json
import re
import sys
from dataclasses import replace
from fractions import Fraction
from html.parser import HTMLParser
from math import inf, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from optuna.storages import InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import TrialState, create_trial

from harness.refusals import refused
from mupscale.cli.main import main
from mupscale.studies import Recipe
from mupscale.studies.agenda.grid import Point
from mupscale.studies.agenda.status import Equality, study_status
from mupscale.studies.engine import open_storage
from mupscale.studies.ledger import Failure, Ledger
from mupscale.studies.report.bars import bars_of, steps_in_full, steps_taken
from mupscale.studies.report.known import Known, Sweep, know, tried_rows
from mupscale.studies.report.lines import curves_of, draw_curves
from mupscale.studies.report.maps import draw_map, draw_rungs
from mupscale.studies.report.report import write_report
from mupscale.studies.report.widths import cautions, draw_widths, why_not
from mupscale.studies.settings import Settings, check_same

PROXY = """
import torch
from torch import nn
torch.set_num_threads(1)
def build(width):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
def inputs():
    return torch.zeros(16, 4)
def train(run, steps, report):
    for step in range(run.steps, steps):
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
        loss = (run.model(x) - (2 * x[:, :1]).sin() * x[:, 1:2]).square().mean()
        run.model.zero_grad()
        loss.backward()
        run.optimizers[0].step()
        report(step, loss)
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real study with runs that diverge and runs that are stopped, made by the command with its report."""
    place = tmp_path_factory.mktemp("tuned")
    (place / "proxy.py").write_text(PROXY)
    arguments = "--width 6 -k 2 --steps 16 --lrs 0.004,0.008 --scheme sigma --noises 0.1,1000 --factors 0.5,1 --extend 0 --quiet"
    given = ["tune", str(place / "proxy.py"), *arguments.split(), "--folder", str(place / "study")]
    assert main(given) == 0
    return place


def loss_of(point: Point, end: int) -> float:
    """A bowl around learning rate 0.02 and noise 0.2, lower with more steps; far from it runs diverge."""
    if point.lr > 1:
        return inf
    far = abs(log2(point.lr / 0.02)) + (0 if point.noise is None else 20 * abs(point.noise - 0.2))
    return (1 + far) * 10 / end


def made(place: Path | InMemoryStorage, legs: int = 10**6, name: str = "mupscale", **given: Any) -> Settings:
    """A study without training, as workers would have left it after so many legs."""
    line = {"lrs": (0.01, 0.02, 0.04), "noises": (0.1, 0.2, 0.4), "factors": (0.5, 1.0, 2.0), "extend": 0}
    settings = Settings(**{"width": 64, "k": 2, "steps": 80, **line, **given})
    storage = open_storage(place / "study.journal" if isinstance(place, Path) else place)
    ledger = Ledger(storage, name, settings)
    for _ in range(legs):
        now = study_status(settings, ledger.results(ledger.trials()))
        if now.done:
            break
        for leg in now.open[: max(1, legs // 1000)]:  # one at a time where the number matters
            trial = ledger.claim(leg)
            assert trial is not None
            loss = 1e-7 if isinstance(leg, Equality) else loss_of(leg.point, leg.end)
            curve = [(step, 10 / step) for step in range(leg.begin + 5, leg.end + 1, 5)]
            told = {"curve": curve, "seconds": 1.0, "resumed_at": leg.begin, "steps": 1, "tolerance": 1e-3}
            ledger.complete(trial, loss, told)
    return settings


def known_of(**given: Any) -> Known:
    """What is known of a study made in memory."""
    storage = InMemoryStorage()
    made(storage, **given)
    return know("somewhere", storage)


def drawn(axes: Axes, gid: str) -> tuple[list[float], list[float]]:
    """The places of the one line that is called so."""
    (line,) = [line for line in axes.lines if line.get_gid() == gid]
    x, y = (np.asarray(values, dtype=float).tolist() for values in line.get_data())
    return x, y


def wide_of(known: Known) -> Sweep:
    assert known.wide is not None
    return known.wide


def star(figure: Figure, gid: str = "best") -> tuple[str, str]:
    """The labels of the row and column on which the star stands."""
    axes: Axes = figure.axes[0]
    x, y = (round(values[0]) for values in drawn(axes, gid))
    return axes.get_yticklabels()[y].get_text(), axes.get_xticklabels()[x].get_text()


def crosses(figure: Figure) -> int:
    return sum(line.get_gid() == "diverged" for line in figure.axes[0].lines)


def test_the_star_is_at_the_recipes_point_and_a_planted_one_is_told_apart(tuned):
    recipe, known = Recipe.read(tuned / "study" / "recipe.json"), know(tuned / "study")
    sweep = wide_of(known)
    best = min(
        (
            row
            for row in recipe.tried
            if row["sweep"] == "wide" and row["steps"] == 16 and not row["diverged"]
        ),
        key=lambda row: row["loss"],
    )
    assert best["lr"] == recipe.lr
    expected = ("no noise" if best["noise"] == 0 else f"{best['noise']:g}", f"{recipe.lr:.2g}")
    assert star(draw_map(sweep, "noise")) == expected
    others = [t.point for t in sweep.tried if t.point != sweep.best]
    assert others
    for other in others:
        assert star(draw_map(replace(sweep, best=other), "noise")) != expected
    assert f"learning rate {recipe.lr:.4g}" in (tuned / "study" / "report" / "index.html").read_text()


def test_empty_cells_are_the_points_that_diverged(tuned):
    recipe, sweep = Recipe.read(tuned / "study" / "recipe.json"), wide_of(know(tuned / "study"))
    diverged = sum(row["diverged"] for row in recipe.tried if row["sweep"] == "wide")
    figure = draw_map(sweep, "noise")
    assert crosses(figure) == diverged > 0
    cells = [patch.get_gid() for patch in figure.axes[0].patches]
    assert cells.count("cell diverged") == diverged
    assert len(cells) == len(sweep.tried)
    assert cells.count("cell stopped") == sum(t.state == "stopped" for t in sweep.tried) > 0
    healed = replace(sweep, tried=tuple(replace(t, rungs={16: 1.0}) for t in sweep.tried))
    assert crosses(draw_map(healed, "noise")) == 0


def test_what_is_known_is_what_the_recipe_says(tuned):
    recipe, known = Recipe.read(tuned / "study" / "recipe.json"), know(tuned / "study")
    assert tried_rows(known) == [dict(row) for row in recipe.tried]
    assert known.recipe == recipe
    assert steps_taken(known) == (recipe.cost["base_width_steps"], recipe.cost["wide_steps"])
    assert sum(steps_in_full(known)) > sum(steps_taken(known))
    assert known.work.counted == known.work.trials
    assert [tuple(c) for c in known.base.tried[0].curve][-1][0] == known.base.tried[0].steps


def test_the_bars_are_those_of_the_cost_command(tuned, capsys):
    known = know(tuned / "study")
    bars = bars_of(known)
    assert bars.unit == "FLOPs"
    assert bars.case is not None
    assert bars.cost is not None
    capsys.readouterr()
    for name, trials in (("as done", bars.case.trials), ("full grid", None)):
        total = {bar.name: bar.total for bar in bars.bars}
        if trials is None:
            trials = total["tuning, full grid"] / (
                Fraction(bars.cost.scratch) / bars.case.steps * bars.case.steps
            )
        given = f"-k 2 --width 6 --proxy 6 --steps 16 --base-steps 16 --trials {float(trials)!r}"
        assert main(["cost", str(tuned / "proxy.py"), *given.split()]) == 0
        text = capsys.readouterr().out
        unit = {"GFLOPs": 1e9, "MFLOPs": 1e6, "FLOPs": 1.0}[re.findall(r"(\w+) of whole runs", text)[0]]
        for said, bar in (("from scratch", "from scratch"), ("base", "base"), ("tuning", f"tuning, {name}")):
            row = next(
                line for line in text.split("whole runs")[1].splitlines() if line.strip().startswith(said)
            )
            counted = float(row.split()[-2].replace(",", ""))
            assert counted == pytest.approx(float(total[bar]) / unit, rel=6e-4), (said, row)
    # Control: the two ways of tuning differ by far more than the digits that are printed.
    assert float(total["tuning, full grid"] / total["tuning, as done"]) > 1.1
    assert bars.cost.tuning == total["tuning, as done"]


def test_a_study_whose_proxy_counts_no_flops_has_its_cost_in_steps(tuned):
    known = know(tuned / "study")
    assert bars_of(known).unit == "FLOPs"
    uncounted = replace(known, settings=replace(known.settings, flops=None))
    bars = bars_of(uncounted)
    assert bars.unit == "steps"
    assert "inputs()" in bars.why_steps


def test_the_page_says_whether_growing_beat_not_growing(tuned, tmp_path):
    """Controls: a study without those runs says why, and one that has not done them yet says so."""
    recipe, text = Recipe.read(tuned / "study" / "recipe.json"), write_report(tuned / "study").read_text()
    assert set(recipe.stay) == {"going on", "from scratch"}
    won = min(loss for loss in recipe.stay.values() if loss is not None) > (recipe.loss or inf)
    assert f"growing {'beat' if won else 'did not beat'} not growing on the proxy" in text
    assert "not grown, from scratch" in text
    made(tmp_path / "none")
    assert "needs the FLOPs of a step" in write_report(tmp_path / "none").read_text()
    made(tmp_path / "left out", flops=(1, 4), stay=False)
    assert "was left out" in write_report(tmp_path / "left out").read_text()
    total = known_of(flops=(1, 4)).work.counted
    made(tmp_path / "open", total - 1, flops=(1, 4))
    assert know(tmp_path / "open").status == "unfinished: 1 of 2 runs that do not grow"


class Resources(HTMLParser):
    """Everything that a page would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [
            value or "" for key, value in attrs if key in ("src", "href", "srcset", "data", "action")
        ]
        self.tags += [key for key, _ in attrs if key.startswith("on")]


def resources(text: str) -> Resources:
    parser = Resources()
    parser.feed(text)
    return parser


def test_the_page_needs_nothing_but_itself(tuned):
    folder = tuned / "study" / "report"
    text = (folder / "index.html").read_text()
    seen = resources(text)
    assert len(seen.found) > 3
    assert all(value.startswith("data:image/png;base64,") for value in seen.found)
    assert "url(" not in text
    assert "@import" not in text
    assert "script" not in seen.tags
    assert "prefers-color-scheme: dark) { img { filter: invert" in text, (
        "pictures are no white boxes in the dark"
    )
    pictures = {path.name: path.read_bytes()[:4] for path in folder.glob("*.png")}
    assert {"sweep1.png", "sweep2.png", "rungs.png", "curves.png", "cost.png"} == set(pictures)
    assert set(pictures.values()) == {b"\x89PNG"}
    assert not list(folder.glob(".*"))
    # Control: the parser sees what it should.
    assert resources('<img src="https://x/y.png" onerror=a>').tags == ["img", "onerror"]


HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>$\\frac"


def test_hostile_names_are_escaped(tmp_path):
    folder = tmp_path / ("<b>" + "long " * 40 + "$x_{" + "<img src=x onerror=alert(3)>".replace("/", ""))
    settings = made(folder, name=HOSTILE)
    ledger = Ledger(open_storage(folder / "study.journal"), HOSTILE, settings)
    now = study_status(settings, ledger.results(ledger.trials()))
    trial = ledger.storage.create_new_trial(ledger.study)
    ledger.storage.set_trial_user_attr(trial, "stretch", HOSTILE)
    ledger.fail(trial, HOSTILE)
    known = know(folder, study=HOSTILE)
    assert now.wide is not None
    recipe = Recipe(
        "torch.optim.AdamW", {"lr": 0.02, HOSTILE: HOSTILE}, {HOSTILE: 0.1}, k=2, tensors={},
        tried=tuple(tried_rows(known)), remarks=(HOSTILE,), batch=None,
    )  # fmt: skip
    recipe.save(folder / "recipe.json")
    text = write_report(folder, study=HOSTILE, out=tmp_path / "out").read_text()
    assert text.count("&lt;script&gt;alert(1)") >= 5
    seen = resources(text)
    assert "script" not in seen.tags
    assert not [t for t in seen.tags if t.startswith("on")]
    assert "b" not in seen.tags
    assert all(value.startswith("data:image/png") for value in seen.found)
    assert resources(HOSTILE).tags.count("script") == 1  # control: unescaped it would be there


def test_an_unfinished_study_is_shown_as_far_as_it_is_and_not_written_to(tmp_path):
    total = known_of().work.counted
    for legs in (0, 2, 12, total - 1):
        folder = tmp_path / f"cut {legs}"
        made(folder, legs)
        before = (folder / "study.journal").read_bytes()
        known, text = know(folder), write_report(folder).read_text()
        assert (folder / "study.journal").read_bytes() == before
        assert known.work.counted == legs
        assert not known.done
        assert re.search(
            rf"unfinished: sweep [12], {known.base.done if known.wide is None else '[0-9]+'} of ", text
        )
        assert "There is none yet" in text
        assert ("There is no chart of sweep 1" in text) is (legs == 0)
        assert (folder / "report" / "sweep1.png").exists() is (legs > 0), "nothing empty is drawn"
        if known.wide is not None and known.wide.leader is not None:
            figure = draw_map(known.wide, "noise")
            assert "best" not in [line.get_gid() for line in figure.axes[0].lines]
            star(figure, "leader")


def test_trials_that_do_not_count_are_told_by_kind():
    storage = InMemoryStorage()
    settings = made(storage, 3)
    ledger = Ledger(storage, "mupscale", settings)
    leg = study_status(settings, ledger.results(ledger.trials())).open[0]
    # The last two as version 0.2.0 stored them, and as an error is stored.
    for why in (Failure.ENDED, Failure.SECOND, "its worker was silent", "ValueError: x"):
        trial = ledger.claim(leg)
        assert trial is not None
        ledger.fail(trial, why)
    ledger.claim(leg)
    work = know("somewhere", storage).work
    assert (work.trials, work.counted, work.running) == (8, 3, 1)
    assert (work.killed, work.extra, work.failed) == (2, 1, 1)


def test_losses_at_different_steps_never_share_a_scale():
    sweep = wide_of(known_of(factors=(0.5, 1.0, 2.0, 64.0)))
    figure = draw_map(sweep, "noise")
    text = [label.get_text() for label in figure.axes[0].texts]
    stopped = [t for t in sweep.tried if t.state == "stopped"]
    assert stopped
    for tried in stopped:
        assert f"{tried.loss:.3g}\nat step {tried.steps}" in text
    hatched = [patch for patch in figure.axes[0].patches if patch.get_gid() == "cell stopped"]
    assert len(hatched) == len(stopped)
    assert {patch.get_hatch() for patch in hatched} == {"////"}
    assert len({patch.get_facecolor() for patch in hatched}) == 1  # grey says nothing of a loss
    rungs = draw_rungs(sweep, "noise")
    assert rungs is not None
    maps = [axes for axes in rungs.axes if axes.get_title()]
    shown = [sum(p.get_gid() == "cell finished" for p in axes.patches) for axes in maps]
    assert shown == [sum(t.rungs.get(end, inf) < inf for t in sweep.tried) for end in sweep.ladder.rungs]
    assert draw_rungs(wide_of(known_of(halving=False)), "noise") is None


@pytest.mark.parametrize("draw", [draw_map, draw_rungs])
def test_a_long_name_of_the_noise_fits_beside_the_map(draw):
    name = "noise, as the rise of the loss in shares of what was learned by the base until it was grown"
    figure = draw(wide_of(known_of()), name)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    label = figure.axes[0].yaxis.label
    assert label.get_text().replace("\n", " ") == name
    edges, whole = label.get_window_extent(canvas.get_renderer()), figure.bbox
    assert edges.y0 >= whole.y0
    assert edges.y1 <= whole.y1
    label.set_text(name)
    canvas.draw()
    edges = label.get_window_extent(canvas.get_renderer())
    assert edges.height > whole.height, "control: in one line it does not"


def test_curves_are_at_the_best_rate_with_the_control_dashed():
    known = known_of(halving=False)
    best = wide_of(known).best
    chosen, at_rate = curves_of(wide_of(known))
    assert at_rate
    assert best is not None
    assert {t.point.lr for t in chosen} == {best.lr}
    figure = draw_curves(known)
    assert figure is not None
    (control,) = [line for line in figure.axes[0].lines if line.get_gid() == "control"]
    assert (control.get_color(), control.get_linestyle()) == ("black", "--")
    assert min(drawn(figure.axes[0], "control")[0]) > known.settings.steps


def test_studies_side_by_side_need_one_reference(tmp_path):
    first, second = (known_of(width=width, reference=64) for width in (64, 128))
    own, other = known_of(width=128), known_of(width=128, reference=64, steps=40)
    assert "more than one width" in why_not([first])
    assert "more than one width" in why_not([first, known_of(width=64, seed=1)])
    assert "--reference 64" in why_not([first, own])
    assert not why_not([first, second])
    assert not cautions([first, second])
    assert any("steps" in line for line in cautions([first, other]))
    widths, rates = drawn(draw_widths([second, first]).axes[2], "best")
    assert widths == [64.0, 128.0]
    best = [wide_of(known).best for known in (first, second)]
    assert rates == [point.lr for point in best if point is not None]


def test_no_noise_best_at_every_width_is_drawn(tmp_path):
    studies = [known_of(width=width, reference=64, noises=(0.5, 1.0)) for width in (64, 128)]
    assert [point.noise for known in studies if (point := wide_of(known).best) is not None] == [0, 0]
    # A logarithmic axis with nothing on it fails only when it is drawn.
    draw_widths(studies).savefig(tmp_path / "widths.png")
    assert (tmp_path / "widths.png").is_file()


def test_one_page_about_several_studies(tmp_path):
    for width in (64, 128):
        made(tmp_path / f"{width}", width=width, reference=64)
    given = ["report", str(tmp_path / "64"), str(tmp_path / "128"), "--out", str(tmp_path / "two")]
    assert main(given) == 0
    assert {"widths.png", "1-sweep2.png", "2-sweep2.png"} < {p.name for p in (tmp_path / "two").iterdir()}


def test_a_recipe_of_another_study_is_left_out(tuned, tmp_path):
    made(tmp_path)
    (tmp_path / "recipe.json").write_bytes((tuned / "study" / "recipe.json").read_bytes())
    known = know(tmp_path)
    assert known.recipe is None
    assert "another study" in known.notes[-1]
    (tmp_path / "recipe.json").write_text(json.dumps({"format": "<x>"}))
    assert "left out" in know(tmp_path).notes[-1]


def test_many_points_and_all_diverged_are_drawn(tmp_path):
    many = InMemoryStorage()
    made(many, factors=tuple(1.1**i for i in range(16)), noises=tuple(0.01 * 1.4**i for i in range(12)))
    assert len(wide_of(know(tmp_path, many)).tried) == 16 * 13
    assert write_report(tmp_path, storage=many).is_file()
    none = InMemoryStorage()
    with refused("study.base_diverged"):
        made(none, lrs=(2.0, 4.0))
    assert "every run of sweep 1 diverged" in write_report(tmp_path, storage=none).read_text()


def test_a_study_that_is_not_there_is_refused(tmp_path):
    made(tmp_path / "study", 2, name="mine")
    with refused("study.unknown_name", where="'mine'"):
        write_report(tmp_path / "study")
    assert know(tmp_path / "study", study="mine").work.counted == 2
    with refused("report.names_unlike_folders"):
        write_report(tmp_path / "study", study=["a", "b"])
    with refused("study.no_journal", where="nowhere"):
        write_report(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_tuning_without_matplotlib_says_one_line_and_succeeds(tuned, monkeypatch, capsys):
    for name in [n for n in sys.modules if n.startswith("mupscale.studies.report.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    arguments = "--width 6 -k 2 --steps 16 --lrs 0.004,0.008 --scheme sigma --noises 0.1,1000 --factors 0.5,1 --extend 0 --quiet"
    given = ["tune", str(tuned / "proxy.py"), *arguments.split(), "--folder", str(tuned / "study")]
    assert main(given) == 0
    assert "pip install 'mupscale[plot]'" in capsys.readouterr().out.splitlines()[-1]
    assert main([*given, "--no-report"]) == 0
    assert "report:" not in capsys.readouterr().out


SETTINGS_OF_0_2_0 = {
    "width": 64, "k": 2, "steps": 80, "wide_steps": None, "reference": None, "lrs": [0.01, 0.02], "noises": [0.1],
    "scheme": "sigma", "factors": [1.0], "halving": True, "rungs": [0.5], "keep": 0.5, "extend": 0, "seed": 0,
    "control_at_base": True, "stay": True, "batch": 16, "optimizer": "torch.optim.AdamW", "constants": "[]",
    "proxy": "0123456789abcdef", "flops": [10, 20], "sampler": "grid", "generations": 3,
}  # fmt: skip
TRIALS_OF_0_2_0 = [
    ("base-lr=0.01 to step 40", 0, 40, 3.0),
    ("base-lr=0.02 to step 40", 0, 40, 2.0),
    ("base-lr=0.02 to step 80", 40, 80, 1.5),
    ("zero noise is the base", 0, 8, 1e-7),
    ("wide-noise=0-lr=0.02 to step 40", 0, 40, 1.4),
    ("wide-noise=0.1-lr=0.02 to step 40", 0, 40, 1.6),
    ("wide-noise=0-lr=0.02 to step 80", 40, 80, 1.3),
    ("wide-noise=0.1-lr=0.02 to step 80", 40, 80, 1.1),
    ("stay, going on to step 160", 0, 160, 1.25),
    ("stay, from scratch to step 240", 0, 240, 1.2),
]


@pytest.mark.parametrize("name", ["stretch", "leg"])
def test_a_study_that_0_2_0_stored_is_read(name: str):
    """Written by Optuna alone, by the names of 0.2.0. Control: by another name of one attribute nothing is found."""
    storage = InMemoryStorage()
    study = storage.create_new_study([StudyDirection.MINIMIZE], "mupscale")
    storage.set_study_user_attr(study, "settings", SETTINGS_OF_0_2_0)
    for key, begin, end, loss in TRIALS_OF_0_2_0:
        told = {"curve": [[end, loss]], "seconds": 2.0, "resumed_at": end // 2, "steps": 9, "tolerance": 1e-3}
        kept = {name: key, "begin": begin, "end": end, "told": told}
        storage.create_new_trial(study, create_trial(value=loss, user_attrs=kept))
    lost = {name: TRIALS_OF_0_2_0[0][0], "begin": 0, "end": 40, "extra": "its worker was silent"}
    storage.create_new_trial(study, create_trial(state=TrialState.FAIL, user_attrs=lost))
    if name != "stretch":
        with pytest.raises(KeyError):
            know("somewhere", storage)
        return
    known = know("somewhere", storage)
    assert known.done
    assert (known.base.best, wide_of(known).best) == (Point(0.02), Point(0.02, 0.1))
    assert [done.loss for done in known.stay.values() if done is not None] == [1.25, 1.2]
    assert [tried.curve for tried in known.base.tried][1] == ((40, 2.0), (80, 1.5))
    assert (known.work.counted, known.work.killed, known.work.seconds) == (10, 1, 20.0)
    assert known.work.resumed == sum(end // 2 > begin for _, begin, end, _ in TRIALS_OF_0_2_0)
    (trouble,) = known.work.troubles
    assert (trouble.leg, trouble.why) == ("base-lr=0.01 to step 40", "its worker was silent")
    check_same(known.settings, SETTINGS_OF_0_2_0)
