"""One tiny Llama after a few steps of AdamW, stored as each of the formats that hold a run; what comparing checkpoints is shown on.

Written with the savers of torch and transformers, or in the layout that DeepSpeed's converter and Lightning write.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from harness.megatron_files import Stored, rows

STEPS = 3
SIZES = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 97,
}  # fmt: skip


@dataclass
class Job:
    """A model with its optimizer and schedule."""

    model: Any
    optimizer: torch.optim.AdamW
    schedule: LambdaLR
    steps: int = STEPS


def trained(tied: bool = True, dtype: torch.dtype = torch.float32) -> Job:
    """A run after its first steps."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from mupscale.checkpoints.state.trainer_state import trainer_order

    torch.manual_seed(0)
    sizes: dict[str, Any] = SIZES
    model: Any = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied))
    model = model.to(dtype)
    named = dict(model.named_parameters())
    decayed, bare = ([named[n] for n in names] for names in trainer_order(model, {}))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": bare, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    tokens = torch.randint(97, (2, 16))
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        schedule.step()
    return Job(model, optimizer, schedule)


def trainer(job: Job, folder: Path) -> Path:
    """What the stock Trainer writes."""
    job.model.save_pretrained(folder)
    torch.save(job.optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(job.schedule.state_dict(), folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": job.steps}))
    return folder


def weights(job: Job, folder: Path) -> Path:
    """A Hugging Face directory without a run."""
    job.model.save_pretrained(folder)
    return folder


def dcp(job: Job, folder: Path, flat: bool = False, model: nn.Module | None = None) -> Path:
    """What torch.distributed.checkpoint writes of one rank."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings(action="ignore"):
        save(state_of(job, flat, model), checkpoint_id=folder)
    return folder


def state_of(job: Job, flat: bool = False, model: nn.Module | None = None) -> dict[str, Any]:
    """What a job hands to torch.distributed.checkpoint."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(job.model, job.optimizer, options=options)
    saved = {"model": (model or job.model).state_dict(), "optim": state, "step": job.steps}
    return {**saved, "lr_scheduler": job.schedule.state_dict()}


def flat_dcp(job: Job, folder: Path) -> Path:
    """The same with groups tensor by tensor, as torchtitan saves them."""
    return dcp(job, folder, flat=True)


def resharded(job: Job, folder: Path, ranks: int) -> Path:
    """What torch.distributed.checkpoint writes of several ranks of FSDP2."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, _ = flatten_state_dict(state_of(job, flat=True))
    folder.mkdir(parents=True)
    held: dict[tuple[str, int | None], torch.Tensor] = {
        (name, None): value for name, value in flat.items() if isinstance(value, torch.Tensor)
    }
    values = {name: value for name, value in flat.items() if not isinstance(value, torch.Tensor)}
    Stored(ranks, rows).write(folder, held, values)
    (folder / "metadata.json").unlink()
    return folder


def universal(job: Job, folder: Path) -> Path:
    """A universal checkpoint of DeepSpeed, as its converter writes it."""
    zero = folder / "global_step3_universal" / "zero"
    names = {id(p): name for name, p in job.model.named_parameters()}
    shapes, groups = [], []
    for group in job.optimizer.param_groups:
        shapes.append({names[id(p)]: p.shape for p in group["params"]})
        groups.append({key: value for key, value in group.items() if key != "params"} | {"params": [0]})
        for parameter in group["params"]:
            own, state = zero / names[id(parameter)], job.optimizer.state[parameter]
            own.mkdir(parents=True)
            files = {
                "fp32": parameter.detach().float(),
                "exp_avg": state["exp_avg"],
                "exp_avg_sq": state["exp_avg_sq"],
            }
            for key, tensor in files.items():
                torch.save({"cat_dim": 0, "param": tensor.clone()}, own / f"{key}.pt")
            torch.save(state["step"].clone(), own / "step.pt")
    torch.save({"param_groups": groups, "zero_stage": 2}, zero / "optimizer_state.pt")
    told = {"param_shapes": shapes, "global_steps": job.steps, "lr_scheduler": job.schedule.state_dict()}
    torch.save(told, zero.parent / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(zero.parent.name)
    return folder


def lightning(job: Job, folder: Path) -> Path:
    """A checkpoint of Lightning whose optimizer got named parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {id(p): name for name, p in job.model.named_parameters()}
    state = job.optimizer.state_dict()
    for group, live in zip(state["param_groups"], job.optimizer.param_groups, strict=True):
        group["param_names"] = [f"model.{names[id(p)]}" for p in live["params"]]
    tree = {
        "state_dict": {f"model.{name}": tensor for name, tensor in job.model.state_dict().items()},
        "optimizer_states": [state],
        "lr_schedulers": [job.schedule.state_dict()],
        "global_step": job.steps,
    }
    torch.save(tree, folder / "last.ckpt")
    return folder / "last.ckpt"


FORMATS: dict[str, Callable[[Job, Path], Path]] = {
    "trainer": trainer, "dcp": dcp, "flat dcp": flat_dcp, "universal": universal, "lightning": lightning,
}  # fmt: skip


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what a file of torch.save holds; what `change` returns is written, if it returns anything."""
    tree = torch.load(path, weights_only=False)
    torch.save(change(tree) or tree, path)
