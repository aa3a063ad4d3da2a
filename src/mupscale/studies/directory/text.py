"""Text for a small language model: a file, read as tokens of the model's own tokenizer and cut into sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import Fault, MupscaleError, raise_faults
from ...files.directory import TOKENIZERS

_LINES = (".jsonl", ".ndjson")
PASSES = 4
"""How often a sequence may be seen: up to four times, repeated text is nearly as good as new (arXiv 2305.16264)."""
HELD = 8
"""Sequences that are not trained on; the loss by which noise is sized is measured on them."""


@dataclass(frozen=True)
class TextData:
    """Sequences of one length: those to train on, and a few that are held out."""

    train: Tensor
    held: Tensor

    @property
    def digest(self) -> str:
        """Identifies the sequences, so that a study is not continued with another text."""
        rows = torch.cat([self.train, self.held]).numpy()
        return hashlib.sha256(rows.tobytes() + str(rows.shape).encode()).hexdigest()[:16]

    def batch(self, step: int, size: int, seed: int = 0) -> Tensor:
        """The sequences of a step, a function of its number alone: each pass over the text is in an order of its own.

        >>> data = TextData(torch.arange(6).view(6, 1), torch.zeros(1, 1))
        >>> sorted(int(row) for step in range(3) for row in data.batch(step, 2))
        [0, 1, 2, 3, 4, 5]
        """
        count = len(self.train)
        rows = [divmod(number, count) for number in range(step * size, (step + 1) * size)]
        return self.train[[_order(seed, turn, count)[row] for turn, row in rows]]


@lru_cache(maxsize=2)
def _order(seed: int, turn: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(1_000_003 * seed + turn)
    return [int(row) for row in torch.randperm(count, generator=generator, device="cpu")]


def read_text(path: Path, directory: Path, *, words: int, length: int, most: int) -> TextData:
    """At most `most` sequences of `length` tokens, and those that are held out; raises if there are fewer than a few.

    Each line of a .jsonl file is an object with "text", or with "input_ids" that need no tokenizer. Every other file is one
    plain text. `words` is the size of the model's vocabulary.
    """
    wanted = (most + HELD) * length
    tokens: list[int] = []
    for some in _documents(path, directory):
        tokens += some
        if len(tokens) >= wanted:
            break
    unknown = [token for token in tokens if not 0 <= token < words]
    if unknown:
        what = f"its token {unknown[0]} is not one of the model's {words:,}"
        raise_faults(
            "this text cannot be read",
            [Fault("data.unknown_token", str(path), what, "use the model's own tokenizer")],
        )
    rows = torch.tensor(tokens[: len(tokens) // length * length], dtype=torch.long, device="cpu").view(
        -1, length
    )[: most + HELD]
    if len(rows) <= HELD:
        what = f"{len(tokens):,} tokens, expected more than {HELD} sequences of {length}"
        raise_faults(
            "this text is too short",
            [Fault("data.too_few_sequences", str(path), what, "give more text, or --context 64")],
        )
    return TextData(rows[:-HELD], rows[-HELD:])


def check_enough(data: TextData, path: Path, needed: int) -> None:
    """Raise unless a run that sees `needed` sequences sees none of them more than `PASSES` times."""
    have, length = len(data.train), data.train.shape[1]
    if needed > PASSES * have:
        what = (
            f"{have * length:,} tokens to train on, and the longest run sees {needed * length:,}: each more than "
            f"{PASSES} times"
        )
        remedy = f"give {needed * length // PASSES:,} tokens or more, or train less (--steps, --batch)"
        raise_faults("this text is too short", [Fault("data.repeated_too_often", str(path), what, remedy)])


def _documents(path: Path, directory: Path) -> Iterator[list[int]]:
    if not path.is_file():
        raise MupscaleError(
            f"{path}: no such file; name a .jsonl file with texts, or a plain text", code="data.no_such_file"
        )
    tokenizer: Any = None
    for where, found in _texts(path):
        if isinstance(found, list):
            yield found
            continue
        if tokenizer is None:
            tokenizer = _tokenizer(directory, path)
        tokens = list(tokenizer(found)["input_ids"])
        end = tokenizer.eos_token_id
        if tokens and end is not None and tokens[-1] != end:
            tokens.append(end)
        if found.strip() and not tokens:
            raise MupscaleError(
                f"{where}: the tokenizer gives no tokens for this text", code="data.no_tokens"
            )
        yield tokens


def _texts(path: Path) -> Iterator[tuple[str, str | list[int]]]:
    """Every document with its place: a text, or tokens."""
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix not in _LINES:
                yield str(path), file.read()
                return
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    yield where, _entry(line, where)
    except UnicodeDecodeError as error:
        raise MupscaleError(
            f"{path} is not text in UTF-8: {error.reason}; name a .jsonl or text file",
            code="data.not_utf8_text",
        ) from None


def _entry(line: str, where: str) -> str | list[int]:
    remedy = 'expected {"text": "…"} or {"input_ids": [1, 2, 3]}'
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise MupscaleError(f"{where}: not JSON ({error}); {remedy}", code="data.line_not_json") from None
    if isinstance(entry, dict):
        if isinstance(entry.get("text"), str):
            return str(entry["text"])
        tokens = entry.get("input_ids")
        if isinstance(tokens, list) and all(type(token) is int for token in tokens):
            return tokens
    raise MupscaleError(f"{where}: {remedy}", code="data.line_without_text")


def _tokenizer(directory: Path, data: Path) -> Any:
    from transformers import AutoTokenizer

    remedy = (
        f'save one there (tokenizer.save_pretrained), or write lines of {{"input_ids": […]}} to a .jsonl file '
        f"instead of {data.name}"
    )
    if not any((directory / name).is_file() for name in TOKENIZERS):
        what = f"no tokenizer, expected one of {', '.join(TOKENIZERS)}"
        raise_faults(
            "text cannot be turned into tokens", [Fault("data.no_tokenizer", str(directory), what, remedy)]
        )
    try:
        load: Any = AutoTokenizer.from_pretrained
        return load(str(directory), local_files_only=True)
    except Exception as error:  # tokenizers fail in many ways, and all mean this
        first = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise_faults(
            "text cannot be turned into tokens",
            [
                Fault(
                    "data.tokenizer_not_loadable",
                    str(directory),
                    f"its tokenizer cannot be loaded: {first}",
                    remedy,
                )
            ],
        )
