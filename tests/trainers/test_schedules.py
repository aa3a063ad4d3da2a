"""Schedules over a budget in the stock Trainer and in Lightning: through growth, and started again after their end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import mupscale as mu
from harness import trainer as bench
from harness.draws import data, seeded
from harness.refusals import refusal
from mupscale.formats.lightning.grow import grow_lightning_checkpoint

transformers = pytest.importorskip("transformers")
PretrainedConfig, PreTrainedModel = transformers.PretrainedConfig, transformers.PreTrainedModel
Trainer, TrainerCallback = transformers.Trainer, transformers.TrainerCallback
PrinterCallback = transformers.PrinterCallback
K, STOP, LATER, END = 2, 12, 16, 24
EQUAL = 1e-9
PLAIN = mu.GrowthSchedule(36, warmup=0.1, decay=0.5)
KNOWN = PLAIN.grown(STOP, 2.0)
assert sum(KNOWN.steps_of_stages) == END
NEW = mu.GrowthSchedule(10, warmup=0.2, decay=0.5)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*dataloader.*"),
    pytest.mark.filterwarnings("ignore:.*mid-epoch.*"),
    pytest.mark.filterwarnings("ignore:.*treespec.*:FutureWarning"),
]


X = data(64, 6, seed=3)
ROWS: list[dict[str, Tensor]] = [{"x": x, "y": x[:3] * x[3:]} for x in X]


class Config(PretrainedConfig):  # type: ignore[misc, valid-type]
    """The width of a small network."""

    model_type = "small"

    def __init__(self, width: int = 4, **given: Any) -> None:
        super().__init__(**given)
        self.width = width


class Small(PreTrainedModel):  # type: ignore[misc, valid-type]
    """A network in float64 throughout, which the Trainer saves and loads."""

    config_class = Config
    _supports_sdpa = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        n = config.width
        self.net = nn.Sequential(
            nn.Linear(6, n), nn.Tanh(), nn.LayerNorm(n), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, 3)
        )
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        pass

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(x), y)}


def small(k: int = 1) -> Any:
    return seeded(lambda: Small(Config(width=4 * k)))


@pytest.fixture(scope="module")
def plan() -> mu.Plan:
    torch.set_num_threads(1)
    bench.silence()
    batch = {"x": X, "y": X[:, :3]}
    return mu.plans.plan_between(small, 1, K, loss=lambda model: model(**batch)["loss"])


def trained(
    folder: Path,
    k: int,
    schedule: Any,
    stop: int,
    resume: Path | None = None,
    callbacks: Any = (),
    **changes: Any,
) -> tuple[bench.Curve, Any]:
    """What the stock Trainer logs up to a step, in float64; `schedule` None leaves the Trainer its own."""

    class Stop(TrainerCallback):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    losses: list[float] = []

    class Kept(Trainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super().compute_loss(*args, **options)
            losses.append(float(loss.detach()))
            return loss

    usual = {"max_steps": END, "save_steps": 4, "warmup_steps": 2, "gradient_accumulation_steps": 1}
    args = bench.arguments(folder, **{**usual, **changes})
    trainer = Kept(model=small(k), args=args, train_dataset=ROWS, callbacks=[*callbacks, Stop()])
    trainer.remove_callback(PrinterCallback)
    if schedule is not None:
        trainer.create_optimizer()
        trainer.lr_scheduler = LambdaLR(trainer.optimizer, schedule)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    first = 0 if resume is None else json.loads((resume / "trainer_state.json").read_text())["global_step"]
    logged = [e for e in trainer.state.log_history if "loss" in e and e["step"] > first]
    rates = {e["step"]: e["learning_rate"] for e in logged}
    return bench.Curve(dict(enumerate(losses, first + 1)), rates), trainer


def callback(*args: Any, **options: Any) -> list[Any]:
    return [mu.trainers.HuggingFaceCallback(*args, **options)]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: Any, plan: mu.Plan) -> Path:
    folder = tmp_path_factory.mktemp("clock")
    _, trainer = trained(folder / "base", 1, PLAIN, STOP)
    base = folder / "base" / f"checkpoint-{STOP}"
    return bench.grow_directory(base, folder / "wide", plan, trainer.model, small(K))


def test_the_trainer_goes_on_along_the_budget(tmp_path: Path, plan: mu.Plan, wide: Path):
    known, _ = trained(tmp_path / "known", 1, KNOWN, END)
    curve, _ = trained(tmp_path / "wide", K, PLAIN, END, wide, callback(wide, step_cost=2.0))
    assert sorted(curve.losses) == list(range(STOP + 1, END + 1))
    assert bench.gap(known.losses, curve.losses) < EQUAL
    assert curve.rates == {step: rate for step, rate in known.rates.items() if step > STOP}
    later = tmp_path / "wide" / f"checkpoint-{LATER}"
    again, _ = trained(tmp_path / "again", K, PLAIN, END, later, callback(later, step_cost=2.0))
    assert again.rates == {step: rate for step, rate in curve.rates.items() if step > LATER}
    assert again.losses == {step: loss for step, loss in curve.losses.items() if step > LATER}
    refusal(
        lambda: trained(tmp_path / "no", K, PLAIN, END, wide, callback(wide)), "schedule.step_cost_missing"
    )
    steps, _ = trained(tmp_path / "steps", K, PLAIN, END, wide, callback(wide, step_cost=1.0))
    assert bench.gap(known.rates, steps.rates) > 0.1, "control: a schedule over steps"
    saved = callback(wide, step_cost=2.0)
    same, _ = trained(tmp_path / "any", K, lambda step: 1.0, END, wide, saved)
    assert same.rates == curve.rates, (
        "the schedule of the checkpoint continues, whatever the Trainer was made with"
    )


def after(curve: bench.Curve, step: int) -> tuple[dict[int, float], dict[int, float]]:
    return tuple({i: value for i, value in of.items() if i > step} for of in (curve.losses, curve.rates))  # type: ignore[return-value]


@pytest.mark.parametrize("schedule", [None, mu.GrowthSchedule(STOP)], ids=["stock", "budget"])
def test_the_trainer_starts_again_after_the_end_of_its_schedule(schedule: Any, tmp_path: Path, plan: mu.Plan):
    linear: dict[str, Any] = {"lr_scheduler_type": "linear"}
    trained(tmp_path / "base", 1, schedule, STOP, max_steps=STOP, **linear)
    base = tmp_path / "base" / f"checkpoint-{STOP}"
    wide = bench.grow_directory(base, tmp_path / "wide", plan, small(), small(K))

    def go_on(name: str, k: int, start: Path, since: Any, **options: Any) -> bench.Curve:
        on = callback(since, **options)
        return trained(tmp_path / name, k, schedule, 22, start, on, max_steps=22, **linear)[0]

    told: dict[str, Any] = {"rewarm": NEW, "peak_lr": 4e-3}
    known = go_on("known", 1, base, mu.Run(small()), **told)
    curve = go_on("new", K, wide, wide, **told)
    assert curve.rates == known.rates == {STOP + 1 + i: 4e-3 * NEW(i) for i in range(10)}
    assert bench.gap(known.losses, curve.losses) < EQUAL
    later = tmp_path / "new" / "checkpoint-16"
    again = go_on("again", K, later, later, **told)
    assert (again.losses, again.rates) == after(curve, 16)
    same = go_on("same", K, later, later, step_cost=1.0)
    assert (same.losses, same.rates) == after(curve, 16), "what was saved continues without rewarm too"
    assert max(go_on("peak", K, wide, wide, rewarm=NEW).rates.values()) == bench.RATE / 2
    other = mu.GrowthSchedule(20)
    refusal(lambda: go_on("other", K, later, later, rewarm=other), "schedule.other_than_running")
    if schedule is not None:
        still = go_on("still", K, wide, wide, step_cost=1.0)
        assert set(still.rates.values()) == {0.0}, "control: the ended schedule is kept"


def test_what_a_callback_cannot_use_is_refused(tmp_path: Path, plan: mu.Plan):
    refusal(lambda: callback(plan, peak_lr=1e-3), "schedule.peak_without_schedule")
    refusal(lambda: callback(plan, rewarm=1000), "argument.wrong_type", where="GrowthSchedule")
    callback(plan, peak_lr=1e-3, rewarm=mu.GrowthSchedule(1000))
    refusal(
        lambda: trained(tmp_path / "a", K, None, 2, None, callback(plan, step_cost=2.0)),
        "schedule.step_cost_unused",
    )
    optimizer = torch.optim.SGD(small(K).parameters())
    [on] = callback(plan, rewarm=NEW)
    plateau = ReduceLROnPlateau(optimizer)
    refusal(
        lambda: on._go_on(plateau, optimizer), "trainer.scheduler_not_replaceable", where="ReduceLROnPlateau"
    )
    callback(plan)[0]._go_on(plateau, optimizer)  # control: nothing is asked for
    trained(tmp_path / "c", K, None, 2, None, callback(plan, rewarm=NEW), lr_scheduler_type="linear")


L = pytest.importorskip("lightning")


class Module(L.LightningModule):  # type: ignore[misc, name-defined]
    """The network above with two groups; `schedule` is a function of steps, or the name of torch's own schedulers."""

    def __init__(self, k: int, schedule: Any, interval: str = "step") -> None:
        super().__init__()
        self.model, self.schedule, self.interval = small(k).net, schedule, interval
        self.curve = bench.Curve()

    def training_step(self, batch: Any, index: int) -> Any:
        step = self.trainer.global_step
        x, y = batch[0][:], batch[1][:]
        loss = nn.functional.mse_loss(self.model(x + step % 3), y)
        self.curve.losses[step + 1] = float(loss.detach())
        self.curve.rates[step + 1] = self.optimizers().param_groups[0]["lr"]
        return loss

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups: list[dict[str, Any]] = [{"params": named[:2]}, {"params": named[2:], "lr": 2e-2}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        if self.schedule == "sequence":
            warm, fall = LinearLR(optimizer, 0.5, 1.0, 4), CosineAnnealingLR(optimizer, STOP - 4)
            scheduler: Any = SequentialLR(optimizer, [warm, fall], [4])
        elif self.schedule == "cosine":
            scheduler = CosineAnnealingLR(optimizer, STOP)
        else:
            scheduler = LambdaLR(optimizer, self.schedule)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.interval}}


