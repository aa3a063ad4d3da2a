"""What batches of small copies reach: sound and tiles beside text, global attention, tensors that a class never uses."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from harness.refusals import refused
from mupscale.errors import Fault, MupscaleError
from mupscale.planning.declare import Declared

pytest.importorskip("transformers")

from mupscale.families.config.goal import Goal
from mupscale.families.copy.losses import batch_for
from mupscale.families.copy.reached import Reach, unused
from mupscale.families.copy.shrink import growth_of, shrunk
from mupscale.families.models import as_data, config_from, factory, model_class
from mupscale.families.plan import family_plan
from mupscale.families.prove import prove

TEXT = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
EYE = {
    "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4, "projection_dim": 8,
}  # fmt: skip
TILES = {
    "model_type": "llava_next", "text_config": TEXT, "vision_config": EYE, "image_token_index": 32000,
    "image_grid_pinpoints": [[16, 32], [32, 16]],
}  # fmt: skip
BIRD = {
    "model_type": "big_bird", "architectures": ["BigBirdForMaskedLM"], "vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "attention_type": "original_full",
}  # fmt: skip


def small(raw, gently=False):
    """The small copy of a configuration, with random weights."""
    config, goal = config_from(raw), Goal({"every": 2})
    cls = model_class(config)
    copy = shrunk(config, goal, cls, growth_of(config, goal, cls), gently)
    return factory(cls)(copy), copy


def gradients(model, batch):
    """The names of the parameters that the first output of a batch reaches."""
    total = model(
        **{n: v.double() if v.is_floating_point() else v for n, v in batch.items() if n != "use_cache"}
    )[0]
    total.square().sum().backward()
    return {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}


def test_a_type_whose_stock_class_is_that_of_another_type_grows():
    sizes = {**TEXT, "model_type": "internlm3", "head_dim": 16, "qkv_bias": True, "bias": True}
    family = prove(family_plan(sizes, 2), 2)
    assert (family.architecture, family.wide_config["attention_bias"]) == ("LlamaForCausalLM", True)
    assert family.plan["model.layers.0.self_attn.q_proj.bias"].wide_shape == (64,)
    with refused("family.class_of_other_type"):
        family_plan({**sizes, "model_type": "mistral"}, 2, architecture="LlamaForCausalLM")


def test_tensors_that_a_class_never_uses_grow_and_are_named():
    family = prove(family_plan(BIRD, 2), 2)
    assert family.plan["bert.pooler.weight"].wide_shape == (64, 64)
    assert any("bert.pooler.weight" in note for note in family.notes)
    assert not any("bert.embeddings" in note for note in family.notes)


class Parts(nn.Module):
    """A head, and parts without gradient: dead, not run, decided by, routed past, and used by a loss with labels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.head, self.dead, self.absent = (nn.Linear(4, width) for _ in range(3))
        self.gate, self.routed, self.second = (nn.Linear(4, width) for _ in range(3))

    def forward(self, x, labels=None):
        self.dead(x)
        second = self.second(x)
        out = self.head(x) + self.routed(x) * 0 + self.gate(x).argmax(-1, keepdim=True)
        found = {} if labels is None else {"loss": (out + second).square().mean()}
        return {**found, "out": out}


def test_only_what_no_output_and_no_loss_depends_on_is_unused():
    torch.manual_seed(0)
    model, batch = Parts().double(), {"x": torch.randn(3, 4)}
    names = [f"{part}.weight" for part in ("dead", "absent", "gate", "routed", "second")]
    assert unused(model, batch, names) == {"dead.weight"}
    before = [p.clone() for p in model.parameters()]
    assert all(map(torch.equal, before, model.parameters()))


def test_roles_of_unused_tensors_are_free_and_each_other_part_is_one_fault():
    torch.manual_seed(0)
    base, wide, x = Parts().double(), Parts(8).double(), torch.randn(3, 4).double()
    others, asked = ("absent.*", "gate.*", "routed.*", "second.*"), []

    def search(said):
        asked.append(said.roles)
        if not said.roles:
            fault = Fault("search.tensor_undecided", "dead.weight", "its gradient is zero")
            raise MupscaleError("the loss does not decide every tensor", [fault])
        return asked

    reach = Reach(base, wide, {"x": x}, lambda model: model(x)["out"].mean(), others)
    reach.decided(search, Declared())
    assert asked == [{}, {"dead.weight": "out"}]
    with pytest.raises(MupscaleError) as caught:
        replace(reach, idle=()).decided(search, Declared())
    assert [fault.where for fault in caught.value.faults] == ["absent", "gate", "routed", "second"]
    assert {*caught.value.codes} == {"family.not_reached_by_batch"}


