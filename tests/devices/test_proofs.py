"""Plans are found, proved and judged where the model is, with the CPU's answers; without float64 on the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mupscale as mu
from harness.refusals import refused
from mupscale.models import float64
from mupscale.models.attempts import attempted
from mupscale.models.build import build
from mupscale.noise import measures as statistics
from mupscale.planning.search import up_to_copies as copies
from mupscale.plans.direction import Direction
from mupscale.plans.tensor_plan import TensorPlan
from mupscale.plans.wide_model import fill_model_
from mupscale.rules.axes import Axis
from mupscale.rules.scale import Scale
from mupscale.tensors import differences, spectral
from mupscale.tensors.devices import exact, has_float64, holds_float64
from mupscale.training.check import clone_run as run_copies
from mupscale.training.check import symmetry
from mupscale.training.check.symmetry import noise_shares
from mupscale.training.start import drawn as structure
from mupscale.training.start import init

pytestmark = pytest.mark.device
HOST = torch.device("cpu")
CLOSE = (
    1e-6  # relative to the largest entry: float32 rounds at 6e-8, and five steps of AdamW make 5e-7 of that
)


def mlp(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))


class Attention(nn.Module):
    """One layer with a fused projection and heads of a fixed size."""

    def __init__(self, width):
        super().__init__()
        self.embed, self.qkv = nn.Embedding(11, width), nn.Linear(width, 3 * width, bias=False)
        self.out, self.read = nn.Linear(width, width), nn.Linear(width, 11)

    def forward(self, ids):
        x = self.embed(ids)
        b, t, w = x.shape
        q, k, v = (p.view(b, t, w // 4, 4).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        mask = torch.full((t, t), float("-inf"), device=ids.device).triu(1)
        attended = ((q @ k.transpose(-1, -2)) / 2 + mask).softmax(-1) @ v
        return self.read(x + self.out(attended.transpose(1, 2).reshape(b, t, w)))


class OneMore(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape) * (1 + self.weight)


class Tied(nn.Module):
    def __init__(self, width, norm):
        super().__init__()
        self.embed, self.hidden, self.norm = nn.Embedding(11, width), nn.Linear(width, width), norm(width)
        self.read = nn.Linear(width, 11, bias=False)
        self.read.weight = self.embed.weight

    def forward(self, ids):
        return self.read(self.norm(torch.tanh(self.hidden(self.embed(ids)))))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Blocks(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.start, self.read = nn.Linear(8, 12), nn.Linear(12, 1)
        self.blocks = nn.ModuleList([Block(12) for _ in range(depth)])

    def forward(self, x):
        return self.read(nn.Sequential(*self.blocks)(self.start(x)))


def rms(width):
    return nn.Sequential(nn.Linear(8, width), nn.RMSNorm(width, eps=1e-6), nn.Linear(width, 1))


MODELS = {
    "fused qkv": (Attention, 8, 16, {}),
    "tied": (lambda n: Tied(n, nn.LayerNorm), 8, 16, {}),
    "one more": (lambda n: Tied(n, OneMore), 8, 16, {}),
    "deeper": (Blocks, 2, 3, {"order": {"blocks": [0, None, 1]}}),
    "padded": (rms, 16, 24, {"by": "padded"}),
}


def regression(where):
    x = torch.linspace(-1, 1, 256).view(32, 8).sin().to(where)
    return lambda model: (model(x) - 1).square().mean()


def text(where):
    ids = (torch.arange(24).square() % 11).view(3, 8).to(where)
    return lambda model: F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def loss_for(model, where):
    return text(where) if isinstance(model, (Attention, Tied)) else regression(where)


def step_with(loss):
    def step(run, i):
        run.optimizer.zero_grad()
        value = loss(run.model)
        value.backward()
        run.optimizer.step()
        return value

    return step


def trained(make, size, where):
    """A run after five steps, and its loss."""
    torch.manual_seed(0)
    model = make(size).to(where)
    run, loss = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2)), loss_for(model, where)
    for i in range(5):
        step_with(loss)(run, i)
    return run, loss


def grown(where):
    run, loss = trained(mlp, 16, where)
    return mu.upscale(run, lambda: mlp(32), loss=loss)


def test_the_first_line_of_the_readme(place):
    here, there = grown(HOST), grown(place)
    assert {p.device.type for p in there.model.parameters()} == {place.type}
    assert (there.plan.hash, there.plan.proof) == (here.plan.hash, "loss")
    want = here.model.state_dict()
    for name, found in there.model.state_dict().items():
        apart = float((found.cpu() - want[name]).abs().max())
        assert apart <= CLOSE * max(1.0, float(want[name].abs().max())), name


@pytest.mark.parametrize("name", MODELS)
def test_a_search_finds_the_plan_that_it_finds_on_the_cpu(name, place):
    make, size, wide, options = MODELS[name]
    torch.manual_seed(0)
    base = make(size)
    here = mu.infer_plan(base, lambda: make(wide), loss=loss_for(base, HOST), **options)  # type: ignore[arg-type]
    base.to(place)
    there = mu.infer_plan(base, lambda: make(wide), loss=loss_for(base, place), **options)  # type: ignore[arg-type]
    assert there.hash == here.hash
    assert {p.device.type for p in base.parameters()} == {place.type}


def test_example_inputs_prove_there(place):
    run, _ = trained(mlp, 16, place)
    wide = mu.grow(run, lambda: mlp(32), example_inputs=(torch.ones(4, 8, device=place),))
    assert wide.plan.proof == "outputs"  # type: ignore[union-attr]


class Spread(nn.Module):
    """Layers on two devices, a table that stays on the CPU, and buffers that the forward writes."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.Linear(8, width), nn.Linear(width, 1)
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))
        self.norm = nn.BatchNorm1d(width)

    def spread_(self):
        self.first.to("pretend:0")
        for module in (self.norm, self.second):
            module.to("pretend:1")

    def forward(self, x):
        x = self.first((x * self.table).to(self.first.weight.device))
        return self.second(self.norm(x.to(self.second.weight.device)).relu())


