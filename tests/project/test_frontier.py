"""The study of decayed schedules: specs are stored once, runs resume, budgets are kept, missing seeds are reported."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import mupscale as mu
from mupscale.rules.noise_defaults import BEHIND, BEHIND_OF
from reproduce.growth import clock, command
from reproduce.growth.book import NOT_RUN, Book, sunk_contest
from reproduce.growth.methods import METHODS, grow
from reproduce.growth.page import figures, marked, quoted
from reproduce.growth.page import new_units as new_units_tables
from reproduce.growth.page.stored import Stored, stored
from reproduce.growth.questions import (
    after,
    exactness,
    family,
    midrun,
    new_units,
    noise_rule,
    order,
    states,
    sunk,
    unseen,
    widths,
)
from reproduce.growth.settings import text
from reproduce.growth.settings.mlp import made_up, task
from reproduce.growth.sizes import HERE, SMOKE
from reproduce.growth.spec import Spec, spec_of
from reproduce.growth.studies import STUDIES
from reproduce.growth.train import Trainer
from reproduce.peers import SHRINK
from reproduce.store import Store

pytestmark = pytest.mark.nightly

NARROW = Spec(8, 40_000_000, 2**-6, 0)


class KilledError(Exception):
    pass


def trainer(folder, stop=None, **options):
    """A trainer on made-up rows; `stop` ends it like a kill would, after so many steps. Steps taken are counted."""
    taken: list[int] = []

    def setting(spec):
        made = task(spec.layers, made_up, SMOKE.reference)

        def loss(model, step, seed):
            if model.training and stop is not None and len(taken) == stop:
                raise KilledError
            taken.append(step)
            return made.loss(model, step, seed)

        return replace(made, loss=loss)

    made = Trainer(Store(folder / "runs.jsonl"), folder / "cache", setting, say=lambda line: None, **options)
    return made, taken


def grown(**changes):
    return replace(NARROW, width=16, start=NARROW, **changes)


def invented(spec):
    """A result without training: wider is better, growing better still, and seeds differ a little."""
    loss = 1 / spec.width + 0.001 * spec.seed - (0.005 if spec.grows else 0.0) + abs(spec.lr - 2**-6)
    noise = {name: {"train": value} for name, value in (("before", 0.3), ("after", 0.4), ("untrained", 1.9))}
    result = {"held": loss, "choose": loss, "train": loss, "early": loss, "diverged": False}
    return {**result, "noise": {**noise, "t": 0.1}, "steps": 100, "flops": 100, "flops_before": 100}


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Every run of the smallest study, with an invented result, as a store knows it."""
    store = Store(tmp_path_factory.mktemp("frontier") / "all.jsonl")
    while (spec := order.next_missing(lambda spec: store.known(spec.key), SMOKE)) is not None:
        store.of(spec.key, partial(invented, spec))
    again = Store(store.path)
    return lambda spec: again.known(spec.key)


def test_a_stored_run_is_not_made_again(tmp_path):
    first = trainer(tmp_path)[0].run(grown(noise=0.1))
    again, taken = trainer(tmp_path)
    assert again.run(grown(noise=0.1)) == first
    assert not taken
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [spec_of(line["key"]) for line in lines] == [NARROW, grown(noise=0.1)]


@pytest.mark.parametrize("spec", [NARROW, grown(noise=0.1), grown(noise=0.1, at=0.25)], ids=lambda s: s.label)
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, spec):
    straight, all_steps = trainer(tmp_path / "straight")
    wanted = straight.run(spec)
    with pytest.raises(KilledError):
        trainer(tmp_path, stop=len(all_steps) - 5, save_every=0.0)[0].run(spec)
    again, taken = trainer(tmp_path)
    found = again.run(spec)
    assert len(taken) < len(all_steps) / 2
    for name in ("held", "curve", "early", "steps", "flops"):
        assert found[name] == wanted[name], name