def fitted(module: Any, stop: int, resume: Path | None = None, **on: Any) -> tuple[bench.Curve, Any]:
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = [mu.trainers.LightningCallback(**on)] if on else []
    trainer = L.Trainer(
        max_steps=stop, accelerator="cpu", enable_checkpointing=False, callbacks=callbacks, **options
    )
    loader = DataLoader(TensorDataset(X, X[:, :3] * X[:, 3:]), batch_size=64)
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    return module.curve, trainer


@pytest.fixture(scope="module")
def inner(plan: mu.Plan) -> mu.Plan:
    return mu.plans.plan_between(lambda k: small(k).net, 1, K)


def test_lightning_goes_on_along_the_budget(tmp_path: Path, inner: mu.Plan):
    base, wide, later = (tmp_path / f"{name}.ckpt" for name in ("base", "wide", "later"))
    fitted(Module(1, PLAIN), STOP)[1].save_checkpoint(base)
    grow_lightning_checkpoint(base, wide, plan=inner)
    known, _ = fitted(Module(1, KNOWN), END)
    curve, _ = fitted(Module(K, PLAIN), END, wide, since=wide, step_cost=2.0)
    assert curve.rates == after(known, STOP)[1]
    assert bench.gap(known.losses, curve.losses) < EQUAL
    fitted(Module(K, PLAIN), LATER, wide, since=wide, step_cost=2.0)[1].save_checkpoint(later)
    again, _ = fitted(Module(K, PLAIN), END, later, since=later, step_cost=2.0)
    assert (again.losses, again.rates) == after(curve, LATER)
    refusal(lambda: fitted(Module(K, PLAIN), END, wide, since=wide), "schedule.step_cost_missing")
    steps, _ = fitted(Module(K, PLAIN), END, wide, since=wide, step_cost=1.0)
    assert bench.gap(known.rates, steps.rates) > 0.1, "control: a schedule over steps"


