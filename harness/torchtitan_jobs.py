"""Jobs of torchtitan that tests compare: a tiny Llama in the stock Trainer, on CPUs.

Knows: how a job is configured, which manager it starts through, and how it is spoiled for a control; how ranks are
started. Does not know what is compared with what. One rank of one job, in a folder that has `assets`:

    torchrun … -m harness.torchtitan_jobs FOLDER JOB SETUP
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[1]
K, STOP, LATER, END = 2, 10, 20, 30
TOKENS, LENGTH, BATCH, RATE, CLIP, WARM = 256, 32, 2, 1e-2, 0.3, 4
TIMEOUT = 240  # seconds for a job

Curve = Mapping[str, tuple[float, float]]
"""What a job logged by step: loss and gradient norm."""


@dataclass(frozen=True)
class Setup:
    """What all jobs of a comparison share."""

    world: int = 2
    tensor_parallel: int = 1
    backend: str = "partial_dtensor"  # the default, spmd_types, needs a later torch than 2.13
    fused: bool = True


@dataclass(frozen=True)
class Job:
    """A job of `k` times the base's width, and the checkpoint of another job that it starts from."""

    k: int = 1
    start: str = ""
    base: int = 1  # the width that is in `start`
    steps: int = END
    weights_only: bool = False
    files: bool = False  # safetensors: what it starts from, or what it leaves when it starts from nothing
    spoil: str = ""
    resumes: str = ""  # the job whose folder it continues in


JOBS = {
    "base": Job(),
    "wide": Job(K, f"base/checkpoint/step-{STOP}"),
    "plain_units": Job(K, f"base/checkpoint/step-{STOP}", spoil="units"),
    "plain_norm": Job(K, f"base/checkpoint/step-{STOP}", spoil="norm"),
    "resumed": Job(K, f"base/checkpoint/step-{STOP}", resumes="wide"),
    "again": Job(K * K, f"wide/checkpoint/step-{LATER}", base=K),
    "base_weights": Job(1, f"base/checkpoint/step-{STOP}", weights_only=True),
    "wide_weights": Job(K, f"base/checkpoint/step-{STOP}", weights_only=True),
    "base_files": Job(1, steps=STOP, files=True),
    "wide_files": Job(K, f"base_files/checkpoint/step-{STOP}", weights_only=True, files=True),
}


def titan(module: str) -> Any:
    """A module of torchtitan, imported when it is needed."""
    return import_module(f"torchtitan.{module}")


def on_cpu() -> None:
    """Let torchtitan 0.3.0, which looks for an accelerator and for a later torch, run on CPUs with torch 2.13.

    Call it before any other part of torchtitan is imported. Nothing about models, optimizers or checkpoints changes.
    """
    tools = titan("tools.utils")

    room = SimpleNamespace(total_memory=1)
    fakes = {
        "current_device": lambda: 0,
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: room,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
    }
    names = {name: getattr(torch.cpu, name) for name in ("set_device", "synchronize", "device_count")}
    tools.device_type, tools.device_module = "cpu", SimpleNamespace(**names, **fakes)
    # It calls torch.distributed.set_timeout, which 2.13 does not have.
    titan("distributed.utils").set_pg_timeouts = lambda **_: None


def parallelize(model: Any, **given: Any) -> Any:
    """torchtitan's own way of sharding a Llama; gloo lacks the reduction that FSDP2 would use for its gradients."""
    from torch.distributed.fsdp import FSDPModule

    model = titan("models.llama3").parallelize_llama(model, **given)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def model_config(k: int = 1, *, fused: bool = True, tied: bool = False) -> Any:
    """A Llama of k times the width; `flex` attention does not train on CPUs, so it is torch's own."""
    common, llama = titan("models.common"), titan("models.llama3.model")
    attend, configs = titan("models.common.attention"), titan("models.common.config_utils")
    skip = titan("models.common.param_init").skip_param_init
    dim, hidden, size = 32 * k, 48 * k, 8
    small = {"weight": partial(nn.init.normal_, std=0.05), "bias": nn.init.zeros_}
    embedding = {"weight": skip if tied else partial(nn.init.normal_, std=1.0)}
    norm = common.RMSNorm.Config(normalized_shape=dim, param_init={"weight": nn.init.ones_})
    rope = common.ComplexRoPE.Config(dim=size, max_seq_len=64, theta=500000, scaling="llama")
    attention = partial(
        configs.make_gqa_config,
        dim=dim,
        n_heads=4 * k,
        n_kv_heads=2 * k,
        wqkv_param_init=small,
        wo_param_init=small,
    )
    blocks = [
        llama.Llama3TransformerBlock.Config(
            attention_norm=replace(norm),
            ffn_norm=replace(norm),
            attention=attention(
                inner_attention=attend.ScaledDotProductAttention.Config(), fuse_qkv=fused, rope=rope
            ),
            feed_forward=configs.make_ffn_config(
                dim=dim, hidden_dim=hidden, w1_param_init=small, w2w3_param_init=small
            ),
        )
        for _ in range(2)
    ]
    return llama.Llama3Model.Config(
        dim=dim,
        vocab_size=TOKENS,
        enable_weight_tying=tied,
        tok_embeddings=common.Embedding.Config(
            num_embeddings=TOKENS, embedding_dim=dim, param_init=embedding
        ),
        norm=norm,
        lm_head=common.Linear.Config(in_features=dim, out_features=TOKENS, param_init=small),
        layers=blocks,
    )


def spec(setup: Setup, k: int = 1) -> Any:
    return titan("protocols.model_spec").ModelSpec(
        name="llama3",
        flavor=f"{k} times as wide",
        model=model_config(k, fused=setup.fused),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=titan("models.llama3.state_dict_adapter").Llama3StateDictAdapter,
    )