def test_a_lost_cache_gives_the_same_base(tmp_path):
    spec = grown(noise=0.1, at=0.5)
    wanted = trainer(tmp_path)[0].run(spec)
    kept = (tmp_path / "runs.jsonl").read_text().splitlines()
    (tmp_path / "runs.jsonl").write_text(kept[0] + "\n")
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    assert trainer(tmp_path)[0].run(spec)["held"] == wanted["held"]


def test_phases_share_the_budget_and_the_clock(tmp_path):
    made, _ = trainer(tmp_path)
    for share in HERE.shares:
        spec = Spec(64, 10**11, 2**-6, 0)
        spec = replace(spec, width=256, start=spec, at=share)
        phase = made.phase(spec)
        assert phase.begins == pytest.approx(share, abs=phase.flops / phase.budget)
        assert phase.spent(phase.steps) == pytest.approx(1.0, abs=phase.flops / phase.budget)
        steps_alone = made.phase(spec.start).steps
        assert phase.first == round(share * steps_alone)
    again = made.phase(replace(spec, at=1.0))
    assert (again.begins, again.first) == (0.0, steps_alone)
    assert clock.multiplier(again.spent(again.steps)) < 0.01


@pytest.mark.parametrize("share", HERE.family_shares)
def test_a_family_pays_for_a_common_way_once(share):
    """Control: three ways from their first steps on cost more than what is saved leaves."""
    made, known = STUDIES["mlp"].trainer(), STUDIES["mlp"].trainer().known
    small = family.independent(known, HERE)[0].chosen
    middle, large = (arm.chosen for arm in family.grown(known, HERE, share))
    phases = [made.phase(spec) for spec in (small, middle, large) if spec is not None]
    assert len(phases) == 3
    assert [phase.begins for phase in phases] == pytest.approx([0.0, 0.25, 0.25], abs=1e-4)
    own = [phase.steps * phase.flops for phase in phases]
    alone = sum(HERE.flops(HERE.family.units * 2**i) for i in range(3))
    assert 1 - sum(own) / alone == pytest.approx(family.saved(share), abs=1e-4)
    whole = sum(own) + sum(phase.begins * phase.budget for phase in phases)
    assert 1 - whole / alone < family.saved(share) - 0.1


@pytest.mark.parametrize(
    ("state", "follows"), [("carried", True), ("wrong_units", False), ("fresh", False), ("asymmetric", False)]
)
def test_only_the_carried_state_follows_the_base(tmp_path, state, follows):
    """Without noise a wide run of as many steps is the base's own, if the rate is the same at every step."""
    made, _ = trainer(tmp_path)
    made.run(NARROW)
    base = made._trained(NARROW, 0.5)
    wide, _ = made._begin(grown(at=0.5, state=state))
    setting = made.of(NARROW)
    ends = []
    for run in (base, wide):
        mu.set_lr_(run.optimizer, NARROW.lr)
        ends.append([setting.step(run, step, 0) for step in range(30)][-1])
    apart = abs(ends[0] - ends[1]) / ends[0]
    assert (apart < 1e-3) == follows, apart


def test_every_stage_is_listed_and_ends(known):
    for stage in SMOKE.stages:
        listed = list(order.specs(known, SMOKE, stage))
        assert listed
        assert {spec.seed for spec in listed} == {SMOKE.tuning_seed, *SMOKE.seeds}
    first = next(order.specs(lambda spec: None, HERE))
    assert (first.start, first.seed) == (None, HERE.tuning_seed)


def test_choices_look_at_the_tuning_seed_alone(known):
    def spoiled(spec):
        found = known(spec)
        if found is None or spec.seed == SMOKE.tuning_seed:
            return found
        return {**found, "held": 9.0, "choose": 9.0 - found["choose"]}

    for name in midrun.names(SMOKE):
        told = [midrun.arm(each, SMOKE, name, SMOKE.mid_run[1]).chosen for each in (known, spoiled)]
        assert told[0] is not None
        assert told[0] == told[1]


