"""Recommenders of the zoo: scores that are sums over growing embeddings of users, items, words or fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import LENGTH, TOKENS
from harness.models import CASES
from harness.zoo.attention import tokens
from harness.zoo.batches import FIELDS, IDS, tables, words
from harness.zoo.entry import Entry, Exact, vector_model

ROWS = FIELDS * IDS
OFFSETS = torch.arange(FIELDS) * IDS
HALF_POWER = "2^(-1/2)"


class Factors(nn.Module):
    """Matrix factorisation: the dot product of a user and an item, with a bias each."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(IDS, w), nn.Embedding(IDS, w)
        self.user_bias, self.item_bias = nn.Embedding(IDS, 1), nn.Embedding(IDS, 1)

    def forward(self, x: Tensor) -> Any:
        user, item = x[:, 0], x[:, 1]
        score = (self.user(user) * self.item(item)).sum(-1)
        return score + self.user_bias(user)[:, 0] + self.item_bias(item)[:, 0]


class Ranked(Factors):
    """BPR: the item that was taken against one that was not."""

    def forward(self, x: Tensor) -> Any:
        user, taken, other = (f(i) for f, i in zip((self.user, self.item, self.item), x.T[:3], strict=True))
        return (user * (taken - other)).sum(-1)


class InAndOut(nn.Module):
    """word2vec: logits of all words from two embeddings."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.word, self.context = nn.Embedding(TOKENS, w), nn.Embedding(TOKENS, w)

    def forward(self, x: Tensor) -> Any:
        return self.word(x) @ self.context.weight.T


class Triple(nn.Module):
    """A knowledge graph: TransE measures head + relation - tail, DistMult multiplies the three."""

    def __init__(self, w: int, product: bool) -> None:
        super().__init__()
        self.product, self.entity, self.relation = product, nn.Embedding(IDS, w), nn.Embedding(IDS, w)

    def forward(self, x: Tensor) -> Any:
        head, relation, tail = self.entity(x[:, 0]), self.relation(x[:, 1]), self.entity(x[:, 2])
        return (head * relation * tail).sum(-1) if self.product else (head + relation - tail).abs().sum(-1)


class Fields(nn.Module):
    """One embedding table for all fields of a row; subclasses say how the fields meet."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, w)

    def rows(self, x: Tensor) -> Any:
        return self.embed(x + OFFSETS)


class DeepFM(Fields):
    """A factorisation machine next to a perceptron that reads the same embeddings."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.first = nn.Embedding(ROWS, 1)
        self.deep = nn.Sequential(nn.Linear(FIELDS * w, 2 * w), nn.ReLU(), nn.Linear(2 * w, 1))

    def forward(self, x: Tensor) -> Any:
        e = self.rows(x)
        pairs = 0.5 * (e.sum(1).square() - e.square().sum(1)).sum(-1)
        return self.first(x + OFFSETS).sum((1, 2)) + pairs + self.deep(e.flatten(1))[:, 0]


class Interactions(Fields):
    """DLRM: dot products of all pairs of fields."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.out = nn.Linear(FIELDS * (FIELDS - 1) // 2, 1)

    def forward(self, x: Tensor) -> Any:
        e = self.rows(x)
        i, j = torch.triu_indices(FIELDS, FIELDS, 1)
        return self.out((e @ e.mT)[:, i, j])[:, 0]


class Crossed(Fields):
    """DCN: the concatenated fields times a number that is linear in them, twice."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.cross = nn.ModuleList(nn.Linear(FIELDS * w, 1, bias=False) for _ in range(2))
        self.bias = nn.ParameterList(torch.zeros(FIELDS * w) for _ in range(2))
        self.out = nn.Linear(FIELDS * w, 1)

    def forward(self, x: Tensor) -> Any:
        first = h = self.rows(x).flatten(1)
        for cross, bias in zip(self.cross, self.bias, strict=True):
            h = h + first * cross(h) + bias
        return self.out(h)[:, 0]


class Joined(nn.Module):
    """NCF: user and item side by side in a perceptron."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(IDS, w), nn.Embedding(IDS, w)
        self.deep = nn.Sequential(nn.Linear(2 * w, w), nn.ReLU(), nn.Linear(w, 1))

    def forward(self, x: Tensor) -> Any:
        return self.deep(torch.cat([self.user(x[:, 0]), self.item(x[:, 1])], -1))[:, 0]


class History(nn.Module):
    """The mean of what was seen, through a perceptron, against all items."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.seen, self.items = nn.Embedding(TOKENS, w), nn.Embedding(TOKENS, w)
        self.deep = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w))

    def forward(self, x: Tensor) -> Any:
        return self.deep(self.seen(x).cumsum(1)) @ self.items.weight.T


class SASRec(nn.Module):
    """A sequence of items: embeddings times sqrt(width), attention, and the same embeddings as readout."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.items, self.places = nn.Embedding(TOKENS, w), nn.Embedding(LENGTH, w)
        self.norm, self.last = nn.LayerNorm(w), nn.LayerNorm(w)
        self.attend = nn.MultiheadAttention(w, 1, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        h = self.items(x) * self.items.embedding_dim**0.5 + self.places(torch.arange(x.shape[1]))
        h = h + self.attend(self.norm(h), h, h, attn_mask=later)[0]
        return self.last(h) @ self.items.weight.T


class SessionGRU(nn.Module):
    """GRU4Rec: a GRU over items, and a readout of its own."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.items, self.gru = nn.Embedding(TOKENS, w), nn.GRU(w, w, batch_first=True)
        self.out = nn.Linear(w, TOKENS)

    def forward(self, x: Tensor) -> Any:
        return self.out(torch.tanh(self.gru(self.items(x))[0]))


def ranking(found: Tensor, _: Tensor) -> Tensor:
    return -F.logsigmoid(found).mean()


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(list(model.parameters()), lr=3e-3)


def table(name: str, make: Callable[[Any], nn.Module], *rest: Any, **options: Any) -> Entry:
    return vector_model(name, make, *rest, **{"batch": tables, **options})


W2V = CASES["Word2Vec"]
MODELS = (
    Entry("house_word2vec", W2V.make, 6, 18, W2V.batch, criterion=F.mse_loss, optimizer=sparse_adam),
    table("matrix_factorisation", Factors),
    table("bayesian_ranking", Ranked, criterion=ranking),
    Entry("word2vec_softmax", InAndOut, 8, 16, words),
    table("transe", lambda w: Triple(w, product=False), Exact(folds={"*.weight": "1/2"})),
    table("distmult", lambda w: Triple(w, product=True), Exact(folds={"*.weight": "2^(-1/3)"})),
    table(
        "deepfm",
        DeepFM,
        Exact(
            folds={"embed.weight": HALF_POWER, "deep.0.weight": "2^(1/2)"}, layouts={"deep.0.weight": {1: 1}}
        ),
        sizes=(4, 8),
    ),
    table("dlrm_interactions", Interactions, sizes=(4, 8)),
    table("deep_cross", Crossed, sizes=(4, 8)),
    table("ncf_concatenated", Joined),
    tokens("history_mean", History, Exact(folds={"items.weight": "1/2"})),
    tokens("sasrec", SASRec, Exact(folds={"items.weight": HALF_POWER, "last.*": HALF_POWER})),
    tokens("session_gru", SessionGRU),
)
