"""The stock Trainer resumes a checkpoint that grew by zeros with its state, and follows the base until noise wakes them."""

from typing import Any

import pytest

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness import trainer as bench  # noqa: E402
from harness.trainer import gap, hugging_face, model  # noqa: E402
from mupscale.cli.main import main  # noqa: E402

QUIET: dict[str, Any] = {"save_strategy": "no"}
SIZES = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 128}


@pytest.fixture(scope="module")
def base(trained, tmp_path_factory):
    return tmp_path_factory.mktemp("any_width"), trained.directory, trained.curve


def wider(folder, stopped, verb, *more):
    out = folder / verb
    goal = ["-k", "ffn=2", "--to", "hidden=48,heads=6,kv_heads=3"]
    assert main([verb, str(stopped), str(out), *goal, "--quiet", *more]) == 0
    callbacks = [mu.trainers.HuggingFaceCallback(out)]
    return hugging_face(model(**SIZES), folder / f"{verb}ed", out, callbacks, **QUIET)[0]


def test_the_wider_run_follows_the_base(base):
    folder, stopped, curve = base
    assert gap(curve.losses, wider(folder, stopped, "widen").losses) < bench.EQUAL


def test_woken_zeros_leave_the_base(base):
    """Control: with noise the first loss is nearly the base's, and later ones are not."""
    folder, stopped, curve = base
    found = wider(folder, stopped, "upscale", "--noise", "t=1e-6", "--no-loss").losses
    first = min(found)
    assert found[first] == pytest.approx(curve.losses[first], rel=1e-4)
    assert gap(curve.losses, found) > bench.DIFFERENT
