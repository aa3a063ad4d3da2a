"""Every block of the README and the docs runs, or says why not, and generated pages equal what generates them."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch

import mupscale as mu
from harness.evidence import unmarked
from harness.pages import blocks_of, commands_of, faults_of
from mupscale.cli.main import parser
from mupscale.rules.optimizers import RULES
from tests.blocks import run_page
from tests.prepared import PREPARED

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LLMS = ROOT / "docs" / "llms.txt"
"""What a program that reads for a user finds first: it is run and checked like a page."""
SLOW = ("tuning.md",)
"""Pages whose blocks run nightly: three studies and a directory are tuned there."""


def texts() -> list[tuple[Path, str]]:
    return [(page, page.read_text(encoding="utf-8")) for page in (*PAGES, LLMS)]


@pytest.mark.filterwarnings(
    "ignore:.*dataloader.*", "ignore:.*mid-epoch.*", "ignore:.*treespec.*:FutureWarning"
)
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.nightly) if p.name in SLOW else p for p in (*PAGES, LLMS)],
    ids=[p.name for p in (*PAGES, LLMS)],
)
def test_every_block_of_a_page_runs_in_order(page, tmp_path, monkeypatch, trained, planned_here):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    saved, threads = dict(RULES), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        names = PREPARED[page.name](tmp_path, trained) if page.name in PREPARED else {}
        run_page(page.read_text(encoding="utf-8"), str(page), {"__name__": page.stem, **names})
    finally:
        torch.set_num_threads(threads)
        RULES.clear()
        RULES.update(saved)


def test_every_block_runs_or_says_why_not():
    faults = [f"{page.name}, {fault}" for page, text in texts() for fault in faults_of(text)]
    assert not faults, "\n".join(faults)


def is_public(names: list[str]) -> bool:
    """Whether `mu.name` or `mu.namespace.name` is exported; what follows are attributes of it."""
    if names[0] in ("diagnostics", "errors", "plans", "rules", "trainers"):
        return len(names) > 1 and names[1] in getattr(mu, names[0]).__all__
    return names[0] in mu.__all__


def test_what_is_not_run_names_what_exists():
    """Commands can be parsed, and every `mu.name` is public; other packages' outlines are at least Python."""
    for page, text in texts():
        for block in blocks_of(text):
            if block.reason and block.language == "bash":
                for command in commands_of(block.text):
                    _, found, arguments = command.removeprefix("srun ").partition("mupscale ")
                    if found and not command.startswith("pip"):
                        parser().parse_args(shlex.split(arguments))
            elif block.reason and block.language == "python":
                ast.parse(block.text)
                for name in re.findall(r"\bmu((?:\.\w+)+)", block.text):
                    assert is_public(name.split(".")[1:]), f"{page.name}, line {block.line}: mu{name}"


def test_every_row_of_what_a_proof_covers_names_a_test():
    page = (ROOT / "docs" / "exactness.md").read_text(encoding="utf-8")
    _, _, section = page.partition("## What a proof covers")
    rows = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 16
    for row in rows:
        (path, name), *more = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert not more
        functions = [
            n for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)
        ]
        assert name in {function.name for function in functions}, f"{path} has no {name}"