def stock(spec):
    """The Llama and the Mixtral, with invented results."""
    loss = 4.0 - 0.1 * spec.grows + 0.001 * spec.seed
    noise = {name: {"choose": 4.0} for name in ("before", "after")}
    return {"held": loss, "choose": loss, "noise": noise, "steps": 100}


def test_tables_and_figures_are_printed_from_a_store(known):
    lines: list[str] = []
    found = Stored([Book(known, SMOKE)], stock)
    assert marked.show(found, lines.append) == 0
    told = dict(part.split("=") for part in lines[-1].split())
    assert list(told) == [
        *("settings", "methods", "runs", "quarter", "once", "midrun", "family", "lm_quarter", "lm_once"),
        *("large_once", "depth_over_peers", "experts_over_peers", "without_sweep"),
    ]
    assert {name for name, value in told.items() if value == NOT_RUN} == {
        *("family", "large_once", "lm_quarter", "lm_once")
    }
    book, base = found.books[0], SMOKE.cited_bases[0]
    ours, copies = book.new_units(base, "copied readers", 1.0), book.sunk(base, "grown to 16", 1.0)
    assert ours is not None
    assert copies is not None
    assert float(told["once"]) == pytest.approx(copies.mean / ours.mean, abs=1e-4)
    recipe, tuned = (book.unseen(name) for name in unseen.NAMES)
    assert recipe is not None
    assert tuned is not None
    printed = "\n".join(lines)
    for name in ("right_width", "after", "state", "untuned", "order", "mixture"):
        assert f"\n{name}\n| |" in printed.replace("| the peak after growth |", "| |"), name


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("b", sunk.names(SMOKE, SMOKE.bases[0])[1]),
        ("b", "goes on"),
        ("c", "carried, no noise"),
        ("a", "grown at 0.5"),
        ("d", "recipe"),
        ("b", sunk.ruled(SMOKE, SMOKE.bases[0])[0]),
        ("u", "copied readers"),
        ("u", "new units, moments kept"),
        ("w", "copied readers"),
        ("r", "copies, 1, 2"),
        ("s", "fresh, noise"),
    ],
)
def test_a_missing_seed_fails(known, name, without):
    base = SMOKE.bases[0]
    arm = {
        "b": lambda: sunk.arm(known, SMOKE, base, without, 1.0),
        "c": lambda: exactness.arm(known, SMOKE, without),
        "a": lambda: midrun.arm(known, SMOKE, without, SMOKE.mid_run[1]),
        "d": lambda: unseen.arm(known, SMOKE, without),
        "u": lambda: new_units.arm(known, SMOKE, base, without, 1.0),
        "w": lambda: widths.arm(known, SMOKE, SMOKE.ways[0], without),
        "r": lambda: after.arm(known, SMOKE, without),
        "s": lambda: states.arm(known, SMOKE, without),
    }[name]()
    assert arm.chosen is not None
    lost = arm.chosen.with_seed(SMOKE.seeds[-1])
    lines: list[str] = []
    book = Book(lambda spec: None if spec == lost else known(spec), SMOKE)
    assert marked.show(Stored([book], stock), lines.append) == 1
    assert any(line.startswith(f"missing: {name}: ") and line.endswith(without) for line in lines)


def test_an_empty_store_has_not_run(tmp_path):
    lines: list[str] = []
    assert marked.show(Stored([Book(lambda spec: None, HERE)]), lines.append) == 1
    told = dict(part.split("=") for part in lines[-1].split())
    counted = {told.pop(name) for name in ("settings", "methods", "runs")}
    assert counted == {"0", "1"}
    assert {part for value in told.values() for part in value.split(",")} == {NOT_RUN}


@pytest.mark.slow
@pytest.mark.timeout(7200)  # its work is bounded; the wall clock of a busy machine is not
def test_the_smoke_run_makes_every_stage(tmp_path, capsys):
    assert command.smoke(tmp_path) == 0
    assert " quarter=not_run" not in capsys.readouterr().out


