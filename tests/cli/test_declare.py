"""`--declare`: what the search cannot know is read from a file, proved like everything else, and recorded."""

import json
from dataclasses import replace
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from harness.refusals import refusal  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.families.plan import family_plan  # noqa: E402
from mupscale.families.prove import prove  # noqa: E402
from mupscale.families.types import rows  # noqa: E402
from mupscale.families.types.declarations import FORM, Declarations  # noqa: E402
from mupscale.rules.scale import Scale  # noqa: E402

LLAMA: dict[str, Any] = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)  # fmt: skip
MAMBA: dict[str, Any] = dict(  # noqa: C408
    model_type="mamba2", architectures=["Mamba2ForCausalLM"], hidden_size=32, num_hidden_layers=1, vocab_size=97,
    num_heads=8, head_dim=8, n_groups=2, state_size=8, expand=2, tie_word_embeddings=False,
)  # fmt: skip


def test_the_file_that_messages_show_is_one():
    assert Declarations.of_json(json.loads(FORM)).roles == {"*.router.weight": {0: "out", 1: "in"}}


def test_layouts_are_written_in_sizes_and_folds_in_k():
    told = Declarations.of_json(
        {"layouts": {"a": {"0": "H*D: G*D | 2*KV*D: D"}, "b": 1}, "folds": {"n": "k^-1/2", "m": 2}}
    )
    assert told.values({"H": 4, "KV": 2, "G": 2, "D": 8}, 3) == {"a": {0: (((2, 3), (16, 1)), ((4, 3), (8, 1)))}, "b": 1}  # fmt: skip
    assert told.scales(4) == {"n": Scale.of("1/2"), "m": Scale.of(2)}
    assert Declarations.of_json(json.loads(json.dumps(told.as_json()))) == told


@pytest.mark.parametrize(
    ("entry", "code", "where"),
    [
        ([], "plan.declarations_not_object", ()),
        ({"rolls": {}}, "plan.unknown_declaration", "rolls"),
        ({"roles": ["a"]}, "plan.declaration_not_by_name", "roles"),
        ({"roles": {"a": "up"}}, "plan.role_not_readable", "roles, a"),
        ({"roles": {"a": {"x": "in"}}}, "plan.role_not_readable", "roles, a"),
        ({"layouts": {"a": 0}}, "plan.layout_not_readable", "layouts, a"),
        ({"folds": {"a": "half"}}, "plan.fold_not_a_factor", "folds, a"),
        ({"folds": {"a": 0.1}}, "plan.fold_not_a_factor", "folds, a"),
        ({"plus_one": "a"}, "plan.plus_one_not_list", "plus_one"),
    ],
)
def test_what_is_wrong_is_told_at_once(entry, code, where):
    refusal(lambda: Declarations.of_json(entry), code, where=where)


def test_a_file_of_the_user_does_what_a_row_of_the_registry_does(monkeypatch):
    row = rows.ROWS["mamba2"]
    want = family_plan(MAMBA, 2).plan
    monkeypatch.setattr(rows, "ROWS", {**rows.ROWS, "mamba2": replace(row, layouts={})})
    told = {name: {str(d): text for d, text in axes.items()} for name, axes in row.layouts.items()}
    family = prove(family_plan(MAMBA, 2, declared=Declarations.of_json({"layouts": told})), steps=2)
    assert family.plan.hash == want.hash


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(folder)
    return folder


@pytest.mark.usefixtures("planned_here")
def test_declarations_are_recorded_and_checked_again(base, tmp_path, capsys):
    told = {
        "roles": {"*up_proj.weight": {"0": "out", "1": "in"}},
        "layouts": {"*q_proj.weight": {"0": "G*D"}},
    }
    file = tmp_path / "declare.json"
    file.write_text(json.dumps(told))
    out = tmp_path / "wide"
    assert main(["grow", str(base), str(out), "-k", "2", "--declare", str(file)]) == 0
    assert f"--declare {file}" in capsys.readouterr().out, "the next command repeats it"
    kept = json.loads(json.loads((out / "mupscale.json").read_text())["request"]["declared"])
    assert {key: kept[key] for key in told} == told
    assert main(["check", str(out), "--base", str(base), "--quiet"]) == 0


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"layouts": {"*q_proj.weight": {"0": 3}}}, ("q_proj.weight [layout.not_a_divisor]",)),
        ({"roles": {"*typo.weight": "out"}}, ("*typo.weight [argument.pattern_matches_nothing]",)),
        ({"layouts": {"*q_proj.weight": 8}}, ("[layout.axis_not_named]", "--declare FILE [plan.can_be_declared]")),
    ],
    ids=["a wrong layout", "a wrong name", "a layout without its axis"],
)  # fmt: skip
def test_a_wrong_declaration_is_refused(base, tmp_path, capsys, told, words):
    """Control: a declaration is proved, not believed."""
    file = tmp_path / "declare.json"
    file.write_text(json.dumps(told))
    assert main(["plan", str(base), "-k", "2", "--declare", str(file)]) == 2
    said = capsys.readouterr().err
    assert all(word in said for word in words), said


def test_a_file_that_is_not_there_is_refused_before_planning(base, tmp_path, capsys):
    assert main(["plan", str(base), "-k", "2", "--declare", str(tmp_path / "nowhere.json")]) == 2
    said = capsys.readouterr().err
    assert "nowhere.json" in said
    assert "[file.does_not_exist]" in said