def places_of(model):
    return {name: str(tensor.device) for name, tensor in model.state_dict().items()}


def test_a_model_over_two_devices_keeps_its_places(place):
    torch.manual_seed(0)
    base, x = Spread(16), torch.linspace(-1, 1, 256).view(32, 8).sin()

    def loss(model):
        return model(x).square().mean()

    here = mu.grow(base, lambda: Spread(32), loss=loss)
    base.spread_()
    there = mu.grow(base, lambda: Spread(32), loss=loss)
    assert there.plan.hash == here.plan.hash  # type: ignore[union-attr]
    assert places_of(there.model) == places_of(base)
    assert set(places_of(base).values()) == {"pretend:0", "pretend:1", "cpu"}
    pair = float64.prepare(base, Spread(32))
    want = places_of(base if has_float64(place) else Spread(16))
    assert [places_of(model) for model in pair] == [want, want]


class Extra(nn.Linear):
    """Has a parameter and a table that the base has not."""

    def __init__(self, width):
        super().__init__(8, width)
        self.gate = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.ones(2))


def test_what_is_new_is_made_where_the_base_is(device):
    """Parameters are built on the meta device, tables on the CPU."""
    base = nn.Linear(8, 4).to(device)
    plan = mu.infer_plan(base, nn.Linear(8, 8))
    fixed = {name: (Axis.fixed(size),) for name, size in (("gate", 3), ("table", 2))}
    new = {
        "gate": TensorPlan((), fixed["gate"], fold=Scale.of("1/2"), fill="one"),
        "table": TensorPlan((), fixed["table"], kind="buffer", fill="own"),
    }
    plan = replace(plan, tensors={**plan.tensors, **new})
    wide = fill_model_(build(lambda: Extra(8)), base, Direction(plan))
    assert {tensor.device for tensor in wide.state_dict().values()} == {base.weight.device}
    assert (wide.gate.tolist(), wide.table.tolist()) == ([0.5] * 3, [1.0] * 2)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_verify_holds_there(place, dtype):
    run, loss = trained(mlp, 16, place)
    step = step_with(loss)
    assert mu.verify(run, lambda: mlp(32), step=step, steps=3, dtype=dtype).holds
    broken = mu.grow(run, lambda: mlp(32))
    with torch.no_grad():
        broken.model[2].weight.mul_(1.5)  # type: ignore[index]
    assert not mu.verify(run, broken, step=step, steps=3, dtype=dtype).holds, "control"


def capturable(where):
    run, loss = trained(mlp, 16, where)
    step = step_with(loss)
    run = mu.Run(run.model, torch.optim.AdamW(run.model.parameters(), lr=1e-2, capturable=True))
    step(run, 0)
    return mu.verify(run, lambda: mlp(32), step=step, steps=3).holds


def test_a_capturable_optimizer_is_certified(place):
    assert capturable(place)


def test_an_optimizer_that_leaves_its_device_is_no_longer_capturable(coarse, monkeypatch):
    """Control: torch refuses capturable optimizers on the CPU."""
    monkeypatch.setattr(run_copies, "_leave_device_", lambda optimizer: None)
    with pytest.raises(AssertionError, match="capturable"):
        capturable(coarse)


def test_the_units_of_an_optimizer_are_checked_on_the_default_device(place):
    used: set[tuple[str, torch.dtype]] = set()

    def make(parameters):
        used.update((p.device.type, p.dtype) for p in parameters)
        return torch.optim.AdamW(parameters, lr=1e-2)

    torch.set_default_device(place)
    try:
        assert mu.rules.check_optimizer(make) < 1e-9
    finally:
        torch.set_default_device(None)
    exact_place = place.type if has_float64(place) else "cpu"
    assert used == {(exact_place, torch.float64), (place.type, torch.float32)}


