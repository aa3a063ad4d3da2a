"""A trained checkpoint is tuned from its directory and a text, and grown by the recipe, with the command line alone.

The base is a trained Llama of 231 thousand parameters, whose tokenizer is first written in the form of transformers; the text
are textbooks. `mupscale tune` may take 1200 CPU seconds on one thread for 200 steps; a quarter of both is run.
"""

from __future__ import annotations

import json
import lzma
import os
import resource
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from harness.data import DATA, tokenizer_of

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]

STEPS, MOST_SECONDS, DOCUMENTS = 50, 300, 120
"""CPU seconds that tuning may take, which bound it; the wall clock of the timeout is for a machine that is busy."""
TINY = DATA / "models" / "tiny_llama"


def prepared(folder: Path) -> tuple[Path, Path]:
    """The base with its tokenizer, and a text to tune on."""
    base = folder / "base"
    shutil.copytree(TINY, base, copy_function=shutil.copyfile)
    base.chmod(0o755)
    tokenizer_of(base / "tok512.bin").save(str(base / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (base / "tokenizer_config.json").write_text(json.dumps(told))
    with lzma.open(DATA / "text" / "openstax.jsonl.xz", "rt", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in islice(file, DOCUMENTS)]
    data = folder / "text.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return base, data


def mupscale(*words: str) -> tuple[str, float]:
    """Run a command; its output, and the CPU seconds that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mupscale", *words],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"$ mupscale {' '.join(words)}\n{done.stdout}({spent:.0f} CPU seconds)\n", flush=True)
    assert done.returncode == 0
    return done.stdout, spent


@pytest.mark.skipif(not TINY.is_dir(), reason="there is no tiny_llama; set MUPSCALE_DATA")
def test_a_directory_is_tuned_and_grown_by_its_recipe(tmp_path):
    base, data = prepared(tmp_path)
    study, out = tmp_path / "study", tmp_path / "wide"
    tune = ["tune", str(base), "--data", str(data), "--steps", str(STEPS)]
    _, seconds = mupscale(*tune, "--folder", str(study))
    assert seconds < MOST_SECONDS
    recipe = json.loads((study / "recipe.json").read_text())
    grow = ["-k", str(recipe["k"]), "--recipe", str(study / "recipe.json")]
    said, _ = mupscale("upscale", str(base), str(out), *grow, "--optimizer", recipe["optimizer"])
    assert "the loss is the base's" in said, "a recipe of new units wakes them without a jump"
    assert mupscale("check", str(out), "--base", str(base))[0]
