"""A directory that holds an adapter of PEFT, and the command that makes a model of it.

Knows how PEFT's files look on disk. Needs no PEFT and loads nothing.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable
from fnmatch import fnmatchcase

from ..errors import Fault, MupscaleError
from ..storage.location import Location
from .strict import parse_json, printable, read_regular

_CONFIG = "adapter_config.json"
_FILES = (_CONFIG, "adapter_model.*")
_CLASSES = {
    "CAUSAL_LM": "AutoPeftModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}
"""PEFT's task_type -> the class that loads an adapter together with its model."""


def adapter_faults(path: Location, names: Iterable[str]) -> list[Fault]:
    """A fault with the command that merges the adapter, if there is one."""
    found = [name for name in names if any(fnmatchcase(name, pattern) for pattern in _FILES)]
    if not found:
        return []
    what = "an adapter, which changes a model that lies elsewhere"
    merged = f"{path}-merged"
    remedy = (
        f"merge it into its model, grow the result, and train a new adapter on that: {shlex.join(merge_command(path, merged))}; "
        f"then name {merged}"
    )
    return [Fault("directory.holds_an_adapter", printable(found[0]), what, remedy)]


def merge_command(path: Location, merged: str) -> list[str]:
    """The command that writes the model of an adapter with the adapter merged into it."""
    loads = _CLASSES.get(_task(path), "AutoPeftModel")
    ends = [json.dumps(str(path)), json.dumps(merged)]
    lines = (
        f"import peft; peft.{loads}.from_pretrained({ends[0]}).merge_and_unload().save_pretrained({ends[1]})"
    )
    return ["python", "-c", lines]


def _task(path: Location) -> str:
    try:
        config = parse_json(read_regular(path / _CONFIG), _CONFIG)
    except (OSError, MupscaleError):
        return ""
    return str(config.get("task_type")) if isinstance(config, dict) else ""
