"""The experiments: peers keep the function that they claim to keep, runs resume, the ledger gives the paper's numbers."""

import json
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import mupscale as mu
from harness.closeness import difference
from harness.refusals import refused
from mupscale.budgets.cost import Cost
from mupscale.rules.noise_defaults import DEFAULT_T
from mupscale.training.recipe import TensorGrowth
from reproduce import command, ledger, page, peers, stages, without_proxy
from reproduce.books import books, curves_of, missed
from reproduce.data import DATA
from reproduce.gpt2 import setting as gpt2
from reproduce.mlp import scales as mlp_scales
from reproduce.mlp import setting as mlp
from reproduce.resnet import setting as resnet
from reproduce.scale import Scale
from reproduce.setting import Setting

pytestmark = pytest.mark.nightly

few = pytest.mark.filterwarnings("ignore:the recipe comes from a proxy of")


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def images(count=8):
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def rows(count=64, step=0):
    x = torch.randn(count, 54, generator=torch.Generator().manual_seed(step))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def mlp_setting(optimizer="adamw"):
    """The MLP on made-up rows."""
    kind, constants = mlp.OPTIMIZERS[optimizer]

    def loss(model, step, seed):
        x, y = rows(step=1000 * seed + step)
        return F.cross_entropy(model(x), y)

    def watch(model):
        with torch.no_grad():
            return {"held_out": float(loss(model, 500, 0))}

    return Setting(
        f"toy_{optimizer}", mlp.build, loss, watch, kind, 8, constants, watch=watch,
        inputs=lambda: rows()[0], batch=64,
    )  # fmt: skip


def resnet_setting():
    def loss(model, step, seed):
        return F.cross_entropy(model(images()), torch.arange(8))

    return Setting(
        "toy_resnet", resnet.ResNet18, loss, lambda model: {}, torch.optim.SGD, 2, resnet.CONSTANTS,
        shapes_tell=False,
    )  # fmt: skip


def start_of(setting, sigma=0.0, width=None, k=2, steps=5):
    """A trained base and a recipe as tuning would have written it."""
    width = 2 * setting.reference if width is None else width
    base = setting.fresh(width, 0.01, 0)
    setting.train(base, range(steps), 0)
    plan = setting.plan(setting.reference, k * setting.reference)
    constants = {"lr": 0.02, **setting.constants}
    if setting.optimizer is torch.optim.AdamW:
        constants |= {"eps": 1e-8, "betas": [0.9, 0.999]}
    name = f"torch.optim.{setting.optimizer.__name__}"
    recipe = mu.studies.Recipe(
        name, constants, sigma, k=k, tensors=TensorGrowth.all_of(plan, None), width=setting.reference,
        reference=setting.reference, base_lr=0.01,
    )  # fmt: skip
    return peers.Start(setting, base, width, k, 0.01, recipe, seed=3)


def moved(start, run):
    """How far the output is from the base's, in the mode in which both are trained, relative."""
    x = rows()[0] if start.setting.name.startswith("toy_a") or "toy_s" in start.setting.name else images()
    with torch.no_grad():
        before, after = start.base.model(x), run.model(x)
    return difference(after, before)


@pytest.mark.parametrize("make", [mlp_setting, resnet_setting])
@pytest.mark.parametrize(
    "grow",
    [lambda s: peers.net2wider(s, jitter=0.0), peers.zero_padding, peers.tiling, peers.ours],
    ids=["net2wider", "zero_padding", "tiling", "ours"],
)
def test_a_method_that_claims_it_keeps_the_function(make, grow):
    start = start_of(make(), 0.0 if make is mlp_setting else {})
    if make is resnet_setting:
        sigmas = {n: 0.0 for n, e in start.plan.tensors.items() if e.kind == "parameter"}
        start = replace(start, recipe=replace(start.recipe, sigma=sigmas))
    run = grow(start)
    assert moved(start, run) < 1e-12
    assert run.model is not start.base.model


def test_controls_the_nearest_wrong_rules_move_the_function():
    start = start_of(mlp_setting())
    assert moved(start, peers.net2wider(start)) > 1e-4  # its own noise
    padded = peers.zero_padding(start)
    with torch.no_grad():
        dict(padded.model.named_parameters())["6.weight"][:, start.width :] += 0.1  # new units that are read
    assert moved(start, padded) > 1e-4
    noisy = replace(start, recipe=replace(start.recipe, sigma=0.1))
    assert moved(start, peers.ours(noisy)) > 1e-3


