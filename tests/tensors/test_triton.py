"""The Triton kernel gives the bits of the CPU, on random slices of random tensors.

On the CPU it runs in Triton's interpreter, which executes the same program. What a slice is, `tensors/triton/compare.py` says.
Triton may be next to the environment: `PYTHONPATH=folder python -m pytest -m nightly tests/tensors/test_triton.py`.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.nightly
COMPARE = """
import torch
from mupscale.tensors.triton.compare import compare_slices
torch.set_num_threads(1)
found = compare_slices(240, "cpu", kernel="triton")
print(*found.different, sep="\\n")
print(found.slices, found.kernel, len(found.different), found.control)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
def test_the_triton_kernel_gives_the_bits_of_the_cpu():
    """Control: rounding product and sum once, as a fused multiply-add does, gives other bits."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COMPARE], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    slices, kernel, different, control = map(int, done.stdout.splitlines()[-1].split())
    assert (slices, kernel) == (240, 240), "the kernel made every slice"
    assert different == 0, done.stdout
    assert control > 0
