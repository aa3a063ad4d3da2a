"""Train small with FSDP2, save, start wide, load the narrow checkpoint into the wide shards, continue.

    torchrun --nproc-per-node 2 examples/fsdp2.py

Runs on CPUs (gloo). Prints the next losses of the base and of the wide run without noise, which are the same, and
with noise, which lets the new width be used.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import mupscale as mu

WORDS, LENGTH = 64, 16


def block(n: int) -> nn.Module:
    return nn.Sequential(nn.RMSNorm(n), nn.Linear(n, 4 * n), nn.GELU(), nn.Linear(4 * n, n, bias=False))


def make(n: int) -> nn.Module:
    blocks = block(n), block(n)
    return nn.Sequential(nn.Embedding(WORDS, n), *blocks, nn.RMSNorm(n), nn.Linear(n, WORDS, bias=False))


def sharded(n: int, since: mu.Plan) -> mu.Run:
    model = mu.plans.on_meta(lambda: make(n))  # parameters on the meta device: no rank holds a full tensor
    for part in (model[1], model[2], model):
        fully_shard(part)
    groups = mu.param_groups(model, since, torch.optim.AdamW, lr=3e-3, weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups)
    mu.clip_before_step_(optimizer, since, model=model, max_norm=0.5)  # the same clip at every width
    return mu.Run(model, optimizer)


def train(run: mu.Run, steps: range) -> list[float]:
    losses = []
    for step in steps:
        seed = step * dist.get_world_size() + dist.get_rank()
        words = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(seed))
        labels = (words * 7 + 3).remainder(WORDS).flatten()
        loss = nn.functional.cross_entropy(run.model(words).flatten(0, 1), labels)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
    return losses


dist.init_process_group("gloo")
torch.manual_seed(0)  # every rank measures the same sizes at the reference
itself, plan = mu.plans.plan_between(make, 32, 32), mu.plans.plan_between(make, 32, 96)
base = sharded(32, itself)
base.model.to_empty(device="cpu")
mu.init_weights_(base.model, itself, std=make(32), seed=0)
train(base, range(30))
folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
dist.broadcast_object_list(folder)
model, state = get_state_dict(base.model, list(base.optimizers))
dcp.save({"model": model, "optim": state}, checkpoint_id=folder[0])

wide = mu.load_grown_(folder[0], sharded(96, plan), plan=plan)
noisy = mu.load_grown_(folder[0], sharded(96, plan), plan=plan, noise=mu.SignalNoise(0.05), seed=0)
curves = [train(run, range(30, 45)) for run in (base, wide, noisy)]
if dist.get_rank() == 0:
    print("step      base   width 96   width 96 with noise")
    for step, (a, b, c) in enumerate(zip(*curves, strict=True), 30):
        print(f"{step:4d} {a:9.6f}  {b:9.6f}             {c:9.6f}")
gap, moved = (max(abs(a - b) / a for a, b in zip(curves[0], c, strict=True)) for c in curves[1:])
assert gap < 1e-5 < 1e-2 < moved, f"without noise {gap:.1e}, with noise {moved:.1e}"
dist.destroy_process_group()
