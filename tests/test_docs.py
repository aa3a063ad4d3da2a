"""Every Python block of the README and the docs runs, and generated pages equal what generates them."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest

from mupscale.rules.optimizers import RULES

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "coming_from.md": "snippets of other packages",
    "continue.md": "a Trainer and Lightning with a run behind them; benchmarks/trainer.py runs the same",
    "engines.md": "other people's engines on several ranks; benchmarks/engines.py and torchtitan_resume.py run the same",
}
"""Pages that have ```py blocks, which are shown and not run, and why."""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_python_block_of_a_page_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some blocks write checkpoints
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.S)
    saved = dict(RULES)
    space: dict[str, object] = {"__name__": page.stem}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            for block in blocks:
                exec(compile(block, str(page), "exec"), space)
    finally:
        RULES.clear()
        RULES.update(saved)


def test_blocks_that_are_not_run_are_on_known_pages_only():
    assert {page.name for page in PAGES if "```py\n" in page.read_text()} == NOT_RUN.keys()


def test_drawings_are_what_draws_them():
    drawings = runpy.run_path(str(ROOT / "docs" / "drawings.py"))["DRAWINGS"]
    for name, draw in drawings.items():
        assert (ROOT / "docs" / "figures" / name).read_text() == str(draw()), "python docs/drawings.py"


def test_examples_of_docstrings_become_code():
    """Control: the text around them stays as it is."""
    fenced = runpy.run_path(str(ROOT / "docs" / "fences.py"))["fenced"]
    assert fenced("Adds.\n\n>>> 1 + 1\n2\n\nMore.") == "Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."
    assert fenced("a >> b\n> quoted") == "a >> b\n> quoted"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES[1:]:
        assert f": {page.name}\n" in navigation, f"{page.name} is missing in mkdocs.yml"


def test_generated_pages_are_what_the_registries_print():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for name, make in pages.items():
        assert (ROOT / "docs" / name).read_text() == make(), "python docs/generate.py"


def test_the_readme_lists_every_module():
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "src" / "mupscale").rglob("*.py"):
        if path.name != "__init__.py" and path.parent.name != "cli":
            assert path.name in tree, f"{path.name} is missing in the README's tree"
