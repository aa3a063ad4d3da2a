"""Much-used model types: their list, the rows of the registry that they need, and batches with images."""

import json

import pytest
import torch

import mupscale as mu
from harness.popular_types import POPULAR
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.families.config.goal import Goal
from mupscale.families.config.nested import edits, following, with_edits
from mupscale.families.types.rows import ROWS

pytest.importorskip("transformers")

from mupscale.families import process
from mupscale.families.copy.images import beside_text, images
from mupscale.families.copy.losses import batch_for
from mupscale.families.models import config_from, factory, model_class, quiet
from mupscale.families.plan import family_plan
from mupscale.families.process import plan_in_process
from mupscale.families.record import FamilyPlan

CASES = {case.name: case for case in POPULAR}
# Types whose row is needed for a plan, and the parts of a row that are taken away in the control. The first few stand for
# each kind of row; the others take seconds each.
QUICK = ("mpt", "siglip", "esm", "nemotron_h", "qwen3_5_text")
SLOW = (
    "bamba", "falcon_h1", "granitemoehybrid", "zamba2", "qwen3_next", "phimoe", "paligemma", "siglip2",
    "gemma3n_text", "gemma4_text",
)  # fmt: skip


def raw_of(name):
    case = CASES[name]
    return {"model_type": case.model_type, "architectures": [case.architecture], **case.fields}


@pytest.fixture
def few_trials(monkeypatch):
    monkeypatch.setattr("mupscale.planning.search.search.TRIALS", 4)


def test_the_list_has_115_types_of_different_names():
    assert len(CASES) == len(POPULAR) == 115
    for name in CASES:
        with quiet():
            config = config_from(raw_of(name))
            assert model_class(config).__name__ == CASES[name].architecture


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_row_makes_its_type_exact_and_without_it_there_is_no_plan(name, few_trials, monkeypatch):
    assert family_plan(raw_of(name), 2).plan.proved
    monkeypatch.delitem(ROWS, CASES[name].model_type)
    with pytest.raises((mu.MupscaleError, RuntimeError)):
        family_plan(raw_of(name), 2)


def test_what_a_tower_writes_follows_the_tower_that_reads_it():
    data = raw_of("qwen2_5_vl")
    data["text_config"]["model_type"] = "qwen2_5_vl_text"
    data["vision_config"]["model_type"] = "qwen2_5_vl_vision"
    grown = with_edits(data, edits(data, Goal.parse("hidden=3")))
    assert grown["vision_config"]["out_hidden_size"] == grown["text_config"]["hidden_size"] == 192
    assert not following(grown, grown)
    data = {**data, "vision_config": {**data["vision_config"], "out_hidden_size": 8}}  # a width of its own
    grown = with_edits(data, edits(data, Goal.parse("hidden=3")))
    assert grown["vision_config"]["out_hidden_size"] == 8


def test_one_tower_grows_and_what_the_other_writes_for_it_follows():
    data = raw_of("qwen2_5_vl")
    data["text_config"]["model_type"] = "qwen2_5_vl_text"
    data["vision_config"]["model_type"] = "qwen2_5_vl_vision"
    sizes = {}
    for tower in ("text", "vision"):
        wide = with_edits(data, edits(data, Goal.parse(f"{tower}=2")))
        eye = wide["vision_config"]
        sizes[tower] = (wide["text_config"]["hidden_size"], eye["hidden_size"], eye["out_hidden_size"])
    assert sizes == {"text": (128, 32, 128), "vision": (64, 64, 64)}
    both = Goal.parse("2,vision=1")
    assert edits(data, both) == edits(data, Goal.parse("text=2"))
    assert both.declared.copies("hidden", 8) == Goal.parse("text=2").declared.copies("hidden", 8) == 2


