"""A trained Llama gets words: its logits stay to the last bit, and the stock Trainer resumes it and follows the base."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")

import mupscale as mu  # noqa: E402
from harness import trainer as bench  # noqa: E402
from harness.trainer import gap, hugging_face, model  # noqa: E402
from mupscale.cli.main import main  # noqa: E402

DATA = Path(os.environ.get("MUPSCALE_DATA", Path(__file__).parents[3] / "shared" / "data"))
TINY = DATA / "models" / "tiny_llama"
QUIET: dict[str, Any] = {"save_strategy": "no"}
WORDS = int(model().config.vocab_size)


def over(words):
    """The loss of the Trainer's `compute_loss_func`, over the first words."""

    def loss(outputs, labels, num_items_in_batch=None):
        logits = outputs.logits[:, :-1, :words]
        return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())

    return loss


@pytest.fixture(scope="module")
def base(trained, tmp_path_factory):
    folder, stopped = tmp_path_factory.mktemp("words"), trained.directory
    curve, _ = hugging_face(model(), folder / "on", stopped, loss=over(None), **QUIET)
    out = folder / "wide"
    assert main(["grow", str(stopped), str(out), "--to", "vocab=+64", "--quiet"]) == 0
    return folder, out, curve


def resumed(folder, out, words):
    callbacks = [mu.trainers.HuggingFaceCallback(out)]
    more = model(vocab_size=WORDS + 64)
    return hugging_face(more, folder / f"over{words}", out, callbacks, loss=over(words), **QUIET)[0].losses


def test_the_trainer_resumes_and_follows_the_base(base):
    folder, out, curve = base
    assert gap(curve.losses, resumed(folder, out, WORDS)) < bench.EQUAL


def test_a_loss_over_all_words_leaves_the_base(base):
    folder, out, curve = base
    assert gap(curve.losses, resumed(folder, out, WORDS + 64)) > bench.DIFFERENT


@pytest.mark.skipif(not TINY.exists(), reason="there is no tiny_llama; set MUPSCALE_DATA")
@pytest.mark.parametrize(("verb", "rise"), [("grow", 0.0057), ("upscale", 0.0016)])
def test_a_trained_llama_keeps_its_logits(tmp_path, capsys, verb, rise):
    torch.set_num_threads(1)
    noise = ["--noise", "t=0.05"] if verb == "upscale" else []
    assert main([verb, str(TINY), str(tmp_path / "wide"), "--to", "vocab=+64", "--quiet", *noise]) == 0
    assert f"a rise of {rise}" in capsys.readouterr().out
    told = json.loads((tmp_path / "wide" / "mupscale.json").read_text())["words"]
    assert told["ids"] == [512, 576]
    small, wide = (
        transformers.LlamaForCausalLM.from_pretrained(folder).eval() for folder in (TINY, tmp_path / "wide")
    )
    words = torch.randint(0, 512, (2, 30))
    with torch.no_grad():
        logits = [small(words).logits, wide(words).logits]
    assert torch.equal(logits[0], logits[1][..., :512])
    losses = [F.cross_entropy(each[:, :-1, :512].flatten(0, 1), words[:, 1:].flatten()) for each in logits]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-5)