@pytest.mark.parametrize(
    "page",
    [
        "```yaml\nkey: value\n```\n",
        "```\nmupscale demo\n```\n",
        "Write\n\n    mupscale demo\n",
        "<!-- not run: -->\n```py\nx = 1\n```\n",
        "```text\nloss 1\n```\n",
        "<!-- not run: a cluster -->\n```bash\nsrun it\n```\n```text\ndone\n```\n",
    ],
)
def test_a_block_without_a_reason_is_found(page):
    """Controls: unknown language, none, indented, an empty reason, output of nothing, output of what is not run."""
    assert faults_of(page)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```python\nx = 1 / 0\n```\n", "division by zero"),
        ("```python\nx = 1\n```\n\n```python\nassert x == 2, 'another x'\n```\n", "another x"),
        ("```bash\nmupscale plan ./nowhere -k 2\n```\n", "exit status 2"),
        ("```bash\nmupscale upscale ./base --no-such-option\n```\n", "exit status 2"),
        ("```bash\ntrue | false\n```\n", "exit status 1"),
        ('```python\nprint("loss 1.5")\n```\n\n```text\nlosses 1.5\n```\n', "not printed"),
    ],
)
def test_a_broken_block_fails(page, said, tmp_path, monkeypatch):
    """Controls: raised, wrong in a later block, refused, no such option, a shell that fails, another output."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((AssertionError, ArithmeticError), match=said):
        run_page(page, "page", {})


def test_shown_outputs_may_differ_in_digits():
    shown = '```python\nprint("loss  1.5e-3")\n```\n\n```text\nloss 20\n```\n'
    run_page(shown, "page", {})


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
    first, reference, _ = navigation.partition("  - Reference:\n")
    assert reference
    assert len(re.findall(r": \w+\.md$", first, re.M)) <= 16, (
        "a reader looks at all of them before the reference"
    )


def untold(text: str) -> list[str]:
    """Pages of the navigation that a list of pages does not name, or names without a sentence."""
    told = re.findall(r"^- \[[^\]]+\]\((\w+\.md)\): [^\n]+\.$", text, re.M)
    return sorted({page.name for page in PAGES[1:]} ^ {*told})


def test_every_page_has_a_sentence_in_the_list_for_programs():
    """Controls: a page that is not named, one that does not exist, and one without a sentence."""
    text = LLMS.read_text(encoding="utf-8")
    assert untold(text) == []
    line = next(line for line in text.splitlines() if "(growth.md)" in line)
    assert untold(text.replace(line, "")) == ["growth.md"]
    assert untold(text + "- [None](nothing.md): none.\n") == ["nothing.md"]
    assert untold(text.replace(line, line.partition(":")[0])) == ["growth.md"]


def broken_links(text: str, folder: Path) -> list[str]:
    """Relative links and pictures of a page that lead nowhere, or to a heading that the page does not have."""
    outside_of_code = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    named = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)", outside_of_code)
    broken = []
    for name, heading in named:
        target = folder / name if name else None
        if target is not None and not target.exists():
            broken.append(name)
        elif heading and (target is None or target.suffix == ".md"):
            page = text if target is None else target.read_text(encoding="utf-8")
            if heading not in map(anchor, re.findall(r"^#+ (.*)$", page, re.M)):
                broken.append(f"{name}#{heading}")
    return broken


def anchor(heading: str) -> str:
    """What a heading is called in a link."""
    return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


OUTSIDE = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "examples/README.md")]


@pytest.mark.parametrize("path", [*PAGES, LLMS, *OUTSIDE], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    """Controls: a page that is not there, and a heading that its page does not have, are found."""
    text = path.read_text(encoding="utf-8")
    assert not broken_links(text, path.parent)
    broken = "[x](no_such_page.md#part) [y](#no-such-heading)"
    assert broken_links(text + broken, path.parent) == ["no_such_page.md", "#no-such-heading"]


def test_badges_of_the_readme_say_what_is_declared():
    """Control: another version has no badge."""
    readme, declared = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pyproject.toml"))
    for name, pattern in (("python", r'requires-python = ">=([\d.]+)"'), ("torch", r'"torch>=([\d.]+)"')):
        found = re.search(pattern, declared)
        assert found
        assert f"badge/{name}-%E2%89%A5{found[1]}-" in readme
        assert f"badge/{name}-%E2%89%A5{found[1]}9-" not in readme


def test_generated_pages_are_what_the_registries_print():
    """But for the notes about earlier versions: a change of the code alone does not change what a page has to say."""
    pages = runpy.run_path(str(ROOT / "docs" / "generate.py"))["PAGES"]
    for name, make in pages.items():
        stored = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert unmarked(stored) == unmarked(make()), "python docs/generate.py"
