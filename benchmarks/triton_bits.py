"""The Triton kernel gives the bits of the CPU, on random slices of random tensors.

    pip install triton
    python benchmarks/triton_bits.py [--slices 240] [--seed 0] [--device cpu|cuda]

What a slice is, `proofs/slices.py` says. On the CPU the kernel runs in Triton's interpreter, which executes the same
program; nothing is said about speed. The control rounds product and sum once, as a fused multiply-add does.

The last line is `slices=N different=D control=C`: slices, those with another bit than the portable code, and those of the
control that differ. The exit code is 1 unless D is 0, C is above 0, and the kernel made every slice.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

if "cuda" not in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from mupscale.proofs.slices import compare_slices


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slices", type=int, default=240)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found = compare_slices(chosen.slices, chosen.device, chosen.seed)
    for line in found.different:
        print(f"FAILED: {line}")
    if found.kernel < found.slices:
        print(
            f"FAILED: {found.slices - found.kernel} slices were not made by the kernel; is triton installed?"
        )
    print(f"slices={found.slices} different={len(found.different)} control={found.control}")
    return 1 if found.different or not found.control or found.kernel < found.slices else 0


if __name__ == "__main__":
    sys.exit(main())
