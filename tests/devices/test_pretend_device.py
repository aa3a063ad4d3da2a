"""The pretended device does what a training run needs, with the CPU's results, and refuses what a GPU refuses."""

import copy
import ctypes
import io
import shutil

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness import pretend_device
from harness.native import NotBuiltError

pytestmark = pytest.mark.device
HOST = torch.device("cpu")


class Block(nn.Module):
    """Attention written out, and torch's own."""

    def __init__(self, width=16, heads=2):
        super().__init__()
        self.embed, self.norm, self.heads = nn.Embedding(11, width), nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mixed = nn.MultiheadAttention(width, heads, bias=False, batch_first=True)
        self.read = nn.Linear(width, 11)

    def forward(self, ids):
        x = self.embed(ids)
        b, t, w = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, w))
        return self.read(x + self.mixed(x, x, x, need_weights=False)[0])


def trained(device, make_optimizer):
    """A model after four steps with a schedule, a data loader and clipping, its optimizer, and the last loss."""
    torch.manual_seed(0)
    model = Block().to(device)
    optimizer = make_optimizer(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    rows = torch.utils.data.TensorDataset(torch.arange(64).view(8, 8) % 11)
    with sdpa_kernel(SDPBackend.MATH):  # the device has no other
        for (host_ids,) in torch.utils.data.DataLoader(rows, batch_size=2):
            ids = host_ids.to(device)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].reshape(-1, 11), ids[:, 1:].reshape(-1))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
    assert all(p.device.type == device.type for p in model.parameters())
    return model, optimizer, loss


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, capturable=p[0].device.type != "cpu"),
        lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adafactor(p, lr=1e-2),
    ],
    ids=["adamw", "foreach", "fused", "capturable", "sgd", "adafactor"],
)
def test_training_gives_the_numbers_of_the_cpu(device, make):
    (a, _, on_host), (b, _, there) = (trained(where, make) for where in (HOST, device))
    torch.testing.assert_close(there.cpu(), on_host, rtol=0, atol=1e-5)
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        # Adam divides by gradients that are rounding, so a step of lr 1e-2 may differ in its second digit
        torch.testing.assert_close(y.cpu(), x, rtol=0, atol=1e-3)


def test_operands_on_several_devices_are_refused_as_on_cuda(device):
    x, w, other = torch.ones(2, 3), torch.ones(3, 4, device=device), torch.ones(3, 4, device="pretend:1")
    for act in (
        lambda: x @ w,
        lambda: w.T @ x.T,
        lambda: w + torch.ones(4),
        lambda: torch.cat([w, torch.ones(3, 4)]),
        lambda: w + other,
        lambda: nn.functional.linear(x, w.T),
        lambda: w.add_(torch.ones(3, 4)),
        lambda: nn.functional.embedding(torch.tensor([0]), w),
        lambda: torch._foreach_add([w], [torch.ones(3, 4)]),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            act()
    with pytest.raises(RuntimeError, match="indices should be"):
        torch.ones(3)[torch.ones(3, device=device) > 0]
    assert (w * torch.tensor(2.0)).device == (w[torch.tensor([0])]).device == w.device


def test_memory_is_the_devices_own(device):
    w = torch.ones(3, device=device)
    w.cpu().add_(1)
    twin = copy.deepcopy(nn.Linear(2, 2).to(device))
    assert w.sum().item() == 3
    assert twin.weight.device == w.device == w.untyped_storage().device
    assert w.to("pretend:1").get_device() == 1
    with pytest.raises(TypeError, match="numpy"):
        w.numpy()
    assert not 0 <= ctypes.c_int64(w.data_ptr()).value < 2**47, "an address that the host could read"


def test_a_run_is_saved_and_loaded(device):
    model, optimizer, _ = trained(device, torch.optim.AdamW)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    for where, want in ((None, "pretend"), ("cpu", "cpu"), ("pretend:1", "pretend")):
        file.seek(0)
        held = torch.load(file, map_location=where, weights_only=True)
        assert held["model"]["read.bias"].device.type == want
    model.load_state_dict(held["model"])
    optimizer.load_state_dict(held["optimizer"])
    assert all(p.device.index == 0 for p in model.parameters())


def test_moving_a_module_keeps_its_parameters(device):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1.0), model[0].weight
    model.to(device)
    assert model[1].weight is model[0].weight is own is optimizer.param_groups[0]["params"][0]
    one, two = nn.Linear(2, 2).to("pretend:0"), nn.Linear(2, 2).to("pretend:1")
    two(one(torch.ones(1, 2, device=device)).to("pretend:1")).sum().backward()
    gradients = [layer.weight.grad for layer in (one, two)]
    assert [g.device.index for g in gradients if g is not None] == [0, 1]


def test_random_numbers_are_the_devices_own(device):
    torch.manual_seed(3)
    first, host = torch.randn(4, device=device), torch.randn(4)
    torch.manual_seed(3)
    assert torch.equal(host, torch.randn(4))
    assert torch.equal(first.cpu(), torch.randn(4, device=device).cpu())
    assert not torch.equal(first.cpu(), host)
    own = torch.Generator(device).manual_seed(3)
    assert torch.equal(torch.randn(4, device=device, generator=own).cpu(), first.cpu())
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device=device, generator=torch.Generator())
    with torch.random.fork_rng(devices=[0], device_type="pretend"):
        inside = torch.rand(2, device=device)
    assert torch.equal(inside.cpu(), torch.rand(2, device=device).cpu())


def test_autocast_and_the_default_device(device):
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert nn.Linear(2, 2).to(device)(torch.ones(1, 2, device=device)).dtype == torch.bfloat16
    torch.set_default_device("pretend")
    try:
        assert nn.Linear(2, 2).weight.device.type == torch.ones(2).device.type == "pretend"
    finally:
        torch.set_default_device(None)
    pretend_device.set_device(1)
    try:
        assert torch.ones(1, device="pretend").device.index == 1
    finally:
        pretend_device.set_device(0)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.BatchNorm1d(4), (8, 4)),
        (nn.Conv2d(3, 4, 3), (2, 3, 5, 5)),
        (nn.Sequential(nn.Dropout(0.0), nn.RMSNorm(4)), (2, 4)),
    ],
    ids=["batch norm", "convolution", "rms norm"],
)
def test_other_modules_give_the_numbers_of_the_cpu(device, module, shape):
    x, there = torch.randn(shape), copy.deepcopy(module).to(device)
    outs = [m(v)[0] for m, v in ((module, x), (there, x.to(device)))]
    for out in outs:
        out.square().sum().backward()
    torch.testing.assert_close(outs[1].cpu(), outs[0])
    for p, q in zip(module.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(q.grad.cpu(), p.grad, rtol=1e-4, atol=1e-5)
    for p, q in zip(module.buffers(), there.buffers(), strict=True):
        torch.testing.assert_close(q.cpu(), p)


def test_float64_can_be_refused_as_on_mps(device):
    pretend_device.float64(False)
    try:
        with pytest.raises(TypeError, match="float64"):
            torch.ones(2, device=device).double()
        with pytest.raises(TypeError, match="float64"):
            nn.Linear(2, 2).double().to(device)
        trained(device, torch.optim.AdamW)
    finally:
        pretend_device.float64(True)
    assert torch.ones(2, device=device).double().dtype == torch.float64


def test_no_compiler_is_a_reason_and_no_error(device, tmp_path, monkeypatch):
    """Control: with the library that is there, no compiler is needed."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert pretend_device.built().exists()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(NotBuiltError, match="no compiler"):
        pretend_device.built()
    assert not list(tmp_path.rglob("*.so"))
