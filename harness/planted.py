"""Pairs of checkpoints that continue the same run, in every format, and pairs in which one fault is planted, each as small as
a profile must see.

A fault changes the run in memory, and any format then writes it; faults of converters are in `renamed.py`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import inf, nextafter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness import continued, megatron_files, renamed
from harness.continued import Job
from mupscale.sameness.profiles import PROFILES, SINGLE

Write = Callable[[Job, Path], Path]


@dataclass(frozen=True)
class Pair:
    """Two checkpoints to be compared, by the names of their formats."""

    formats: tuple[str, str]
    a: Path
    b: Path
    profile: str = "strict"
    kind: str = ""
    """The fault that was planted."""
    code: str = ""
    """The code that must be among the differences."""


def _titan(job: Job, folder: Path) -> Path:
    return continued.flat_dcp(renamed.renamed(job, renamed.titan), folder)


def _megatron(
    job: Job, folder: Path, ranks: int, fsdp: bool = False, bare: bool = False, **faults: Any
) -> Path:
    own = renamed.renamed(job, partial(renamed.megatron, **faults))
    write = megatron_files.fsdp_dtensor if fsdp else megatron_files.torch_dist
    return write(folder, own, ranks, args=renamed.ARGS, change=_bare if bare else None)


def _bare(tensors: dict[Any, Any], values: dict[str, Any]) -> None:
    """Leave out what is not a weight, as `--no-save-optim` does."""
    for held in (tensors, values):
        for key in [key for key in held if str(key if isinstance(key, str) else key[0]).startswith("opt")]:
            del held[key]


def _weights_dcp(job: Job, folder: Path, convert: renamed.Convert = dict) -> Path:
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = {name: parameter.detach() for name, parameter in job.model.named_parameters()}
    with warnings.catch_warnings(action="ignore"):
        save(convert(weights), checkpoint_id=folder, no_dist=True)
    return folder


def _weights_lightning(job: Job, folder: Path) -> Path:
    folder.mkdir(parents=True)
    torch.save({"state_dict": dict(job.model.named_parameters())}, folder / "last.ckpt")
    return folder / "last.ckpt"


RUNS: dict[str, Write] = {
    **continued.FORMATS,
    "torchtitan": _titan,
    "dcp of 4 ranks": partial(continued.resharded, ranks=4),
    "dcp of 2 ranks": partial(continued.resharded, ranks=2),
}
"""Formats that hold the whole run under names that can be matched."""
MEGATRON: dict[str, Write] = {
    f"{'fsdp_dtensor' if fsdp else 'torch_dist'} of {ranks}": partial(_megatron, ranks=ranks, fsdp=fsdp)
    for fsdp in (False, True)
    for ranks in (1, 2)
}
"""The same of Megatron, whose schedule no other trainer has."""
WEIGHTS: dict[str, Write] = {
    "Hugging Face": continued.weights,
    "dcp weights": _weights_dcp,
    "Lightning weights": _weights_lightning,
    "torchtitan weights": partial(_weights_dcp, convert=renamed.titan),
    "torch_dist weights": partial(_megatron, ranks=2, bare=True),
    "fsdp_dtensor weights": partial(_megatron, ranks=1, fsdp=True, bare=True),
}
"""Formats of the weights alone."""


def honest(folder: Path, runs: bool = True) -> Iterator[Pair]:
    """Pairs that continue the same run: every two formats, bf16 with float32 copies, and a chain of conversions.

    Without `runs`, of the formats that hold weights alone.
    """
    if runs:
        yield from every_two(folder / "runs", RUNS)
        yield from every_two(folder / "Megatron", MEGATRON)
    yield from every_two(folder / "weights", WEIGHTS, tied=False)
    yield from _rounded(folder)
    yield from _converted(folder)


def every_two(folder: Path, formats: Mapping[str, Write], tied: bool = True) -> Iterator[Pair]:
    """One run in every two of some formats."""
    job = continued.trained(tied=tied)
    made = {name: write(job, folder / name) for name, write in formats.items()}
    for one, other in combinations(made, 2):
        yield Pair((one, other), made[one], made[other])


def _rounded(folder: Path) -> Iterator[Pair]:
    """Weights in bf16 next to float32 copies, against those of other ranks and against the float32 weights."""
    job = renamed.renamed(continued.trained(), renamed.megatron)
    made = {
        f"torch_dist in bf16 of {ranks}": megatron_files.torch_dist(
            folder / f"bf16 {ranks}", job, ranks, copies="fp32_param", dtype=torch.bfloat16, args=renamed.ARGS
        )
        for ranks in (1, 2)
    }
    made["fsdp_dtensor in float32"] = megatron_files.fsdp_dtensor(
        folder / "float32", job, 1, args=renamed.ARGS
    )
    for one, other in combinations(made, 2):
        yield Pair((one, other), made[one], made[other])


def _converted(folder: Path) -> Iterator[Pair]:
    """Hugging Face → DCP → Megatron → Hugging Face, each read back from the files of the one before."""
    from torch.distributed.checkpoint.state_dict_loader import load

    job = continued.trained(tied=False)
    first = continued.weights(job, folder / "first")
    dcp = _weights_dcp(job, folder / "second")
    loaded = {name: torch.empty_like(p) for name, p in job.model.named_parameters()}
    with warnings.catch_warnings(action="ignore"):
        load(loaded, checkpoint_id=dcp, no_dist=True)
    again = copy.deepcopy(job.model)
    again.load_state_dict(loaded)
    third = WEIGHTS["torch_dist weights"](Job(again, _rebuilt(job, again), job.schedule), folder / "third")
    last = continued.weights(Job(again, job.optimizer, job.schedule), folder / "last")
    steps = {
        "Hugging Face": first,
        "dcp weights": dcp,
        "torch_dist weights": third,
        "Hugging Face again": last,
    }
    for one, other in zip(steps, [*steps][1:], strict=False):
        yield Pair((one, other), steps[one], steps[other])
    yield Pair(("Hugging Face", "Hugging Face again"), first, last)


def _rebuilt(job: Job, model: Any) -> torch.optim.AdamW:
    """The optimizer of a copy of a job's model."""
    of = dict(zip(job.model.parameters(), model.parameters(), strict=True))
    groups = [{**group, "params": [of[p] for p in group["params"]]} for group in job.optimizer.param_groups]
    optimizer = torch.optim.AdamW(groups)
    for parameter, state in job.optimizer.state.items():
        optimizer.state[of[parameter]] = {key: value.clone() for key, value in state.items()}
    return optimizer


