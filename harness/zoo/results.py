"""What the lines of the zoo must show, how they are summed up, and how they are kept in benchmarks/zoo.jsonl."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.evidence import is_of
from harness.zoo.entry import Entry, Impossible
from harness.zoo.measure import Line

ROOT = Path(__file__).resolve().parents[2]
STORED = ROOT / "benchmarks" / "zoo.jsonl"
SHARE = 0.75
"""The least share of the models with a known or possible exact plan that some path grows exactly."""
CONTROL, QUICK_CONTROL = 30, 8
"""The least number of models that are silent without proofs, in the whole zoo and in its quick part."""
MODELS = 150
QUICK = (
    "gpt_heads_fixed", "single_head", "head_size_in_view", "qk_norm_heads_fixed", "gpt_tied_by_function",
    "matrix_factorisation", "sasrec", "tutorial_sqrt_width", "unit_length", "softmax_over_channels", "dpr_dot_products",
    "pixel_shuffle_function", "dcgan_linear_view", "buffer_summed_over", "mlp_dropout", "mlp_gelu", "house_resnet",
    "house_llama", "stock_encoder_heads_fixed", "lstm_bidirectional", "unet", "mnist_example", "swiglu_fused",
    "inception", "graphsage", "vit_heads_grow", "nerf_input_skip", "batchnorm_after_batchnorm",
)  # fmt: skip
"""Fast models of every kind for CI; more than half of them are silent without proofs."""


def stored(key: str) -> dict[tuple[str, str, str], Line]:
    """The lines of this code, by name, mode and dtype."""
    if not STORED.exists():
        return {}
    rows = map(json.loads, STORED.read_text(encoding="utf-8").splitlines())
    lines = (Line.from_json(row) for row in rows if is_of(key, row))
    return {(line.name, line.mode, line.dtype): line for line in lines}


def store(line: Line, key: str) -> None:
    """Put the line in the place of the one with its name, mode and dtype."""
    rows = STORED.read_text(encoding="utf-8").splitlines() if STORED.exists() else []
    mine = (line.name, line.mode, line.dtype)
    kept = [row for row in rows if tuple(json.loads(row)[k] for k in ("name", "mode", "dtype")) != mine]
    kept.append(json.dumps({"key": key, **line.as_json()}, ensure_ascii=False))
    STORED.write_text("\n".join(kept) + "\n", encoding="utf-8")


def summary(lines: Iterable[Line], entries: list[Entry]) -> dict[str, float]:
    """The numbers of the last line."""
    found = {line.name: line for line in lines}
    kinds = Counter(line.kind for line in found.values())
    possible = [e for e in entries if not isinstance(e.judgement, Impossible) and e.available]
    reached = sum(any(o.kind == "exact" for o in found[e.name].paths.values()) for e in possible)
    return {
        "models": len(found),
        **{kind: kinds[kind] for kind in ("exact", "refused", "dropout", "slow", "crashed", "silent")},
        "remedy_wrong": sum(line.remedy_wrong for line in found.values()),
        "false_alarms": sum(line.false_alarm for line in found.values()),
        "skipped": sum(not e.available for e in entries),
        "share": round(reached / max(len(possible), 1), 3),
    }


def failures(numbers: dict[str, float], mode: str, quick: bool, whole: bool) -> Iterator[str]:
    """Every bound that does not hold, in words."""
    if mode == "control":
        least = QUICK_CONTROL if quick else CONTROL
        if whole and numbers["silent"] < least:
            yield f"{numbers['silent']} models are silent without proofs, expected at least {least}"
        return
    if mode == "prove":
        if numbers["exact"] < numbers["models"]:
            yield "a stored plan is not exact"
        if numbers["false_alarms"]:
            yield "verify denies a stored plan"
        return
    for word in ("silent", "remedy_wrong", "false_alarms"):
        if numbers[word]:
            yield f"{word}={numbers[word]}, expected 0"
    if whole and not quick and numbers["share"] < SHARE:
        yield f"{numbers['share']} of the models that can be exact are, expected {SHARE}"
