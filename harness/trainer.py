"""A tiny Llama that the stock Trainer and Lightning train, stop at step 20, and continue with: what the tests of trainers share.

AdamW with a group without decay, warm-up and cosine, accumulation over two batches, clipping at every step. `Trained`
has both bases at step 20, trained once for all processes of a test session.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

import mupscale as mu
from mupscale.checkpoints.state.trainer_state import trainer_moves
from mupscale.jobs.digests import make_job
from mupscale.jobs.worker import run_job
from mupscale.runs.growth_record import FORMAT

STOP, LATER, END = 20, 30, 40
EQUAL, DIFFERENT = 1e-5, 1e-3
TOKENS, LENGTH, ROWS, BATCH, ACCUMULATION = 64, 17, 512, 4, 2
RATE, DECAY, EPS, CLIP, WARM = 1e-2, 0.1, 1e-4, 0.3, 8
CARRIED = (
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
    "generation_config.json",
)


@dataclass(frozen=True)
class Curve:
    """What a run logged, by step."""

    losses: dict[int, float] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    norms: dict[int, float] = field(default_factory=dict)


def config(k: int = 1, **changes: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32 * k, "intermediate_size": 64 * k, "num_attention_heads": 4 * k}
    rest = {"num_hidden_layers": 2, "head_dim": 8, "vocab_size": TOKENS, "max_position_embeddings": 64}
    return LlamaConfig(
        **{
            **sizes,
            **rest,
            "num_key_value_heads": 2 * k,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
        }
        | changes
    )


def model(k: int = 1, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    stock: Any = transformers.LlamaForCausalLM
    return stock(config(k, **changes))


def data() -> list[dict[str, Tensor]]:
    """Sequences in which the next token is 5t + 3, or, three times in ten, any token."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=g)
    kept = torch.rand(ROWS, LENGTH, generator=g) < 0.7
    for i in range(LENGTH - 1):
        tokens[:, i + 1] = torch.where(kept[:, i], (5 * tokens[:, i] + 3) % TOKENS, tokens[:, i + 1])
    return [{"input_ids": row, "labels": row} for row in tokens]


def plan_for(k: int, by: Any = "copies", **changes: Any) -> mu.Plan:
    from transformers import LlamaForCausalLM

    rows = torch.stack([row["input_ids"] for row in data()[:4]])

    def loss(module: Any) -> Tensor:
        value: Tensor = module(input_ids=rows, labels=rows).loss
        return value

    return mu.plans.plan_between(LlamaForCausalLM, config(**changes), config(k, **changes), loss=loss, by=by)


def arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    usual = {
        "output_dir": str(folder),
        "max_steps": END,
        "per_device_train_batch_size": BATCH,
        "report_to": [],
    }
    usual |= {"gradient_accumulation_steps": ACCUMULATION, "learning_rate": RATE, "weight_decay": DECAY}
    usual |= {"lr_scheduler_type": "cosine", "warmup_steps": WARM, "max_grad_norm": CLIP, "adam_epsilon": EPS}
    usual |= {"logging_steps": 1, "save_steps": 10, "use_cpu": True, "disable_tqdm": True, "seed": 3}
    return TrainingArguments(**{**usual, **changes})


