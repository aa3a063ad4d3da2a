"""Recurrent models of the zoo: torch's own layers and cells, gates by hand, state spaces, and sequence to sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.data import INPUTS, OUTPUTS, TOKENS, text
from harness.models import CASES
from harness.zoo.attention import tokens
from harness.zoo.batches import generator, sequences
from harness.zoo.entry import Entry, Exact, Impossible, vector_model

SYMBOLS = 5


class Layers(nn.Module):
    """A torch LSTM, and a readout of its last state."""

    def __init__(self, w: int, out: int, **options: Any) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(INPUTS, w, batch_first=True, **options), nn.Linear(out, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.lstm(x)[0][:, -1])


class Cell(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(INPUTS, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        assert state is not None
        return self.out(state[0])


class LearnedStart(nn.Module):
    def __init__(self, w: int) -> None:
        super().__init__()
        self.gru, self.h0 = nn.GRU(INPUTS, w, batch_first=True), nn.Parameter(torch.randn(1, 1, w))
        self.out = nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.gru(x, self.h0.expand(-1, len(x), -1).contiguous())[0][:, -1])


class HandGRU(nn.Module):
    """Three gates in one projection each for input and state."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.w, self.x, self.h = w, nn.Linear(INPUTS, 3 * w), nn.Linear(w, 3 * w)
        self.out = nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        h = x.new_zeros(len(x), self.w)
        for t in range(x.shape[1]):
            xr, xz, xn = self.x(x[:, t]).chunk(3, -1)
            hr, hz, hn = self.h(h).chunk(3, -1)
            z = (xz + hz).sigmoid()
            h = (1 - z) * torch.tanh(xn + (xr + hr).sigmoid() * hn) + z * h
        return self.out(h)


