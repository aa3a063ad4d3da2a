"""Gated models of the zoo: GLU and its relatives, modulation by a second input, maxout, mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, OUTPUTS
from harness.zoo.entry import Exact, vector_model

EXPERTS = 4


class Modulated(nn.Module):
    """FiLM: a second input scales and shifts the hidden units."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.film, self.out = nn.Linear(INPUTS, w), nn.Linear(INPUTS, 2 * w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        scale, shift = self.film(x).chunk(2, -1)
        return self.out(F.gelu(self.a(x) * (1 + scale) + shift))


class AdaptiveNorm(nn.Module):
    """DiT's block: shift, scale and gate of two layers come from one fused projection."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(INPUTS, w), nn.LayerNorm(w, elementwise_affine=False)
        self.condition = nn.Sequential(nn.SiLU(), nn.Linear(w, 6 * w))
        self.first, self.second, self.out = nn.Linear(w, w), nn.Linear(w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        parts = self.condition(h).chunk(6, -1)
        for layer, (shift, scale, gate) in ((self.first, parts[:3]), (self.second, parts[3:])):
            h = h + gate * layer(self.norm(h) * (1 + scale) + shift)
        return self.out(h)


class Product(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(INPUTS, w), nn.Bilinear(w, w, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.out(self.b(h, torch.tanh(h)))


class FusedSwiGLU(nn.Module):
    """Gate and value are the halves of one projection."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.norm, self.out = nn.Linear(INPUTS, w), nn.RMSNorm(w), nn.Linear(w, OUTPUTS)
        self.up, self.down = nn.Linear(w, 4 * w, bias=False), nn.Linear(2 * w, w, bias=False)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        gate, value = self.up(self.norm(x)).chunk(2, -1)
        return self.out(x + self.down(F.silu(gate) * value))


class FunctionalGLU(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, 2 * w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(F.glu(self.a(x)))


class Maxout(nn.Module):
    """The larger of every two neighbours."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, 2 * w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.a(x).unflatten(-1, (-1, 2)).amax(-1))


class RoutedExperts(nn.Module):
    """Two of four experts per row, as modules."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.router, self.out = nn.Linear(INPUTS, w), nn.Linear(w, EXPERTS), nn.Linear(w, OUTPUTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(w, 2 * w), nn.GELU(), nn.Linear(2 * w, w)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, places = (chosen == i).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return self.out(x + y)


class StackedExperts(nn.Module):
    """All experts in one raw parameter per layer, mixed softly."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.router, self.out = nn.Linear(INPUTS, w), nn.Linear(w, EXPERTS), nn.Linear(w, OUTPUTS)
        self.w1 = nn.Parameter(torch.randn(EXPERTS, w, 2 * w) / w**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, 2 * w, w) / w**0.5)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        y = torch.einsum("bd,edf->bef", x, self.w1)
        y = torch.einsum("bef,efd->bed", F.gelu(y), self.w2)
        return self.out(x + (y * self.router(x).softmax(-1)[..., None]).sum(1))


MODELS = (
    vector_model("film", Modulated),
    vector_model("dit_adaptive_norm", AdaptiveNorm),
    vector_model("bilinear", Product, sizes=(4, 8)),
    vector_model("swiglu_fused", FusedSwiGLU),
    vector_model(
        "glu_module", lambda w: nn.Sequential(nn.Linear(INPUTS, 2 * w), nn.GLU(), nn.Linear(w, OUTPUTS))
    ),
    vector_model("glu_functional", FunctionalGLU),
    vector_model("maxout_neighbours", Maxout, Exact(layouts={"a.weight": {0: 2}, "out.weight": {1: 1}})),
    vector_model("experts_routed", RoutedExperts),
    vector_model("experts_stacked", StackedExperts),
)