def hugging_face(
    start: Any,
    folder: Path,
    resume: Path | None = None,
    callbacks: Sequence[Any] = (),
    stop: int = END,
    loss: Any = None,
    **changes: Any,
) -> tuple[Curve, Any]:
    """Train `start` with the stock Trainer, from a checkpoint or afresh, up to a step of the 40; `loss` is its compute_loss_func."""
    from transformers import PrinterCallback, Trainer, TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= stop

    args, rows = arguments(folder, **changes), data()
    trainer = Trainer(
        model=start,
        args=args,
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[*callbacks, Stop()],
        compute_loss_func=loss,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [
        entry for entry in trainer.state.log_history if "loss" in entry and entry["step"] > _first(resume)
    ]
    read = [{int(e["step"]): e[key] for e in logged} for key in ("loss", "learning_rate", "grad_norm")]
    return Curve(*read), trainer


def _first(resume: Path | None) -> int:
    """The step at which a checkpoint was taken."""
    if resume is None:
        return 0
    return int(torch.load(resume / "scheduler.pt", weights_only=True)["last_epoch"])


def grow_directory(
    base: Path,
    out: Path,
    plan: mu.Plan,
    start: Any,
    wide: Any,
    workers: int = 1,
    optimizer: str | None = None,
) -> Path:
    """What `mupscale grow` does to a Trainer's directory, without its self-test: state streamed, weights in memory."""
    file, moves = trainer_moves(base, plan, start, wide, optimizer=optimizer)
    about = {"format": FORMAT, "plan": plan.as_json(), "since_reference": plan.as_json()}
    carried = [name for name in CARRIED if (base / name).exists()]
    run_job(make_job(base, out, [file], moves, carried=carried, about=about, block_bytes=4096), workers)
    wide.load_state_dict(mu.trainers.grow_state_dict(type(start).from_pretrained(base).state_dict(), plan))
    wide.save_pretrained(out)
    return out


def lightning_module(k: int, **changes: Any) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(k, **changes)
            self.curve, self.sum, self.rows = Curve(), 0.0, data()

        def training_step(self, batch: Any, index: int) -> Any:
            # A resumed epoch begins at its first row, so the rows are chosen by the step instead.
            first = (self.trainer.global_step * ACCUMULATION + index % ACCUMULATION) * BATCH % ROWS
            rows = torch.stack([row["input_ids"] for row in self.rows[first : first + BATCH]])
            loss = self.model(input_ids=rows, labels=rows).loss
            self.sum += float(loss.detach()) / ACCUMULATION
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            if (index + 1) % ACCUMULATION == 0:
                self.curve.losses[self.trainer.global_step], self.sum = self.sum, 0.0

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.curve.rates[self.trainer.global_step + 1] = optimizer.param_groups[0]["lr"]

        def configure_optimizers(self) -> Any:
            named = list(self.named_parameters())
            groups = [
                {"params": [(n, p) for n, p in named if p.dim() > 1], "weight_decay": DECAY},
                {"params": [(n, p) for n, p in named if p.dim() == 1], "weight_decay": 0.0},
            ]
            optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPS)
            after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, END - WARM, eta_min=RATE / 50)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=WARM)
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, after], [WARM])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}

    return Module()


def fit(
    module: Any, resume: Path | None = None, callbacks: Iterable[Any] = (), stop: int = END, **changes: Any
) -> tuple[Curve, Any]:
    """Train with Lightning up to a step of the 40, from a checkpoint or afresh."""
    import lightning as L
    from torch.utils.data import DataLoader

    usual = {"accumulate_grad_batches": ACCUMULATION, "gradient_clip_val": CLIP, "logger": False}
    usual |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_steps=stop, accelerator="cpu", callbacks=list(callbacks), **{**usual, **changes})
    loader: Any = DataLoader(data(), batch_size=BATCH)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    return module.curve, trainer


def gap(a: dict[int, float], b: dict[int, float]) -> float:
    """The largest relative difference over the steps of `b`, all of which `a` must have."""
    return max(abs(a[step] - b[step]) / abs(a[step]) for step in b)


@dataclass(frozen=True)
class Setting:
    """A base at step 20, its plan, its wide checkpoint, and the base's further curve."""

    folder: Path
    base: Path
    wide: Path
    plan: mu.Plan
    curve: Curve


@dataclass(frozen=True)
class Trained:
    """Bases at step 20 in a folder that the processes of a session share; each is trained by the first that asks.

    Nobody writes into them: what grows from them lies elsewhere.
    """

    folder: Path

    @property
    def directory(self) -> Path:
        """The Trainer's `checkpoint-20`."""
        runs = self._once("runs", lambda out: hugging_face(model(), out, stop=STOP))
        return runs / f"checkpoint-{STOP}"

    @property
    def curve(self) -> Curve:
        """What the Trainer logs when it continues from there to step 40."""
        return self._curve(
            "curve", lambda: hugging_face(model(), self.folder / "on", self.directory, save_strategy="no")
        )

    @property
    def lightning(self) -> Path:
        """Lightning's checkpoint."""
        return self._once(
            "base.ckpt", lambda out: fit(lightning_module(1), stop=STOP)[1].save_checkpoint(out)
        )

    @property
    def lightning_curve(self) -> Curve:
        """What Lightning logs when it continues from there to step 40."""
        return self._curve("lightning_curve", lambda: fit(lightning_module(1), self.lightning))

    def _curve(self, name: str, train: Callable[[], tuple[Curve, Any]]) -> Curve:
        made = self._once(name, lambda out: out.write_bytes(pickle.dumps(train()[0])))
        curve: Curve = pickle.loads(made.read_bytes())
        return curve

    def _once(self, name: str, make: Callable[[Path], object]) -> Path:
        """What `make` writes under this name, by whichever process comes first."""
        silence()
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / f"{name}.lock"):
            if not (self.folder / name).exists():
                make(self.folder / f"{name}.part")
                (self.folder / f"{name}.part").rename(self.folder / name)
        return self.folder / name


def silence() -> None:
    """Both trainers print much."""
    import logging
    import warnings

    import lightning.pytorch  # sets the level of its loggers when it is imported
    from transformers.utils import logging as stock

    talk: Any = stock
    talk.set_verbosity_error()
    talk.disable_progress_bar()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=lightning.__name__)
