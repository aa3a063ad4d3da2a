"""Recipes: applied at any width, refused where they do not hold."""

import json
import warnings
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.refusals import refused
from mupscale.rules.optimizers import qualified_name
from mupscale.training.recipe import Recipe, TensorGrowth

WIDTH, K = 128, 2


def make(width, depth=2):
    hidden = [part for _ in range(depth - 1) for part in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), *hidden, nn.Linear(width, 1))


def recipe_for(reference=WIDTH, width=WIDTH, **changes):
    plan = mu.plans.plan_between(make, width, K * width)
    early = None if reference == width else mu.plans.plan_between(make, reference, width)
    sigmas = {"0.weight": 0.1, "2.weight": 0.2, "4.weight": 0.3}
    made = Recipe(
        optimizer="torch.optim.AdamW", constants={"lr": 2e-3}, sigma=sigmas, k=K,
        tensors=TensorGrowth.all_of(plan, early), units=width, width=width, reference=reference,
        wide_steps=100, batch=64, schedule="CosineAnnealingLR",
    )  # fmt: skip
    return replace(made, **changes)


def run_at(width, reference, optimizer=torch.optim.AdamW):
    """A base under μP, its constants written at `reference`."""
    model = make(width)
    since = mu.plans.plan_between(make, reference, width)
    return mu.Run(model, optimizer(mu.param_groups(model, since, optimizer, lr=1e-3)), since=since)


def added(wide, run):
    """The size of the noise in the hidden matrix of an upscaled run."""
    exact = mu.grow(run, lambda: make(len(wide.model.state_dict()["2.weight"])))
    noise = wide.model.state_dict()["2.weight"] - exact.model.state_dict()["2.weight"]
    return float(noise.std())


def test_a_recipe_is_the_same_after_a_file(tmp_path):
    recipe = recipe_for()
    recipe.save(tmp_path / "recipe.json")
    assert Recipe.read(tmp_path / "recipe.json") == recipe


def test_it_gives_noise_and_learning_rate_at_a_larger_width():
    recipe = recipe_for()
    run = run_at(4 * WIDTH, WIDTH)
    wide = mu.upscale(run, lambda: make(8 * WIDTH), recipe=recipe, seed=3)
    by_hand = mu.upscale(run, lambda: make(8 * WIDTH), mu.MupNoise(recipe.sigma), lr=2e-3, seed=3)
    for one, other in zip(wide.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert mu.diagnostics.reference_lr(wide.optimizers[0]) == pytest.approx(2e-3)
    assert added(wide, run) == pytest.approx(0.2 * 8**-0.5, rel=0.02), "σ̄ of the reference times q"
    assert wide.provenance["recipe"]["k"] == K
    json.dumps(wide.provenance.as_json())


def test_a_run_without_optimizers_takes_the_noise_alone():
    wide = mu.upscale(make(WIDTH), lambda: make(K * WIDTH), recipe=recipe_for())
    assert wide.optimizers == ()


def test_a_base_whose_schedule_has_ended_starts_again_with_the_recipe_s_rate():
    run = run_at(2 * WIDTH, WIDTH)
    mu.set_lr_(run.optimizers[0], 0.0)
    wide = mu.upscale(run, lambda: make(4 * WIDTH), recipe=recipe_for())
    assert mu.diagnostics.reference_lr(wide.optimizers[0]) == pytest.approx(2e-3)
    assert {group["lr"] for group in wide.optimizers[0].param_groups} > {2e-3}, "each tensor in its own units"


@pytest.mark.parametrize(
    ("run", "width", "code", "where"),
    [
        (
            lambda: run_at(WIDTH, WIDTH, torch.optim.SGD),
            (2 * WIDTH,),
            "recipe.other_optimizer",
            ["torch.optim.SGD", "torch.optim.AdamW"],
        ),
        (lambda: run_at(WIDTH, WIDTH), (4 * WIDTH,), "recipe.other_growth", ["2.weight", "out x4, in x4", "out x2, in x2"]),
        (lambda: mu.Run(make(WIDTH, 3)), (2 * WIDTH, 3), "recipe.other_tensors", "6.weight"),
        (lambda: mu.Run(make(2 * WIDTH)), (4 * WIDTH,), "recipe.other_reference", "(256, 256)"),
        (lambda: run_at(WIDTH, 64), (2 * WIDTH,), "recipe.other_reference", "(64, 64)"),
    ],
    ids=["optimizer", "k", "depth", "own reference", "other reference"],
)  # fmt: skip
def test_it_is_refused_where_it_does_not_hold(run, width, code, where):
    with refused(code, where=where):
        mu.upscale(run(), lambda: make(*width), recipe=recipe_for())


def test_a_target_that_is_its_own_reference_takes_a_recipe_tuned_at_that_reference():
    """The proxy is narrower than the reference; the base there was trained without μP."""
    recipe = recipe_for(reference=2 * WIDTH, width=WIDTH)
    model = make(2 * WIDTH)
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    wide = mu.upscale(run, lambda: make(4 * WIDTH), recipe=recipe)
    assert added(wide, run) == pytest.approx(0.2 * float(Fraction(1, 2)) ** 0.5, rel=0.02)


def test_it_warns_of_a_narrow_proxy_and_of_another_schedule():
    plan = mu.plans.plan_between(make, 32, 64)
    narrow = recipe_for(tensors=TensorGrowth.all_of(plan, None), units=32, width=32, reference=32)
    with pytest.warns(UserWarning, match="proxy of 32 units"):
        mu.upscale(make(32), lambda: make(64), recipe=narrow)
    run = run_at(WIDTH, WIDTH)
    steps = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 10)
    with pytest.warns(UserWarning, match=r"CosineAnnealingLR.*StepLR"):
        mu.upscale(mu.Run(run.model, run.optimizers, steps), lambda: make(2 * WIDTH), recipe=recipe_for())
    assert len(recipe_for().differences(steps=200, batch=128)) == 2
    assert recipe_for().differences(steps=100, batch=64) == []


