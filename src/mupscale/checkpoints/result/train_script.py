"""`train.py` next to a grown directory: a complete script that trains it with the stock Trainer.

Decoders predict the next token, encoders with a masked head predict masked tokens, models of sentence-transformers learn from pairs,
and models that classify images from images with labels. Other heads get no script.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Literal

from ...files.directory import Directory
from ...files.strict import parse_json, read_regular
from ...files.typed import named
from . import scripts

NAME, STATE = "train.py", "trainer_state.json"
_LONGEST = 1 << 28  # bytes; a log has a line for every few steps

_LENGTH = 256
_LR, _SENTENCES_LR = 3e-4, 2e-5
"""Rates that are usual for small decoders, and for sentence-transformers; the recipe's is taken where there is one."""
SENTENCES = "sentence_transformers"
"""What a record has where the directory is a model of sentence-transformers, whose modules are carried."""
Data = Literal["tokens", "pairs", "images"]


def rate_of(about: Mapping[str, Any]) -> tuple[float | None, str]:
    """The learning rate to start with, and where it comes from; None where new units were woken and the base's is not known."""
    tuned = ((about["noise"] or {}).get("asked") or {}).get("lr")
    if tuned is not None:
        return tuned, "the recipe's"
    peak = about.get("peak_lr")
    if peak is None and about.get(SENTENCES):
        return _SENTENCES_LR, "a usual rate of sentence-transformers, not tuned for this model"
    if "peak_lr" not in about:
        return _LR, "a usual rate, not tuned for this model"
    half = "half of the base's highest rate, which suits new units"
    return (None, half) if peak is None else (float(f"{peak / 2:.6g}"), f"{half}: {STATE} has {peak:g}")


def peak_rate(directory: Directory) -> float | None:
    """The highest learning rate of the run that left a directory, as its Trainer has logged it; None where it has not.

    The settings of the run (training_args.bin) are a pickle, which is never opened.
    """
    if STATE not in directory.trainer:
        return None
    log = named(parse_json(read_regular(directory.path / STATE, _LONGEST), STATE, infinity=True)).get(
        "log_history"
    )
    rates = (
        [row.get("learning_rate") for row in log if isinstance(row, dict)] if isinstance(log, list) else []
    )
    known = [float(rate) for rate in rates if isinstance(rate, (int, float)) and 0 < rate < inf]
    return max(known, default=None)


def writes_text(about: Mapping[str, Any]) -> bool:
    """Whether the model predicts the next token, so that it can be trained on text and evaluated by lm-eval."""
    name, config = about["architecture"], about["config"]
    return name.endswith(("ForCausalLM", "LMHeadModel")) and not config.get("is_encoder_decoder")


def data_of(about: Mapping[str, Any]) -> Data | None:
    """What the model is trained on by its script; None for a model that gets none."""
    name = about["architecture"]
    if about.get(SENTENCES):
        return "pairs"
    if writes_text(about) or name.endswith("ForMaskedLM"):
        return "tokens"
    return "images" if name.endswith("ForImageClassification") else None


def train_script(about: Mapping[str, Any]) -> str | None:
    """The script for a record, or None for a model whose labels are not known.

    >>> about = {"architecture": "LlamaForCausalLM", "config": {"max_position_embeddings": 64}, "noise": None}
    >>> "LlamaForCausalLM.from_pretrained" in train_script(about), train_script({**about, "architecture": "ViTModel"})
    (True, None)
    """
    data = data_of(about)
    if data is None:
        return None
    lr, source = rate_of(about)
    rate = "required=True" if lr is None else f"default={lr}"
    config = about["config"]
    longest = config.get("max_position_embeddings") or config.get("n_positions") or _LENGTH
    length = scripts.LENGTH.format(length=min(_LENGTH, int(longest))) if data == "tokens" else ""
    masked = not writes_text(about)
    return scripts.TEXTS[data].format(
        head=scripts.HEAD.format(length=length, rate=rate, source=source),
        architecture=about["architecture"],
        settings=scripts.SETTINGS,
        run=scripts.RUN,
        labels=scripts.MASKED if masked else scripts.NEXT,
        mask=scripts.MASK if masked else "",
    )
