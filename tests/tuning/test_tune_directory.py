"""Tune a trained checkpoint from its directory and a text, and grow it by the recipe, with the command line alone.

    python benchmarks/tune_directory.py [--steps 200]

The base is a trained Llama of 231 thousand parameters, whose tokenizer is first written in the form of transformers; the text
are textbooks. Prints the time of each command, the recipe, and last `cpu_s=… rise=… before=… after=…`: CPU seconds of
`mupscale tune` on one thread, and the loss of text that the base writes under the base and under the grown checkpoint. The
exit code is 1 above 1200 CPU seconds. Needs the data under $MUPSCALE_DATA or ../shared/data, else it is 2.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.real_models import DATA

MOST_SECONDS, DOCUMENTS = 1200, 240


def tokenizer_of(path: Path) -> Any:
    """The tokenizer of a llama2.c file: tokens with scores, merged best score first, bytes for what is unknown."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    raw, at, tokens = path.read_bytes(), 4, list[tuple[str, float]]()
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        tokens.append((raw[at + 8 : at + 8 + length].decode().replace(" ", "▁"), score))
        at += 8 + length
    tokens[1:3] = [("<s>", 0.0), ("</s>", 0.0)]
    words = {token: number for number, (token, _) in enumerate(tokens)}
    merges = [
        (token[:cut], token[cut:])
        for token, score in sorted(tokens[259:], key=lambda pair: -pair[1])
        for cut in range(1, len(token))
        if token[:cut] in words and token[cut:] in words
    ]
    made: Any = Tokenizer(models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return made


def prepared(folder: Path) -> tuple[Path, Path]:
    """The base with its tokenizer, and a text to tune on."""
    base = folder / "base"
    shutil.copytree(DATA / "models" / "tiny_llama", base, copy_function=shutil.copyfile)
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
    if done.returncode:
        raise SystemExit(1)
    return done.stdout, spent


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    chosen = parser.parse_args()
    if not (DATA / "models" / "tiny_llama").is_dir():
        print(f"no data under {DATA}")
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        base, data = prepared(folder)
        study = folder / "study"
        asked = ["--steps", str(chosen.steps), "--folder", str(study)]
        _, seconds = mupscale("tune", str(base), "--data", str(data), *asked)
        recipe = json.loads((study / "recipe.json").read_text())
        out = folder / "wide"
        grow = ["-k", str(recipe["k"]), "--recipe", str(study / "recipe.json")]
        told, _ = mupscale("upscale", str(base), str(out), *grow, "--optimizer", recipe["optimizer"])
        line = next(line for line in told.splitlines() if line.startswith("loss of"))
        before, after = (
            float(word) for word in line.replace(",", "").split() if word[0].isdigit() and "." in word
        )
    print(f"cpu_s={seconds:.0f} rise={recipe['rise']} before={before:.4f} after={after:.4f}")
    return int(seconds > MOST_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
