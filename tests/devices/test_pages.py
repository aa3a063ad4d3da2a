"""The Python of the first pages runs with another device as the default, in the order of each page, its text unchanged."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from harness.pages import RUN, blocks_of
from mupscale.rules.optimizers import RULES
from tests.blocks import run_page
from tests.prepared import growth

pytestmark = pytest.mark.device
ROOT = Path(__file__).parents[2]
PAGES = ("README", "index", "upscale", "continue", "schedules", "training", "plans", "growth")
LEFT_OUT = {
    "transformers import AutoModelForCausalLM, Trainer": "the Trainer does not take a device that it does not know",
    "import lightning as L": "Lightning has no accelerator for the device",
}
"""Words of the blocks that are not run on the device, and why."""
MOVED = {
    # Its step draws with a generator of the CPU, as a data loader does; torch refuses that where another device is
    # the default, so the model is moved instead.
    "index": ("model = make(16)\n", 'model = make(16).to("pretend")\n'),
}
"""Pages that run without a default device, and the line that moves their model."""


def page_of(name):
    folder = ROOT if name == "README" else ROOT / "docs"
    return (folder / f"{name}.md").read_text(encoding="utf-8")


def left_out(block):
    return block.language != "python" or any(words in block.text for words in LEFT_OUT)


# mse_loss on the device goes through a kernel of the CPU that resizes what torch hands it.
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", PAGES)
def test_every_python_block_runs_on_the_device(device, name, tmp_path, monkeypatch, trained):
    monkeypatch.chdir(tmp_path)
    page, saved = page_of(name), dict(RULES)
    if name in MOVED:
        line, moved = MOVED[name]
        assert page.count(line) == 1
        page = page.replace(line, moved)
    else:
        torch.set_default_device(device)
    try:
        names = growth(tmp_path, trained) if name == "growth" else {}
        with sdpa_kernel(SDPBackend.MATH):  # the device has no other
            run_page(page, name, {"__name__": name, **names}, left_out)
    finally:
        torch.set_default_device(None)
        RULES.clear()
        RULES.update(saved)


def test_what_is_left_out_is_on_a_page():
    """And each page has a block that is run."""
    blocks = {name: [b for b in blocks_of(page_of(name)) if b.runs and b.language in RUN] for name in PAGES}
    for words in LEFT_OUT:
        assert any(words in block.text for found in blocks.values() for block in found), words
    for name, found in blocks.items():
        assert not all(map(left_out, found)), name


def test_a_block_that_cannot_run_on_the_device_fails(device):
    """Control: a batch of the CPU."""
    torch.set_default_device(device)
    try:
        block = '```python\nimport torch\ntorch.nn.Linear(8, 1)(torch.ones(2, 8, device="cpu"))\n```\n'
        with pytest.raises(RuntimeError, match="same device"):
            run_page(block, "page", {}, left_out)
    finally:
        torch.set_default_device(None)
