"""The pretended second device, in a process of its own: `pytest -m device`. One line says why where it cannot be built."""

import pytest
import torch

from harness import pretend_device

_REASON = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def device(request):
    reason = pretend_device.load()
    if reason is not None:
        request.config.stash[_REASON] = reason
        pytest.skip(reason)
    return torch.device(pretend_device.NAME)


def pytest_terminal_summary(terminalreporter, config):
    if _REASON in config.stash:
        terminalreporter.write_line(f"left out, tests on the pretended device: {config.stash[_REASON]}")