def test_tiles_of_an_image_reach_what_stands_between_their_rows():
    model, config = small(TILES)
    assert as_data(config)["image_token_index"] < 96  # 32000 is no word of this vocabulary
    reached = gradients(model, batch_for(model, config))
    assert {"model.image_newline", "model.multi_modal_projector.linear_1.weight"} <= reached
    assert prove(family_plan(TILES, "text=2"), 2).plan["model.image_newline"].wide_shape == (64,)


def test_global_attention_reaches_its_own_projections():
    sizes = {
        **BIRD,
        "model_type": "longformer",
        "architectures": ["LongformerForMaskedLM"],
        "attention_window": [4],
    }
    del sizes["attention_type"]
    model, config = small({**sizes, "max_position_embeddings": 64, "pad_token_id": 1})
    assert "longformer.encoder.layer.0.attention.self.query_global.weight" in gradients(
        model, batch_for(model, config)
    )


def test_sound_stands_between_the_words():
    ear = {**EYE, "model_type": "glmasr_encoder", "intermediate_size": 64, "num_mel_bins": 8}
    for name in ("image_size", "patch_size", "projection_dim"):
        del ear[name]
    model, config = small(
        {"model_type": "glmasr", "audio_config": ear, "text_config": TEXT, "audio_token_id": 90}, True
    )
    batch = batch_for(model, config)
    assert bool((batch["input_ids"] == 90).any())
    assert any(name.startswith("model.audio_tower.conv1") for name in gradients(model, batch))


def test_a_tower_alone_writes_less_in_its_small_copy():
    eye = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 512}
    raw = {
        "model_type": "qwen3_vl_vision",
        **eye,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    assert as_data(small(raw)[1])["out_hidden_size"] == 56


def test_an_encoder_of_images_runs_alone_on_patches_and_their_grid():
    eye = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    more = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "patch_size": 2}
    model, config = small({"model_type": "qwen3_vl_vision", **eye, **more})
    batch = batch_for(model, config)
    assert batch["grid_thw"].tolist() == [[1, 4, 4]] * 3
    assert "blocks.0.attn.qkv.weight" in gradients(model, batch)


SERIES = {
    "model_type": "timesfm", "context_length": 32, "patch_length": 8, "horizon_length": 8, "hidden_size": 32, "head_dim": 8,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
CLIPS = {
    "model_type": "vjepa2", "crop_size": 32, "patch_size": 16, "frames_per_clip": 4, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "pred_hidden_size": 24, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 1,
}  # fmt: skip
ENTITIES = {
    "model_type": "luke", "architectures": ["LukeForMaskedLM"], "vocab_size": 96, "entity_vocab_size": 96, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "entity_emb_size": 16,
}  # fmt: skip
SHOWN = {
    "model_type": "video_llava", "text_config": TEXT, "vision_config": EYE, "image_token_index": 95,
    "video_token_index": 94,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "given", "reached"),
    [
        (SERIES, {"past_values", "past_values_padding", "freq"}, "freq_emb"),
        (CLIPS, {"pixel_values_videos"}, "encoder.embeddings"),
        (ENTITIES, {"entity_ids", "entity_position_ids"}, "luke.entity_embeddings"),
        (SHOWN, {"pixel_values", "pixel_values_videos"}, "model.video_tower"),
    ],
    ids=lambda value: value.get("model_type", "") if isinstance(value, dict) else "",
)
def test_an_argument_is_given_by_its_name(raw, given, reached):
    config = config_from(raw)
    model = factory(model_class(config))(config)
    batch = batch_for(model, config)
    assert given <= batch.keys()
    assert any(name.startswith(reached) for name in gradients(model, batch))


class Pooled(nn.Module):
    """Torch's attention, whose output projection is read and never called, in a head that no output needs."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body = nn.Linear(4, width)
        self.head = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        out = self.body(x)
        self.head(out, out, out)
        return {"out": out}


def test_a_projection_that_attention_reads_without_a_call_is_unused():
    model, batch = Pooled().double(), {"x": torch.randn(3, 5, 4)}
    assert unused(model, batch, ["head.out_proj.weight"]) == {"head.out_proj.weight"}
