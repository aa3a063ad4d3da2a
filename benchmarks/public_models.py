"""Well-known models can be planned from their public configurations alone: what grows, its size, and the cost of planning.

benchmarks/public_models.json has the fields of each configuration that decide shapes, and the number of parameters that
its authors publish. Each is planned as `mupscale plan` does it, on a small copy in a process of its own, with no weights. The
number of parameters must be the published one to 1 %; the control is the same configuration with half of its layers.

    python benchmarks/public_models.py [NAME …]

What is found is stored in benchmarks/public_models_found.json, from which `python docs/generate.py` fills the README; with
names, the others stay as they were. The last line is `models=N exact=N published=E control=E seconds=S rss_mib=M`: the
largest relative difference from a published number, the smallest of a control, and the most expensive plan. The exit code is
1 when a bound fails.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.evidence import key_of
from harness.fresh_install import cpu_seconds
from harness.program import Outcome, option, run
from mupscale.errors import MupscaleError
from mupscale.families.process import plan_in_process
from mupscale.families.record import FamilyPlan
from mupscale.files.floats import TORCH_NAMES
from mupscale.files.places import item_size
from mupscale.text import size

HERE = Path(__file__).parent
MODELS, FOUND = HERE / "public_models.json", HERE / "public_models_found.json"
PUBLISHED = 0.01
"""Published numbers are rounded to two or three digits, and some leave out biases or norms."""
TRAINING = 16
"""Bytes per parameter: weight, gradient and two moments in float32, as `mupscale plan` counts them."""
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")


def planned(config: Mapping[str, Any], growth: str) -> tuple[FamilyPlan, float, int]:
    """The plan, and the processor seconds and the largest memory of the process that found it."""
    before = cpu_seconds()
    family = plan_in_process(config, growth, timeout=3600)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    return family, cpu_seconds() - before, peak


def halved(config: Mapping[str, Any]) -> dict[str, Any]:
    """The control: another model than the published one.

    >>> halved({"hidden_size": 64, "num_hidden_layers": 12})
    {'hidden_size': 64, 'num_hidden_layers': 6}
    """
    return {key: value // 2 if key in LAYERS else value for key, value in config.items()}


def counted(config: Mapping[str, Any]) -> int:
    """Parameters of the stock class of a configuration, each shared one once; nothing is allocated."""
    import torch
    import transformers

    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(transformers.AutoConfig.for_model(config["model_type"], **fields))
    return sum(p.numel() for p in model.parameters())


def row_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table, as it is stored."""
    family, seconds, rss = planned(model["config"], model["growth"])
    base, wide = family.plan.parameters("base"), family.plan.parameters("wide")
    published = model["published"]
    item = item_size(TORCH_NAMES[model["config"]["torch_dtype"]])
    return {
        "growth": model["growth"],
        "parameters": [base, wide],
        "weights": [base * item, wide * item],
        "exact": family.plan.proved,
        "gradient": family.evidence.worst_gradient,
        "published": abs(base - published) / published,
        "control": abs(counted(halved(model["config"])) - published) / published,
        "seconds": round(seconds, 1),
        "rss_mib": rss,
    }


def table() -> str:
    """The rows that the README shows, from what is stored.

    >>> table().splitlines()[0].split(" | ")[1]
    'what grows'
    """
    lines = [
        "| model | what grows | parameters | weights | to train the wide one, AdamW | CPU seconds to plan |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in json.loads(FOUND.read_text(encoding="utf-8")).items():
        numbers = " → ".join(map(short, row["parameters"]))
        weights = " → ".join(map(size, row["weights"]))
        what = {"2": "every width", "ffn=2": "feed-forward layers"}[row["growth"]]
        train = size(TRAINING * row["parameters"][1])
        lines.append(
            f"| {name} | {what}: `-k {row['growth']}` | {numbers} | {weights} | {train} | {row['seconds']:.0f} |"
        )
    return "\n".join(lines)


def short(number: int) -> str:
    """A number of parameters as people say it.

    >>> short(8_030_261_248), short(109_514_298), short(2_671_684_800_512)
    ('8.03 B', '110 M', '2,672 B')
    """
    billions = number / 1e9
    if billions >= 100:
        return f"{billions:,.0f} B"
    return f"{billions:.3g} B" if billions >= 1 else f"{number / 1e6:.3g} M"


def measure(chosen: argparse.Namespace) -> Outcome:
    models = json.loads(MODELS.read_text(encoding="utf-8"))
    rows = json.loads(FOUND.read_text(encoding="utf-8")) if chosen.names and FOUND.exists() else {}
    for name in chosen.names or models:
        try:
            rows[name] = {**row_of(models[name]), "key": key_of("public_models")}
        except MupscaleError as error:
            return Outcome("", [f"{name}: {error}"])
        print(name, json.dumps(rows[name]), flush=True)
        ordered = {known: rows[known] for known in models if known in rows}
        FOUND.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    values = list(rows.values())
    published, control = max(row["published"] for row in values), min(row["control"] for row in values)
    exact, costly = sum(row["exact"] for row in values), max(values, key=lambda row: float(row["seconds"]))
    bounds = {
        f"{len(values) - exact} plans are not exact": exact == len(values),
        f"a number of parameters is {published:.1e} off, allowed {PUBLISHED}": published <= PUBLISHED,
        f"half of the layers is {control:.1e} off only": control > PUBLISHED,
    }
    line = (
        f"models={len(values)} exact={exact} published={published:.1e} control={control:.1e} "
        f"seconds={costly['seconds']:.0f} rss_mib={max(row['rss_mib'] for row in values)}"
    )
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


if __name__ == "__main__":
    names = option("names", nargs="*", help="models of public_models.json (default: all)")
    sys.exit(run(measure, names, doc=__doc__))
