"""The cost of growing: the paper's numbers from sizes, formulas against counts, accounts, reasons against it, the command."""

import json
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from harness.refusals import refusal, refused
from mupscale.budgets.cost import ACCOUNTS, ComparedRuns, Cost, reasons
from mupscale.budgets.flops import (
    count,
    gpt2_parameters,
    mlp_flops,
    quadratic,
    resnet18_flops,
    step_of,
    transformer_flops,
)
from mupscale.budgets.stock_flops import StockModel
from mupscale.cli.main import main
from reproduce.paper_cost import (
    CIFAR,
    COVERTYPE,
    EXPERIMENTS,
    LAYERS,
    gpt2_step,
    mlp_epoch,
    paper,
    tera,
)

TINY = {
    "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MLP = """
import torch
from torch import nn
def build(width):
    return nn.Sequential(nn.Linear(54, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 7))
def inputs():
    return torch.zeros(10, 54)
"""


# The paper


def test_the_papers_tuning_comes_out_of_sizes():
    cost = EXPERIMENTS["GPT-2"].cost
    assert tera(cost.tuning_charged) == "26,218,874"
    assert tera(cost.base_charged) == "17,154,587"


def test_other_sizes_do_not_give_the_papers_totals():
    """Control: what the paper's text says, or the nearest other reading, gives other totals."""
    steps = 10_000
    assert tera(steps * gpt2_step(3840)) == "37,929,809"
    assert tera(steps * gpt2_step(3840, vocabulary=50_257)) != "37,929,809"
    assert tera(steps * gpt2_step(3840, tokens=2**19)) != "37,929,809"
    with_positions = gpt2_parameters(3840, LAYERS, 50_304) + 1024 * 3840
    assert tera(steps * 2**18 * transformer_flops(with_positions, LAYERS, 3840, 1024)) != "37,929,809"
    assert tera(500 * mlp_epoch(2000) * 581_012 // COVERTYPE) != "11,326"
    assert tera(500 * COVERTYPE * mlp_flops(54, 2000, 7, layers=5)) != "11,326"
    assert tera(100 * CIFAR * resnet18_flops(256, classes=10, size=32)) != "265,970"


@pytest.mark.parametrize("run", EXPERIMENTS)
def test_the_lengths_of_upscaled_runs_are_the_only_ones_that_fit(run):
    case, flops_at = EXPERIMENTS[run].case, EXPERIMENTS[run].flops_at
    printed = tera(EXPERIMENTS[run].cost.upscaled)
    step = 1 if run == "GPT-2" else Fraction(1, 5)
    assert case.upscaled_steps is not None
    for other in (case.upscaled_steps - step, case.upscaled_steps + step):
        assert tera(other * flops_at(case.wide)) != printed


def test_the_table_has_every_number_of_the_paper():
    lines = paper().splitlines()
    rows = {line[:26].strip(): line[26:].split() for line in lines[1:] if line}
    assert rows["TFLOPs from scratch"] == ["11,326", "11,326", "265,970", "37,929,809"]
    assert rows["TFLOPs of the base"] == ["740", "740", "66,547", "10,615,488"]
    assert rows["TFLOPs upscaled"] == ["598", "3,031", "132,985", "6,539,099"]
    assert rows["TFLOPs of tuning"] == ["–", "–", "–", "19,679,775"]
    assert rows["a trial at k·n / at k·n0"] == ["23.6", "23.6", "16.0", "48.2"]
    assert rows["stay: steps at n / at k·n"] == ["15.3", "15.3", "4.0", "3.6"]
    assert rows["speedup, base charged"] == ["8.5", "3.0", "1.3", "2.2"]
    assert rows["speedup, tuning charged"] == ["–", "–", "–", "1.4"]
    assert rows["speedup, both charged"] == ["–", "–", "–", "1.03"]
    assert any("50,257 and 0.5 M" in line for line in lines)


# Formulas against counts


def mlp(width: int, layers: int = 4) -> nn.Module:
    hidden = [part for _ in range(layers - 2) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(54, width), nn.ReLU(), *hidden, nn.Linear(width, 7))


class Block(nn.Module):
    def __init__(self, inside: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.shortcut = nn.Identity() if inside == out else nn.Conv2d(inside, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.shortcut(x))


def resnet18(width: int, classes: int) -> nn.Module:
    sizes = [width * 2**stage for stage in range(4)]
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    for stage, out in enumerate(sizes):
        inside = sizes[max(stage - 1, 0)]
        blocks += [Block(inside, out, 1 if stage == 0 else 2), Block(out, out, 1)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], classes))


def test_an_mlp_counts_what_the_formula_says_but_for_the_gradient_of_the_data():
    step = step_of(lambda: mlp(100), torch.zeros(5, 54))
    assert step.formula == 5 * mlp_flops(54, 100, 7, layers=4)
    assert step.formula - step.counted == 5 * 2 * 54 * 100
    assert step.parameters == sum(p.numel() for p in mlp(100).parameters())


def test_a_resnet_counts_what_the_formula_says_but_for_the_gradient_of_the_data():
    step = step_of(lambda: resnet18(8, 100), torch.zeros(2, 3, 32, 32))
    assert step.formula == 2 * resnet18_flops(8, classes=100, size=32)
    assert step.formula - step.counted == 2 * 2 * (3 * 8 * 9 * 32 * 32)


def test_gpt2_counts_what_the_formula_says_but_for_gains_and_biases():
    model = StockModel(TINY, k=2, batch=3, context=16)
    step, tokens = model.at(32), 3 * 16
    parameters = gpt2_parameters(32, layers=2, vocabulary=64)
    assert step.formula == tokens * transformer_flops(parameters, layers=2, width=32, context=16)
    vectors = 2 * 13 * 32 + 2 * 32
    assert step.formula - step.counted == 6 * vectors * tokens
    assert step.parameters == parameters + 16 * 32


def test_attention_counts_what_the_formula_says_whoever_holds_its_weights():
    """torch's own layer calls no module for its projections. What is left is the gradient of the data."""
    width, length, rows = 32, 8, 3
    make = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, batch_first=True)
    step = step_of(make, torch.zeros(rows, length, width))
    weights = 12 * width**2
    per_token = transformer_flops(weights, layers=1, width=width, context=length)
    assert step.formula == rows * length * per_token
    assert step.formula - step.counted == rows * length * 2 * 3 * width**2


