"""Every form of dropout is off in a proof, and the proof says where it was met."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from mupscale.models.dropout import without_dropout

X = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))


class Dropping(nn.Module):
    """One layer of width 8 with dropout of one kind."""

    def __init__(self, kind, width=8):
        super().__init__()
        self.kind, self.inside, self.out = kind, nn.Linear(8, width), nn.Linear(width, 2)
        self.drop = nn.Dropout(0.5) if kind == "module" else nn.Identity()
        if kind == "attention module":
            self.mixed = nn.MultiheadAttention(width, 2, dropout=0.5, batch_first=True)
        if kind in ("recurrent", "packed"):
            self.cell = nn.GRU(width, width, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        h = self.drop(torch.tanh(self.inside(x)))
        if self.kind == "functional":
            h = F.dropout(h, training=self.training)
        elif self.kind == "attention":
            h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.5 * self.training)
        elif self.kind == "attention module":
            h = self.mixed(h, h, h)[0]
        elif self.kind == "recurrent":
            h = self.cell(h)[0]
        elif self.kind == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(h, torch.tensor([5, 4, 3, 2]), batch_first=True)
            h = nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0], batch_first=True)[0]
        return self.out(h)


MET = {
    "module": "drop",
    "functional": "a functional dropout in the model",
    "attention": "a functional dropout in the model",
    "attention module": "mixed",
    "recurrent": "cell",
    "packed": "cell",
}


@pytest.mark.parametrize("kind", MET)
def test_dropout_is_off_and_met_by_name(kind):
    model = Dropping(kind)
    with without_dropout(model) as observed:
        found = model(X)
    assert list(observed.dropout) == [MET[kind]]
    dropped = model(X)
    model.eval()
    with without_dropout(model) as quiet:
        expected = model(X)
    assert torch.equal(found, expected), "as in eval mode"
    assert not quiet.dropout
    assert not torch.equal(dropped, expected), "control: outside the context it drops"


def test_a_plan_that_is_measured_without_dropout_says_so():
    def loss(model):
        return model(X).square().mean()

    plan = mu.infer_plan(Dropping("functional"), lambda: Dropping("functional", 16), loss=loss)
    assert any("no dropout (a functional dropout in the model)" in need for need in plan.needs)
    assert not mu.infer_plan(Dropping("none"), lambda: Dropping("none", 16), loss=loss).needs


def test_dropout_outside_a_model_is_met_too():
    with without_dropout() as observed:
        assert torch.equal(F.dropout(X, 0.5), X)
        assert torch.equal(torch.dropout(X, 0.5, False), X)
    assert list(observed.dropout) == ["a functional dropout outside the model"]
