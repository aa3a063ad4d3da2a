"""The data of the experiments, as tensors: Forest Cover Type, CIFAR images, OpenStax and FineWeb-Edu text.

`$MUPSCALE_DATA` (or ../shared/data beside the project) is looked at first. Without it Forest Cover Type comes from
scikit-learn, images and FineWeb-Edu from Hugging Face. What is slow to make, the tokens, is kept in `$MUPSCALE_CACHE`.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mupscale import MupscaleError

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("MUPSCALE_DATA", ROOT.parent / "shared" / "data"))
CACHE = Path(os.environ.get("MUPSCALE_CACHE", Path.home() / ".cache" / "mupscale"))
WORDS = 8192


@cache
def forest(rows: int | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training features and labels, then those held out: a stratified fifth. `rows` keeps so many to train on.

    Measurements are in units of their spread in the training rows; the 44 binary columns stay as they are.
    """
    x, y = _forest()
    order = np.random.default_rng(0).permutation(len(y))
    held = np.zeros(len(y), dtype=bool)
    for label in range(7):
        members = order[y[order] == label]
        held[members[: len(members) // 5]] = True
    train, test = order[~held[order]][:rows], order[held[order]]
    mean, spread = x[train, :10].mean(0), x[train, :10].std(0)
    x = np.concatenate([(x[:, :10] - mean) / spread, x[:, 10:]], 1)
    return (
        torch.from_numpy(x[train]),
        torch.from_numpy(y[train]),
        torch.from_numpy(x[test]),
        torch.from_numpy(y[test]),
    )


def _forest() -> tuple[Any, Any]:
    path = DATA / "covtype" / "covtype.npz"
    if path.is_file():
        data = np.load(path)
        hot = [np.eye(n, dtype="f4")[data[key]] for key, n in (("wilderness", 4), ("soil", 40))]
        return np.concatenate([data["cont"].astype("f4"), *hot], 1), data["y"].astype("i8") - 1
    try:
        from sklearn.datasets import fetch_covtype  # type: ignore[import-untyped]
    except ImportError as error:
        raise MupscaleError(
            f"Forest Cover Type is not at {path}: set MUPSCALE_DATA, or pip install scikit-learn to fetch it"
        ) from error
    fetched = fetch_covtype()
    return fetched.data.astype("f4"), fetched.target.astype("i8") - 1


@dataclass(frozen=True)
class Images:
    """Images of bytes to train on, with an edge of zeros around each, and those held out, without."""

    x: Tensor
    y: Tensor
    x_held: Tensor
    y_held: Tensor
    mean: Tensor
    spread: Tensor

    def normal(self, x: Tensor) -> Tensor:
        """Bytes as numbers in units of the channels' spread in the training images."""
        return (x.float() - self.mean) / self.spread


@cache
def images(name: str, rows: int | None = None, edge: int = 4) -> Images:
    """CIFAR-10 or CIFAR-100, all of it or so many training images. Edges are of the mean colour when normalised."""
    x, y, x_held, y_held = _images(name)
    x, y = x[:rows], y[:rows]
    mean = x.mean((0, 1, 2)).reshape(3, 1, 1)
    spread = x.std((0, 1, 2)).reshape(3, 1, 1)
    padded = np.broadcast_to(
        mean.reshape(3).round().astype("u1"), (len(x), 32 + 2 * edge, 32 + 2 * edge, 3)
    ).copy()
    padded[:, edge:-edge, edge:-edge] = x
    return Images(
        torch.from_numpy(padded).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(y.astype("i8")),
        torch.from_numpy(x_held).permute(0, 3, 1, 2).contiguous(),
        torch.from_numpy(y_held.astype("i8")),
        torch.from_numpy(mean.astype("f4")),
        torch.from_numpy(spread.astype("f4")),
    )


def _images(name: str) -> tuple[Any, Any, Any, Any]:
    """Images as bytes (count, row, column, channel) with labels: to train on, then held out."""
    for path in sorted((DATA / "images").glob(f"{name}*.npz")):
        data = np.load(path)
        return data["x_train"], data["y_train"], data["x_test"], data["y_test"]
    load = _hugging_face(f"{name} is not at {DATA / 'images' / (name + '.npz')}")
    fetched = load(f"uoft-cs/{name}")
    label = "fine_label" if name == "cifar100" else "label"
    parts: list[Any] = []
    for split in ("train", "test"):
        parts.append(np.stack([np.asarray(image) for image in fetched[split]["img"]]))
        parts.append(np.asarray(fetched[split][label]))
    return parts[0], parts[1], parts[2], parts[3]


def _hugging_face(missing: str) -> Any:
    try:
        from datasets import load_dataset  # type: ignore[import-not-found]
    except ImportError as error:
        raise MupscaleError(f"{missing}: set MUPSCALE_DATA, or pip install datasets to fetch it") from error
    return load_dataset


@cache
def text(words: int = WORDS) -> tuple[Tensor, Tensor]:
    """The tokens of the textbooks to train on and, from the last fiftieth of the documents, those held out.

    The vocabulary is a byte-level BPE made from the training documents. A smaller one than 8,192 leaves its rarer
    words out, for quick tests.
    """
    train, held = subwords(WORDS)
    return train[train < words], held[held < words]


@cache
def subwords(words: int) -> tuple[Tensor, Tensor]:
    """The same text in a byte-level BPE of so many words that is made from the training documents; none is left out."""
    path = DATA / "text" / "openstax.jsonl.xz"
    if not path.is_file():
        raise MupscaleError(
            f"there is no {path}: set MUPSCALE_DATA to the folder that holds text/openstax.jsonl.xz"
        )
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    kept = CACHE / f"openstax-{digest}-{words}.npz"
    if not kept.is_file():
        _tokenise(path, kept, words)
    tokens = np.load(kept)
    train, held = (torch.from_numpy(tokens[part].astype("i8")) for part in ("train", "held"))
    return train, held


FINEWEB, FINEWEB_TOKENS, FINEWEB_HELD = "CC-MAIN-2013-20", 11_800_000_000, 5_500_000


@cache
def fineweb() -> tuple[Tensor, Tensor]:
    """Tokens of FineWeb-Edu by GPT-2's own words, as 16-bit numbers read from disk: to train on, and held out.

    They are made once, in `$MUPSCALE_DATA/text/fineweb.u2`: 24 GB, and a day of fetching and cutting into words.
    """
    path = DATA / "text" / "fineweb.u2"
    if not path.is_file():
        _fetch_fineweb(path)
    tokens = torch.from_file(str(path), shared=False, size=path.stat().st_size // 2, dtype=torch.uint16)
    return tokens[FINEWEB_HELD:], tokens[:FINEWEB_HELD]


def _fetch_fineweb(path: Path) -> None:
    load = _hugging_face(f"the tokens of FineWeb-Edu are not at {path}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained("gpt2")
    rows = load("HuggingFaceFW/fineweb-edu", name=FINEWEB, split="train", streaming=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished, left = path.with_suffix(".unfinished"), FINEWEB_TOKENS + FINEWEB_HELD
    with unfinished.open("wb") as file:
        for row in rows:
            words = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id][:left]
            file.write(np.asarray(words, dtype="u2").tobytes())
            left -= len(words)
            if not left:
                break
    unfinished.replace(path)


def _tokenise(path: Path, kept: Path, words: int) -> None:
    from tokenizers import ByteLevelBPETokenizer

    with lzma.open(path, "rt", encoding="utf-8") as lines:
        documents = [json.loads(line)["text"] for line in lines]
    cut = len(documents) - len(documents) // 50
    tokenizer = ByteLevelBPETokenizer()
    end = "<|endoftext|>"
    tokenizer.train_from_iterator(
        documents[:cut], vocab_size=words, special_tokens=[end], show_progress=False
    )
    parts = {}
    for name, chosen in (("train", documents[:cut]), ("held", documents[cut:])):
        encoded = tokenizer.encode_batch([document + end for document in chosen])
        parts[name] = np.concatenate([np.asarray(one.ids, dtype="u2") for one in encoded])
    kept.parent.mkdir(parents=True, exist_ok=True)
    unfinished = kept.with_name(f".{os.getpid()}-{kept.name}")
    np.savez(unfinished, allow_pickle=False, **parts)
    unfinished.replace(kept)
