"""Retrieval and metric learning in the zoo: dot products, cosines and distances between outputs that grow."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, OUTPUTS, cross_entropy, regression
from harness.zoo.batches import labelled, paired
from harness.zoo.entry import Exact, Impossible, vector_model
from harness.zoo.recommenders import HALF_POWER


def tower(w: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, w), nn.GELU(), nn.Linear(w, w))


class Towers(nn.Module):
    """Two towers whose outputs meet in a dot product: of unit vectors (CLIP) or as they are (DPR)."""

    def __init__(self, w: int, unit: bool) -> None:
        super().__init__()
        self.unit, self.a, self.b = unit, tower(w), tower(w)
        self.heat = nn.Parameter(torch.tensor(1.0)) if unit else None

    def forward(self, x: Tensor) -> Any:
        a, b = self.a(x), self.b(x.flip(-1))
        if self.heat is None:
            return a @ b.T
        return self.heat.exp() * F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T


class LateInteraction(nn.Module):
    """ColBERT: every word of a query finds its best word in a document; unit vectors."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.parts = nn.Linear(INPUTS, 3 * 4)
        self.encode = nn.Sequential(nn.Linear(4, w), nn.GELU(), nn.Linear(w, w))

    def forward(self, x: Tensor) -> Any:
        e = F.normalize(self.encode(self.parts(x).unflatten(-1, (3, 4))), dim=-1)
        return 4 * torch.einsum("qid,pjd->qpij", e, e.flip(1)).amax(-1).sum(-1)


class Embedded(nn.Module):
    """An encoder as wide as its embedding, with a loss on distances between embeddings."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.encode = tower(w)

    def forward(self, x: Tensor) -> Any:
        return self.encode(x)


class Prototypes(Embedded):
    """Logits are squared distances to the first rows."""

    def forward(self, x: Tensor) -> Any:
        e = self.encode(x)
        return -(e[:, None] - e[:4]).square().sum(-1)


class Difference(Embedded):
    """A siamese net that reads the absolute difference."""

    def __init__(self, w: int) -> None:
        super().__init__(w)
        self.out = nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out((self.encode(x) - self.encode(x.flip(0))).abs())


def triplet(found: Tensor, _: Tensor) -> Tensor:
    near, far = found.roll(1, 0), found.roll(2, 0)
    return F.triplet_margin_loss(found, near, far)


def fixed(w: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, w), nn.ReLU(), nn.Linear(w, 4))


MODELS = (
    vector_model("clip_unit_vectors", lambda w: Towers(w, unit=True), batch=paired, criterion=cross_entropy),
    vector_model(
        "dpr_dot_products",
        lambda w: Towers(w, unit=False),
        Exact(folds={"[ab].2.*": HALF_POWER}),
        batch=paired,
        criterion=cross_entropy,
    ),
    vector_model("late_interaction", LateInteraction, batch=paired, criterion=cross_entropy),
    vector_model(
        "prototypes_euclidean",
        Prototypes,
        Exact(folds={"encode.2.*": HALF_POWER}),
        batch=labelled,
        criterion=cross_entropy,
    ),
    vector_model("siamese_difference", Difference),
    vector_model(
        "triplet_growing",
        Embedded,
        Impossible("the distance adds an eps to every channel"),
        batch=regression,
        criterion=triplet,
    ),
    vector_model("triplet_fixed", fixed, criterion=triplet),
)
