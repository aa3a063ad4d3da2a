"""Your own small GPT, trained on the bytes of this file, grown twice as wide in the middle of its run.

    python examples/gpt.py

The model has no code for growth. Shapes do not determine the layout of attention heads in the fused projection, so
`plan_between` gets a loss and keeps the layout under which every gradient is right. The control copies one projection unit by unit.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mupscale as mu

torch.manual_seed(0)
TEXT = torch.tensor(list(Path(__file__).read_bytes()))
CONTEXT, HEAD, GROW, END = 32, 8, 60, 100


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, up, down = (nn.Linear(m * width, n * width) for m, n in ((1, 1), (1, 4), (4, 1)))
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, HEAD)).movedim((2, 3), (0, 2))
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.proj(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.bytes(text) + self.places.weight)))


def loss_at(model: nn.Module, step: int = 0) -> Tensor:
    starts = torch.randint(len(TEXT) - CONTEXT, (8, 1), generator=torch.Generator().manual_seed(step))
    rows = TEXT[starts + torch.arange(CONTEXT + 1)]
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train_step(run: mu.Run, step: int) -> float:
    run.model.zero_grad()
    (loss := loss_at(run.model, step)).backward()
    run.optimizer.step()
    return float(loss.detach())


plan = mu.plans.plan_between(GPT, 32, 64, loss=loss_at)
print(plan.explain("blocks.0.qkv.weight"), "\n")
base = mu.Run(model := GPT(32), torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1))
for step in range(GROW):
    train_step(base, step)
wide = mu.grow(base, lambda: GPT(64), plan=plan)
noisy = mu.upscale(base, lambda: GPT(64), mu.SignalNoise(0.05), plan=plan, seed=0)
control = mu.grow(base, lambda: GPT(64), plan=plan)
narrow = model.blocks[0].qkv.weight.detach()
control.model.blocks[0].qkv.weight.data = narrow.repeat_interleave(2, 0).repeat_interleave(2, 1) / 2
curves = [[train_step(run, step) for step in range(GROW, END)] for run in (base, wide, noisy, control)]
print("step     width 32    width 64   with noise")
for i in range(0, END - GROW, 5):
    print(f"{GROW + i:4}" + "".join(f"{curve[i]:12.6f}" for curve in curves[:3]))
right, wrong = (max(abs(a - b) / a for a, b in zip(curves[0], curves[i], strict=True)) for i in (1, 3))
print(f"losses differ by {right:.1e} at most; the control's by {wrong:.1e}")
assert right < 1e-5 < 1e-3 < wrong
