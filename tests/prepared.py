"""What a reader of a page has before its first block: a checkpoint, a proxy, a run that was stopped. All of it tiny.

Each function makes files in a folder and returns names that the page's Python takes for granted. Knows pages by their
file names and nothing of their text.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mupscale as mu
from harness import continued, trainer
from harness.trainer import Trained
from mupscale.studies.settings import Settings

Names = dict[str, object]
_EXAMPLE = Path(__file__).parent.parent / "examples" / "proxy_mlp.py"
_MLP = """
import torch
from torch import nn

def build(width):
    return nn.Sequential(
        nn.Linear(54, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 7),
    )

def inputs():
    return torch.zeros(2000, 54)
"""


def llama(folder: Path) -> None:
    trainer.silence()
    trainer.model().save_pretrained(folder)


def proxy(path: Path) -> None:
    """The example's proxy with small batches, so that a study is a matter of seconds."""
    text = _EXAMPLE.read_text(encoding="utf-8")
    assert text.count("batch = 256") == 1
    path.write_text(text.replace("batch = 256", "batch = 8"), encoding="utf-8")


def index(folder: Path, trained: Trained) -> Names:
    llama(folder / "base")
    proxy(folder / "proxy.py")
    return {}


def checkpoints(folder: Path, trained: Trained) -> Names:
    for name in ("base", "70b"):
        llama(folder / name)
    return {}


def one_checkpoint(folder: Path, trained: Trained) -> Names:
    llama(folder / "base")
    return {}


def cost(folder: Path, trained: Trained) -> Names:
    """A configuration alone is enough for a cost."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
    }
    LlamaConfig(**sizes, architectures=["LlamaForCausalLM"]).save_pretrained(folder / "base")
    (folder / "proxy.py").write_text(_MLP, encoding="utf-8")
    return {}


def going_on(folder: Path, trained: Trained) -> Names:
    """A Trainer and a Lightning run of the same Llama, both stopped at step 20."""
    from torch.utils.data import DataLoader

    shutil.copytree(trained.directory.parent, folder / "runs")
    shutil.copy(trained.lightning, folder / "base.ckpt")
    rows: Any = trainer.data()
    return {
        "args": trainer.arguments(folder / "grown"),
        "data": rows,
        "loader": DataLoader(rows, batch_size=trainer.BATCH),
        "plan": trainer.plan_for(2, by="units"),
        "wide_module": trainer.lightning_module(2),
    }


def growth(folder: Path, trained: Trained) -> Names:
    """A Llama with its optimizer, and a residual net whose blocks are in a list."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.read, self.write = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            written: torch.Tensor = self.write(torch.relu(self.read(self.norm(x))))
            return x + written

    class Net(nn.Module):
        def __init__(self, blocks: int) -> None:
            super().__init__()
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            value: torch.Tensor = self.last(x)
            return value

    llama(folder / "base")
    model, batch = trainer.model(), torch.randn(16, 8)
    return {
        "make": Net,
        "loss": lambda net: net(batch.to(net.last.weight.dtype)).square().mean(),
        "config": folder / "base",
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
    }


def tuning(folder: Path, trained: Trained) -> Names:
    """A directory with a text, and studies at half and twice the width of the page's own, at its reference: the page
    lays all three over each other."""
    llama(folder / "base")
    row = json.dumps({"input_ids": [token % 32 for token in range(512)]})
    (folder / "text.jsonl").write_text(f"{row}\n" * 800, encoding="utf-8")
    proxy(folder / "small_proxy.py")
    for width in (64, 256):
        settings = Settings(
            width=width, k=2, steps=16, lrs=[0.004], noises=[0.1], factors=[1], extend=0, reference=128
        )
        mu.tune(folder / "small_proxy.py", settings, folder=folder / f"study{width}")
    return {}


def same(folder: Path, trained: Trained) -> Names:
    """One run as the Trainer and torch.distributed.checkpoint store it."""
    trainer.silence()
    job = continued.trained()
    continued.trainer(job, folder / "run" / "checkpoint-3")
    continued.dcp(job, folder / "converted")
    return {}


PREPARED: dict[str, Callable[[Path, Trained], Names]] = {
    "README.md": one_checkpoint, "checkpoints.md": checkpoints, "coming_from.md": one_checkpoint,
    "continue.md": going_on, "cost.md": cost, "growth.md": growth, "index.md": index,
    "llms.txt": one_checkpoint, "same.md": same, "schedules.md": going_on, "tuning.md": tuning,
}  # fmt: skip
