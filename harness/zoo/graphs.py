"""Graphs, sets and point clouds in the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import CLASSES, INPUTS, OUTPUTS
from harness.zoo.batches import IDS, labelled, neighbours, sequences, tables
from harness.zoo.entry import Entry, Exact, vector_model

HEADS = 2
FAR = -1e9


class Convolved(nn.Module):
    """GCN: neighbours are averaged after every layer."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(INPUTS, w), nn.Linear(w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        near = neighbours().to(x.dtype)
        return near @ self.out(F.relu(near @ self.b(F.relu(near @ self.a(x)))))


class RawConvolved(nn.Module):
    """PyTorch's example: GCN with raw kernels (inputs, outputs) and log-softmax at the end."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(INPUTS, w)), nn.Parameter(torch.randn(w, CLASSES))
        self.bias = nn.Parameter(torch.zeros(w))

    def forward(self, x: Tensor) -> Any:
        near = neighbours().to(x.dtype)
        h = F.relu(near @ (x @ self.first) + self.bias)
        return F.log_softmax(near @ (h @ self.second), -1)


class Isomorphism(nn.Module):
    """GIN: the sum of neighbours and (1 + eps) times the node, through a perceptron."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.eps = nn.Linear(INPUTS, w), nn.Parameter(torch.zeros(()))
        self.mlp = nn.Sequential(nn.Linear(w, 2 * w), nn.ReLU(), nn.Linear(2 * w, w))
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        return self.out(self.mlp((1 + self.eps) * h + (neighbours() > 0).to(x.dtype) @ h))


class Attentive(nn.Module):
    """GAT with one head, scored by two linear layers."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, w, bias=False), nn.Linear(w, CLASSES)
        self.left, self.right = nn.Linear(w, 1, bias=False), nn.Linear(w, 1, bias=False)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        scores = F.leaky_relu(self.left(h) + self.right(h).T, 0.2).masked_fill(neighbours() == 0, FAR)
        return self.out(F.elu(scores.softmax(-1) @ h))


class ManyHeads(nn.Module):
    """PyG's GAT: heads are a dimension of one raw parameter, which is summed over."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.heads, self.lin = HEADS, nn.Linear(INPUTS, HEADS * w, bias=False)
        self.att, self.out = nn.Parameter(torch.randn(1, HEADS, w)), nn.Linear(HEADS * w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        h = self.lin(x).unflatten(-1, (self.heads, -1))
        score = (h * self.att).sum(-1).T
        scores = F.leaky_relu(score[:, :, None] + score[:, None], 0.2).masked_fill(neighbours() == 0, FAR)
        return self.out(F.elu(torch.einsum("hij,jhc->ihc", scores.softmax(-1), h)).flatten(1))


class Sampled(nn.Module):
    """GraphSAGE: a node next to the mean of its neighbours."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2 * INPUTS, w), nn.Linear(2 * w, w), nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        near = neighbours().to(x.dtype)
        h = F.relu(self.a(torch.cat([x, near @ x], -1)))
        return self.out(F.relu(self.b(torch.cat([h, near @ h], -1))))


class Messages(nn.Module):
    """Message passing: an edge reads both of its ends, a GRU cell updates the nodes."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.edge, self.update = nn.Linear(INPUTS, w), nn.Linear(2 * w, w), nn.GRUCell(w, w)
        self.out = nn.Linear(w, CLASSES)

    def forward(self, x: Tensor) -> Any:
        h = self.a(x)
        ends = torch.cat([h[:, None].expand(-1, len(h), -1), h[None].expand(len(h), -1, -1)], -1)
        near = neighbours().to(x.dtype)
        return self.out(self.update(torch.einsum("ij,ijc->ic", near, F.relu(self.edge(ends))), h))


class Propagated(nn.Module):
    """LightGCN: embeddings of users and items are averaged over a graph, then multiplied."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.nodes = nn.Embedding(IDS, w)

    def forward(self, x: Tensor) -> Any:
        near = neighbours()[:IDS, :IDS].to(self.nodes.weight.dtype)
        h = (self.nodes.weight + near @ self.nodes.weight) / 2
        return (h[x[:, 0]] * h[x[:, 1]]).sum(-1)


class Aligned(nn.Module):
    """PointNet: a matrix of width by width, made from the points, turns their features."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.a, self.look = w, nn.Conv1d(INPUTS, w, 1), nn.Conv1d(w, 2 * w, 1)
        self.turn, self.b = nn.Linear(2 * w, w * w), nn.Conv1d(w, 4 * w, 1)
        self.out = nn.Linear(4 * w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.a(x.mT))
        turn = self.turn(F.relu(self.look(h)).amax(-1)).view(-1, self.w, self.w)
        return self.out(self.b(torch.bmm(turn + torch.eye(self.w, dtype=x.dtype), h)).amax(-1))


class Edges(nn.Module):
    """DGCNN: nearest neighbours in feature space, and both layers side by side at the end."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(2 * INPUTS, w), nn.Linear(2 * w, w), nn.Linear(2 * w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        found = []
        for layer in (self.a, self.b):
            near = (x[:, :, None] - x[:, None]).square().mean(-1).topk(3, largest=False).indices
            others = torch.stack([row[i] for row, i in zip(x, near, strict=True)])
            ends = torch.cat([x[:, :, None].expand_as(others), others - x[:, :, None]], -1)
            x = F.leaky_relu(layer(ends)).amax(2)
            found.append(x)
        return self.out(torch.cat(found, -1).amax(1))


class DeepSet(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(INPUTS, w), nn.ReLU(), nn.Linear(w, w))
        self.all = nn.Sequential(nn.Linear(w, w), nn.ReLU(), nn.Linear(w, OUTPUTS))

    def forward(self, x: Tensor) -> Any:
        return self.all(self.each(x).sum(1))


class GatedPooling(nn.Module):
    """Multiple instance learning: two gates weigh the instances."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.v, self.u = nn.Linear(INPUTS, w), nn.Linear(w, w), nn.Linear(w, w)
        self.score, self.out = nn.Linear(w, 1), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        h = F.relu(self.a(x))
        weights = self.score(self.v(h).tanh() * self.u(h).sigmoid()).softmax(1)
        return self.out((weights * h).sum(1))


def nodes(name: str, make: Callable[[Any], nn.Module], *rest: Any, **options: Any) -> Entry:
    return Entry(name, make, 8, 16, labelled, *rest, **options)


MODELS = (
    nodes("gcn", Convolved),
    nodes("gcn_raw_kernels", RawConvolved, criterion=F.nll_loss, rebuilt=True),
    nodes("gin", Isomorphism),
    nodes("gat_one_head", Attentive),
    nodes("gat_many_heads", ManyHeads),
    nodes("graphsage", Sampled),
    nodes("message_passing", Messages),
    vector_model("lightgcn", Propagated, Exact(folds={"nodes.weight": "2^(-1/2)"}), batch=tables),
    vector_model(
        "pointnet_turned",
        Aligned,
        Exact(layouts={"turn.*": {0: [(4, 2), (4, 2)]}}, folds={"turn.*": "1/2"}),
        batch=sequences,
        sizes=(4, 8),
    ),
    vector_model("dgcnn_edges", Edges, batch=sequences),
    vector_model("deep_set", DeepSet, batch=sequences),
    vector_model("gated_pooling", GatedPooling, batch=sequences),
)