class MinimalGRU(nn.Module):
    """minGRU: gates of the input alone, summed by a scan."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.gate, self.new, self.out = nn.Linear(INPUTS, w), nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        z, new = self.gate(x).sigmoid(), self.new(x)
        h = torch.zeros_like(new[:, 0])
        for t in range(x.shape[1]):
            h = (1 - z[:, t]) * h + z[:, t] * new[:, t]
        return self.out(h)


class Mamba(nn.Module):
    """A selective state space; the rank of its time step is fixed or grows."""

    def __init__(self, w: int, rank: int, states: int = 4) -> None:
        super().__init__()
        self.sizes, inner = [rank, states, states], 2 * w
        self.a, self.inp = nn.Linear(INPUTS, w), nn.Linear(w, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 3, groups=inner, padding=2)
        self.select, self.dt = nn.Linear(inner, rank + 2 * states, bias=False), nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.down, self.out = nn.Linear(inner, w, bias=False), nn.Linear(w, OUTPUTS)

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        u, z = self.inp(x).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.select(u).split(self.sizes, -1)
        dt = F.softplus(self.dt(dt))[..., None]
        h, seen = torch.zeros_like(dt[:, 0] * b[:, 0, None]), []
        for t in range(x.shape[1]):
            h = torch.exp(-dt[:, t] * self.A_log.exp()) * h + dt[:, t] * u[:, t, :, None] * b[:, t, None]
            seen.append((h * c[:, t, None]).sum(-1))
        y = (torch.stack(seen, 1) + u * self.D) * F.silu(z)
        return self.out((x + self.down(y)).mean(1))


class DiagonalStates(nn.Module):
    """S4D with real states: every channel has its own decays and weights."""

    def __init__(self, w: int, states: int = 4) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)
        self.decay, self.b, self.c = (nn.Parameter(torch.rand(w, states)) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        h = torch.zeros_like(x[:, 0, :, None] * self.b)
        for t in range(x.shape[1]):
            h = torch.exp(-self.decay.exp()) * h + x[:, t, :, None] * self.b
        return self.out((h * self.c).sum(-1))


class RWKV(nn.Module):
    """Time mixing with a decay per channel."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.a, self.out = nn.Linear(INPUTS, w), nn.Linear(w, OUTPUTS)
        self.mix = nn.ParameterList(nn.Parameter(torch.rand(1, 1, w)) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.rand(w)), nn.Parameter(torch.rand(w))
        self.k, self.v, self.r, self.o = (nn.Linear(w, w, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        x = self.a(x)
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (
            f(x * m + before * (1 - m)) for f, m in zip((self.k, self.v, self.r), self.mix, strict=True)
        )
        top, low, seen = torch.zeros_like(x[:, 0]), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            now, fade = (self.first + k[:, t]).exp(), (-self.decay.exp()).exp()
            seen.append((top + now * v[:, t]) / (low + now))
            top, low = fade * top + k[:, t].exp() * v[:, t], fade * low + k[:, t].exp()
        return self.out((x + self.o(r.sigmoid() * torch.stack(seen, 1))).mean(1))


class TiedWords(nn.Module):
    """PyTorch's word language model: an LSTM between an embedding and its own transpose."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(TOKENS, w), nn.LSTM(w, w, batch_first=True)
        self.readout = nn.Linear(w, TOKENS)
        self.readout.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.readout(self.lstm(self.embed(x))[0])


class Seq2Seq(nn.Module):
    """Two GRUs; scores are additive (Bahdanau) or dot products (Luong); states are concatenated."""

    def __init__(self, w: int, additive: bool) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(TOKENS, w), nn.Linear(2 * w, TOKENS)
        self.encoder, self.decoder = nn.GRU(w, w, batch_first=True), nn.GRU(w, w, batch_first=True)
        self.query = nn.Linear(w, w) if additive else None
        self.key = nn.Linear(w, w) if additive else None
        self.score = nn.Linear(w, 1) if additive else None

    def forward(self, x: Tensor) -> Any:
        k, h = self.encoder(self.embed(x))
        q, _ = self.decoder(self.embed(x.flip(1)), h)
        if self.query is None or self.key is None or self.score is None:
            scores = q @ k.mT
        else:
            scores = self.score(torch.tanh(self.query(q)[:, :, None] + self.key(k)[:, None])).squeeze(-1)
        return self.out(torch.cat([q, scores.softmax(-1) @ k], -1))


class Speech(nn.Module):
    """A convolution and a bidirectional LSTM, trained with CTC."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(INPUTS, w, 3, padding=1), nn.Linear(2 * w, SYMBOLS)
        self.lstm = nn.LSTM(w, w, 2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.lstm(F.relu(self.conv(x.mT)).mT)[0])


def spoken(number: int) -> tuple[Tensor, Tensor]:
    return sequences(number)[0], torch.randint(1, SYMBOLS, (5, 2), generator=generator(number))


def ctc(logits: Tensor, labels: Tensor) -> Tensor:
    scores = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, labels, torch.full((5,), 6), torch.full((5,), 2))


LSTM = CASES["LSTM"]
MODELS = (
    Entry("house_lstm", LSTM.make, LSTM.base, LSTM.wide, text),
    vector_model(
        "lstm_bidirectional", lambda w: Layers(w, 2 * w, num_layers=2, bidirectional=True), batch=sequences
    ),
    vector_model(
        "lstm_projection_grows", lambda w: Layers(w, w // 2, num_layers=2, proj_size=w // 2), batch=sequences
    ),
    vector_model("lstm_projection_fixed", lambda w: Layers(w, 4, num_layers=2, proj_size=4), batch=sequences),
    vector_model("lstm_cell", Cell, batch=sequences),
    vector_model("gru_learned_start", LearnedStart, batch=sequences),
    vector_model("gru_by_hand", HandGRU, batch=sequences),
    vector_model("gru_minimal", MinimalGRU, batch=sequences),
    vector_model("mamba_rank_fixed", lambda w: Mamba(w, 2), batch=sequences),
    vector_model(
        "mamba_rank_grows",
        lambda w: Mamba(w, w // 4),
        Impossible("a growing rank next to fixed states would need two gradient scales in one tensor"),
        batch=sequences,
    ),
    vector_model("s4d_real", DiagonalStates, batch=sequences),
    vector_model("rwkv_time_mix", RWKV, batch=sequences),
    tokens("lstm_tied_words", TiedWords, Exact(folds={"embed.weight": "1/2", "lstm.weight_ih_l0": "2"})),
    tokens("seq2seq_bahdanau", lambda w: Seq2Seq(w, additive=True)),
    tokens(
        "seq2seq_luong",
        lambda w: Seq2Seq(w, additive=False),
        Impossible("a dot product of two GRU states, which no tensor scales"),
    ),
    vector_model("speech_ctc", Speech, batch=spoken, criterion=ctc),
)
