"""Lightning continues from a widened checkpoint like the base; what is in doubt is refused."""

import pickle
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mupscale as mu
from harness import trainer as bench
from harness.refusals import refused
from harness.trainer import Setting, fit, gap, lightning_module, plan_for
from mupscale.formats.lightning.grow import grow_lightning_checkpoint
from mupscale.runs.growth_record import KEY
from mupscale.trainers.going_on import both_plans

L = pytest.importorskip("lightning")
K = 2
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader.*"),
    pytest.mark.filterwarnings("ignore:.*mid-epoch.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]


@pytest.fixture(scope="module")
def setting(trained, tmp_path_factory):
    folder, base, plan = tmp_path_factory.mktemp("lightning"), trained.lightning, plan_for(K)
    wide = folder / "wide.ckpt"
    mu.grow_checkpoint(base, wide, plan=plan)
    return Setting(folder=folder, base=base, wide=wide, plan=plan, curve=trained.lightning_curve)


@pytest.fixture(scope="module")
def grown(setting):
    return fit(lightning_module(K), setting.wide, [mu.trainers.LightningCallback(setting.wide)])


def test_the_wide_run_goes_on_like_the_base(setting, grown):
    curve, trainer = grown
    assert sorted(curve.losses) == list(range(21, 41))
    assert gap(setting.curve.losses, curve.losses) < bench.EQUAL
    assert setting.curve.rates == curve.rates
    assert trainer.gradient_clip_val == bench.CLIP
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks


def test_without_the_callback_it_does_not(setting):
    """Controls: no callback; right units with Lightning's own norm."""
    plain, _ = fit(lightning_module(K), setting.wide)
    assert gap(setting.curve.losses, plain.losses) > bench.DIFFERENT

    class StockNorm(mu.trainers.LightningCallback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            trainer.gradient_clip_val = bench.CLIP

    stock, _ = fit(lightning_module(K), setting.wide, [StockNorm(setting.wide)], stop=30)
    assert gap(setting.curve.losses, stock.losses) > 10 * bench.EQUAL


def test_a_wide_run_that_was_stopped_is_resumed_the_same_way(setting, grown, tmp_path):
    _, trainer = fit(
        lightning_module(K), setting.wide, [mu.trainers.LightningCallback(setting.plan)], stop=30
    )
    trainer.save_checkpoint(later := tmp_path / "later.ckpt")
    assert both_plans(later) == (setting.plan, setting.plan)
    assert mu.diagnostics.read_provenance(later)["plan"] == setting.plan.hash
    curve, _ = fit(lightning_module(K), later, [mu.trainers.LightningCallback(later)])
    assert curve.losses == {step: loss for step, loss in grown[0].losses.items() if step > 30}


@pytest.fixture(scope="module")
def awake(trained, tmp_path_factory):
    """The base at step 20 with new units that are awake, as `mu.upscale` makes them."""
    folder, plan = tmp_path_factory.mktemp("awake"), plan_for(K, by="units")
    wide = folder / "wide.ckpt"
    mu.grow_checkpoint(trained.lightning, wide, plan=plan, noise=mu.NewUnits())
    return Setting(folder=folder, base=trained.lightning, wide=wide, plan=plan, curve=trained.lightning_curve)


def test_new_units_wake_without_a_jump_and_train_on(awake):
    """Control: asleep, the wide run is the base's to its end, and awake it is not."""
    on = mu.trainers.LightningCallback(awake.wide)
    curve, trainer = fit(lightning_module(K), awake.wide, [on], stop=30)
    assert gap(awake.curve.losses, {21: curve.losses[21]}) < bench.EQUAL
    assert gap(awake.curve.losses, curve.losses) > bench.DIFFERENT
    assert curve.losses[30] < curve.losses[21]
    assert {step: awake.curve.rates[step] for step in curve.rates} == curve.rates
    trainer.save_checkpoint(later := awake.folder / "later.ckpt")
    again, _ = fit(lightning_module(K), later, [mu.trainers.LightningCallback(later)])
    whole, _ = fit(lightning_module(K), awake.wide, [mu.trainers.LightningCallback(awake.wide)])
    assert again.losses == {step: loss for step, loss in whole.losses.items() if step > 30}
    asleep = awake.folder / "asleep.ckpt"
    mu.grow_checkpoint(awake.base, asleep, plan=awake.plan)
    same, _ = fit(lightning_module(K), asleep, [mu.trainers.LightningCallback(asleep)])
    assert gap(awake.curve.losses, same.losses) < bench.EQUAL


def test_files_of_new_units_have_the_weights_of_a_live_run(awake):
    module = lightning_module(1)
    module.load_state_dict(torch.load(awake.base, weights_only=True)["state_dict"])
    live = mu.upscale(module.model, lambda: bench.model(K), plan=awake.plan)
    found = torch.load(awake.wide, weights_only=True)["state_dict"]
    for name, tensor in live.model.state_dict().items():
        assert torch.equal(found[f"model.{name}"], tensor), name
    told = mu.diagnostics.read_provenance(awake.wide)
    assert (told["noise"], told["seed"]) == (live.provenance["noise"], 0)


def test_everything_else_is_carried(setting):
    base, wide = (torch.load(path, weights_only=True) for path in (setting.base, setting.wide))
    for key in base:
        if key not in ("state_dict", "optimizer_states"):
            assert wide[key] == base[key], key
    for old, new in zip(
        base["optimizer_states"][0]["param_groups"], wide["optimizer_states"][0]["param_groups"], strict=True
    ):
        assert old == new


def make(n: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, n), nn.GELU(), nn.LayerNorm(n), nn.Linear(n, n), nn.GELU(), nn.Linear(n, 3)
    )


def test_a_file_has_the_history_of_the_run_that_it_continues(tmp_path):
    files, live = [tmp_path / f"{n}.ckpt" for n in (4, 8, 16)], mu.Run(make(4))
    weights = {f"model.{name}": tensor for name, tensor in live.model.state_dict().items()}
    torch.save({"state_dict": weights, "optimizer_states": []}, files[0])
    for n, base, wide in ((8, *files[:2]), (16, *files[1:])):
        plan = mu.plans.plan_between(make, n // 2, n)
        grow_lightning_checkpoint(base, wide, plan=plan)
        live = mu.grow(live, partial(make, n), plan=plan)
    assert mu.diagnostics.read_provenance(files[2]) == live.provenance
    assert mu.diagnostics.read_provenance(files[1]).growths == live.provenance.growths[:1], "control"


def test_new_units_wake_in_a_file_as_they_do_live(tmp_path):
    """Weights, state and record. Control: another seed."""

    def units(n: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, n), nn.GELU(), nn.Linear(n, 3))

    model, files = units(8), [tmp_path / f"{name}.ckpt" for name in ("base", "wide", "other")]
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).square().mean().backward()
    optimizer.step()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": weights, "optimizer_states": [optimizer.state_dict()]}, files[0])
    plan = mu.infer_plan(model, units(16), example_inputs=(X,), by="units")
    for file, seed in zip(files[1:], (5, 6), strict=True):
        mu.grow_checkpoint(files[0], file, plan=plan, noise=mu.NewUnits(), seed=seed)
    saved, other = (torch.load(file, weights_only=True) for file in files[1:])
    live = mu.upscale(mu.Run(model, optimizer), lambda: units(16), mu.NewUnits(), plan=plan, seed=5)
    states = saved["optimizer_states"][0]["state"]
    for at, (name, parameter) in enumerate(live.model.named_parameters()):
        assert torch.equal(saved["state_dict"][f"model.{name}"], parameter), name
        assert torch.equal(states[at]["exp_avg"], live.optimizer.state[parameter]["exp_avg"]), name
    assert mu.diagnostics.read_provenance(files[1])["noise"] == live.provenance["noise"]
    assert not torch.equal(other["state_dict"]["model.0.weight"], saved["state_dict"]["model.0.weight"])