def test_a_token_uses_some_experts_only():
    raw = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 64, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    step = StockModel(raw, k=2, batch=1, context=8).at(64)
    all_experts = StockModel({**raw, "num_experts_per_tok": 8}, k=2, batch=1, context=8).at(64)
    assert step.formula == pytest.approx(step.counted, rel=0.01)
    assert all_experts.formula > 2 * step.formula
    assert all_experts.counted > 2 * step.counted


@pytest.mark.parametrize("kind", ["bert", "opt", "gpt_neox"])
def test_classes_that_look_at_masks_differently_are_counted(kind):
    sizes = {
        "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 64,
        "ffn_dim": 64, "word_embed_proj_dim": 32, "vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0,
        "pad_token_id": 1,
    }  # fmt: skip
    step = StockModel({"model_type": kind, **sizes}, k=2, batch=1, context=8).at(32)
    assert step.formula == pytest.approx(step.counted, rel=0.1)


def test_widths_that_are_no_multiple_are_computed_exactly():
    """The control takes the line through the two nearest multiples."""
    other = StockModel({**TINY, "n_embd": 48}, k=2, batch=1, context=16).at(48)
    model = StockModel(TINY, k=2, batch=1, context=16)
    assert model.at(48) == other
    assert (model.at(32).counted + model.at(64).counted) // 2 != other.counted


def test_a_model_that_is_cubic_in_its_width_is_told_apart():
    def counted(width: int) -> int:
        return count(nn.Linear(width**2, width, device="meta"), torch.zeros(2, width**2))[1]

    assert quadratic([(width, counted(width)) for width in (4, 8, 16, 2)]) is None
    squares = [(w, count(mlp(w).to("meta"), torch.zeros(2, 54))[1]) for w in (4, 8, 16, 2)]
    assert quadratic(squares) is not None


def test_counting_leaves_the_users_model_alone():
    model = mlp(8)
    step_of(model, torch.zeros(2, 54))
    assert all(p.grad is None and not p.is_meta for p in model.parameters())


