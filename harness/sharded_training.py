"""A small sharded base and its wide run, trained side by side: what the tests of training on shards compare.

A small model with embedding, residual matrices, norms and biases, whose sizes no number of ranks divides, is trained
with AdamW, or Muon next to AdamW, under FSDP2 (and HSDP, and FSDP with tensor parallelism on 4 ranks), and saved by DCP. The wide model is
built without memory, sharded, loaded from that checkpoint with zero noise, and both continue side by side. Clipping
bites at every step. The controls leave the units out of the clipping, or out of the groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu
from harness.exactness import precise_muon
from harness.runs import step
from mupscale.training.units.clip import Clip

BASE, WIDE, TOKENS, BATCH, STEPS, WARM = 10, 20, 11, 16, 50, 5
EQUAL = {torch.float64: 1e-9, torch.float32: 1e-5}
DIFFERENT = 1e-4
ADAMW: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
MUON: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}
LIMIT = 0.02
LAYOUTS = {1: ("fsdp",), 2: ("fsdp",), 4: ("fsdp", "hsdp", "fsdp+tp")}


class Net(nn.Module):
    """Embedding, a residual block of two matrices, RMSNorm, an untied readout; biases throughout."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, n)
        self.norm = nn.RMSNorm(n)
        self.up = nn.Linear(n, 2 * n)
        self.down = nn.Linear(2 * n, n)
        self.readout = nn.Linear(n, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embed(tokens)
        h = h + self.down(torch.tanh(self.up(self.norm(h))))
        out: Tensor = self.readout(h)
        return out


def shard(model: nn.Module, layout: str) -> nn.Module:
    """Shard a model over all ranks, as its trainer would."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    ranks, cut = dist.get_world_size(), {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "tp":
        return parallelize_module(model, init_device_mesh(device(), (ranks,)), cut)
    if layout == "fsdp":
        mesh = init_device_mesh(device(), (ranks,), mesh_dim_names=("shard",))
    elif layout == "hsdp":
        mesh = init_device_mesh(device(), (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh(device(), (2, ranks // 2), mesh_dim_names=("shard", "tensor"))
        parallelize_module(model, both["tensor"], cut)
        mesh = both["shard"]
    for part in (model.get_submodule(name) for name in ("up", "down")):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def device() -> str:
    """Where this job trains."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def optimizers(model: nn.Module, kind: str, since: mu.Plan | None = None) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for the hidden matrices next to it; in the units of `since`, or as written."""
    muon = {"up.weight", "down.weight"} if kind == "muon" else set()
    rest = {name for name, _ in model.named_parameters()} - muon
    rows: list[tuple[Any, dict[str, Any], set[str]]] = [
        (torch.optim.Muon, MUON, muon),
        (torch.optim.AdamW, ADAMW, rest),
    ]
    found = []
    for cls, settings, names in rows:
        chosen = [(name, p) for name, p in model.named_parameters() if name in names]
        if chosen and since is not None:
            found.append(cls(mu.param_groups(model, since, cls, parameters=chosen, **settings)))
        elif chosen:
            found.append(cls(chosen, **settings))
    return found


def base_run(layout: str, kind: str, dtype: torch.dtype) -> mu.Run:
    """A base after a few steps, so that there is state to carry."""
    torch.manual_seed(0)
    model = shard(Net(BASE).to(device(), dtype), layout)
    run = mu.Run(model, optimizers(model, kind), steps=WARM)
    mu.clip_before_step_(run.optimizers, run, model=model, max_norm=LIMIT)
    for i in range(WARM):
        train_step(run, i)
    return run


def wide_run(source: Path | mu.Run, plan: mu.Plan, layout: str, kind: str, dtype: torch.dtype) -> mu.Run:
    """The wide run on these ranks, from the base's checkpoint or from the live base."""
    with torch.device("meta"):
        model = Net(WIDE).to(dtype)
    shard(model, layout)
    return mu.load_grown_(source, mu.Run(model, optimizers(model, kind, plan)), plan=plan)


def save(run: mu.Run, folder: Path) -> Path:
    """Write a run as DCP, as torch's own recipes do."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optim = get_state_dict(run.model, list(run.optimizers), options=options)
    state_dict_saver.save({"model": model, "optim": optim}, checkpoint_id=folder)
    return folder


def train_step(run: mu.Run, i: int) -> float:
    """One step on this rank's share of batch i; the loss of the whole batch."""
    tokens = torch.randint(TOKENS, (BATCH,), generator=torch.Generator().manual_seed(i))
    targets = (5 * tokens + 3) % TOKENS
    embedding: Any = run.model.get_parameter("embed.weight")
    # those that share the batch: data parallel, not tensor parallel
    ranks = embedding.device_mesh.mesh.flatten().tolist()
    mine = ranks.index(dist.get_rank())
    tokens, targets = (t.chunk(len(ranks))[mine].to(device()) for t in (tokens, targets))
    loss = F.cross_entropy(run.model(tokens), targets)
    step(run, loss)
    value = loss.detach().double()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


@dataclass(frozen=True)
class Row:
    """One comparison: where, with what, and the largest relative difference of a loss from the base's."""

    ranks: int
    layout: str
    optimizer: str
    dtype: str
    wrong: str
    worst: float
    clipped: float
    """The smallest norm before clipping, in units of the limit: clipping bit at every step when it is above 1."""


def side_by_side(base: mu.Run, wide: mu.Run, steps: int = STEPS) -> tuple[float, float]:
    """Train both; the largest relative difference of a loss, and the smallest norm over the limit."""
    worst, least = 0.0, float("inf")
    for i in range(WARM, WARM + steps):
        a, b = train_step(base, i), train_step(wide, i)
        gap = abs(a - b) / abs(a)
        worst = max(worst, gap if gap == gap else float("inf"))
        least = min(least, *(float(norm) / LIMIT for norm in (last_norm(base), last_norm(wide))))
    return worst, least


def last_norm(run: mu.Run) -> Tensor:
    hooks = [h for o in run.optimizers for h in o._optimizer_step_pre_hooks.values()]
    norm = next(hook.last_norm for hook in hooks if isinstance(hook, Clip))
    assert norm is not None
    return norm


def compare(
    layout: str,
    kind: str,
    dtype: torch.dtype,
    checkpoint: Path | None = None,
    wrong: str = "",
    steps: int = STEPS,
) -> Row:
    """Grow a base, through a checkpoint or live, and train on; `wrong` leaves units out of one place."""
    plan = mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),))
    with precise_muon():
        base = base_run(layout, kind, dtype)
        wide = wide_run(base if checkpoint is None else save(base, checkpoint), plan, layout, kind, dtype)
        if wrong == "groups":
            for optimizer in wide.optimizers:
                for group in optimizer.param_groups:
                    group |= ADAMW
        since = mu.Run(wide.model) if wrong == "clipping" else plan
        mu.clip_before_step_(wide.optimizers, since, model=wide.model, max_norm=LIMIT)
        worst, least = side_by_side(base, wide, steps)
    name = str(dtype).removeprefix("torch.")
    return Row(dist.get_world_size(), layout, kind, name, wrong, worst, least)


def collectives_per_clip() -> int:
    """How many collectives one clipping of the wide run takes, over all its tensors."""
    from torch.distributed.tensor.debug import CommDebugMode

    plan = mu.plans.plan_between(Net, BASE, WIDE, example_inputs=(torch.arange(TOKENS),))
    counts: list[int] = []
    for layout in LAYOUTS[dist.get_world_size()]:
        run = mu.Run(shard(Net(WIDE), layout))
        run.model(torch.arange(TOKENS)).square().mean().backward()
        mode = CommDebugMode()  # type: ignore[no-untyped-call]
        with mode:
            mu.trainers.clip_grad_norm_(run.model, plan, max_norm=LIMIT)
        counts.append(int(mode.get_total_counts()))
    return max(counts)