def test_the_sentences_about_optimizer_state_are_what_is_stored():
    book = stored().books[0]
    arms = {name: book.exactness(name) for name in exactness.cited(HERE)}
    means = {name: seen.mean for name, seen in arms.items() if seen is not None}
    noisy = {name: mean for name, mean in means.items() if name.endswith(", noise")}
    assert max(noisy, key=noisy.__getitem__) == "wrong_units, noise"
    by_state = max(noisy.values()) - min(noisy.values())
    by_noise = means["carried, no noise"] - means["carried, noise"]
    assert by_noise > 4 * by_state, "noise is worth far more than the state"
    assert noisy["carried, noise"] > noisy["fresh, noise"], "a fresh optimizer does as well"


def test_how_long_copies_are_behind_the_base_is_what_is_stored():
    study = STUDIES["text"]
    book, [base] = Book.of(study, study.trainer()), study.sizes.cited_bases
    grown, stays = (book.sunk(base, name, 1.0) for name in ("grown to 64", "goes on"))
    assert grown is not None
    assert stays is not None
    ours, theirs = (new_units_tables._curve(book, each.chosen) for each in (grown, stays))
    behind = max(i for i, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one >= other) + 1
    steps = (book.known(grown.chosen.with_seed(study.sizes.seeds[0])) or {})["steps"]
    assert steps == BEHIND_OF
    assert pytest.approx(behind / len(ours) * steps, rel=0.01) == BEHIND


def test_noise_by_rule_is_the_librarys_own_choice_for_the_steps_that_follow(tmp_path):
    made, _ = trainer(tmp_path)
    spec = grown(by_rule=True, at=0.5)
    result = made.run(spec)
    told = result["noise"]
    share = mu.AutoNoise(steps=result["steps"]).share
    rise = told["after"]["train"] - told["before"]["train"]
    wide, _ = made._begin(replace(spec, by_rule=False, noise=told["t"]))
    by_rule, _ = made._begin(spec)
    untrained = by_rule.provenance["auto"]["untrained"]
    assert rise == pytest.approx(share * (untrained - told["before"]["train"]), rel=0.2)
    assert all(map(torch.equal, wide.model.parameters(), by_rule.model.parameters()))
    assert "noise" not in spec.key


@pytest.mark.parametrize("method", ["new_units", "copied_readers"])
def test_new_units_leave_the_loss_and_the_state_of_what_was_there(tmp_path, method):
    made, _ = trainer(tmp_path)
    spec = grown(at=0.5, method=method, state="kept")
    result = made.run(spec)
    assert result["noise"]["after"]["train"] == pytest.approx(result["noise"]["before"]["train"], rel=1e-4)
    base = made._trained(NARROW, 0.5)
    kept, empty = (made._begin(replace(spec, state=state))[0] for state in ("kept", "empty"))
    old, new = (run.optimizer.state[run.model.get_parameter("2.weight")] for run in (base, kept))
    assert torch.equal(new["exp_avg_sq"][:8, :8], old["exp_avg_sq"])
    assert not new["exp_avg_sq"][8:].any()
    assert not empty.optimizer.state
    weights = [run.model.get_parameter("2.weight") for run in (base, kept)]
    assert torch.equal(weights[1][:8, :8], weights[0])
    assert not weights[1][:8, 8:].any(), "old units do not read new ones yet"
    assert bool(weights[1][8:, :8].all()), "new units read what was there"


def test_one_rate_for_all_tensors_leaves_out_the_factor_of_the_fold():
    """Control: without it what writes the stream and the gains behind it have rates of their own."""
    setting = text.task(text.made_up, 32, measured=1)
    start = Spec(32, 10**9, 2**-6, 0)
    spec = replace(start, width=64, start=start, at=0.5, method="copied_readers")
    rates = []
    for one in (True, False):
        base = setting.fresh(32, start.lr, 0)
        run = grow(setting, base, replace(spec, one_rate=one), 1, lambda model: setting.loss(model, 0, 0))
        rates.append({group["lr"] for group in run.optimizer.param_groups})
    assert rates[0] == {2**-6}
    assert len(rates[1]) > 2


