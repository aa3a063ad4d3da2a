"""What a release promises: one version, pages that name tests which exist, no code of a checkpoint, no secrets."""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import mupscale
from harness.refusals import refusal
from mupscale.cli.main import main
from mupscale.files.directory import read_directory

ROOT = Path(__file__).parents[2]
yaml: Any = import_module("yaml")  # it comes with transformers and has no types of its own


def test_the_version_stands_in_one_place():
    found = [
        path.relative_to(ROOT)
        for path in (ROOT / "pyproject.toml", ROOT / "CITATION.cff", *(ROOT / "src").rglob("*.py"))
        if re.search(rf"version.*{re.escape(mupscale.__version__)}", path.read_text(encoding="utf-8"))
    ]
    assert found == [Path("src/mupscale/version.py")]


def test_one_sentence_says_what_the_product_does(capsys):
    """Where a reader meets it first: the package, its help, its pages and the index of packages."""
    told = (mupscale.__doc__ or "").splitlines()[0]
    assert {"width", "depth", "experts", "words"} <= {*re.findall(r"\w+", told)}
    with pytest.raises(SystemExit):
        main(["--help"])
    assert told in " ".join(capsys.readouterr().out.split())
    places = ("README.md", "docs/index.md", "mkdocs.yml", "pyproject.toml", "CITATION.cff")
    texts = {place: " ".join((ROOT / place).read_text(encoding="utf-8").split()) for place in places}
    assert [place for place, text in texts.items() if told.removesuffix(".") not in text] == []


def unready(changelog: str, version: str) -> str:
    """What is wrong with the newest sections of a changelog, or nothing: changes after the version may stand above it."""
    sections = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", changelog, re.M | re.S)
    later, newest = sections[: sections[0][0] == "Unreleased"], sections[sections[0][0] == "Unreleased"]
    named = re.fullmatch(r"(\S+) \(\d{4}-\d\d-\d\d\)", newest[0])
    if named is None:
        return "the newest heading is not a version with a date"
    if named[1] != version:
        return f"the newest heading is of {named[1]}, the version is {version}"
    for heading, text in (*later, newest):
        parts = re.findall(r"^### (.*)", text, re.M)
        if not parts or parts != [part for part in ("Added", "Changed", "Fixed") if part in parts]:
            return f"parts {parts} of {heading}"
    return ""


def test_the_changelog_is_of_the_version():
    """Controls: another version, no date, a part of another name, parts in another order, and later changes that are not the first."""
    changelog, version = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), mupscale.__version__
    assert not unready(changelog, version)
    assert "the version is 9.0.0" in unready(changelog, "9.0.0")
    assert "date" in unready(changelog.replace(f"## {version} (", f"## {version} ", 1), version)
    dated = changelog[changelog.index(f"## {version}") :]
    assert not unready(dated, version)
    for text in (dated, f"## Unreleased\n\n### Added\n\n### Changed\n\n{dated}"):
        assert not unready(text, version)
        assert "Improved" in unready(text.replace("### Changed", "### Improved", 1), version)
        assert "parts" in unready(text.replace("### Added", "### Fixed", 1), version)
    assert "date" in unready(
        dated.replace(f"## {version}", f"## Unreleased\n\n## Unreleased\n\n## {version}", 1), version
    )


def test_the_security_page_names_tests_that_exist():
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+)` in `(tests/\w+/\w+\.py)`", page)
    assert len(named) >= 5
    for test, file in named:
        assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{test} is not in {file}"
    for file in re.findall(r"`(tests/\w+/\w+\.py)`", page):
        assert (ROOT / file).is_file()


def test_custom_code_is_never_run(tmp_path, capsys):
    """A checkpoint with code of its own: neither reading nor planning touches it, and the user is warned."""
    marker = tmp_path / "ran"
    base = tmp_path / "base"
    base.mkdir()
    (base / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    own = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    (base / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": own}))
    (base / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    refusal(lambda: read_directory(base), "config.code_with_checkpoint")
    assert main(["plan", str(base), "-k", "2"]) == 2
    assert "code" in capsys.readouterr().err
    assert not marker.exists()


def test_workflows_call_the_projects_own_scripts_and_hold_no_secret():
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / ".github").rglob("*.yml")}
    assert texts.keys() == {"ci.yml", "nightly.yml", "release.yml"}
    for text in texts.values():
        assert "secrets." not in text
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}
        for script in re.findall(r"run: (\.ci/\w+)", text):
            assert (ROOT / script).is_file()
    assert ".ci/run static" in texts["ci.yml"]
    assert "run: python benchmarks/first_minutes.py --keep dist" in texts["release.yml"]
    assert "run: python -m harness.evidence" in texts["release.yml"], "a release has fresh figures"
    assert "CHANGELOG.md" in texts["release.yml"], "a release has a dated section"
    assert yaml.safe_load(texts["release.yml"])["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_the_citation_has_what_its_format_requires_and_the_paper():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "preferred-citation"} <= cited.keys()
