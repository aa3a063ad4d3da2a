"""The pretended second device, in a process of its own: `pytest -m device`. One line says why where it cannot be built."""

import pytest
import torch

from harness import pretend_device
from mupscale.tensors.devices import holds_float64

_REASON = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def device(request):
    reason = pretend_device.load()
    if reason is not None:
        request.config.stash[_REASON] = reason
        pytest.skip(reason)
    return torch.device(pretend_device.NAME)


@pytest.fixture(params=[True, False], ids=["float64", "no float64"])
def place(request, device):
    """The device, once with float64 and once without."""
    yield from with_float64(device, request.param)


@pytest.fixture
def coarse(device):
    """The device without float64."""
    yield from with_float64(device, False)


def with_float64(device, has):
    pretend_device.float64(has)
    holds_float64.cache_clear()
    yield device
    pretend_device.float64(True)
    holds_float64.cache_clear()


def pytest_terminal_summary(terminalreporter, config):
    if _REASON in config.stash:
        terminalreporter.write_line(f"left out, tests on the pretended device: {config.stash[_REASON]}")