def test_what_is_written_there_stays_there(coarse):
    """A loss that adds into a float32 tensor on the device, reads it, and names the device."""
    run, _ = trained(mlp, 16, coarse)
    x, total = torch.ones(4, 8, device=coarse), torch.zeros(1, device=coarse)

    def loss(model):
        total.zero_()
        total.add_(model(x).detach().mean())
        weights = torch.ones(4, 1, device=coarse) * (1 + total)
        return (model(x).float() * weights.to(coarse)).square().mean()

    wide = mu.grow(run, lambda: mlp(32), loss=loss)
    assert (wide.plan.proof, total.device.type, total.dtype) == ("loss", coarse.type, torch.float32)  # type: ignore[union-attr]
    assert float(total) != 0


def diagnosed(where):
    """What measures weights in float64, as numbers."""
    run, loss = trained(mlp, 16, where)
    wide = mu.upscale(run, lambda: mlp(32), mu.SignalNoise(0.05))
    shares = noise_shares(run, wide)
    certificate = mu.verify(run, lambda: mlp(32), loss=loss, dtype=torch.float32)
    length = statistics.statistic(run.model[0].bias, "norm")
    drawn = mlp(64).to(where)
    mu.init_weights_(drawn, mu.plans.plan_between(mlp, 16, 64), std=run.model)
    deep, loss = trained(Blocks, 2, where)
    plan = mu.infer_plan(deep.model, lambda: Blocks(3), loss=loss, order={"blocks": [0, None, 1]})
    woken = mu.upscale(deep, lambda: Blocks(3), mu.SignalNoise(0.05), plan=plan)
    found = (*shares.values(), *noise_shares(deep, woken).values())
    assert {t.device.type for m in (drawn, wide.model, woken.model) for t in m.parameters()} == {where.type}
    numbers = (number for one in found for number in one)
    sizes = (float(p.detach().norm()) for p in drawn.parameters())
    return [certificate.holds, float(length), *numbers, *sizes]


def test_diagnostics_give_the_numbers_of_the_cpu(place):
    assert diagnosed(place) == pytest.approx(diagnosed(HOST), rel=1e-3, abs=1e-9)


def test_a_tensor_is_measured_where_float64_is(device, coarse):
    x = torch.ones(3, device=device)
    assert exact(x).device == HOST
    torch.ops.pretend.float64(True)
    assert not has_float64(device), "tried once"
    holds_float64.cache_clear()
    assert exact(x).device.type == device.type


class Stuck(torch.Tensor):
    """A tensor that does not leave the CPU."""

    def to(self, *args, **kwargs):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize(
    ("module", "name", "planted"),
    [
        (float64, "leave_without_float64_", lambda model: model.cpu()),
        (copies.torch, "randn", lambda *a, randn=torch.randn, **k: randn(*a, **k).as_subclass(Stuck)),  # type: ignore[attr-defined]
    ],
    ids=["models moved to the CPU", "weights of a comparison left on the CPU"],
)
def test_what_is_on_the_wrong_device_is_an_error_and_no_other_plan(
    device, monkeypatch, module, name, planted
):
    make, size, wide, _ = MODELS["fused qkv"]
    base, loss = make(size).to(device), text(device)
    monkeypatch.setattr(module, name, planted)
    with pytest.raises(RuntimeError, match="same device"):
        mu.infer_plan(base, lambda: make(wide), loss=loss)


def test_without_moving_operands_a_device_without_float64_proves_nothing(coarse, monkeypatch):
    """Control."""
    monkeypatch.setattr(float64, "_together", lambda name, args, named, left: (args, named))
    with refused("model.not_in_float64"):
        grown(coarse)


@pytest.mark.parametrize("module", [differences, init, statistics, structure, symmetry, spectral])
def test_a_place_that_measures_on_a_device_without_float64_is_seen(module, coarse, monkeypatch):
    """Control."""
    if module is spectral:
        monkeypatch.setattr(module, "has_float64", lambda device: True)
    else:
        monkeypatch.setattr(module, "exact", lambda tensor, dtype=torch.float64: tensor.to(dtype))
    with pytest.raises(TypeError, match="float64"):
        diagnosed(coarse)


def test_an_error_of_a_device_is_no_refusal(device):
    x = torch.ones(2, 3, device=device)
    for call in (lambda: x @ torch.ones(3, 2), lambda: nn.LayerNorm(3)(x)):
        with pytest.raises(RuntimeError, match="same device"):
            attempted(call)
    with pytest.raises(RuntimeError, match="generator"):
        attempted(lambda: torch.randn(2, device=device, generator=torch.Generator()))
    assert attempted(lambda: nn.LayerNorm(4).to(device)(x)) is None, "control: a wrong shape"
    assert attempted(lambda: nn.LayerNorm(3).to(device)()) is None, "control: a missing argument"