def _weight(job: Job, layer: int = 0) -> Tensor:
    return job.model.model.layers[layer].mlp.up_proj.weight.data  # type: ignore[no-any-return]


def _moment(job: Job, slot: str) -> Tensor:
    return job.optimizer.state[job.model.model.layers[1].self_attn.q_proj.weight][slot]  # type: ignore[no-any-return]


def _bit(tensor: Tensor) -> None:
    tensor.view(torch.int32)[3, 5] ^= 1


def _beyond(tensor: Tensor, profile: str) -> None:
    """Move one entry by 1.1 times what a profile grants it."""
    own, size = float(tensor[3, 5].abs()), float(tensor.double().square().mean().sqrt())
    allowed = PROFILES[profile]
    tensor[3, 5] += 1.1 * SINGLE * (allowed.entry * own + allowed.sums * (own + size)) + SINGLE * own / 2


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def _group(job: Job, key: str, change: Callable[[Any], Any]) -> None:
    for group in job.optimizer.param_groups:
        group[key] = change(group[key])


def _up(value: float) -> float:
    return nextafter(value, inf)


def _lost(job: Job, *slots: str) -> None:
    state = job.optimizer.state[job.model.model.layers[1].self_attn.q_proj.weight]
    for slot in slots:
        state[slot] = torch.zeros_like(state[slot])


def _step(job: Job, change: float) -> None:
    for at, state in enumerate(job.optimizer.state.values()):
        if change < 0 or at == 4:
            state["step"] += change


def _decays(job: Job) -> None:
    one, other = job.optimizer.param_groups
    one["weight_decay"], other["weight_decay"] = other["weight_decay"], one["weight_decay"]


def _schedule(job: Job, key: str, change: Callable[[Any], Any]) -> None:
    vars(job.schedule)[key] = change(vars(job.schedule)[key])


def _job_step(job: Job) -> None:
    job.steps += 1


