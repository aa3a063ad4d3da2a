"""Every example in the help of a verb does what it says, in a folder that has what the example names."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("planned_here")]

from mupscale.cli.main import main, parser  # noqa: E402

_ELSEWHERE = {
    "postgresql://": "a server",
    "--device cuda": "a device",
    "/scratch": "a disk",
    "proxy.py": "a model of one's own",
    "./dcp": "a checkpoint of another format",
}
"""What a test may not have: such examples are only parsed."""
_SHORTER = "--steps 16 --batch 2 --context 16"
"""What a study gets besides: without it, it trains for minutes."""
Lines = dict[str, list[str]]


def examples() -> Lines:
    verbs: Any = parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    return {
        name: [line.strip() for line in verb.epilog.splitlines() if line.startswith("  mupscale ")]
        for name, verb in verbs.items()
    }


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=4, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("base")
    tokens = torch.randint(64, (20, 300)).tolist()
    Path("text.jsonl").write_text("".join(json.dumps({"input_ids": one}) + "\n" for one in tokens))
    return tmp_path


@pytest.mark.parametrize("verb", examples())
def test_examples_of_a_verb_run(verb, room):
    if verb == "check":
        assert main(shlex.split("grow ./base ./wide -k 2 --quiet")) == 0
    if verb == "report":
        assert main(shlex.split(f"tune ./base --data text.jsonl {_SHORTER} --quiet")) == 0
        for name in ("width128", "width256"):
            shutil.copytree("tuning", name)
    for name in ("before", "after") if verb == "same" else ():
        shutil.copytree("base", name)
    for line in examples()[verb]:
        if any(part in line for part in _ELSEWHERE):
            continue
        for left in Path().glob("wide*") if verb in ("grow", "upscale") else ():
            left.rename(f"done-{len(list(Path().iterdir()))}")
        if verb == "tune":
            line = f"{line} {_SHORTER} --folder tuning-{len(list(Path().iterdir()))}"
        assert main(shlex.split(line)[1:]) == 0, line
