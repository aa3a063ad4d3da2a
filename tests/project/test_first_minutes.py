"""What is typed in an empty environment stands on the pages, and the tree that is built is the one that git tracks."""

import os
import shutil
import subprocess
from math import isnan

import pytest

from harness.fresh_install import ROOT, Shell, exported, tracked
from harness.pages import apart, blocks_of, changed, not_shown, python_of, section_of, shell_of, typed


def test_the_pages_have_what_each_user_types():
    """Every change that a control makes can be made. Controls: a part that is gone, and a change that fits nowhere."""
    own = python_of(typed("README.md", "Prove and grow, in Python"))
    assert "mu.upscale(" in own
    assert changed(own, r"(?<=value\.backward\(\);)", " clip();") != own
    sharded = python_of(typed("docs/sharded.md"))
    assert "verify_sharded(" in sharded
    assert changed(sharded, r"init_process_group\(.*# under torchrun: (.*)", r"\1") != sharded
    trainer = typed("docs/continue.md", "Continue with the Hugging Face Trainer")
    assert "trainer.train(" in python_of(trainer)
    assert all(changed(line, "mupscale upscale", "mupscale grow") != line for line in shell_of(trainer))
    with pytest.raises(LookupError, match="nothing to type"):
        typed("README.md", "No such heading")
    with pytest.raises(LookupError, match="0 places"):
        changed(own, "no such words", "")


def test_what_a_page_shows_must_be_printed():
    """Control: another output."""
    blocks = blocks_of("```python\nprint('exact: 1e-9')\n```\n```text\nexact: 2e-9\n```\n")
    assert not not_shown(blocks, "exact: 3e-10\n")
    assert not_shown(blocks, "BROKEN: 3e-10\n") == "exact: 2e-9\n"


def test_curves_are_compared_to_their_ends():
    """Control: a run that ended early is not equal."""
    assert apart([2.0, 4.0], [2.0, 3.0]) == 0.25
    assert isnan(apart([1.0, 2.0], [1.0]))
    assert not apart([1.0, 2.0], [1.0]) <= 1.0


def test_a_section_ends_where_the_next_begins():
    page = "## A\none\n```bash\n# not a heading\n```\n### A.1\ntwo\n## B\nthree\n"
    assert section_of(page, "A") == "one\n```bash\n# not a heading\n```\n### A.1\ntwo\n"
    assert section_of(page, "C") == ""


def test_a_new_user_inherits_nothing(tmp_path, monkeypatch):
    """Control: the way to the registry stays."""
    for name in ("PYTHONPATH", "VIRTUAL_ENV", "MUPSCALE_DATA", "GIT_DIR", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "here")
    monkeypatch.setenv("PIP_INDEX_URL", "there")
    found = Shell(tmp_path, variables={"OMP_NUM_THREADS": "1"}).environment()
    assert "here" not in found.values()
    assert found["PIP_INDEX_URL"] == "there"
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["PATH"].startswith(str(tmp_path / "venv"))


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "root"
    for name in ("pyproject.toml", "src/one.py", "src/__pycache__/one.pyc", ".ci/venv/python", ".gitignore"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x = 1\n")
    (root / ".gitignore").write_text("__pycache__/\n.ci/venv/\n")
    return root


def files(root):
    found = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith(".git/")}


CLEAN = {"pyproject.toml", "src/one.py", ".gitignore"}


def test_an_archive_without_git_is_copied_without_what_tools_make(tree, tmp_path):
    assert not tracked(tree)
    assert files(exported(tree, tmp_path / "copy")) == CLEAN


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_a_clone_is_copied_as_git_tracks_it(tree, tmp_path, monkeypatch):
    """Files that are not tracked stay behind, whatever GIT_DIR says. Controls: without git they come; a file that was
    removed is left out."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    subprocess.run(["git", "init", "-q", tree], check=True)
    subprocess.run(["git", "-C", tree, "add", "."], check=True)
    (tree / "src" / "stray.py").write_text("x = 2\n")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert files(exported(tree, tmp_path / "copy")) == CLEAN
    (tree / "src" / "one.py").unlink()
    assert files(exported(tree, tmp_path / "second")) == CLEAN - {"src/one.py"}
    shutil.rmtree(tree / ".git")
    assert "src/stray.py" in files(exported(tree, tmp_path / "third"))


def test_the_tree_of_this_project_can_be_built_anywhere(tmp_path):
    """Control: the folder of the tree itself would not do, it may hold an environment and caches."""
    copy = exported(ROOT, tmp_path / "tree")
    assert (copy / "pyproject.toml").is_file()
    assert (copy / "src" / "mupscale" / "version.py").is_file()
    assert not [path for path in copy.rglob("*") if path.name in ("__pycache__", "venv", ".git")]
