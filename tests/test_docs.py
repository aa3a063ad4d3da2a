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


def test_generated_pages_are_what_the_registries_print():
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for name, make in pages.items():
        assert (ROOT / "docs" / name).read_text() == make(), "python docs/generate.py"


def test_the_readme_lists_every_module():
    tree = (ROOT / "README.md").read_text()
    for path in (ROOT / "src" / "mupscale").rglob("*.py"):
        if path.name != "__init__.py" and path.parent.name != "cli":
            assert path.name in tree, f"{path.name} is missing in the README's tree"
