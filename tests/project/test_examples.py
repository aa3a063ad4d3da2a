"""The examples run as their first lines say and show what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
_LEFT_BEHIND = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

CLAIMS = {
    "mlp.py": r"largest relative difference \d\.\de-1\d; control \d\.\de[+-]0[01]",
    "gpt.py": r"losses differ by \d\.\de-0[5-9] at most",
    "huggingface_trainer.py": r"largest relative difference \d\.\de-0[6-9]; without the callback",
    "lightning_trainer.py": r"largest relative difference \d\.\de-0[6-9]; without the callback",
    "fsdp2.py": r"^ *44 +\S+ +\S+ +\S+$",
    "optuna_study.py": r"at width 200 to 400: loss \S+, without noise",
    "coordinate_check.py": r"the slope farthest from 0: [+-]0\.[01]",
    "register_optimizer.py": r"(?s)no units are known for.*the right row: off by \d\.\de-1\d after 12 steps",
    "family_row.py": r"gradients agree to \de-1\d, 5 AdamW steps to \de-1\d",
}
"""What each prints when it holds; each also asserts it, and fails when it does not."""


def run(script: str) -> str:
    """What an example prints; a port that somebody took in between is asked for again."""
    command = [sys.executable]
    if "torchrun" in (EXAMPLES / script).read_text(encoding="utf-8"):
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {key: value for key, value in os.environ.items() if key not in _LEFT_BEHIND}
    environment |= {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for _ in range(3):
        done = subprocess.run(
            [*command, str(EXAMPLES / script)], capture_output=True, text=True, timeout=600, env=environment
        )
        if "address already in use" not in done.stderr.lower():
            break
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("script", CLAIMS)
def test_an_example_shows_what_it_claims(script):
    assert re.search(CLAIMS[script], run(script), re.M)


def test_every_example_is_run_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts - {"proxy_mlp.py"} == CLAIMS.keys(), "proxy_mlp.py is run by the tests of tuning"
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in sorted(scripts):
        text = (EXAMPLES / name).read_text(encoding="utf-8")
        assert f"`{name}`" in listed, f"{name} is not in the list"
        assert f"examples/{name}" in text.split('"""')[1], f"{name} does not say how to run it"


def test_examples_use_the_public_interface_alone():
    inside = {
        name
        for path in EXAMPLES.glob("*.py")
        for name in re.findall(r"^from (mupscale\.\S+) import", path.read_text(encoding="utf-8"), re.M)
    }
    assert inside == {"mupscale.families.prove", "mupscale.families.types.rows", "mupscale.studies"}, (
        "a row is tried where it is kept"
    )
