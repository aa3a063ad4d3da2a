"""Torch's own modules and raw parameters continue exactly: 3 steps, grow with state, 10 more of both."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mupscale as mu
from harness.closeness import EXACT
from harness.draws import data, seeded
from harness.refusals import refused
from harness.runs import drift, train
from harness.wrong import mistaken, other_power
from mupscale.planning.facts.modules import MODULES, ModuleFacts


@dataclass(frozen=True)
class Case:
    """A family: how it is built, its two sizes, what it reads, and the tensor whose wrong rule must be seen."""

    make: Callable[[Any], Any]
    base: Any
    wide: Any
    inputs: tuple[Tensor, ...]
    control: str
    options: dict[str, Any] = field(default_factory=dict)
    search: bool = False


def loss_of(case: Case) -> Callable[[Any], Any]:
    def loss(model: Any) -> Any:
        found = model(*case.inputs)
        return (found - data(*found.shape, seed=7)).square().mean()

    return loss


def check(case: Case, plan: mu.Plan, steps: int = 10) -> float:
    model = seeded(case.make, case.base)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, weight_decay=0.1)
    run = mu.Run(model, optimizer)
    loss = loss_of(case)
    train(run, loss, 3)
    wide = mu.grow(run, lambda: case.make(case.wide), plan=plan, prove=False)
    return drift(run, wide, loss, steps, lambda m: m(*case.inputs))


def inferred(case: Case) -> mu.Plan:
    loss = loss_of(case) if case.search else None
    return mu.plans.plan_between(case.make, case.base, case.wide, loss=loss, **case.options)


class Around(nn.Module):
    """A layer that changes the width, or keeps it, between a stem and a readout of fixed sizes."""

    def __init__(self, stem: nn.Module, layer: nn.Module, head: nn.Module):
        super().__init__()
        self.stem, self.layer, self.head = stem, layer, head

    def forward(self, x):
        h = self.layer(torch.tanh(self.stem(x)))
        return self.head(torch.tanh(h[0] if isinstance(h, tuple) else h))


def dense(layer: Callable[[int], Any], n: int) -> Any:
    return Around(nn.Linear(3, n), layer(n), nn.Linear(n, 2))


def conv(kind: type, layer: Callable[[int], Any], out: int, n: int) -> Any:
    return Around(kind(2, n, 3, padding=1), layer(n), kind(out * n, 2, 1))


class Bilinear(nn.Module):
    def __init__(self, sizes: tuple[int, int, int]):
        super().__init__()
        a, b, c = sizes
        self.a, self.b, self.both, self.head = (
            nn.Linear(3, a),
            nn.Linear(3, b),
            nn.Bilinear(a, b, c),
            nn.Linear(c, 2),
        )

    def forward(self, x):
        return self.head(self.both(self.a(x).tanh(), self.b(x).tanh()).tanh())


class Attention(nn.Module):
    """Attention over a stream whose width is the product of heads and head size; keys and values may differ."""

    def __init__(self, size: tuple[int, int], outside: bool = False, extra: bool = False):
        super().__init__()
        n = size[0] * size[1]
        self.stem = nn.Linear(3, n)
        kinds = {"kdim": 5, "vdim": 3} if outside else {}
        self.attention = nn.MultiheadAttention(n, size[0], batch_first=True, add_bias_kv=extra, **kinds)
        self.head = nn.Linear(n, 2)
        self.outside = outside

    def forward(self, x):
        h = self.stem(x)
        keys, values = (x.repeat(1, 1, 2)[..., :5], x) if self.outside else (h, h)
        return self.head(self.attention(h, keys, values)[0])


class Encoder(nn.Module):
    def __init__(self, size: tuple[int, int, int], norm_first: bool):
        super().__init__()
        heads, head_size, hidden = size
        n = heads * head_size
        self.stem, self.head = nn.Linear(3, n), nn.Linear(n, 2)
        self.layer = nn.TransformerEncoderLayer(
            n, heads, hidden, 0.0, batch_first=True, norm_first=norm_first
        )

    def forward(self, x):
        return self.head(self.layer(self.stem(x)))


class Recurrent(nn.Module):
    def __init__(self, kind: type, n: int, **settings: Any):
        super().__init__()
        self.cell = kind(3, n, **settings)
        per_direction = settings.get("proj_size") or n
        self.head = nn.Linear(per_direction * (2 if settings.get("bidirectional") else 1), 2)

    def forward(self, x):
        return self.head(self.cell(x)[0])


class Cell(nn.Module):
    """A recurrent cell that the model itself steps over a sequence."""

    def __init__(self, kind: type, n: int):
        super().__init__()
        self.stem, self.cell, self.head = nn.Linear(3, n), kind(n, n), nn.Linear(n, 2)

    def forward(self, x):
        state = None
        for column in self.stem(x).tanh().unbind(1):
            state = self.cell(column, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


def projected(n: int) -> Any:
    return Recurrent(nn.LSTM, n, proj_size=n // 2)


class Bag(nn.Module):
    def __init__(self, mode: str, n: int):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, n, mode=mode), nn.Linear(n, 2)

    def forward(self, tokens):
        return self.head(self.bag(tokens).tanh())


class Raw(nn.Module):
    """Parameters that no torch module owns: class token, position table, LayerScale, a readout vector."""

    def __init__(self, n: int):
        super().__init__()
        self.stem, self.mix = nn.Linear(3, n), nn.Linear(n, n)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, n))
        self.positions = nn.Parameter(0.02 * torch.randn(6, n))
        self.scale = nn.Parameter(torch.full((n,), 0.5))
        self.readout = nn.Parameter(torch.randn(n) / 2)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), 1, -1), self.stem(x)], 1) + self.positions
        return ((h + self.scale * self.mix(h).tanh()) @ self.readout).tanh()


VECTORS, SEQUENCES, TOKENS = (data(6, 3),), (data(4, 5, 3),), (torch.arange(12).view(4, 3) % 6,)
IMAGES = {d: (data(3, 2, *[4] * d),) for d in (1, 2, 3)}
LAYERS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
MHA = partial(
    Case, make=Attention, base=(2, 4), inputs=SEQUENCES, control="attention.in_proj_weight", search=True
)
ROLES = {"token": "out", "positions": "out", "scale": "out", "readout": "in"}


def plain(name: str, layer: Callable[[int], Any], control: str = "layer.weight") -> dict[str, Case]:
    return {name: Case(partial(dense, layer), 6, 12, VECTORS, control)}


def convolution(
    name: str, layer: Callable[[int], Any], d: int = 1, out: int = 1, k: int = 3
) -> dict[str, Case]:
    return {name: Case(partial(conv, LAYERS[d], layer, out), 4, 4 * k, IMAGES[d], "layer.weight")}


CASES: dict[str, Case] = {
    **plain("Linear", lambda n: nn.Linear(n, n)),
    "Bilinear": Case(Bilinear, (2, 3, 4), (4, 9, 8), VECTORS, "both.weight"),
    **convolution("Conv1d", lambda n: nn.Conv1d(n, 2 * n, 3, padding=1), 1, 2),
    **convolution("Conv2d", lambda n: nn.Conv2d(n, n, 3, padding=1), 2),
    **convolution("Conv3d", lambda n: nn.Conv3d(n, n, 3, padding=1), 3, k=2),
    **convolution("grouped", lambda n: nn.Conv1d(n, 2 * n, 3, groups=2), 1, 2),
    **convolution("depthwise", lambda n: nn.Conv2d(n, n, 3, groups=n), 2),
    **convolution("transposed", lambda n: nn.ConvTranspose1d(n, 2 * n, 3), 1, 2),
    **convolution("transposed 2d", lambda n: nn.ConvTranspose2d(n, n, 3, stride=2), 2),
    **convolution("transposed grouped", lambda n: nn.ConvTranspose1d(n, 2 * n, 3, groups=2), 1, 2),
    **convolution("transposed depthwise", lambda n: nn.ConvTranspose1d(n, n, 3, groups=n)),
    "Embedding": Case(lambda n: nn.Sequential(nn.Embedding(6, n), nn.Tanh(), nn.Linear(n, 2)), 4, 12, TOKENS, "0.weight"),
    **{f"EmbeddingBag {m}": Case(partial(Bag, m), 4, 12, TOKENS, "bag.weight") for m in ("sum", "mean", "max")},
    **plain("LayerNorm", nn.LayerNorm),
    **plain("RMSNorm", lambda n: nn.RMSNorm(n)),
    **plain("BatchNorm", nn.BatchNorm1d),
    **plain("GroupNorm", lambda n: nn.GroupNorm(2, n)),
    **convolution("InstanceNorm", lambda n: nn.InstanceNorm1d(n, affine=True, track_running_stats=True)),
    **convolution("GroupNorm 2d", lambda n: nn.GroupNorm(2, n), 2),
    **convolution("BatchNorm 3d", lambda n: nn.BatchNorm3d(n), 3, k=2),
    **plain("PReLU", lambda n: nn.PReLU(n)),
    "more heads": MHA(wide=(4, 4)),
    "larger heads": MHA(wide=(2, 12)),
    "more and larger heads": MHA(wide=(6, 8)),
    "kdim and vdim": MHA(make=partial(Attention, outside=True), wide=(4, 12), control="attention.v_proj_weight"),
    "bias_k and bias_v": MHA(make=partial(Attention, extra=True), wide=(4, 12), control="attention.bias_v"),
    "encoder": Case(partial(Encoder, norm_first=True), (2, 4, 6), (4, 8, 18), SEQUENCES, "layer.linear1.weight", search=True),
    "post-norm encoder": Case(partial(Encoder, norm_first=False), (2, 4, 6), (4, 4, 6), SEQUENCES, "layer.norm2.weight", search=True),
    "LSTM": Case(partial(Recurrent, nn.LSTM, num_layers=2), 4, 12, SEQUENCES, "cell.weight_hh_l1"),
    "bidirectional LSTM": Case(partial(Recurrent, nn.LSTM, num_layers=2, bidirectional=True), 4, 8, SEQUENCES, "cell.weight_ih_l1"),
    "LSTM with projection": Case(projected, 4, 12, SEQUENCES, "cell.weight_hr_l0"),
    "GRU": Case(partial(Recurrent, nn.GRU, num_layers=2), 4, 12, SEQUENCES, "cell.weight_hh_l1"),
    "RNN": Case(partial(Recurrent, nn.RNN), 4, 12, SEQUENCES, "cell.weight_hh_l0"),
    "LSTMCell": Case(partial(Cell, nn.LSTMCell), 4, 12, SEQUENCES, "cell.weight_hh"),
    "GRUCell": Case(partial(Cell, nn.GRUCell), 4, 12, SEQUENCES, "cell.weight_ih"),
    "RNNCell": Case(partial(Cell, nn.RNNCell), 4, 12, SEQUENCES, "cell.bias_hh"),
    "raw, searched": Case(Raw, 4, 12, SEQUENCES, "token", search=True),
    "raw, declared": Case(Raw, 4, 12, SEQUENCES, "readout", {"declared": mu.Declared(roles=ROLES)}),
    "raw LayerScale": Case(Raw, 4, 8, SEQUENCES, "scale", {"declared": mu.Declared(roles=ROLES)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_widened_module_trains_as_if_it_were_the_base(name):
    case = CASES[name]
    plan = inferred(case)
    assert check(case, plan) <= EXACT
    assert check(case, mistaken(plan, case.control)) > 1e-6, "control: in taken for out"
    assert check(case, other_power(plan, case.control)) > 1e-6, "control: another power of the width"


def test_the_search_finds_the_roles_that_would_be_declared():
    assert inferred(CASES["raw, searched"]) == inferred(CASES["raw, declared"])


def flattened(n: int) -> Any:
    return nn.Sequential(nn.Conv2d(2, n, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * n, 2))


LAYOUT_CASES = {
    "flattened image": Case(flattened, 4, 8, IMAGES[2], "3.weight"),
    "multiplier": Case(partial(conv, nn.Conv1d, lambda n: nn.Conv1d(n, 2 * n, 3, groups=n), 2), 4, 12, IMAGES[1], "layer.weight"),
    "more groups": Case(partial(conv, nn.Conv1d, lambda n: nn.Conv1d(n, n, 3, groups=n // 2), 1), 4, 12, IMAGES[1], "layer.weight"),
    "more groups, transposed": Case(
        partial(conv, nn.Conv1d, lambda n: nn.ConvTranspose1d(n, n, 3, groups=n // 2), 1), 4, 12, IMAGES[1], "layer.weight"
    ),
}  # fmt: skip
DECLARED: dict[str, Any] = {
    "flattened image": {"layouts": {"3.weight": {1: 4}}},
    "multiplier": {"layouts": {"head.weight": {1: 2}}},
    "more groups": {"layouts": {"stem.*": {0: 2}, "head.weight": {1: 2}}},
    "more groups, transposed": {"layouts": {"stem.*": {0: 2}, "layer.*": {0: 2}, "head.weight": {1: 2}}},
}


@pytest.mark.parametrize("name", LAYOUT_CASES)
def test_layouts_that_neighbours_share_are_exact_when_declared(name):
    case = LAYOUT_CASES[name]
    plan = mu.plans.plan_between(case.make, case.base, case.wide, declared=mu.Declared(**DECLARED[name]))
    assert check(case, plan) <= EXACT


class Joined(nn.Module):
    """A readout of two widths side by side, which grow by different k: no one lr fits its two halves."""

    def __init__(self, sizes: tuple[int, int]):
        super().__init__()
        self.a, self.b = (nn.Linear(3, n) for n in sizes)
        self.head = nn.Linear(sum(sizes), 2)

    def forward(self, x):
        return self.head(torch.cat([self.a(x), self.b(x)], -1).tanh())


SILENT = {**LAYOUT_CASES, "unequal parts": Case(Joined, (4, 4), (4, 12), VECTORS, "head.weight")}


@pytest.mark.parametrize("name", SILENT)
def test_layouts_that_neighbours_share_are_never_wrong_in_silence(name):
    """Blocks made by one module (groups, a flattened image) are read by the next; only a loss or the user can say so."""
    case = SILENT[name]
    with refused("layout.read_but_not_written"):
        mu.plans.plan_between(case.make, case.base, case.wide)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell])
def test_gates_are_padded_each_or_refused(kind):
    """The rows of a cell are gate after gate: zeros at the very end would shift every gate but the first."""
    around = Cell if issubclass(kind, nn.modules.rnn.RNNCellBase) else Recurrent
    case = Case(partial(around, kind), 4, 6, SEQUENCES, "", {"by": "padded"})
    try:
        plan = inferred(case)
    except mu.MupscaleError:
        return
    assert check(case, plan) <= EXACT


def rows_of(features: str) -> list[Any]:
    return [pytest.param(kind, id=kind.__name__) for kind, row in MODULES.items() if row.features == features]


@pytest.mark.parametrize("kind", rows_of("entrywise"))
def test_the_table_says_what_keeps_zero(kind):
    module = kind(0.5, 1.0) if kind is nn.Threshold else kind()
    assert bool((module(torch.zeros(4, 4, 4)) == 0).all()) is MODULES[kind].keeps_zero


def reaches_other_channels(module: nn.Module, dims: int) -> bool:
    x = data(2, 4, *[4] * dims, seed=1)
    changed = x.clone()
    changed[:, 0] += 1
    return not torch.equal(module.eval()(x)[:, 1:], module(changed)[:, 1:])


@pytest.mark.parametrize("kind", rows_of("per channel"))
def test_the_table_says_what_takes_each_channel_by_itself(kind):
    dims = int(kind.__name__[-2])
    assert not reaches_other_channels(kind(1), dims)


@pytest.mark.parametrize("module", [nn.LocalResponseNorm(2), nn.Softmax(1)])
def test_control_channels_meet_in_modules_that_mix_them(module):
    assert MODULES[type(module)].features == "mixed"
    assert reaches_other_channels(module, 2)


class Transposed(nn.Module):
    """A layer that a user wrote, with a weight of (in, out)."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(a, b))

    def forward(self, x):
        return x @ self.weight


def test_one_row_teaches_a_module_type(monkeypatch):
    def make(n: int) -> nn.Module:
        return nn.Sequential(Transposed(3, n), nn.Tanh(), Transposed(n, 2))

    with refused("plan.unknown_role", where="*.weight"):
        mu.plans.plan_between(make, 4, 8)
    monkeypatch.setitem(MODULES, Transposed, ModuleFacts({"weight": {0: "in", 1: "out"}}))
    case = Case(make, 4, 8, (data(5, 3),), "0.weight")
    assert check(case, inferred(case)) <= EXACT