G = torch.Generator().manual_seed(0)
X = torch.randn(64, 6, generator=G)
Y = (X[:, :3] * X[:, 3:]).argmax(1)


class Small(L.LightningModule):  # type: ignore[misc, name-defined]
    """An MLP without a name before its parameters, two unnamed groups, and a rate that is scheduled."""

    def __init__(self, n: int, named: bool = False) -> None:
        super().__init__()
        self.net, self.named = make(n), named
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        parameters: list[Any] = list(self.named_parameters() if self.named else self.parameters())
        groups: list[dict[str, Any]] = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 2e-2}]
        optimizer = torch.optim.Adam(groups, lr=1e-2, eps=1e-3)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[1e-2, 2e-2], total_steps=20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def train(module: Any, resume: Path | None = None, stop: int = 20, **options: Any) -> Any:
    usual = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    trainer = L.Trainer(max_steps=stop, enable_checkpointing=False, **{**usual, **options})
    trainer.fit(module, DataLoader(TensorDataset(X, Y), batch_size=8), ckpt_path=resume)
    return trainer


SMALL = mu.plans.plan_between(make, 8, 24)
NAMES = [name for name, _ in Small(8).named_parameters()]
CLIPS: dict[str, dict[str, Any]] = {
    "by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "by norm": {"gradient_clip_val": 1e-2, "gradient_clip_algorithm": "norm"},
    "not at all": {},
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_by_norm_or_value_or_not_at_all(clip, tmp_path):
    base, wide = tmp_path / "base.ckpt", tmp_path / "wide.ckpt"
    train(Small(8), stop=8, **CLIPS[clip]).save_checkpoint(base)
    grow_lightning_checkpoint(base, wide, plan=SMALL, prefix="net.", names=[[NAMES[:2], NAMES[2:]]])
    train(on := Small(8), base, **CLIPS[clip])
    train(
        grown := Small(24),
        wide,
        callbacks=[mu.trainers.LightningCallback(wide, prefix="net.")],
        **CLIPS[clip],
    )
    train(plain := Small(24), wide, **CLIPS[clip])
    assert grown.losses == pytest.approx(on.losses, rel=bench.EQUAL)
    assert plain.losses != pytest.approx(on.losses, rel=10 * bench.EQUAL)


def test_growing_twice_counts_from_the_first_reference(tmp_path):
    paths = [tmp_path / f"{i}.ckpt" for i in range(3)]
    train(Small(8, named=True), stop=4).save_checkpoint(paths[0])
    mu.grow_checkpoint(paths[0], paths[1], plan=SMALL)  # "net." is found
    more = mu.plans.plan_between(make, 24, 48)
    mu.grow_checkpoint(paths[1], paths[2], plan=more)
    assert both_plans(paths[2]) == (more, SMALL.then(more))
    train(on := Small(8, named=True), paths[0], stop=12)
    train(
        grown := Small(48, named=True),
        paths[2],
        stop=12,
        callbacks=[mu.trainers.LightningCallback(paths[2], prefix="net.")],
    )
    assert grown.losses == pytest.approx(on.losses, rel=bench.EQUAL)


def test_one_class_stands_for_all_optimizers(tmp_path):
    """Control: a list that is shorter or longer than the optimizers is refused."""
    model, files = make(8), [tmp_path / name for name in ("base.ckpt", "one.ckpt", "each.ckpt")]
    named = list(model.named_parameters())
    optimizers = [torch.optim.SGD(half, lr=0.1, momentum=0.9) for half in (named[:2], named[2:])]
    model(X).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    weights = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    states = [optimizer.state_dict() for optimizer in optimizers]
    for state in states:
        for group in state["param_groups"]:
            group["param_names"] = [f"model.{name}" for name in group["param_names"]]
    torch.save({"state_dict": weights, "optimizer_states": states}, files[0])
    mu.grow_checkpoint(files[0], files[1], plan=SMALL, optimizer_class="torch.optim.SGD")
    grow_lightning_checkpoint(files[0], files[2], plan=SMALL, optimizer_classes=["torch.optim.SGD"] * 2)
    one, each = (torch.load(file, weights_only=True)["optimizer_states"] for file in files[1:])
    assert len(one) == 2
    for a, b in zip(one, each, strict=True):
        assert a["param_groups"] == b["param_groups"]
        assert all(
            torch.equal(a["state"][i]["momentum_buffer"], b["state"][i]["momentum_buffer"])
            for i in a["state"]
        )
    for count in (1, 3):
        with refused("lightning.other_number_of_optimizers", where="optimizer_classes"):
            grow_lightning_checkpoint(
                files[0], files[2], plan=SMALL, optimizer_classes=["torch.optim.SGD"] * count
            )


def test_what_is_in_doubt_is_refused(tmp_path):
    base, out = tmp_path / "base.ckpt", tmp_path / "wide.ckpt"
    train(Small(8), stop=2).save_checkpoint(base)
    whole = torch.load(base, weights_only=True)

    def refuse(code: str, path: Path = base, where: str = "", **options: Any) -> None:
        with refused(code, where=where):
            grow_lightning_checkpoint(path, out, plan=SMALL, **{"prefix": "net.", **options})
        assert not out.exists()

    refuse("state.group_sizes_differ")  # two groups without names
    refuse("plan.unknown_tensor", where="net.0.weight", prefix="model.")
    changed = tmp_path / "changed.ckpt"
    torch.save({**whole, "callbacks": {"Average": {"w": torch.ones(3)}}}, changed)
    refuse("lightning.unknown_tensor_units", changed, "Average")
    torch.save({"state_dict": whole["state_dict"]}, changed)
    refuse("lightning.not_a_checkpoint", changed)
    torch.save({**whole, KEY: "?"}, changed)
    refuse("growth.record_missing", changed)
    with refused("growth.record_missing"):
        mu.trainers.LightningCallback(base)


class OwnClipping(Small):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        pass


def test_trainers_it_cannot_follow_are_refused(tmp_path):
    callback = mu.trainers.LightningCallback(SMALL, prefix="net.")
    with refused("lightning.clips_by_itself", where="configure_gradient_clipping"):
        train(OwnClipping(24), callbacks=[callback], gradient_clip_val=1.0)
    FSDPStrategy = type("FSDPStrategy", (), {})
    trainer = SimpleNamespace(strategy=FSDPStrategy(), gradient_clip_val=None)
    with refused("trainer.shards_parameters", where="FSDPStrategy"):
        callback.on_train_start(trainer, Small(24))
    assert type(pickle.loads(pickle.dumps(callback))) is mu.trainers.LightningCallback


class Functions(Small):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None:
        mu.trainers.clip_grad_norm_(self.net, SMALL, max_norm=1e-2)


class Hooked(Small):
    def on_train_start(self) -> None:
        mu.clip_before_step_(self.optimizers().optimizer, SMALL, model=self.net, max_norm=1e-2)


def test_a_clipping_hook_can_be_attached_when_training_starts():
    """It clips what a closure of Lightning's makes, as `configure_gradient_clipping` does. Control: no clipping."""
    losses = []
    for kind in (Functions, Hooked, Small):
        torch.manual_seed(0)
        module = kind(24)
        train(module, stop=6)
        losses.append(torch.tensor(module.losses))
    assert torch.equal(losses[0], losses[1])
    assert (losses[0] - losses[2]).abs().max() > 1e-3


def test_a_run_that_raises_leaves_nothing_behind(tmp_path):
    class Fails(Small):
        def training_step(self, batch: Any, index: int) -> Any:
            raise RuntimeError("no step today")

    callback = mu.trainers.LightningCallback(SMALL, prefix="net.")
    trainer = L.Trainer(
        max_steps=2, logger=False, enable_checkpointing=False, enable_progress_bar=False, callbacks=[callback],
        gradient_clip_val=0.5, accelerator="cpu", enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no step today"):
        trainer.fit(Fails(24), DataLoader(TensorDataset(X, Y), batch_size=8))
    assert trainer.gradient_clip_val == 0.5
    assert len(trainer.optimizers[0].param_groups) == 2
    assert not trainer.optimizers[0]._optimizer_step_pre_hooks