def trainer_config(folder: Path, assets: Path, job: Job, setup: Setup, checkpoint: Any) -> Any:
    losses, optimizer, config = titan("components.loss"), titan("components.optimizer"), titan("config")
    data, metrics = titan("hf_datasets.text_datasets"), titan("components.metrics")
    training = config.TrainingConfig(
        local_batch_size=BATCH,
        seq_len=LENGTH,
        steps=job.steps,
        max_norm=CLIP,
        mixed_precision_param="float32",
        disable_cuda_graphs=True,
    )
    return titan("trainer").Trainer.Config(
        model_spec=spec(setup, job.k),
        hf_assets_path=str(assets),
        dump_folder=str(folder),
        loss=losses.ChunkedLossWrapper.Config(
            loss_fn=losses.CrossEntropyLoss.Config(global_vocab_size=TOKENS)
        ),
        optimizer=optimizer.default_adamw(lr=RATE),
        lr_scheduler=optimizer.LRSchedulersContainer.Config(
            warmup_steps=WARM, total_steps=END, decay_type="cosine"
        ),
        training=training,
        dataloader=data.HuggingFaceTextDataLoader.Config(
            dataset="c4_test", dataset_path=str(assets / "text")
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=config.ParallelismConfig(
            tensor_parallel_degree=setup.tensor_parallel, spmd_backend=setup.backend
        ),
        activation_checkpoint=titan("distributed.activation_checkpoint").SelectiveAC.Config(),
        checkpoint=checkpoint,
        comm=config.CommConfig(trace_buf_size=0),
        debug=config.DebugConfig(seed=0, enable_structured_logging=False),
    )


def checkpoint_config(job: Job, folder: Path, setup: Setup) -> Any:
    """torchtitan's manager for jobs of the base's width, the growing one for all others."""
    leaves_files = job.files and not job.start
    settings: dict[str, Any] = {
        "enable": True,
        "interval": STOP,
        "keep_latest_k": 0,
        "last_save_model_only": leaves_files,
        "last_save_in_hf": leaves_files,
    }
    if job.start:
        settings |= {
            "initial_load_path": str(folder / job.start),
            "initial_load_model_only": job.weights_only,
            "initial_load_in_hf": job.files,
        }
    if job.resumes:
        settings |= {"load_step": LATER}
    if job.k == 1:
        return titan("components.checkpointer").CheckpointManager.Config(**settings)
    reference = None if job.base == 1 else spec(setup)
    return _manager(job.spoil).Config(
        **settings, base=spec(setup, job.base), reference=reference, small=(spec(setup), spec(setup, 2))
    )


def _manager(spoil: str) -> Any:
    """The growing manager, or one that takes its units or its norm back once it has loaded."""
    from mupscale.trainers.torchtitan import GrowingCheckpointManager

    if not spoil:
        return GrowingCheckpointManager

    class Spoiled(GrowingCheckpointManager):
        @dataclass(kw_only=True, slots=True)
        class Config(GrowingCheckpointManager.Config):  # type: ignore[name-defined, misc, unused-ignore]
            pass

        def dcp_load(self, *given: Any, **named: Any) -> None:
            super().dcp_load(*given, **named)
            for handle in self.clipping:
                handle.remove()
            trainer = self.states["train_state"]
            trainer.config.training = replace(trainer.config.training, max_norm=CLIP)
            for units in self.units if spoil == "units" else ():
                units.remove()

    return Spoiled


def run_job(name: str, folder: Path, setup: Setup) -> Curve:
    """Train one job to its end on this rank."""
    job = JOBS[name]
    checkpoint = checkpoint_config(job, folder, setup)
    home = folder / (job.resumes or name)
    trainer = trainer_config(home, folder / "assets", job, setup, checkpoint).build()
    curve: dict[str, tuple[float, float]] = {}

    def note(metrics: Mapping[str, Any], step: int) -> None:
        curve[str(step)] = (metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"])

    trainer.metrics_processor.logger = SimpleNamespace(log=note, close=lambda: None)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
    return curve


def measure_jobs(names: Sequence[str], setup: Setup) -> dict[str, Curve]:
    """The curves of these jobs, run one after the other in a folder that is then removed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_assets(folder / "assets")
        settings = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
        for job in names:
            command = ["-m", "harness.torchtitan_jobs", name, job, json.dumps(asdict(setup))]
            torchrun(command, setup.world, timeout=TIMEOUT, settings=settings)
        return {job: json.loads((folder / f"{job}.json").read_text()) for job in names}


def gap(one: Curve, other: Curve, what: int = 0) -> float:
    """The largest relative difference of what `other` logged: 0 for losses, 1 for gradient norms."""
    return max(abs(one[step][what] - value[what]) / abs(one[step][what]) for step, value in other.items())


def make_assets(folder: Path) -> None:
    """A tokenizer of single bytes, and this project's license as text, which does not change."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (folder / "text").mkdir(parents=True)
    parts = (ROOT / "LICENSE").read_text().split("\n\n")
    lines = [json.dumps({"text": part}) for part in parts if len(part) > 20]
    (folder / "text" / "train.jsonl").write_text("\n".join(lines))
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: TOKENS - 2]
    marks = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS, initial_alphabet=letters, special_tokens=marks, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": marks[0], "eos_token": marks[1]}))


def main() -> None:
    """One rank of one job."""
    folder, name, setup = Path(sys.argv[1]), sys.argv[2], Setup(**json.loads(sys.argv[3]))
    torch.set_num_threads(1)
    on_cpu()
    curve = run_job(name, folder, setup)
    if os.environ["RANK"] == "0":
        (folder / f"{name}.json").write_text(json.dumps(curve))


if __name__ == "__main__":
    main()
