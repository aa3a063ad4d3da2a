"""Layouts that views show are followed to every tensor that shares an axis, and tried at once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mupscale as mu
from mupscale.planning.declare import Declared
from mupscale.planning.infer import find_plan
from mupscale.plans.direction import Direction
from mupscale.plans.wide_model import fill_model_
from mupscale.proofs.identity import gradient_identity
from mupscale.training.grow import prove

WORDS, HEAD = 7, 4
TOKENS = torch.randint(WORDS, (2, 5), generator=torch.Generator().manual_seed(0))
X = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def linear(n: int, m: int) -> nn.Linear:
    return nn.Linear(n, m, bias=False)


def rms(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class NanoChat(nn.Module):
    """Grouped attention whose values mix with those of the first block and with an embedding of the words."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.words, self.readout = nn.Embedding(WORDS, n), linear(n, WORDS)
        self.values = nn.Embedding(WORDS, n // 2)
        sizes = {"q": (n, n), "k": (n, n // 2), "v": (n, n // 2), "o": (n, n)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({k: linear(*m) for k, m in sizes.items()}) for _ in range(2)
        )

    def forward(self, tokens: torch.Tensor) -> Any:
        x, first = self.words(tokens), None
        block: Any
        for block in self.blocks:
            q, k, v = (block[name](rms(x)).unflatten(-1, (-1, HEAD)) for name in "qkv")
            first = v if first is None else first
            v = (v + first) / 2 + self.values(tokens).unflatten(-1, (-1, HEAD))
            q, k, v = rms(q).transpose(1, 2), rms(k).transpose(1, 2), v.transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + block["o"](y.transpose(1, 2).flatten(2))
        return self.readout(rms(x))


class DeltaNet(nn.Module):
    """The gated delta rule, behind a short convolution over queries, keys and values together."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(WORDS, n), nn.RMSNorm(HEAD)
        self.q, self.k, self.v, self.g, self.o = (linear(n, n) for _ in range(5))
        self.beta, self.decay = nn.Linear(n, n // HEAD), nn.Parameter(torch.rand(n // HEAD))
        self.conv = nn.Conv1d(3 * n, 3 * n, 3, groups=3 * n, padding=2, bias=False)
        self.readout = linear(n, WORDS)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.words(tokens)
        y, (b, t, n) = rms(x), x.shape
        z = F.silu(self.conv(torch.cat([self.q(y), self.k(y), self.v(y)], -1).mT)[..., :t]).mT
        q, k, v = (u.reshape(b, t, -1, HEAD).transpose(1, 2) for u in z.chunk(3, -1))
        q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), self.beta(y).sigmoid().mT
        state, out = x.new_zeros(b, n // HEAD, HEAD, HEAD), []
        for i in range(t):
            state = state * (-self.decay.exp())[:, None, None].exp()
            error = v[:, :, i] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, i])
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, i], error * beta[:, :, i, None])
            out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, i]))
        o = self.norm(torch.stack(out, 1)) * F.silu(self.g(y)).view(b, t, -1, HEAD)
        return self.readout(rms(x + self.o(o.flatten(2))))


class GATv2(nn.Module):
    """Attention over the edges of a graph; more heads of one size, and a residual around them."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.enter, self.left, self.right = nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, n)
        self.a, self.leave = nn.Parameter(torch.randn(1, n // 2, 2)), nn.Linear(n, 3)
        self.register_buffer("edges", torch.randint(12, (2, 30), generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor) -> Any:
        x, (u, v) = self.enter(x).relu(), self.get_buffer("edges")
        left, right = (layer(x).view(len(x), -1, 2) for layer in (self.left, self.right))
        e = (F.leaky_relu(left[u] + right[v]) * self.a).sum(-1).exp()
        share = e / torch.zeros(len(x), e.shape[1], dtype=x.dtype).index_add(0, v, e)[v]
        y = torch.zeros_like(left).index_add(0, v, share[..., None] * left[u])
        return self.leave((x + y.flatten(1)).relu())


class Gemma(nn.Module):
    """A tied readout behind a norm that is read twice, and embeddings times the root of the width."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.words, self.mid, self.norm = nn.Embedding(WORDS, n), nn.Linear(n, n), nn.RMSNorm(n)

    def forward(self, tokens: torch.Tensor) -> Any:
        x = self.words(tokens) * self.words.embedding_dim**0.5
        x = x + self.mid(self.norm(x)).tanh()
        return F.linear(self.norm(x), self.words.weight).tanh()


def generator(n: int) -> nn.Module:
    """DCGAN: channels of 2 x 2 pixels that a linear layer writes."""
    up = [nn.Unflatten(1, (n, 2, 2)), nn.ConvTranspose2d(n, 3, 4, 2, 1), nn.Flatten()]
    return nn.Sequential(nn.Linear(6, 4 * n), nn.ReLU(), *up, nn.Linear(48, 3))


def pooled(pool: nn.Module) -> Callable[[int], nn.Module]:
    """Pooling over features: pairs of neighbours are read together."""
    return lambda n: nn.Sequential(nn.Linear(6, n), pool, nn.Linear(n // 2, 3))


def of_tokens(model: nn.Module) -> Any:
    return F.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.roll(1, 1).flatten())


def of_vectors(model: nn.Module) -> Any:
    return model(X.to(next(model.parameters()).dtype)).tanh().square().mean()


MODELS: dict[str, tuple[Callable[[int], nn.Module], Callable[[nn.Module], Any], int]] = {
    "value residual and value embeddings": (NanoChat, of_tokens, 2),
    "gated delta net": (DeltaNet, of_tokens, 2),
    "GATv2 with more heads": (GATv2, of_vectors, 2),
    "one norm read twice": (Gemma, of_tokens, 12),
    "Unflatten": (generator, of_vectors, 2),
    "MaxPool1d over features": (pooled(nn.MaxPool1d(2)), of_vectors, 2),
    "AvgPool1d over features": (pooled(nn.AvgPool1d(2)), of_vectors, 2),
    "LPPool1d over features": (pooled(nn.LPPool1d(2, 2)), of_vectors, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_few_declared_lines_would_solve_is_found(name):
    make, loss, most = MODELS[name]
    torch.manual_seed(0)
    base, wide = make(8).double(), make(16).double()
    found = find_plan(base, wide, loss, Declared())
    assert found.trials <= most
    fill_model_(wide, base, Direction(found.plan), in_place=True)
    assert gradient_identity(base, wide, loss=loss, plan=found.plan).worst[1] < 1e-11
    wrong = found.plan.fold([n for n, t in found.plan.tensors.items() if t.grows][-1], "2^(1/4)")
    fill_model_(wide, base, Direction(wrong), in_place=True)
    assert gradient_identity(base, wide, loss=loss, plan=wrong).worst[1] > 1e-5, "control: another power"


def test_layouts_are_read_in_every_block_at_once():
    torch.manual_seed(0)
    plan = find_plan(NanoChat(8).double(), NanoChat(16).double(), of_tokens, Declared()).plan
    found = {name: [str(axis) for axis in plan[f"blocks.1.{name}.weight"].axes] for name in "qvo"}
    assert found["q"][0] == "out: 1x2 * 8", "two queries share a head of keys, so they are copied together"
    assert found == {
        "q": ["out: 1x2 * 8", "in: 8x2"],
        "v": ["out: 1x2 * 4", "in: 8x2"],
        "o": ["out: 8x2", "in: 1x2 * 8"],
    }


def one_head(n: int) -> nn.Module:
    """Attention with 1/sqrt(width), which takes folds that no layout shows."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.q, self.k, self.v, self.o = (
                nn.Linear(6, n),
                *(nn.Linear(n, n) for _ in range(3)),
                nn.Linear(n, 3),
            )

        def forward(self, x: torch.Tensor) -> Any:
            x = self.e(x)
            return self.o((self.q(x) @ self.k(x).mT / n**0.5).softmax(-1) @ self.v(x))

    return Attention()  # fmt: skip


def test_a_large_model_gets_its_layouts_without_a_copy_in_float64(monkeypatch):
    """Control: folds that no view shows take the search, which makes copies."""
    monkeypatch.setattr(prove, "FLOAT64_BYTES", 0)
    torch.manual_seed(0)
    proof = mu.grow(NanoChat(8), lambda: NanoChat(16), loss=of_tokens).provenance["proof"]
    assert (proof["dtype"], proof["trials"]) == ("float32", 1)
    proof = mu.grow(one_head(8), lambda: one_head(16), loss=of_vectors).provenance["proof"]
    assert proof["dtype"] == "float64"
