"""How far a command goes: the modules of the package that it imports, and the processes that it starts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.nightly

MODULES = {"plain": 135, "with state": 137}
"""How many of the package are imported in the process of the command, `__init__` files of rooms among them."""
CHILDREN = {"plain": 1, "with state": 2}
"""One plans and proves; one reads the optimizer state, which only transformers can order."""
WALK = """
import json, sys
from multiprocessing import util

started = []
sys.addaudithook(lambda event, args: started.append(args[1]) if event == "subprocess.Popen" else None)
spawn = util.spawnv_passfds


def spawned(path, words, handles):
    if not any("resource_tracker" in str(word) for word in words):
        started.append(list(map(str, words)))
    return spawn(path, words, handles)


if __name__ == "__main__":
    util.spawnv_passfds = spawned
    from mupscale.cli.main import main

    status = main(sys.argv[1:])
    imported = sorted(name for name in sys.modules if name.partition(".")[0] == "mupscale")
    print(json.dumps([status, imported, len(started)]))
"""


@pytest.fixture(scope="module", params=["plain", "with state"])
def walked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, int, list[str], int]:
    """What `mupscale grow ./base ./wide -k 2` does with a tiny Llama."""
    transformers = pytest.importorskip("transformers")
    folder: Path = tmp_path_factory.mktemp("walk")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "base")
    if request.param == "with state":
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), folder / "base" / "optimizer.pt")
    (folder / "walk.py").write_text(WALK)
    words = [sys.executable, "walk.py", "grow", "./base", "./wide", "-k", "2", "--quiet"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    status, imported, children = json.loads(done.stdout.splitlines()[-1])
    return request.param, status, imported, children


def test_growing_a_directory_imports_and_starts_no_more_than_it_needs(walked):
    kind, status, imported, children = walked
    assert status == 0
    assert len(imported) <= MODULES[kind], f"{len(imported)} modules"
    assert children == CHILDREN[kind]


def test_the_process_that_writes_imports_no_model_code_and_no_other_format(walked):
    """Control: what it needs is seen."""
    _, _, imported, _ = walked
    assert "mupscale.jobs.worker" in imported
    for name in (
        "formats.megatron",
        "formats.lightning",
        "families.models",
        "families.loading",
        "training",
        "proofs",
    ):
        assert not [module for module in imported if module.startswith(f"mupscale.{name}")], name