FAULTS: dict[str, tuple[str, str, Callable[[Job], object]]] = {
    "one bit of a weight": ("strict", "same.weight_differs", lambda job: _bit(_weight(job))),
    "two units in the last place": ("standard", "same.weight_differs", lambda job: _beyond(_weight(job), "standard")),
    "a weight beyond sums": ("relaxed", "same.weight_differs", lambda job: _beyond(_weight(job), "relaxed")),
    "one bit of exp_avg": ("strict", "same.moment_differs", lambda job: _bit(_moment(job, "exp_avg"))),
    "one bit of exp_avg_sq": ("strict", "same.moment_differs", lambda job: _bit(_moment(job, "exp_avg_sq"))),
    "a moment beyond sums": ("relaxed", "same.moment_differs", lambda job: _beyond(_moment(job, "exp_avg"), "relaxed")),
    "moments of one tensor zero": ("relaxed", "same.moment_differs", lambda job: _lost(job, "exp_avg", "exp_avg_sq")),
    "moments exchanged": (
        "relaxed", "same.moment_differs", lambda job: _exchange(_moment(job, "exp_avg"), _moment(job, "exp_avg_sq"))
    ),
    "layers exchanged": ("relaxed", "same.weight_differs", lambda job: _exchange(_weight(job), _weight(job, 1))),
    "a square weight transposed": (
        "relaxed", "same.weight_differs",
        lambda job: job.model.model.layers[0].self_attn.q_proj.weight.data.copy_(
            job.model.model.layers[0].self_attn.q_proj.weight.data.T.clone()
        ),
    ),
    "a weight rounded to bf16": (
        "relaxed", "same.weight_differs", lambda job: _weight(job).copy_(_weight(job).bfloat16().float())
    ),
    "every step one less": ("relaxed", "same.step_differs", lambda job: _step(job, -1.0)),
    "one step one more": ("relaxed", "same.step_differs", lambda job: _step(job, 1.0)),
    "one unit of lr": ("strict", "same.setting_differs", lambda job: _group(job, "lr", _up)),
    "lr beyond float32": (
        "relaxed", "same.setting_differs", lambda job: _group(job, "lr", lambda lr: lr * (1 + 2 * SINGLE))
    ),
    "one unit of initial_lr": ("strict", "same.setting_differs", lambda job: _group(job, "initial_lr", _up)),
    "one unit of eps": ("strict", "same.setting_differs", lambda job: _group(job, "eps", _up)),
    "one unit of a beta": ("strict", "same.setting_differs", lambda job: _group(job, "betas", lambda b: (b[0], _up(b[1])))),
    "decays of groups exchanged": ("relaxed", "same.setting_differs", _decays),
    "the schedule one step on": (
        "relaxed", "same.schedule_differs", lambda job: _schedule(job, "last_epoch", lambda step: step + 1)
    ),
    "one unit of a base rate": (
        "strict", "same.schedule_differs", lambda job: _schedule(job, "base_lrs", lambda rates: [_up(rates[0]), *rates[1:]])
    ),
    "the job one step on": ("relaxed", "same.job_step_differs", _job_step),
}  # fmt: skip
"""Faults that any format can carry: the coarsest profile that must see it at this size, the code, and the change."""


def planted(folder: Path, formats: int = 3) -> Iterator[Pair]:
    """Every fault in several formats, against the sound run in another; then faults of converters and of cutting."""
    sound = {name: write(continued.trained(), folder / f"sound {name}") for name, write in RUNS.items()}
    names, at = [*RUNS], 0
    for kind, (profile, code, change) in FAULTS.items():
        job = continued.trained()
        change(job)
        for _ in range(formats):
            other, name = names[at % len(names)], names[(at * 3 + 1) % len(names)]
            at += 1
            yield Pair((other, name), sound[other], RUNS[name](job, folder / f"{at}"), profile, kind, code)
    yield from misconverted(folder)


def misconverted(folder: Path) -> Iterator[Pair]:
    """Faults of converters, against the weights that they converted."""
    job, code = continued.trained(tied=False), "same.weight_differs"
    base = continued.weights(job, folder / "base")
    wrong = renamed.renamed(job, partial(renamed.titan, paired=False))
    yield Pair(
        ("Hugging Face", "torchtitan weights"), base, _weights_dcp(wrong, folder / "unpaired"), "relaxed",
        "rows of queries not turned", code,
    )  # fmt: skip
    for fsdp in (False, True):
        for fault, value in (("grouped", False), ("swapped", True), ("stored", 1)):
            made = _megatron(job, folder / f"{fault} {fsdp}", 2, fsdp, bare=True, **{fault: value})
            pair = "Hugging Face", "fsdp_dtensor weights" if fsdp else "torch_dist weights"
            yield Pair(pair, base, made, "relaxed", f"converted with {fault}={value}", code)
