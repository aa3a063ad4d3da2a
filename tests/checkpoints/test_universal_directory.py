"""A directory of the Trainer with DeepSpeed: its universal checkpoint grows with the weights, by the same command."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("planned_here")
from safetensors.torch import load_file  # noqa: E402

from mupscale.cli.main import main  # noqa: E402

TAG = "global_step2_universal"
SIZES = dict(  # noqa: C408
    hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, vocab_size=97
)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tied Llama with the files of a stock run of ZeRO 2: the converter writes the other name of a tied tensor as well."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True))
    model.save_pretrained(folder)
    shapes: list[dict[str, torch.Size]] = [{}, {}]
    for name, parameter in model.named_parameters(remove_duplicate=False):
        (folder / TAG / "zero" / name).mkdir(parents=True)
        alias = name == "lm_head.weight"
        files = {
            "fp32": parameter.detach(),
            "exp_avg": torch.rand_like(parameter),
            "exp_avg_sq": torch.rand_like(parameter),
        }
        for key, tensor in files.items():
            if not alias or key == "fp32":
                torch.save(
                    {"cat_dim": 0, "param": tensor.clone()}, folder / TAG / "zero" / name / f"{key}.pt"
                )
        if not alias:
            torch.save(torch.tensor(2.0), folder / TAG / "zero" / name / "step.pt")
            shapes["norm" in name][name] = parameter.shape
    settings = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "decoupled_weight_decay": True,
    }  # fmt: skip
    groups = [{**settings, "weight_decay": decay, "params": [0]} for decay in (0.1, 0.0)]
    torch.save({"param_groups": groups, "zero_stage": 2}, folder / TAG / "zero" / "optimizer_state.pt")
    states = {"param_shapes": shapes, "mp_world_size": 1, "global_steps": 2, "lr_scheduler": None}
    torch.save(states, folder / TAG / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(TAG)
    (folder / "global_step2").mkdir()
    return folder


@pytest.mark.parametrize("noise", [["--noise", "t=0.1"], []], ids=["copies", "units"])
def test_weights_and_their_masters_grow_to_the_same_bits(base, tmp_path, capsys, noise):
    """Masters get what the weights get. Control: without state, nothing of DeepSpeed is carried, and a reason is given."""
    out = tmp_path / "wide"
    given = [str(base), str(out), "-k", "2", *noise, "--no-loss", "--quiet", "--threads", "1"]
    assert main(["upscale", *given]) == 0
    told = capsys.readouterr().out
    assert f"its state is in {TAG}" in told
    assert "latest_universal" not in told
    weights = load_file(out / "model.safetensors")
    for name, weight in weights.items():
        stored = torch.load(out / TAG / "zero" / name / "fp32.pt")["param"]
        assert torch.equal(stored, weight), name
    assert (out / "latest_universal").read_text() == TAG
    assert not (out / TAG / "zero" / "lm_head.weight").exists()
    assert main(["check", str(out)]) == 0
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 0
    moment = out / TAG / "zero" / "model.norm.weight" / "exp_avg.pt"
    raw = bytearray(moment.read_bytes())
    at = raw.index(torch.load(moment)["param"].numpy().tobytes())
    raw[at] ^= 1
    moment.write_bytes(raw)
    assert main(["check", str(out), "--base", str(base), "--levels", "bytes", "--quiet"]) == 1, (
        "control: one bit of a moment"
    )


def test_without_a_universal_checkpoint_the_command_that_makes_one_is_told(base, tmp_path, capsys):
    bare = tmp_path / "base"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((base / name).read_bytes())
    (bare / "global_step2").mkdir()
    assert main(["grow", str(bare), str(tmp_path / "wide"), "-k", "2", "--quiet"]) == 0
    assert "ds_to_universal --input_folder" in capsys.readouterr().out