@pytest.mark.usefixtures("planned_here")
def test_the_text_tower_of_a_directory_grows_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(raw_of("clip")))
    told = tmp_path / "plan.json"
    assert main(["plan", str(tmp_path), "-k", "text=2", "--json", str(told)]) == 0
    plan = FamilyPlan.from_json(told.read_text()).plan
    grown = {name for name, entry in plan.tensors.items() if entry.grows}
    assert plan.proved
    assert "text_projection.weight" in grown
    assert "text_model.encoder.layers.0.mlp.fc1.weight" in grown
    assert not [name for name in grown if "vision" in name or "visual" in name]


@pytest.mark.parametrize(
    ("name", "k", "code", "where"),
    [
        ("llama", "text=2", "goal.tower_not_in_config", "text"),
        ("sam", "text=2", "goal.tower_not_in_config", ("text", "vision")),
        ("llava", "text=2,ffn=2", "goal.tower_beside_widths", "text"),
        ("llava", "audio=2", "goal.unknown_width", "audio"),
    ],
)
def test_a_tower_that_is_not_there_is_refused(name, k, code, where):
    refusal(lambda: family_plan(raw_of(name), k), code, where=where)


def test_a_second_name_of_a_width_is_written_too(few_trials, monkeypatch):
    assert family_plan(raw_of("lfm2"), "ffn=2").wide_config["block_ff_dim"] == 192
    monkeypatch.delitem(ROWS, "lfm2")
    assert family_plan(raw_of("lfm2"), "ffn=2").wide_config["block_ff_dim"] == 96


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # by gpt_bigcode's own code
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["falcon 7B", "gpt_bigcode"])
def test_a_refusal_names_what_can_grow_alone(name):
    codes = ("family.fused_rows_copied_unequally", "goal.ffn_can_grow_alone")
    refusal(lambda: plan_in_process(raw_of(name), 2, steps=2), *codes, where="-k ffn=2")
    assert family_plan(raw_of(name), "ffn=2").plan.proved
    with pytest.raises(mu.MupscaleError) as caught:
        plan_in_process({**raw_of("gpt2"), "n_head": 3}, 2, steps=2)
    assert "goal.ffn_can_grow_alone" not in caught.value.codes


@pytest.mark.parametrize(
    ("by", "proved", "codes"),
    [
        ("units", {"by": "copies"}, ["goal.copies_can_grow"]),
        ("units", {"multipliers": "ffn=2"}, ["goal.ffn_can_grow_alone"]),
        ("copies", {"multipliers": "ffn=2"}, ["goal.ffn_can_grow_alone"]),
        ("copies", {"by": "copies"}, []),
        ("units", {}, []),
    ],
)
def test_a_refusal_of_new_units_names_copies_where_they_were_proved(monkeypatch, by, proved, codes):
    tried = []

    def is_proved(request, **changed):
        tried.append(changed)
        return changed == proved

    monkeypatch.setattr(process, "_is_proved", is_proved)
    found = process._nearest({"by": by, "multipliers": "2", "to": None, "export": None})
    assert [fault.code for fault in found] == codes
    assert all(fault.remedy == "write --by copies" for fault in found if fault.code == "goal.copies_can_grow")
    assert tried, "a remedy is tried before it is named"


@pytest.mark.parametrize("name", ["llava", "idefics3", "qwen3_vl"])
def test_texts_have_room_for_their_images(name):
    config = config_from(raw_of(name))
    model = factory(model_class(config))(config)
    batch = batch_for(model, config)
    token = config.image_token_id
    assert "pixel_values" in batch
    assert int((batch["input_ids"] == token).sum()) > 0
    with pytest.raises((RuntimeError, ValueError), match="do not match"):
        model(**{**batch, "input_ids": batch["input_ids"][:, 2:]})


def test_a_model_without_image_features_gets_no_text_with_images():
    generator = torch.Generator().manual_seed(0)
    given = next(images({"pixel_values"}, {"image_size": 8}, 2, generator))
    assert given["pixel_values"].shape == (2, 3, 8, 8)
    assert beside_text(torch.nn.Linear(2, 2), given, torch.zeros(2, 3, dtype=torch.long), 9) is None
