"""The same claims on a CUDA device: `pytest -m gpu`. Skipped by selection where there is none."""

import pytest
import torch
from torch import nn

import mupscale as mu
from harness.launched import folder, launch
from harness.runs import step
from harness.sharded_training import EQUAL, compare
from mupscale.rules.axes import Axis
from mupscale.rules.scale import Scale
from mupscale.tensors.expand import expand
from mupscale.tensors.making import Making

pytestmark = pytest.mark.gpu


def mlp(width):
    return nn.Sequential(
        nn.Linear(8, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", ["1", "1/2", "1/3"])
def test_the_kernel_gives_the_same_bits_as_on_the_cpu(dtype, scale):
    making = Making((Axis.parse("out: 64x2"), Axis.parse("in: 3x2 * 16")), Scale.of(scale))
    base = torch.randn(64, 48).to(dtype)
    assert torch.equal(expand(base, making), expand(base.cuda(), making).cpu())


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}])
def test_widened_runs_stay_on_the_device_and_train_exactly(options):
    model = mlp(16).double().cuda()
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, **options))
    x = torch.randn(32, 8, dtype=torch.float64, device="cuda")

    def loss_of_step(run):
        loss = (run.model(x) - 1).square().mean()
        step(run, loss)
        return loss.item()

    for _ in range(3):
        loss_of_step(run)
    wide = mu.grow(run, lambda: mlp(48))
    assert all(p.is_cuda for p in wide.model.parameters())
    for _ in range(20):
        base, grown = loss_of_step(run), loss_of_step(wide)
        assert abs(base - grown) <= 1e-9 * base


def test_autocast_and_grad_scaler_go_on():
    model = mlp(64).cuda()
    run = mu.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    x = torch.randn(256, 8, device="cuda")

    def loss_of_step(run):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (run.model(x) - 1).square().mean()
        step(run, loss)
        return loss.item()

    for _ in range(5):
        loss_of_step(run)
    wide = mu.grow(run, lambda: mlp(128))
    base, grown = ([loss_of_step(side) for _ in range(10)] for side in (run, wide))
    assert all(abs(a - b) <= 5e-2 * a for a, b in zip(base, grown, strict=True))


def sharded():
    right = [compare("fsdp", "adamw", dtype, folder() / str(dtype), steps=20) for dtype in EQUAL]
    return [*right, compare("fsdp", "adamw", torch.float64, None, "clipping", steps=5)]


def test_sharded_runs_load_and_train_on_all_devices():
    *right, control = launch(__name__, ["sharded"], torch.cuda.device_count(), backend="nccl")["sharded"][0]
    for row in right:
        assert row.worst <= EQUAL[getattr(torch, row.dtype)]
        assert row.clipped > 1
    assert control.worst > 1e-4