def test_readers_are_ranked_case_by_case(known):
    """Copied readers are made the better ones in every case of the text, and the worse ones with a larger budget."""

    def better(spec):
        found = known(spec)
        if found is None or spec.method != "copied_readers":
            return found
        return {**found, "held": found["held"] * (1.1 if spec.budget == SMOKE.flops(4) else 0.9)}

    told = new_units_tables.ranks(Book(better, SMOKE))
    assert told is not None
    assert sum(told.values()) == 3.0
    assert new_units_tables.ranks(Book(known, SMOKE)) == {"new units": 1.5, "copied readers": 1.5}
    assert new_units_tables.chosen([Book(better, SMOKE)]) == min(reversed(told), key=told.__getitem__)
    ratios = new_units_tables.kept_over_empty(Book(known, SMOKE))
    assert all(values == (1.0, 1.0) for values in ratios.values()), "one for every seed"
    assert len(ratios) == 4


def test_only_first_copies_keep_their_moments(tmp_path):
    made, _ = trainer(tmp_path)
    made.run(NARROW)
    run, _ = made._begin(grown(at=0.5, state="asymmetric"))
    moments = run.optimizer.state[run.model.get_parameter("2.weight")]["exp_avg_sq"]
    assert bool(moments[::2, ::2].any())
    assert not moments[1::2].any()
    assert not moments[:, 1::2].any()


@pytest.mark.parametrize(("method", "keeps"), [("split", True), ("lemon", True), ("net2wider", False)])
def test_what_leaves_the_loss_of_the_base(tmp_path, method, keeps):
    found = trainer(tmp_path)[0].run(grown(method=method, at=0.5))["noise"]
    gap = abs(found["after"]["train"] - found["before"]["train"])
    assert (gap < 1e-4) == keeps, gap


def test_later_copies_step_further_as_sparkling_has_it(tmp_path):
    """Control: the same state without the method steps all copies alike."""
    made, _ = trainer(tmp_path)
    made.run(NARROW)
    steps = []
    for method in ("sparkling", "ours"):
        run, _ = made._begin(grown(at=0.5, state="asymmetric", method=method))
        weight = run.model.get_parameter("2.weight")
        before = weight.detach().clone()
        made.of(NARROW).step(run, 0, 0)
        steps.append(weight.detach() - before)
    faster, usual = steps
    assert torch.allclose(faster[::2, ::2], usual[::2, ::2], atol=1e-7)
    assert torch.allclose(faster[1::2], 1.3 * usual[1::2], atol=1e-7)
    assert bool(usual[1::2].any())


def test_every_method_is_found_by_its_file():
    assert {"ours", "copied_readers", "tiling", "stack", "upcycling", "expert_upcycling"} <= METHODS.keys()
    for name, method in METHODS.items():
        assert (method.name, bool(method.source), bool(method.rates)) == (name, True, True)
    base = Spec(32, 10**9, 2**-7, 0, layers=2)
    assert (
        METHODS["stack"].of(base, 5).key == replace(base, layers=4, budget=5, start=base, method="stack").key
    )
    assert not METHODS["copied_readers"].published
    assert METHODS["tiling"].published


def test_the_plan_says_what_lacks():
    lines: list[str] = []
    assert command.plan(lines.append) == 0
    assert any(line.startswith("mlp b: ") and " 0 lack" not in line for line in lines)


def test_a_run_that_stops_early_has_the_schedule_of_the_whole(tmp_path):
    made, _ = trainer(tmp_path)
    whole, part = (made.run(grown(noise=0.1, at=0.25, stop=stop)) for stop in (1.0, 0.1))
    assert (part["early"], part["curve"][0]) == (whole["early"], whole["curve"][0])
    assert part["steps"] == round(0.1 * whole["steps"])