def test_duplicated_units_are_divided_by_how_often_they_occur():
    start = start_of(mlp_setting())
    base, wide = start.base.model.state_dict(), peers.net2wider(start, jitter=0.0).model.state_dict()
    assert torch.equal(wide["0.weight"][: start.width], base["0.weight"])
    assert torch.allclose(wide["2.weight"].sum(1)[: start.width], base["2.weight"].sum(1), atol=1e-12)
    copies = (wide["0.weight"][:, None] == base["0.weight"][None]).all(-1).sum(0)
    assert int(copies.max()) > 2, "duplication is random, so that some units occur more often than others"


def test_the_papers_code_shrinks_hidden_noise_and_leaves_eps():
    start = start_of(mlp_setting(), 0.5, width=64)
    right, wrong = peers.ours(start), peers.paper_code(start)
    quiet = mu.upscale(start.base, start.build, mu.MupNoise(0.0), plan=start.plan)
    for name, ratio in (("0.weight", 1.0), ("2.weight", 0.5), ("6.weight", 1.0)):
        own, theirs, none = (dict(r.model.named_parameters())[name].detach() for r in (right, wrong, quiet))
        assert float(((theirs - none) / (own - none)).mean()) == pytest.approx(ratio, abs=1e-9), name
    eps = [{g["eps"] for g in run.optimizers[0].param_groups} for run in (right, wrong)]
    assert len(eps[0]) > 1
    assert eps[1] == {1e-8}


def test_the_papers_code_shifts_gains_and_loses_statistics():
    start = start_of(resnet_setting())
    sigmas = {n: 0.01 for n, e in start.plan.tensors.items() if e.kind == "parameter" and len(e.axes) > 1}
    tried = [{"sweep": "wide", "noise": 0.3, "lr": 0.02, "steps": 5, "loss": 1.0}]
    start = replace(start, recipe=replace(start.recipe, sigma=sigmas, tried=tried, wide_steps=5))
    right, wrong = (run.model.state_dict() for run in (peers.ours(start), peers.paper_code(start)))
    assert float((wrong["norm.weight"] - right["norm.weight"]).mean()) == pytest.approx(0.3, rel=0.1)
    assert float(wrong["norm.running_mean"].abs().max()) == 0 < float(right["norm.running_mean"].abs().max())


def test_peers_keep_the_rates_of_the_base_and_start_with_no_state():
    start = start_of(mlp_setting())

    def rates(run):
        names = {id(p): n for n, p in run.model.named_parameters()}
        return {names[id(p)]: g["lr"] for o in run.optimizers for g in o.param_groups for p in g["params"]}

    assert rates(peers.tiling(start)) == rates(start.base)
    tenth = {name: rate * 0.1 for name, rate in rates(start.base).items()}
    assert rates(peers.net2wider(start)) == pytest.approx(tenth)
    assert not peers.tiling(start).optimizers[0].state
    assert peers.ours(start).optimizers[0].state
    ours = rates(peers.ours(start))
    assert ours["2.weight"] != ours["0.weight"]  # control: ours follows the width


def test_muon_takes_the_hidden_matrices_and_adamw_goes_on_with_the_rest():
    start = start_of(mlp_setting(), 0.1)
    run = peers.ours_muon(start)
    held = [[p for g in o.param_groups for p in g["params"]] for o in run.optimizers]
    assert [tuple(p.shape) for p in held[0]] == [(32, 32), (32, 32)]
    assert {id(p) for part in held for p in part} == {id(p) for p in run.model.parameters()}
    assert all(run.optimizers[1].state[p] for p in held[1])
    losses = start.setting.train(run, range(5, 25), 0)
    assert losses[-1] < losses[0]


def test_methods_that_cannot_be_applied_say_why():
    text = gpt2.setting(gpt2.Sizes(layers=1, context=8, batch=2, words=32))
    assert "norm" in (peers.why_not("net2wider", text) or "")
    assert "norm" in (peers.why_not("zero_padding", text) or "")
    assert peers.why_not("tiling", text) is None
    assert "convolution" in (peers.why_not("ours_muon", resnet_setting()) or "")
    assert peers.why_not("net2wider", resnet_setting()) is None


@pytest.mark.skipif(not DATA.is_dir(), reason="there are no texts; set MUPSCALE_DATA")
@pytest.mark.parametrize("head_size", [None, 4])
def test_the_declared_plan_is_the_one_that_the_gradient_identity_finds(head_size):
    sizes = gpt2.Sizes(layers=1, heads=2, head_size=head_size, context=6, batch=2, words=32, reference=8)
    declared = gpt2.setting(sizes)

    def loss(model, step, seed):
        tokens = torch.randint(32, (2, 7), generator=torch.Generator().manual_seed(0))
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, -2), tokens[:, 1:].flatten())

    searched = replace(declared, declare=None, loss=loss)
    assert declared.plan(8, 16) == searched.plan(8, 16)


