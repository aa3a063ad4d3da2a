"""The stock Trainer resumes a deeper checkpoint with its state, and follows the base until noise wakes the new blocks."""

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from benchmarks import trainer as bench  # noqa: E402
from benchmarks.trainer import gap, hugging_face, model  # noqa: E402
from mupscale.cli.main import main  # noqa: E402

QUIET: dict[str, Any] = {"save_strategy": "no"}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    torch.set_num_threads(1)
    bench.silence()
    folder = tmp_path_factory.mktemp("deeper")
    hugging_face(model(), folder / "base", stop=bench.STOP)
    stopped = folder / "base" / f"checkpoint-{bench.STOP}"
    curve, _ = hugging_face(model(), folder / "on", stopped, **QUIET)
    return folder, stopped, curve


def deeper(folder, stopped, verb, *more):
    out = folder / verb
    assert main([verb, str(stopped), str(out), "--to", "layers=3,after=0", "--quiet", *more]) == 0
    callbacks = [mu.trainers.HuggingFaceCallback(out)]
    return hugging_face(model(num_hidden_layers=3), folder / f"{verb}ed", out, callbacks, **QUIET)[0]


def test_the_deeper_run_follows_the_base(base):
    folder, stopped, curve = base
    assert gap(curve.losses, deeper(folder, stopped, "widen").losses) < bench.EQUAL


def test_woken_blocks_leave_the_base(base):
    """Control: with noise the first loss is the base's, and later ones are not."""
    folder, stopped, curve = base
    found = deeper(folder, stopped, "upscale", "--noise", "t=0.1", "--no-loss").losses
    first = min(found)
    assert found[first] == pytest.approx(curve.losses[first], rel=1e-5)
    assert gap(curve.losses, found) > bench.DIFFERENT
