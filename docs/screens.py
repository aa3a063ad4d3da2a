"""Draw docs/figures/terminal.png: what `mupscale plan`, `upscale` and `check` print, on a small Llama made here.

python docs/screens.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURE = Path(__file__).parent / "figures" / "terminal.png"
COMMANDS = ("plan base -k 2", "upscale base wide -k 2 --noise t=0.05", "check base wide --bytes --layout")
DARK, LIGHT, GREEN = "#1d2129", "#e4e6ea", "#8fd18f"


def save_base(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        vocab_size=4096, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def said(command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "mupscale.cli.main", *command.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"mupscale {command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.rstrip()


def draw(blocks: list[tuple[str, str]]) -> None:
    lines: list[tuple[str, str]] = []
    for command, text in blocks:
        lines += [
            (f"$ mupscale {command}", GREEN),
            *((line, LIGHT) for line in text.splitlines()),
            ("", LIGHT),
        ]
    height, width = len(lines) * 0.155 + 0.3, 11.5
    figure = plt.figure(figsize=(width, height), facecolor=DARK)
    for number, (line, colour) in enumerate(lines):
        y = 1 - (0.15 + 0.155 * (number + 1)) / height
        short = line if len(line) <= 150 else f"{line[:149]}…"
        figure.text(0.015, y, short, family="DejaVu Sans Mono", fontsize=7.6, color=colour, va="bottom")
    figure.savefig(FIGURE, dpi=130, facecolor=DARK)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        save_base(Path(folder, "base"))
        draw([(command, said(command, Path(folder))) for command in COMMANDS])
    print(f"written: {FIGURE}")


if __name__ == "__main__":
    main()