def test_a_batch_in_parts_is_the_batch():
    whole = mlp_setting()

    def half(model, step, seed):
        x, y = rows(step=step // 2)
        part = slice(step % 2 * 32, (step % 2 + 1) * 32)
        return F.cross_entropy(model(x[part]), y[part])

    parts = replace(whole, loss=half, parts=2)
    runs = [s.fresh(16, 0.01, 0) for s in (whole, parts)]
    losses = [s.train(run, range(4), 0) for s, run in zip((whole, parts), runs, strict=True)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_a_curve_that_was_cut_off_goes_on_where_it_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(stages, "SAVE_EVERY", 0.0)
    setting, job = mlp_setting(), stages.Job("scratch", "scratch", 0, 16, 12, 0)
    path, seen = tmp_path / "run.pt", []

    def watch(model):
        seen.append(1)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return {"held_out": float(len(seen))}

    with pytest.raises(KeyboardInterrupt):
        stages.train_curve(replace(setting, watch=watch), setting.fresh(16, 0.01, 0), job, 6, path)
    again = stages.train_curve(setting, setting.fresh(16, 0.01, 0), job, 6, path)
    whole = stages.train_curve(setting, setting.fresh(16, 0.01, 0), job, 6, tmp_path / "other.pt")
    assert again["loss"] == whole["loss"]
    assert again["held_out"][:3] == [1.0, 2.0, 3.0]


def test_a_run_that_diverges_says_so(tmp_path):
    setting = mlp_setting("sgd")
    job = stages.Job("scratch", "scratch", 0, 16, 40, 0)
    made = stages.train_curve(setting, setting.fresh(16, 1e4, 0), job, 8, tmp_path / "run.pt")
    assert made["diverged"]
    assert len(made["loss"]) < 8
    calm = stages.train_curve(setting, setting.fresh(16, 1e-3, 0), job, 8, tmp_path / "calm.pt")
    assert not calm["diverged"]


def test_a_spike_is_no_divergence(tmp_path):
    """Control: the same run, judged by single losses as sweeps without curves are, counts as diverged."""
    setting = mlp_setting()

    def spiked(model, step, seed):
        return setting.loss(model, step, seed) + (30.0 if step == 17 else 0.0)

    job = stages.Job("scratch", "scratch", 0, 16, 40, 0)
    rough = replace(setting, loss=spiked)
    assert not stages.train_curve(rough, rough.fresh(16, 1e-3, 0), job, 4, tmp_path / "run.pt")["diverged"]
    assert rough.train(rough.fresh(16, 1e-3, 0), range(40), 0)[-1] == float("inf")


def test_the_ledger_gives_the_papers_numbers():
    for scratch, base, upscaled, charged in (
        (11326, 740, 598, 8.5),
        (11326, 740, 3031, 3.0),
        (265970, 66547, 132985, 1.3),
        (37929809, 10615488, 6539099, 2.2),
    ):
        told = ledger.entry([Fraction(upscaled, scratch)], scratch, base, 0)
        assert round(told.speedups["base charged"][0], 1) == charged
    gpt = ledger.entry([Fraction(6539099, 37929809)], 37929809, 10615488, 19679775)
    assert round(gpt.speedups["both charged"][0], 2) == 1.03
    assert round(gpt.speedups["tuning charged"][0], 1) == 1.4
    assert gpt.speedups["both charged"][0] == Cost(37929809, 10615488, 19679775, 6539099).speedup(
        "both charged"
    )


def test_a_single_lucky_point_does_not_reach_the_target():
    losses = [5.0, 4.0, 1.0, 4.0, 3.0, 3.0, 2.0, 2.0, 2.0, 2.0]
    assert ledger.reached(losses, 2.2, over=1) == Fraction(3, 10)  # control
    assert ledger.reached(losses, 2.2) == Fraction(10, 10)
    told = ledger.entry([Fraction(1, 2), None], 100, 10, 0)
    assert (told.seeds, told.missed, told.speedups["base sunk"]) == (2, 1, (2.0, 2.0, 2.0))
    assert ledger.entry([None], 100, 10, 0).speedups == {}


def toy_scale(**changes):
    return Scale(
        proxy=8, base=16, k=2, steps=6, seeds=2, peer_seeds=1, lrs=(0.01,), noises=(0.1,), factors=(1.0,),
        peers=("continue", "tiling", "paper_code"), points=6, extend=0, **changes,
    )  # fmt: skip


@few
def test_an_experiment_is_run_once_and_told_on_a_page(tmp_path):
    def made():
        return stages.Experiment(
            "toy", mlp_setting(), toy_scale(), tmp_path, tmp_path / "cache", say=lambda line: None
        )

    experiment = made()
    assert books(experiment) is None
    assert "No results yet" in page.section(experiment, None, tmp_path)
    jobs = experiment.jobs()
    assert {job.method for job in jobs} == {"base", "scratch", "ours", "continue", "tiling", "paper_code"}
    for job in jobs[:-1]:
        experiment.run(job)
    before = (tmp_path / "toy_adamw.jsonl").read_text()
    again = made()
    for job in jobs[:-1]:
        again.run(job)
    assert (tmp_path / "toy_adamw.jsonl").read_text() == before, "what is kept is not made again"
    known = books(again)
    assert known is not None
    assert known.tuning.grid == 6 * (again.setting.flops(16) + again.setting.flops(8))
    assert len(curves_of(again, "ours")) == 2
    assert not missed(known, {})
    sunk = ledger.entry([Fraction(1, 4), Fraction(1, 2)], 100, 10, 0)
    good = replace(known, entries={"ours": sunk}, below=(2, 2))
    assert not missed(good, {"base sunk": 3.0, "base charged": 2.0})
    assert "3.00 on 2 of 2 seeds, expected 3.1" in missed(good, {"base sunk": 3.1})[0]
    assert "1 of 2 seeds only" in missed(replace(good, below=(1, 2)), {"base sunk": 2.0})[0]
    lucky = replace(good, entries={"ours": ledger.entry([Fraction(1, 4), None], 100, 10, 0)})
    assert missed(lucky, {"base sunk": 2.0}), "a seed that never got there is no speedup"
    drawn = {path.name for path in page.write_figures([again], tmp_path / "figures")}
    assert drawn == {f"reproduce_toy_adamw_{what}.png" for what in ("curves", "peers", "sweep", "ledger")}
    text = page.section(again, known, tmp_path / "figures")
    assert "| the paper's code | 0/1 |" in text
    assert "| tiling (HyperCloning) |" in text
    assert text.count("](figures/") == 4
    row = json.loads(before.splitlines()[-1])
    assert max(len(str(value)) for value in row["result"]["loss"]) < 9, "curves are rounded"


def test_a_change_of_the_scale_asks_for_another_sweep(tmp_path):
    one = stages.Experiment("toy", mlp_setting(), toy_scale(), tmp_path, tmp_path)
    other = replace(one, scale=replace(one.scale, noises=(0.2,)))
    same = replace(one, scale=replace(one.scale, seeds=7))
    assert one.sweep_key("main") == same.sweep_key("main") != other.sweep_key("main")


def test_results_of_other_sizes_are_not_taken_for_these(tmp_path):
    one = stages.Experiment("toy", mlp_setting(), toy_scale(), tmp_path, tmp_path)
    assert one.store.known({"seed": 0}) is None
    assert not list(tmp_path.iterdir()), "to ask leaves nothing behind"
    one.store.of({"seed": 0}, lambda: {"loss": 1.0})
    assert replace(one).store.known({"seed": 0}) is not None
    other = replace(one, scale=replace(one.scale, sizes={"rows": 3}))
    with refused(where=[str(tmp_path), "'rows': 3"]):
        _ = other.store


def test_the_papers_size_is_planned_and_refused_without_its_hardware(capsys):
    torch.set_default_dtype(torch.float32)
    assert (
        command.main("mlp", mlp_scales.SCALES, mlp.of, ["--scale", "paper", "--variant", "sgd", "--plan"])
        == 0
    )
    planned = capsys.readouterr().out
    assert "grown 500 -> 2000" in planned
    assert "memory of the widest run" in planned
    if not torch.cuda.is_available():
        assert command.main("mlp", mlp_scales.SCALES, mlp.of, ["--scale", "paper", "--variant", "sgd"]) == 2
        assert "a CUDA device" in capsys.readouterr().out


def test_the_page_has_a_place_for_every_experiment():
    text = page.PAGE.read_text()
    for experiment in page.experiments():
        assert f"<!-- begin {experiment.setting.name} -->" in text


def test_the_default_noise_is_not_above_the_best_that_was_measured(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["without_proxy"])
    assert without_proxy.main() == 0
    printed = capsys.readouterr().out
    assert "best=0.2 " in printed
    assert f"default={DEFAULT_T:g}" in printed
    told = (page.PAGE.parent / "upscale.md").read_text()
    row = next(line for line in told.splitlines() if line.startswith("| training loss |"))
    shown = [cell.strip(" *") for cell in row.strip("|").split("|")[1:]]
    stored = [line.split()[1] for line in printed.splitlines()[1:-1]]
    assert shown == [*stored[1:], stored[0]], "the page shows what is stored, tuned last"
    assert "**0.2**" in told
    assert f"take `--noise t={DEFAULT_T:g}`" in told
    monkeypatch.setattr(without_proxy, "DEFAULT_T", 0.4)
    assert without_proxy.main() == 1, "control: a default above the best"
