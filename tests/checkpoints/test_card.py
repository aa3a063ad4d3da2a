"""The model card: what the base says of itself is kept, and what is not carried is listed with its reason."""

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

transformers = pytest.importorskip("transformers")
yaml = pytest.importorskip("yaml")
pytestmark = pytest.mark.usefixtures("planned_here")

from mupscale.checkpoints.request import Request  # noqa: E402
from mupscale.checkpoints.result.card import card  # noqa: E402
from mupscale.cli.main import main  # noqa: E402
from mupscale.families.config.goal import Goal  # noqa: E402

BASE_CARD = """---
language: en
license: apache-2.0
base_model: someone/else
tags:
- text-generation
- a: colon
datasets:
- ms_marco
pipeline_tag: text-generation
model-index:
- name: base
  results: []
---

# The base

It scores 12 points.
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cards") / "models--org--some-7b" / "snapshots" / "0a1b"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 97,
    }
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(folder)
    (folder / "README.md").write_text(BASE_CARD)
    for name in (".gitattributes", "tok512.bin", "model.onnx", "modeling_x.py", "notes.pdf", "LICENSE"):
        (folder / name).write_text("x\n")
    (folder / "original").mkdir()
    save_file({"w": torch.zeros(1)}, folder / "consolidated.safetensors")
    return folder


@pytest.fixture(scope="module")
def wide(planned_here, base, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "wide"
    assert main(["grow", str(base), str(out), "-k", "2", "--quiet", "--threads", "1"]) == 0
    return out


def parts(text):
    _, front, body = text.split("---\n", 2)
    return yaml.safe_load(front), body


def test_licence_tags_and_text_of_the_base_are_kept(base, wide):
    old, new = parts(BASE_CARD)[0], parts((wide / "README.md").read_text())[0]
    assert new["base_model"] == "org/some-7b", "the name on the Hub, from the cache"
    assert new["tags"] == [*old["tags"], "mupscale"]
    for key in ("language", "license", "datasets", "pipeline_tag"):
        assert new[key] == old[key]
    assert "model-index" not in new, "results of the base are not those of this model"
    body = parts((wide / "README.md").read_text())[1]
    assert body.index("grown from `org/some-7b`") < body.index("It scores 12 points.")
    assert main(["check", str(wide), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0


def test_every_file_that_is_not_carried_has_a_reason(base, wide, tmp_path, capsys):
    assert main(["grow", str(base), str(tmp_path / "w"), "-k", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    there = {path.name for path in base.iterdir()} - {path.name for path in wide.iterdir()}
    assert there == {".gitattributes", "tok512.bin", "model.onnx", "modeling_x.py", "notes.pdf", "original", "consolidated.safetensors"}  # fmt: skip
    for name in there:
        line = next(line for line in said.splitlines() if line.startswith(f"not carried: {name}, because "))
        why = line.partition("because ")[2]
        assert f"`{name}`: not carried, because {why}" in (wide / "README.md").read_text()
    assert "not carried: LICENSE" not in said, "control: what is carried is not listed"
    assert (wide / "LICENSE").exists()


ABOUT: dict[str, Any] = {
    "base": {"name": "base"}, "noise": None, "request": Request(Goal.parse(2)).as_json(), "multipliers": "2", "config": {}, "factors": [], "version": "1",
    "architecture": "LlamaForCausalLM", "parameters": {"base": 1, "wide": 4}, "not_carried": {}, "spelling": {"left_out": {}, "absent": []},
}  # fmt: skip


@pytest.mark.parametrize(
    ("front", "tags"),
    [
        ("tags: [a, b]", ["a", "b", "mupscale"]),
        ("tags: []", ["mupscale"]),
        ("tags:\n  - a\nlicense: mit", ["a", "mupscale"]),
        ("tags: a", ["a", "mupscale"]),
        ("license: mit", ["mupscale"]),
        ("tags:\n- mupscale", ["mupscale"]),
    ],
)
def test_tags_in_every_form(front, tags):
    assert parts(card(ABOUT, f"---\n{front}\n---\ntext\n"))[0]["tags"] == tags


@pytest.mark.parametrize("text", ["", "no front matter", "---\nnever: closed\n", "---\n---\n"])
def test_a_card_without_front_matter(text):
    """Control: nothing is lost, and the result has front matter of its own."""
    made = card(ABOUT, text)
    assert parts(made)[0] == {
        "base_model": "base",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["mupscale"],
    }
    assert text.strip("-\n") in made


@pytest.mark.parametrize(
    ("more", "library", "tag"),
    [
        ({"architecture": "BertModel", "sentence_transformers": True}, "sentence-transformers", "sentence-similarity"),
        ({"architecture": "ViTForImageClassification"}, "transformers", "image-classification"),
        ({"architecture": "BertModel"}, "transformers", None),
    ],
)  # fmt: skip
def test_the_hub_is_told_what_loads_it_and_what_it_does_unless_the_base_says_so(more, library, tag):
    front, text = parts(card({**ABOUT, **more}))
    assert (front["library_name"], front.get("pipeline_tag")) == (library, tag)
    assert ("SentenceTransformer(here)" in text) is ("sentence_transformers" in more)
    kept = parts(card({**ABOUT, **more}, "---\npipeline_tag: other\nlibrary_name: mine\n---\n"))[0]
    assert (kept["library_name"], kept["pipeline_tag"]) == ("mine", "other"), "control"


def test_names_that_yaml_would_misread_are_quoted():
    assert parts(card({**ABOUT, "base": {"name": "1.5: a"}}))[0]["base_model"] == "1.5: a"


def test_a_card_that_links_out_of_the_directory_is_refused(base, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(base, copy)
    (copy / "README.md").unlink()
    (tmp_path / "secret").write_text("x")
    (copy / "README.md").symlink_to(tmp_path / "secret")
    assert main(["plan", str(copy), "-k", "2"]) == 2
    assert "README.md [directory.link_leads_outside]" in capsys.readouterr().err