def test_a_model_that_reads_values_is_refused():
    class Reader(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * x.max().item()

    with refused("cost.forward_pass_failed", where="Reader"):
        step_of(lambda: Reader(3, 3), torch.zeros(2, 3))


def test_a_model_without_gradients_is_refused():
    with refused("cost.no_gradient", where="Linear"):
        step_of(lambda: nn.Linear(3, 3).requires_grad_(False), torch.zeros(2, 3))


def test_what_the_counter_does_not_see_is_refused():
    x = torch.zeros(2, 3)
    with refused("cost.bilinear_not_counted"):
        step_of(lambda: nn.Bilinear(3, 3, 3), (x, x))
    with refused("cost.nothing_to_count", where="LayerNorm"):
        step_of(lambda: nn.LayerNorm(3), x)


# Accounts


def test_at_break_even_an_account_neither_gains_nor_loses():
    """The control is break-even of another account."""
    cost = Cost(scratch=100, base=20, tuning=30, upscaled=1)
    for account in ACCOUNTS:
        faster = cost.break_even(account)
        assert faster is not None
        at = Cost(cost.scratch, cost.base, cost.tuning, cost.scratch / faster)
        assert at.speedup(account) == pytest.approx(1, abs=1e-12)
        for other in ACCOUNTS:
            assert other == account or abs(at.speedup(other) - 1) > 0.05


def test_accounts_add_up():
    cost = Cost(scratch=100, base=20, tuning=30, upscaled=10)
    assert [cost.total(account) for account in ACCOUNTS] == [10, 30, 40, 60]
    assert (cost.base_sunk, cost.base_charged, cost.tuning_charged, cost.both_charged) == (10, 30, 40, 60)
    assert Cost(100, 60, 50, 1).break_even("both charged") is None


def test_not_growing_spends_exactly_the_flops_of_the_run_from_scratch():
    """The control takes as many steps as the run from scratch, and spends less."""

    def flops_at(width: int) -> int:
        return 6 * width**2 + 1000 * width

    case = ComparedRuns(width=500, k=4, proxy=100, steps=1000, base_steps=10, trials=0)
    steps = case.steps_throughout(flops_at)
    assert steps * flops_at(500) == pytest.approx(case.cost(flops_at).scratch)
    assert steps > 4 * case.steps
    assert case.steps * flops_at(500) < case.cost(flops_at).scratch / 4


@pytest.mark.parametrize("upscaled", [250, None])
@pytest.mark.parametrize("account", ["tuning charged", "both charged"])
def test_the_largest_proxy_pays_and_the_next_one_does_not(account, upscaled):
    def flops_at(width: int) -> int:
        return 6 * width**2 + 1000 * width

    case = ComparedRuns(
        width=500, k=4, proxy=100, steps=1000, base_steps=1000, trials=25, upscaled_steps=upscaled
    )
    largest = case.largest_proxy(flops_at, account)
    assert largest is not None
    assert 1 < largest < 500
    for proxy, pays in ((largest, True), (largest + 1, False)):
        cost = ComparedRuns(500, 4, proxy, 1000, 1000, 25, upscaled).cost(flops_at)
        spent = cost.charges(account) + (0 if upscaled is None else cost.upscaled)
        assert (spent < cost.scratch) is pays


def test_impossible_costs_and_cases_are_refused_together():
    found = refusal(lambda: Cost(scratch=float("nan"), base=-1, tuning=0, upscaled=0), "cost.not_flops")
    assert [fault.where for fault in found.faults] == ["scratch", "base"]
    with refused("cost.nothing_to_compare_with", where="scratch"):
        Cost(0, 0, 0, 0)
    found = refusal(lambda: ComparedRuns(width=8, k=1, proxy=9, steps=0, base_steps=1, trials=-1))
    assert {fault.where: fault.code for fault in found.faults} == {
        "k": "argument.not_whole",
        "steps": "cost.not_steps",
        "trials": "cost.not_trials",
        "proxy": "cost.proxy_wider_than_base",
    }


# Reasons


def advised(k: int = 2, proxy: int = 100, trials: float = 1, upscaled: int | None = 10, tokens: float = 1):
    case = ComparedRuns(500, k, proxy, 100, 100, trials, upscaled)
    return [str(reason) for reason in reasons(case, case.cost(lambda width: width**2), tokens)]


def test_nothing_speaks_against_a_modest_growth():
    assert advised() == advised(k=4) == advised(tokens=20) == advised(upscaled=None) == []


def test_each_reason_against_growing_names_its_source():
    (large,) = advised(k=5)
    assert "k = 5" in large
    assert "2605.13405" in large
    assert "2405.15319" in large
    (long,) = advised(tokens=21)
    assert "21 tokens per parameter" in long
    assert "2605.13405" in long
    (small,) = advised(proxy=99)
    assert "about 100 units" in small
    (tuning,) = advised(trials=100)
    assert "tuning alone costs 4.00 times" in tuning
    (slow,) = advised(upscaled=80)
    assert "does not pay with base charged, with both charged" in slow


# The command


def test_the_command_counts_a_python_file(tmp_path, capsys):
    file = tmp_path / "proxy.py"
    file.write_text(MLP)
    wanted = ["cost", str(file), "-k", "4", "--width", "200", "--proxy", "100", "--steps", "1000"]
    assert main([*wanted, "--upscaled-steps", "250", "--trials", "1"]) == 0
    out = capsys.readouterr().out
    step = step_of(lambda: mlp(800, layers=3), torch.zeros(10, 54))
    assert f"{step.counted / 1e6:.4g}" in out
    assert "n/n0 = 2" in out
    narrow = step_of(lambda: mlp(200, layers=3), torch.zeros(10, 54))
    assert f"{1000 * step.counted / narrow.counted:,.0f} steps of the base's width" in out
    assert "base sunk          4.00  before step 1,000" in out
    assert "nothing found" in out
    assert main(wanted) == 0
    out = capsys.readouterr().out
    assert "as long as from scratch" in out
    assert "never: what is charged already costs more" in out
    assert "tuning alone costs" in out


def test_the_command_counts_a_configuration(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    sizes = ["-k", "2", "--proxy", "8", "--steps", "200000", "--batch", "2", "--context", "16"]
    assert main(["cost", str(tmp_path), *sizes]) == 0
    out = capsys.readouterr().out
    assert "32 -> 64 (k = 2), tuned on 8 -> 16 (n/n0 = 4)" in out
    assert main(["cost", str(tmp_path), *sizes[:2], *sizes[4:]]) == 0
    assert "tuned on 16 -> 32 (n/n0 = 2)" in capsys.readouterr().out, "the proxy that tune makes"
    assert f"{2 * 16 * 200_000 / 105_216:,.0f} tokens per parameter" in out
    assert main(["cost", str(tmp_path / "config.json"), *sizes[:-1], "17"]) == 2
    assert "--context [data.sequences_too_long]" in capsys.readouterr().err


def test_the_command_says_when_no_proxy_can_be_computed(tmp_path, capsys):
    file = tmp_path / "cubic.py"
    file.write_text(
        "import torch\nfrom torch import nn\n"
        "def build(width): return nn.Sequential(nn.Linear(3, width**2), nn.Linear(width**2, width))\n"
        "def inputs(): return torch.zeros(2, 3)\n"
    )
    assert main(["cost", str(file), "-k", "2", "--width", "8", "--proxy", "2", "--steps", "9"]) == 0
    assert "not a polynomial of degree two" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "faults"),
    [
        ([], ["model [option.not_given]"]),
        (["x.py", "-k", "2"], [f"{name} [option.not_given]" for name in ("--steps", "--proxy", "--width")]),
        (["x", "-k", "2", "--proxy", "1", "--steps", "1", "--width", "8"], ["--width [option.said_elsewhere]"]),
        (["x.py", "-k", "2", "--proxy", "1", "--steps", "0", "--width", "8"], ["--steps [option.below_least]"]),
        (["x.py", "-k", "2", "--proxy", "1", "--steps", "1", "--width", "8", "--trials", "inf"], ["--trials [option.below_least]"]),
        (["x.py", "-k", "2", "--proxy", "1", "--steps", "1", "--width", "8"], ["x.py", "[proxy.no_such_file]"]),
        (["x", "-k", "2", "--proxy", "1", "--steps", "1", "--batch", "1", "--context", "1"], ["[config.not_readable]"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_at_once(arguments, faults, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["cost", *arguments]) == 2
    told = capsys.readouterr().err
    assert all(fault in told for fault in faults)


def test_a_file_without_the_functions_is_refused(tmp_path, capsys):
    file = tmp_path / "proxy.py"
    file.write_text("def build(width): raise ValueError('odd width')\n")
    wanted = ["cost", str(file), "-k", "2", "--width", "8", "--proxy", "2", "--steps", "9"]
    assert main(wanted) == 2
    assert "inputs [argument.not_a_function]" in capsys.readouterr().err
    file.write_text(file.read_text() + "def inputs(): return 1\n")
    assert main(wanted) == 2
    told = capsys.readouterr().err
    assert "[proxy.function_failed]" in told
    assert "odd width" in told, "what the file itself raised"


def test_models_of_images_are_sent_to_a_python_file(tmp_path, capsys):
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "vit", "hidden_size": 32, "num_attention_heads": 2})
    )
    sizes = ["-k", "2", "--proxy", "8", "--steps", "2", "--batch", "2", "--context", "16"]
    assert main(["cost", str(tmp_path), *sizes]) == 2
    assert "vit [cost.other_inputs]" in capsys.readouterr().err


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[2] / "docs" / "cost.md").read_text()
    assert paper().split("\n\n")[0] in page
    grid = 25 / EXPERIMENTS["MLP, SGD"].tuning_ratio
    assert f"cost the MLP {grid:.2f} runs from scratch" in page
