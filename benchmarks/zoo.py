"""No model of the zoo grows silently wrong: every path that a user may take is exact or refused.

Each model is trained in float64, grown with zero noise by the shortest call, with a loss, with example inputs, and by
what a refusal tells to write, and goes on beside its base. A path is silent when it does not refuse and the losses
differ; a remedy is wrong when it was printed and gives such a run; verify gives a false alarm when it denies an exact
one. `--control` switches proofs off: the zoo must then show what the proofs are for.

    python benchmarks/zoo.py [--quick] [--control | --prove] [--only NAME] [--dtype float32] [--again] [--list]

A full run is kept in benchmarks/zoo.jsonl, one line per model, and resumed as long as the code is the same. The last
line is `models=… exact=… refused=… dropout=… silent=… remedy_wrong=… false_alarms=… share=…`; the exit code is 1 when
a bound fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.zoo_measure import Line, measured
from harness.evidence import is_of, key_of
from harness.zoo import ZOO
from harness.zoo.entry import Entry, Exact, Impossible

ROOT = Path(__file__).resolve().parents[1]
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


def shown(line: Line) -> str:
    cells = (f"{path} {o.kind}{'' if o.gap is None else f' {o.gap:.0e}'}" for path, o in line.paths.items())
    alarm = "   FALSE ALARM" if line.false_alarm else ""
    return f"{line.name:38} {line.kind:8} {line.seconds:6.1f}s  {'   '.join(cells)}{alarm}"


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


def chosen_entries(options: argparse.Namespace) -> list[Entry]:
    entries = [e for e in ZOO.values() if options.only in e.name]
    if options.quick:
        entries = [e for e in entries if e.name in QUICK]
    if options.prove:
        entries = [e for e in entries if isinstance(e.judgement, Exact)]
    return entries


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} fast models; nothing is stored")
    parser.add_argument("--control", action="store_true", help="the shortest call with proofs switched off")
    parser.add_argument(
        "--prove", action="store_true", help="measure the stored plans of the models judged exact"
    )
    parser.add_argument("--only", default="", help="part of a model's name; nothing is stored")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--again", action="store_true", help="measure what is stored already")
    parser.add_argument("--list", action="store_true", help="print names and judgements, and measure nothing")
    options = parser.parse_args()
    entries = chosen_entries(options)
    if not entries:
        parser.error(f"no model has {options.only!r} in its name; --list prints the names")
    if options.list:
        for entry in entries:
            print(f"{entry.name:38} {entry.judgement}")
        return 0
    mode = "control" if options.control else "prove" if options.prove else "paths"
    whole = not options.only
    keeps = whole and not options.quick
    key = key_of("zoo")
    known = stored(key) if keeps and not options.again else {}
    lines = []
    for entry in entries:
        if not entry.available:
            continue
        line = known.get((entry.name, mode, options.dtype))
        if line is None:
            line = measured(entry.name, mode, getattr(torch, options.dtype))
            if keeps:
                store(line, key)
        print(shown(line), flush=True)
        lines.append(line)
    for package in sorted({e.needs for e in entries if not e.available}):
        print(f"skipped: {package} is not installed")
    numbers = summary(lines, entries)
    failed = list(failures(numbers, mode, options.quick, whole))
    if keeps and len(lines) < MODELS and mode == "paths":
        failed.append(f"{len(lines)} models, expected at least {MODELS}")
    for failure in failed:
        print(f"FAILED: {failure}")
    print("\n" + " ".join(f"{word}={value}" for word, value in numbers.items()))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
