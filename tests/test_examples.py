"""The examples run as their first lines say, and show what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
_LEFT_BEHIND = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torchrun(script: str) -> str:
    """What a script prints on two ranks; a port that somebody took in between is asked for again."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_BEHIND}
    for _ in range(3):
        done = subprocess.run(
            [*command, str(EXAMPLES / script)], capture_output=True, text=True, timeout=300, env=environment
        )
        if "address already in use" not in done.stderr.lower():
            break
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def test_fsdp2_goes_on_from_the_narrow_checkpoint():
    exact, noisy = [], []
    for base, wide, freed in re.findall(r"^ +\d+ +(\S+) +(\S+) +(\S+)$", torchrun("fsdp2.py"), re.M):
        exact.append(abs(float(base) - float(wide)))
        noisy.append(abs(float(base) - float(freed)))
    assert len(exact) == 15
    assert max(exact) < 1e-5 < 1e-2 < max(noisy)
