"""The notebooks run from their first cell to their last, within a minute, and print what is stored in them."""

import copy
import json
import time

import pytest
import torch

from tests.notebooks import DETERMINISTIC, FOLDER, fault, run, stored

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 60
"""CPU seconds of one notebook, which somebody waits for."""


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_prints_what_it_shows(path, tmp_path, monkeypatch, planned_here):
    """Control: another stored output is found, in a cell that is compared to the last digit and in one that is not."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    threads, began = torch.get_num_threads(), time.process_time()
    try:
        torch.set_num_threads(1)
        found = run(notebook)
    finally:
        torch.set_num_threads(threads)
    assert time.process_time() - began < SECONDS
    faults = [text for cell, printed in found if (text := fault(cell, printed))]
    assert not faults, "\n".join(faults)
    said = [(cell, printed) for cell, printed in found if printed]
    assert said
    for cell, printed in said:
        other = copy.deepcopy(cell)
        other["outputs"][0]["text"].append("something else\n")
        assert fault(other, printed)


def test_notebooks_are_stored_with_outputs_in_order():
    assert [path.stem for path in NOTEBOOKS] == ["grow_a_checkpoint", "grow_and_prove"]
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        assert any(DETERMINISTIC in cell["metadata"].get("tags", []) for cell in code)
        for cell in code:
            assert bool(stored(cell)) == any(word in "".join(cell["source"]) for word in ("print(", "!mup"))