def trained_at(reference, optimizer_settings=None):
    """A base of 2 x WIDTH in float64 whose groups were made at a reference, after some steps; its optimizer and data."""
    torch.manual_seed(0)
    model = make(2 * WIDTH).double()
    since = mu.plans.plan_between(make, reference, 2 * WIDTH)
    groups = mu.param_groups(model, since, torch.optim.AdamW, lr=1e-3, **(optimizer_settings or {}))
    optimizer = torch.optim.AdamW(groups)
    train_on(mu.Run(model, optimizer), 5)
    return model, optimizer


def train_on(run, steps):
    losses = []
    for step in range(steps):
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = (run.model(x) - x[:, :1] * x[:, 1:2]).square().mean()
        run.optimizers[0].zero_grad()
        loss.backward()
        run.optimizers[0].step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("declared", [None, WIDTH // 2], ids=["its own reference", "another reference"])
def test_a_run_that_was_trained_at_the_recipe_s_reference_is_read_at_it_whatever_it_says(declared):
    """Exact, because the groups' factors are those from the recipe's reference; unconverted constants give another run."""
    model, optimizer = trained_at(WIDTH)
    recipe = recipe_for(constants={"lr": 2e-3, "eps": 1e-8, "weight_decay": 1e-2})
    says = None if declared is None else mu.plans.plan_between(make, declared, 2 * WIDTH)
    true = mu.plans.plan_between(make, WIDTH, 2 * WIDTH)
    runs = {
        "declared": mu.upscale(mu.Run(model, optimizer, since=true), lambda: make(4 * WIDTH), recipe=recipe),
        "converted": mu.upscale(mu.Run(model, optimizer, since=says), lambda: make(4 * WIDTH), recipe=recipe),
        "unconverted": mu.upscale(
            mu.Run(model, optimizer, since=says), lambda: make(4 * WIDTH), recipe.noise, lr=recipe.lr
        ),
    }
    assert runs["converted"].since == runs["declared"].since
    assert mu.diagnostics.reference_lr(runs["converted"].optimizers[0]) == pytest.approx(recipe.lr)
    losses = {name: train_on(run, 20) for name, run in runs.items()}

    def apart(name):
        return max(abs(a / b - 1) for a, b in zip(losses[name], losses["declared"], strict=True))

    print(f"converted {apart('converted'):.1e}, unconverted {apart('unconverted'):.1e}")
    assert apart("converted") <= 1e-12
    assert apart("unconverted") >= 1e-3, "control: the constants of one reference taken at another"


def test_a_run_whose_rates_stand_in_other_proportions_is_refused():
    """Its groups were made at another reference, or know none: no single learning rate gives the tuned ones."""
    model, optimizer = trained_at(WIDTH // 2)
    with refused("recipe.other_reference"):
        mu.upscale(mu.Run(model, optimizer), lambda: make(4 * WIDTH), recipe=recipe_for())
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with refused("recipe.other_reference"):
        mu.upscale(mu.Run(model, plain), lambda: make(4 * WIDTH), recipe=recipe_for())


def test_shapes_tell_a_reference_only_where_nothing_else_is_needed():
    plan = mu.plans.plan_between(make, 2 * WIDTH, 4 * WIDTH)
    recipe = recipe_for()
    assert recipe.since(plan) == mu.plans.plan_between(make, WIDTH, 2 * WIDTH)
    assert recipe.since(plan.fold("4.weight", "1/2")) is None, "a fold since the reference is not known"
    fewer = {name: grown for name, grown in recipe.tensors.items() if name != "2.weight"}
    assert replace(recipe, tensors=fewer).since(plan) is None

    def normed(width):
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))

    grown = mu.plans.plan_between(normed, WIDTH, 2 * WIDTH)
    buffered = replace(recipe, tensors=TensorGrowth.all_of(grown, None))
    assert buffered.since(grown) is None, "buffers that grow are not in the recipe"


def test_other_constants_are_named_in_one_warning():
    tuned = {"lr": 2e-3, "eps": 1e-8, "weight_decay": 0.01, "betas": [0.9, 0.999], "amsgrad": False}
    recipe = recipe_for(constants=tuned)
    model = make(4 * WIDTH)
    since = mu.plans.plan_between(make, WIDTH, 4 * WIDTH)

    def warned(**settings):
        groups = mu.param_groups(model, since, torch.optim.AdamW, lr=1e-3, no_decay=["*.bias"], **settings)
        run = mu.Run(model, torch.optim.AdamW(groups), since=since)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            mu.upscale(run, lambda: make(8 * WIDTH), recipe=recipe)
        return [str(warning.message) for warning in seen]

    (one,) = warned(weight_decay=0.1, eps=1e-6, betas=(0.9, 0.95))
    assert "weight_decay is 0.1 here, 0.01 in the recipe" in one
    assert "eps is 1e-06 here, 1e-08 in the recipe" in one
    assert "betas is (0.9, 0.95) here, (0.9, 0.999) in the recipe" in one
    assert warned(weight_decay=0.01) == [], (
        "control: the same constants in the units of each tensor are no others"
    )


def test_noise_or_lr_with_a_recipe_are_refused_and_so_are_copies_with_neither():
    for extra in ({"noise": mu.MupNoise(0.1)}, {"lr": 1e-3}):
        with refused("recipe.with_other_settings"):
            mu.upscale(run_at(WIDTH, WIDTH), lambda: make(2 * WIDTH), recipe=recipe_for(), **extra)
    with refused("noise.needs_loss"):
        mu.upscale(make(WIDTH), lambda: make(2 * WIDTH), by="copies")


def llama_in(folder):
    """A tiny Llama in `base`, its plan for k = 2, and the arguments that grow it."""
    transformers = pytest.importorskip("transformers")
    from mupscale.cli.main import main
    from mupscale.runs.growth_record import read_plans

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, vocab_size=31
    )  # fmt: skip
    base = transformers.LlamaForCausalLM(config)
    base.save_pretrained(folder / "base")
    small = ["-k", "2", "--quiet", "--threads", "1"]
    assert main(["grow", str(folder / "base"), str(folder / "wide"), *small]) == 0
    plan, _ = read_plans(folder / "wide")
    return base, plan, small


