"""The examples run as their first lines say, and show what they promise."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_fsdp2_goes_on_from_the_narrow_checkpoint():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "fsdp2.py")], capture_output=True, text=True, timeout=300, check=True
    )
    exact, noisy = [], []
    for base, wide, freed in re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", done.stdout, re.M):
        exact.append(abs(float(base) - float(wide)))
        noisy.append(abs(float(base) - float(freed)))
    assert len(exact) == 15
    assert max(exact) < 1e-5 < 1e-2 < max(noisy)
