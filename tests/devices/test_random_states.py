"""Random states of a device: those in use are put back, others are not asked for; tensors next to CPU generators."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import mupscale as mu
from mupscale.families.plan import family_plan
from mupscale.files.pickles.torch_file import Room, lay_out
from mupscale.jobs.bytes.staging import Staging
from mupscale.studies.checkpoint import keep, kept, random_state, set_random_state_
from mupscale.studies.directory.text import TextData
from mupscale.tensors.random_states import accelerator_states, forked, set_accelerator_states_
from mupscale.training.check.optimizer_row import check_optimizer
from mupscale.training.check.symmetry import noise_shares
from mupscale.training.units.clip import grad_norm
from reproduce import limits
from reproduce.limits.real import train_model

pytestmark = pytest.mark.device


def net(width):
    return nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 1))


@pytest.fixture
def states(device, monkeypatch):
    """The devices whose random states were read, in order."""
    module, asked = torch.get_device_module(device), []
    read = module.get_rng_state

    def noted(of=None):
        asked.append(of.index if isinstance(of, torch.device) else of)
        return read(of)

    monkeypatch.setattr(module, "get_rng_state", noted)
    return asked


def drawn(device):
    return torch.rand(3, device=device)


def test_a_fork_puts_back_what_it_seeds_and_leaves_other_devices_alone(device, states):
    first, second = (torch.device(device.type, index) for index in range(2))
    torch.manual_seed(5)
    want = [drawn(first), drawn(second), drawn("cpu")]
    torch.manual_seed(5)
    with forked(torch.empty(1, device=first), seed=0):
        inside = drawn(first)
    assert [torch.equal(a, b) for a, b in zip(want, map(drawn, (first, second, "cpu")), strict=True)] == [
        True
    ] * 3
    assert states == [0]
    torch.manual_seed(0)
    assert torch.equal(drawn(first), inside), "it was seeded"
    with forked(torch.empty(1, device=second), seed=0):
        again = drawn(second)
    torch.manual_seed(0)
    assert torch.equal(drawn(second), again)
    assert sorted(states) == [0, 0, 1]


def test_verify_and_upscale_ask_for_one_device_and_do_not_warn(device, states):
    model = net(16).to(device)
    run = mu.Run(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(4, 8).to(device)

    def step(run, i):
        run.optimizers[0].zero_grad()
        loss = run.model(x).square().mean()
        loss.backward()
        run.optimizers[0].step()
        return loss.detach()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mu.verify(run, lambda: net(32), step=step).holds
        mu.upscale(run, lambda: net(32), mu.SignalNoise(0.1))
    assert set(states) == {0}


def test_the_default_device_changes_no_numbers(device):
    model = net(16).to(device)
    want = [
        mu.upscale(model, lambda: net(32), noise).model.state_dict()
        for noise in (mu.SignalNoise(0.1), mu.PairedNoise(t=0.1))
    ]
    torch.set_default_device(device)
    try:
        got = [
            mu.upscale(model, lambda: net(32), noise).model.state_dict()
            for noise in (mu.SignalNoise(0.1), mu.PairedNoise(t=0.1))
        ]
        on_host = mu.upscale(model.cpu(), lambda: net(32), mu.SignalNoise(0.1)).model.state_dict()
        check_optimizer(lambda params: torch.optim.AdamW(params, lr=0.1, eps=0.1, weight_decay=0.1))
    finally:
        torch.set_default_device(None)
    for a, b in zip(want, got, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(t.device.type == "cpu" for t in on_host.values())


def made_on_the_host():
    """What is computed for files and for small models of our own, as numbers."""
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, **sizes}
    schedule = limits.Schedule(steps=3, grow_at=2, rate=0.1)
    options: dict[str, Any] = {
        "inputs": [[1.0]],
        "targets": [1.0],
        "sigma": [1, 1, 1],
        "noise": [0.1, 0.1, 0.1],
    }
    real = train_model(8, 2, schedule, **options, activation=nn.Tanh(), keep_values=True)
    engines = (
        limits.FiniteWidth(8, 2, values=real.values),
        limits.SampledKets(k=2, samples=2**6, sampler="sobol"),
        limits.SampledKets(k=2, samples=2**6, sampler="white"),
    )
    outputs = [limits.mlp(engine, schedule, **options) for engine in engines]
    linear = limits.mlp(limits.LinearKets(2), schedule, **options, activation=None)
    file, _ = lay_out("x.pt", {"a": Room("F32", (2,))})
    data = TextData(torch.arange(6, device="cpu").view(6, 1), torch.zeros(1, 1, device="cpu"))
    assert Staging(torch.device("cpu")).room(torch.float32, (2,)).device.type == "cpu"
    return (
        family_plan(config, 2).plan.hash,
        real.outputs,
        outputs,
        linear,
        [bytes(chunk) for _, chunk in file.chunks],
        data.batch(0, 4).tolist(),
    )


def test_the_default_device_changes_nothing_that_is_made_on_the_host(place):
    want = made_on_the_host()
    torch.set_default_device(place)
    try:
        assert made_on_the_host() == want
    finally:
        torch.set_default_device(None)


def test_a_tensor_of_a_cpu_generator_on_a_device_is_refused(device):
    """Control: without device="cpu" next to the generator the draw fails here, as on CUDA."""
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, generator=torch.Generator().manual_seed(0), device=device)


def test_sizes_of_a_reference_and_norms_are_where_the_model_is(device):
    plan = mu.plans.plan_between(net, 16, 64)
    mu.init_weights_(net(64).to(device), plan, std=net(16).to(device))
    assert grad_norm(net(64).to(device), plan).device.type == device.type


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Deep(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def test_the_noise_of_new_blocks_is_reported_where_the_model_is(device):
    x = torch.randn(16, 4)

    def loss(model):
        return (model(x.to(next(model.parameters()))) - 1).square().mean()

    plan = mu.infer_plan(lambda: Deep(2), lambda: Deep(3), loss=loss, order={"blocks": [0, None, 1]})
    base, reports = Deep(2), []
    for place in ("cpu", device):
        run = mu.Run(base.to(place))
        deep = mu.upscale(run, lambda: Deep(3), mu.NewUnits("random"), plan=plan)
        assert {t.device.type for t in deep.model.parameters()} == {torch.device(place).type}
        reports.append(noise_shares(run, deep))
    assert list(reports[0]) == list(reports[1])
    name = next(iter(reports[0]))
    assert reports[1][name].share == pytest.approx(reports[0][name].share, rel=1e-6)


def test_a_checkpoint_of_tune_has_the_states_of_every_device(device, tmp_path):
    model = net(4)
    keep(tmp_path / "point", mu.Run(model), [1.0])
    places = [torch.device(device.type, index) for index in range(2)] + [torch.device("cpu")]
    before = random_state()
    want = [drawn(place) for place in places]
    keep(tmp_path / "point", mu.Run(model), [1.0])
    assert not torch.equal(drawn(places[1]), want[1]), "control: the next numbers are others"
    set_random_state_(before)
    assert [torch.equal(drawn(place), w) for place, w in zip(places, want, strict=True)] == [True] * 3
    stored = kept(tmp_path / "point").random  # type: ignore[union-attr]
    assert len(stored["devices"][device.type]) == 2
    set_random_state_(stored)
    set_accelerator_states_(
        {device.type: accelerator_states()[device.type][:1]}
    )  # of another machine: left out
    set_random_state_({**{k: v for k, v in stored.items() if k != "devices"}, "cuda": []})  # of version 0.2