def test_shrink_pad_and_perturb_has_the_base_in_its_first_block(tmp_path):
    made, _ = trainer(tmp_path)
    made.run(NARROW)
    base = made._trained(NARROW, 0.5)
    fresh = made.of(NARROW).fresh(16, NARROW.lr, 0)
    run, _ = made._begin(grown(at=0.5, method="shrink_pad"))
    found, start, small = (each.model.get_parameter("2.weight") for each in (run, fresh, base))
    assert torch.allclose(found[:8, :8] - start[:8, :8], SHRINK * small, atol=1e-6)
    assert torch.equal(found[8:], start[8:])


def test_a_rule_is_judged_between_the_noises_beside_it():
    case = noise_rule.Case("", 1000, 1.0, ((0.01, 1.2), (0.1, 1.0), (1.0, 1.5)))
    assert case.best == 0.1
    assert [round(case.regret(share), 3) for share in (0.001, 0.1, 10**-0.5, 5.0)] == [0.2, 0.0, 0.25, 0.5]
    assert noise_rule.regrets([case], lambda case: case.best) == (0.0, 0.0)


def test_the_rule_is_nearer_to_the_best_noise_than_any_fixed_share():
    """What the pages say; the control is a fixed share, which must not win."""
    grown_so_far = stored().books[0].grown
    mean = {name: noise_rule.regrets(grown_so_far, rule)[0] for name, rule in noise_rule.RULES.items()}
    (ours,) = (value for name, value in mean.items() if name.endswith("(the rule)"))
    assert ours < min(value for name, value in mean.items() if name.startswith("a fixed"))


def test_a_page_that_says_otherwise_than_the_store_is_told(tmp_path):
    """The pages as they are, then with a figure that is another, then with one that no run accounts for."""
    found = stored()
    assert marked.differences() == []
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("frontier.md", "growth.md", "../README.md"):
        (docs / name).write_text((marked.DOCS / name).read_text("utf-8"), "utf-8")
    assert quoted.unlike(found, docs) == []
    page = docs / "growth.md"
    page.write_text(page.read_text("utf-8").replace("0.034", "0.035"), "utf-8")
    assert "growth.md does not say" in quoted.unlike(found, docs)[0]
    page = docs / "frontier.md"
    page.write_text(page.read_text("utf-8") + "\nIt ends 12.3 % below.\n", "utf-8")
    assert "12.3 %" in quoted.unlike(found, docs)[-1]
    assert marked.page("<!-- table ranks -->\n<!-- end of table -->", found).count("|") > 10


def test_the_default_is_compared_with_the_best_of_the_others(known):
    """Control: a published method that ends lower takes the place of the best."""
    base, found = SMOKE.cited_bases[0], Stored([Book(known, SMOKE)], stock)
    gain = figures.over_the_best(found, found.books[0], base, 1.0)

    def better(spec):
        result = known(spec)
        lower = result is not None and spec.method == "tiling"
        return {**result, **{name: 0.1 * result[name] for name in ("held", "choose")}} if lower else result

    lower = figures.over_the_best(found, Book(better, SMOKE), base, 1.0)
    assert gain is not None
    assert lower is not None
    assert lower[0] < 1
    assert lower[0] < gain[0]


def test_the_readme_says_what_is_stored():
    book = stored().books[0]
    base = HERE.cited_bases[0]
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    arms = {name: book.sunk(base, name, 1.0) for name in sunk.names(HERE, base)}
    means = {name: seen.mean for name, seen in arms.items() if seen is not None}
    for name in ("grown to 64", "goes on", "scratch 64"):
        assert f"{means[name]:.3f}" in readme, name
    text = stored().books[1]
    llama = text.sizes.cited_bases[0]
    cited = {extra: book.new_units(base, "copied readers", extra) for extra in (0.25, 1.0)}
    others = (text.new_units(llama, "copied readers", 1.0), text.sunk(llama, "goes on", 1.0))
    for seen in (*cited.values(), *others, book.sunk(base, "goes on", 0.25)):
        assert seen is not None
        assert f"{seen.mean:.3f}" in readme, seen
    quarter = sunk_contest(book, base, 0.25)
    assert quarter is not None
    assert not quarter[1], "with a quarter growing gains nothing"
    assert means["grown to 128"] > means["grown to 64"], "four times the width gains less"
