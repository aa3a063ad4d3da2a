"""Small models, and runs of them that have trained for a few steps. All are made on the CPU, with its random numbers, and moved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mupscale as mu

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
INPUTS, TOKENS = 8, 11


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.GELU(), nn.Linear(width, 1))


def deep_mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
    )


def rms_mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(INPUTS, width), nn.RMSNorm(width, eps=1e-6), nn.ReLU(), nn.Linear(width, 1)
    )


def dropout_mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.Dropout(0.2), nn.Linear(width, 1))


def cnn(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 5),
    )  # fmt: skip


class Attention(nn.Module):
    """A transformer block in own code with fused qkv, whose plan needs a search; heads grow."""

    def __init__(self, width: int, head: int = 4) -> None:
        super().__init__()
        self.heads = width // head
        self.embed, self.norm = nn.Embedding(TOKENS, width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.read = nn.Linear(width, TOKENS)
        self.register_buffer("position", torch.arange(8), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        b, t, w = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        x = x + self.down(F.gelu(self.up(x)))
        logits: Tensor = self.read(x)
        return logits


class PlusOneNorm(nn.RMSNorm):
    """Gemma's norm, whose scale is 1 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape) * (1 + self.weight)


class Tied(nn.Module):
    """A readout that is the embedding, behind a norm of Gemma's if asked for."""

    def __init__(self, width: int, plus_one: bool = False) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(TOKENS, width), nn.Linear(width, width)
        self.norm: nn.Module = PlusOneNorm(width) if plus_one else nn.Identity()
        self.read = nn.Linear(width, TOKENS, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.read(self.norm(torch.tanh(self.hidden(self.embed(ids)))))
        return logits


def plus_one_tied(width: int) -> nn.Module:
    return Tied(width, plus_one=True)


class Residual(nn.Module):
    """Blocks in a list, for growth in depth."""

    def __init__(self, blocks: int, width: int = 8) -> None:
        super().__init__()
        self.read = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "norm": nn.LayerNorm(width),
                "up": nn.Linear(width, 2 * width, bias=False),
                "down": nn.Linear(2 * width, width, bias=False),
            })
            for _ in range(blocks)
        )  # fmt: skip
        self.out = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(x)
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["down"](torch.relu(block["up"](block["norm"](x))))
        value: Tensor = self.out(x)
        return value


DEEPER = {"blocks": [0, None, 1]}
"""The order of `Residual(3)` from `Residual(2)`."""


class TableOnCpu(nn.Module):
    """A table that is kept on the CPU and looked up there, wherever the weights are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(INPUTS, width), nn.Linear(width, 1)
        self.register_buffer("table", torch.arange(float(INPUTS)))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.get_buffer("table")[torch.arange(INPUTS, device="cpu")].to(x.device)
        value: Tensor = self.last(self.first(x * rows).tanh())
        return value


class Split(nn.Module):
    """A model over two devices, which moves what it computes between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.hidden, self.last = (
            nn.Linear(INPUTS, width),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(self.hidden(self.first(x).tanh().to(self.hidden.weight.device)).tanh())
        return value


class Trained(NamedTuple):
    """A run, the loss of a model, a training step that returns it, and the batch."""

    run: mu.Run
    loss: Callable[[nn.Module], Tensor]
    step: Callable[[mu.Run, Any], Tensor]
    x: Tensor

    def steps(self, run: mu.Run, count: int = 2) -> list[Tensor]:
        return [self.step(run, i).detach() for i in range(count)]


def stepping(loss: Callable[[nn.Module], Tensor]) -> Callable[[mu.Run, Any], Tensor]:
    def step(run: mu.Run, _: Any) -> Tensor:
        value = loss(run.model)
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        value.backward()
        for optimizer in run.optimizers:
            optimizer.step()
        for scheduler in run.schedulers:
            scheduler.step()
        return value

    return step


def trained(
    device: torch.device | str,
    make: Callable[[int], nn.Module] = mlp,
    width: int = 16,
    *,
    optimizer: MakeOptimizer = adamw,
    dtype: torch.dtype = torch.float32,
    steps: int = 5,
) -> Trained:
    """A regression; `steps` of it."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        x = torch.randn(64, INPUTS).to(device, dtype)
        model = make(width).to(device, dtype)

    def loss(model: nn.Module) -> Any:
        return (model(x) - x.sum(1, keepdim=True).tanh()).square().mean()

    found = Trained(mu.Run(model, optimizer(model.parameters())), loss, stepping(loss), x)
    found.steps(found.run, steps)
    return found


def trained_on_tokens(
    device: torch.device | str, make: Callable[[int], nn.Module] = Attention, width: int = 8, steps: int = 3
) -> Trained:
    """A tiny language model."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        ids = torch.randint(TOKENS, (4, 8)).to(device)
        model = make(width).to(device)

    def loss(model: nn.Module) -> Any:
        return F.cross_entropy(model(ids)[:, :-1].reshape(-1, TOKENS), ids[:, 1:].reshape(-1))

    found = Trained(mu.Run(model, adamw(model.parameters())), loss, stepping(loss), ids)
    found.steps(found.run, steps)
    return found


def trained_on_images(device: torch.device | str) -> Trained:
    with torch.device("cpu"):
        torch.manual_seed(0)
        x, classes = torch.randn(8, 3, 8, 8).to(device), torch.arange(8).remainder(5).to(device)
        model = cnn(4).to(device)

    def loss(model: nn.Module) -> Any:
        return F.cross_entropy(model(x), classes)

    run = mu.Run(model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    found = Trained(run, loss, stepping(loss), x)
    found.steps(run, 3)
    return found


def trained_beside_a_table(device: torch.device | str) -> Trained:
    """`TableOnCpu` with its weights on the device."""
    with torch.device("cpu"):
        torch.manual_seed(0)
        model, x = TableOnCpu(16), torch.randn(64, INPUTS).to(device)
    model.first.to(device)
    model.last.to(device)

    def loss(model: nn.Module) -> Any:
        return (model(x) - 1).square().mean()

    found = Trained(mu.Run(model, adamw(model.parameters())), loss, stepping(loss), x)
    found.steps(found.run, 1)
    return found


def deeper_plan(x: Tensor) -> mu.Plan:
    """The plan from `Residual(2)` to `Residual(3)`, found on the CPU."""
    rows = x.cpu()
    with torch.device("cpu"):
        base = Residual(2)
        return mu.infer_plan(base, lambda: Residual(3), loss=lambda m: m(rows).square().mean(), order=DEEPER)


def padded_plan(x: Tensor) -> mu.Plan:
    """The plan from `rms_mlp(16)` to `rms_mlp(24)`, which is no multiple, found on the CPU."""
    rows = x.cpu()
    with torch.device("cpu"):
        base = rms_mlp(16)
        return mu.infer_plan(base, lambda: rms_mlp(24), loss=lambda m: m(rows).square().mean(), by="padded")


def proved(run: mu.Run) -> dict[str, object]:
    """A grown run with what its record says of the noise and the proof."""
    record = run.provenance
    return {
        "run": run,
        "t": record.get("auto", {}).get("t"),
        "loss": record.get("loss"),
        "proof": record.get("proof", {}).get("by"),
    }
