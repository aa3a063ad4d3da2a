"""The report of the doctor holds on the pretended device, and fails where a model is moved away in a proof."""

import pytest

from mupscale.cli.main import main
from mupscale.training.check import device_proofs

pytestmark = pytest.mark.device


def test_the_report_holds_on_the_device(device, capsys, monkeypatch):
    monkeypatch.setattr(device_proofs, "timing", lambda device: "none")  # of copies to the CPU and back
    status = main(["doctor", "--device", device.type])
    said = capsys.readouterr().out
    assert status == 0, said
    for part in ("README", "tutorial", "search", "autocast", "AdamW, fused"):
        assert part in said