@pytest.mark.usefixtures("planned_here")
def test_the_command_applies_a_recipe_to_a_directory(tmp_path, capsys):
    from safetensors.torch import load_file

    from mupscale.cli.main import main

    base, plan, small = llama_in(tmp_path)
    recipe = recipe_for(tensors=TensorGrowth.all_of(plan, None), sigma=0.01)
    recipe.save(tmp_path / "recipe.json")
    arguments = ["upscale", str(tmp_path / "base"), str(tmp_path / "noisy"), *small]
    assert main([*arguments, "--recipe", str(tmp_path / "recipe.json")]) == 0
    assert "lr=0.002" in capsys.readouterr().out
    assert main([*arguments, "--recipe", str(tmp_path / "recipe.json")]) == 0, "again: already complete"
    wide = type(base.config).from_pretrained(tmp_path / "noisy")
    live = mu.upscale(base, lambda: type(base)(wide), recipe=recipe, plan=plan)
    stored, named = load_file(tmp_path / "noisy" / "model.safetensors"), dict(live.model.named_parameters())
    assert all(torch.equal(stored[name], named[name]) for name in stored)
    exact = load_file(tmp_path / "wide" / "model.safetensors")
    assert any(not torch.equal(stored[name], exact[name]) for name in stored), "control: there is noise"
    assert main(["check", str(tmp_path / "noisy"), "--base", str(tmp_path / "base"), "--quiet"]) == 0
    recipe_for().save(tmp_path / "other.json")
    other = [
        "upscale", str(tmp_path / "base"), str(tmp_path / "x"), *small, "--recipe",
        str(tmp_path / "other.json"),
    ]  # fmt: skip
    assert main(other) == 2
    assert "[recipe.other_tensors]" in capsys.readouterr().err
    assert main([*other, "--noise", "t=0.2"]) == 2


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("optimizer", "more", "code", "said"),
    [
        (None, [], 0, "is not known: there is no optimizer.pt"),
        (None, ["--optimizer", "torch.optim.AdamW"], 0, None),
        (None, ["--optimizer", "torch.optim.SGD"], 2, "[recipe.other_optimizer]"),
        ("AdamW", [], 0, "weight_decay is 0.1 here, 0.01 in the recipe"),
        ("AdamW", ["--no-state"], 0, "weight_decay is 0.1 here, 0.01 in the recipe"),
        ("Adam", [], 2, "[recipe.other_optimizer]"),
        ("SGD", [], 2, "[recipe.other_optimizer]"),
        ("old AdamW", [], 0, "is not known: what optimizer.pt keeps fits torch.optim.Adam and torch.optim.AdamW"),
    ],
)  # fmt: skip
def test_the_command_reads_the_optimizer_from_its_state(optimizer, more, code, said, tmp_path, capsys):
    """Optimizer and constants are the recipe's, or others, or not known; each is said in one line."""
    from mupscale.checkpoints.state.trainer_state import trainer_order
    from mupscale.cli.main import main

    base, plan, small = llama_in(tmp_path)
    tuned = {"lr": 2e-3, "eps": 1e-8, "weight_decay": 0.01, "betas": [0.9, 0.999], "amsgrad": False}
    recipe_for(tensors=TensorGrowth.all_of(plan, None), sigma=0.01, constants=tuned).save(
        tmp_path / "recipe.json"
    )
    if optimizer is not None:
        named = dict(base.named_parameters())
        groups = [[named[name] for name in names] for names in trainer_order(base, {})]
        made = getattr(torch.optim, optimizer.split()[-1])(
            [{"params": part, "weight_decay": decay} for part, decay in zip(groups, (0.1, 0.0), strict=True)],
            lr=1e-3,
        )
        base(input_ids=torch.arange(20)[None], labels=torch.arange(20)[None]).loss.backward()
        made.step()
        state = made.state_dict()
        if optimizer.startswith("old"):
            for group in state["param_groups"]:
                del group["decoupled_weight_decay"]
        torch.save(state, tmp_path / "base" / "optimizer.pt")
    capsys.readouterr()
    arguments = ["upscale", str(tmp_path / "base"), str(tmp_path / "noisy"), *small, "--dry-run", *more]
    assert main([*arguments, "--recipe", str(tmp_path / "recipe.json")]) == code
    told = "".join(capsys.readouterr())
    if said is not None:
        assert said in told
    else:
        assert "is not known" not in told
    assert ("is not known" in told) == (said is not None and "is not known" in said)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_a_base_trained_without_mup_is_refused_although_it_names_the_reference(optimizer):
    recipe = recipe_for(optimizer=qualified_name(optimizer))
    model, since = make(4 * WIDTH), mu.plans.plan_between(make, WIDTH, 4 * WIDTH)
    plain = mu.Run(model, optimizer(model.parameters(), lr=1e-3), since=since)
    with refused("recipe.rates_out_of_proportion"):
        mu.upscale(plain, lambda: make(8 * WIDTH), recipe=recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the control: under μP the same base is taken
        mu.upscale(run_at(4 * WIDTH, WIDTH, optimizer), lambda: make(8 * WIDTH), recipe=recipe)


def test_a_file_that_is_no_recipe_is_named(tmp_path):
    path = tmp_path / "other.json"
    with refused("file.does_not_exist", where=str(path)):
        Recipe.read(path)
    for code, contents in {
        "recipe.wrong_format": (b"[]", b"{}", b'{"format": "mupscale recipe 2"}'),
        "json.not_json": (b"nonsense", b"\xff\xfe"),
        "recipe.unknown_keys": (b'{"format": "mupscale recipe 1", "lr": 3}',),
    }.items():
        for content in contents:
            path.write_bytes(content)
            with refused(code, where=str(path)):
                Recipe.read(path)


def noisy_loss(model):
    x = torch.linspace(-1, 1, 96).view(32, 3)
    return (model(x) - x[:, :1] * x[:, 1:2]).square().mean()


def learned(run, steps=200):
    for _ in range(steps):
        run.optimizer.zero_grad()
        noisy_loss(run.model).backward()
        run.optimizer.step()
    return run


def test_a_rise_is_measured_on_the_base_that_the_recipe_is_applied_to(tmp_path):
    recipe = recipe_for(sigma=None, rise=0.01)
    recipe.save(tmp_path / "recipe.json")
    recipe = Recipe.read(tmp_path / "recipe.json")
    torch.manual_seed(0)
    run = learned(run_at(2 * WIDTH, WIDTH))
    by_recipe, by_hand = (
        mu.upscale(run, lambda: make(4 * WIDTH), loss=noisy_loss, seed=3, **given)
        for given in ({"recipe": recipe}, {"noise": mu.AutoNoise(0.01), "lr": 2e-3})
    )
    for one, other in zip(by_recipe.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.equal(one, other)
    auto = by_recipe.provenance["auto"]
    assert auto["found"] == pytest.approx(0.01, rel=0.2)
    assert mu.diagnostics.reference_lr(by_recipe.optimizers[0]) == pytest.approx(2e-3)
    with refused("recipe.needs_loss"):
        mu.upscale(run, lambda: make(4 * WIDTH), recipe=recipe)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"rise": 0.1}, "recipe.sigma_or_rise"),
        ({"sigma": None}, "recipe.sigma_or_rise"),
        ({"sigma": None, "rise": 0}, "recipe.rise_not_positive"),
        ({"sigma": None, "rise": "much"}, "recipe.malformed_record"),
        ({"constants": {}}, "recipe.malformed_record"),
        ({"constants": {"lr": -1}}, "recipe.lr_not_positive"),
        ({"tensors": 3}, "recipe.malformed_record"),
        ({"sigma": "x"}, "recipe.malformed_record"),
        ({"more": 1}, "recipe.unknown_keys"),
    ],
)
def test_values_that_no_recipe_has_are_refused(changes, code):
    values = {**recipe_for().as_json(), **changes}
    with refused(code):
        Recipe.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"noise": mu.MupNoise(0.1)}, "recipe.with_other_settings"),
        ({"lr": 1e-3, "peak_lr": 1e-3, "recipe": None}, "rates.lr_and_peak"),
        ({"seed": 0.5}, "argument.not_whole"),
    ],
)
def test_cheap_mistakes_are_refused_before_the_loss_is_called(given: dict[str, Any], code: str):
    calls = []

    def loss(model: Any) -> Any:
        calls.append(model)
        return noisy_loss(model)

    torch.manual_seed(0)
    run = run_at(2 * WIDTH, WIDTH)
    right = {"recipe": recipe_for(sigma=1e-3), "loss": loss}
    with refused(code):
        mu.upscale(run, lambda: make(4 * WIDTH), **{**right, **given})
    assert not calls
    mu.upscale(run, lambda: make(4 * WIDTH), **right)
    assert calls, "control: the proof calls it"


@pytest.mark.parametrize("grow", [mu.grow, partial(mu.upscale, noise=mu.MupNoise(1e-3))])
def test_a_scheduler_that_cannot_be_carried_is_refused_before_the_loss_is_called(grow: Any):
    calls = []

    def loss(model: Any) -> Any:
        calls.append(model)
        return noisy_loss(model)

    run = run_at(2 * WIDTH, WIDTH)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer)
    with refused("schedule.absolute_rate"):
        grow(replace(run, schedulers=(plateau,)), lambda: make(4 * WIDTH), loss=loss)
    assert not calls
    plateau.eps = 0.0
    grow(replace(run, schedulers=(plateau,)), lambda: make(4 * WIDTH), loss=loss)
    assert calls, "control: as the message says"