@pytest.mark.parametrize(
    "kind", ["sequence", "cosine", mu.GrowthSchedule(STOP)], ids=["sequence", "cosine", "budget"]
)
def test_lightning_starts_again_after_the_end_of_its_schedule(kind: Any, tmp_path: Path, inner: mu.Plan):
    base, wide, later = (tmp_path / f"{name}.ckpt" for name in ("base", "wide", "later"))
    interval = "epoch" if kind == "cosine" else "step"  # an epoch has one step
    _, trainer = fitted(Module(1, kind, interval), STOP)
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    trainer.save_checkpoint(base)
    grow_lightning_checkpoint(base, wide, plan=inner)
    told: dict[str, Any] = {"rewarm": NEW, "peak_lr": 4e-3}
    known, _ = fitted(Module(1, kind, interval), 22, base, since=mu.Run(small().net), **told)
    curve, trainer = fitted(Module(K, kind, interval), 22, wide, since=wide, **told)
    assert curve.rates == known.rates == {STOP + 1 + i: 4e-3 * NEW(i) for i in range(10)}
    assert bench.gap(known.losses, curve.losses) < EQUAL
    assert [g["initial_lr"] for g in trainer.optimizers[0].param_groups] == pytest.approx([4e-3, 8e-3])
    fitted(Module(K, kind, interval), LATER, wide, since=wide, **told)[1].save_checkpoint(later)
    again, _ = fitted(Module(K, kind, interval), 22, later, since=later, **told)
    assert (again.losses, again.rates) == after(curve, LATER)
    if isinstance(kind, mu.GrowthSchedule):
        still, _ = fitted(Module(K, kind), 22, wide, since=wide, step_cost=1.0)
        assert set(still.rates.values()) == {0.0}, "control: the ended schedule is kept"
