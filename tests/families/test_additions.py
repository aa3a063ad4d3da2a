"""A direction of growth is one file and its row, and a model type is a row: toys of both grow through the one door."""

import json
import sys
from importlib import import_module, invalidate_caches
from typing import Any

import pytest
import torch

import mupscale as mu
from harness.refusals import refusal

transformers: Any = pytest.importorskip("transformers")
import mupscale.families.steps as room  # noqa: E402
from mupscale.checkpoints import grow_directory as door  # noqa: E402
from mupscale.checkpoints.request import Request  # noqa: E402
from mupscale.families.config.goal import Goal  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.types.rows import ROWS, Row  # noqa: E402

STEP = '''
from dataclasses import dataclass
from functools import cached_property

from mupscale.errors import Fault, raise_faults
from mupscale.families.config.nested import with_edits
from mupscale.families.copy.trial import End
from mupscale.families.models import as_data, config_from
from mupscale.families.steps.step import Step
from mupscale.plans.rows import row_plan

FIELD = "type_vocab_size"


@dataclass(frozen=True)
class Types(Step):
    """More types of tokens, whose rows are zero: no text of the base names them."""

    number: int

    @property
    def edits(self):
        return {(FIELD,): self.number}

    @cached_property
    def end(self):
        return End(config_from(with_edits(as_data(self.start.config), self.edits)), self.start.cls)

    @property
    def makes_tensors(self):
        return False

    def plan(self, base, wide, copy):
        return row_plan(base, wide, "positions", self.number - getattr(self.start.config, FIELD))

    def small(self, copy):
        return Types(copy, getattr(copy.config, FIELD) + 5)

    def judged(self, done):
        found = done.measured()
        if not found.exact:
            raise_faults("no", [Fault("family.rows_change_the_loss", found.where, f"off by {found.worst:.1e}")])
        return found.worst


def step_of(start, to):
    asked = dict(to.further)
    return Types(start, int(asked["types"])) if "types" in asked else None
'''


@pytest.fixture
def base(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=40, max_position_embeddings=16, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_a_file_of_steps_is_a_direction_of_the_one_door(base, tmp_path, monkeypatch):
    """Control: without it the key is refused."""
    goal = "types=4"
    assert (
        refusal(lambda: mu.grow_checkpoint(base, tmp_path / "wide", 2, to=goal)).code
        == "goal.to_not_readable"
    )
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "toy_types.py").write_text(STEP)
    invalidate_caches()
    monkeypatch.setattr(room, "__path__", [*room.__path__, str(tmp_path / "steps")])
    rows = (
        room.STEPS[0],
        room.Asked("toy_types", {"types": room.Key(r"[1-9]\d?", "types of tokens")}, "types=4"),
        *room.STEPS[1:],
    )
    for user in (
        room,
        import_module("mupscale.families.config.multipliers"),
        import_module("mupscale.families.steps.compose"),
    ):
        monkeypatch.setattr(user, "STEPS", rows)
    monkeypatch.setattr(door, "plan_in_process", family_plan)
    asked = Goal.parse(2, goal)
    assert Goal.of_json(json.loads(json.dumps(asked.as_json()))) == asked
    assert Request.from_json(Request(asked).as_json()).goal == asked
    try:
        assert mu.grow_checkpoint(base, tmp_path / "wide", 2, to=goal).outcome == "written"
        assert mu.grow_checkpoint(base, tmp_path / "wide", 2, to=goal).outcome == "already there"
    finally:
        if sys.modules.pop(f"{room.__name__}.toy_types", None) is not None:
            delattr(room, "toy_types")
    small, wide = (
        transformers.BertForMaskedLM.from_pretrained(path).eval() for path in (base, tmp_path / "wide")
    )
    assert (wide.config.type_vocab_size, wide.config.hidden_size) == (4, 32)
    table = wide.bert.embeddings.token_type_embeddings.weight
    assert table.shape == (4, 32)
    assert not table[2:].any()
    words = torch.arange(12).view(2, 6)
    torch.testing.assert_close(wide(words).logits, small(words).logits, rtol=1e-4, atol=1e-5)
    assert "new types" in (tmp_path / "wide" / "README.md").read_text()


class ToyConfig(transformers.CohereConfig):  # type: ignore[misc]
    model_type = "toy"


class ToyForCausalLM(transformers.CohereForCausalLM):  # type: ignore[misc]
    config_class = ToyConfig


def test_a_row_is_a_model_type_of_the_one_door(tmp_path, monkeypatch):
    """Control: without its row the multiplier in its configuration is left as it is."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = ToyForCausalLM(ToyConfig(vocab_size=40, logit_scale=0.5, **sizes)).eval()
    small.save_pretrained(tmp_path / "base")
    monkeypatch.setattr(door, "plan_in_process", family_plan)
    monkeypatch.setitem(transformers.CONFIG_MAPPING._extra_content, "toy", ToyConfig)
    monkeypatch.setattr(sys.modules["transformers"], "ToyForCausalLM", ToyForCausalLM, raising=False)
    scales: list[float] = []
    for row in (Row(), Row(config={"logit_scale": "1/k"})):
        monkeypatch.setitem(ROWS, "toy", row)
        out = tmp_path / f"wide{len(scales)}"
        assert mu.grow_checkpoint(tmp_path / "base", out, 2).outcome == "written"
        wide = ToyForCausalLM.from_pretrained(out).eval()
        scales.append(wide.config.logit_scale)
        words = torch.arange(12).view(2, 6)
        torch.testing.assert_close(wide(words).logits, small(words).logits, rtol=1e-4, atol=1e-5)
    assert scales == [0.5, 0.25]
