"""MammothModa2's stage against the official loop: written anew, and tokens that the official code drew."""

import json
from typing import Any
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from transformers import GenerationConfig

import visual_spec
from tests.helpers.refusals import refuses
from tests.models.next_token.mammoth_straight import straight
from visual_spec.models.next_token.mammoth import MammothModa2, MammothModa2Config

TEXT, IMAGE = 40, 30  # ids of text, and of image tokens after them: the row end first, codes from 44 on
SIZES: dict[str, Any] = dict(
    vocab_size=TEXT, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}  # as releases write it
DECODERS: dict[str, dict[str, Any]] = {
    "mammothmoda2_qwen3_vl": {
        "head_dim": 8, "rope_theta": 10000.0, "rope_scaling": {**ROPE, "mrope_interleaved": True}
    },
    "mammothmoda2_qwen2_5_vl": {"rope_theta": 10000.0, "rope_scaling": ROPE},
}  # fmt: skip

# Image tokens that the official class drew (bytedance/mammothmoda at ba41c0b, transformers 4.57.6, torch 2.11) with the
# weights, prompts and seed below: by moe_type, cfg_scale and do_sample, two pictures.
OFFICIAL = {
    ("ffn", 1.0, False): "45 51 52 60 45 63 63 63 62 61 49 49 49 49 49 /"
    " 45 52 46 52 46 47 60 45 52 52 51 52 47 60 45",
    ("ffn", 1.0, True): "45 51 52 60 45 45 60 60 45 60 45 60 44 49 62 /"
    " 45 52 60 45 60 63 63 62 57 62 47 60 47 62 59",
    ("ffn", 3.0, False): "61 48 48 48 44 51 61 61 61 61 51 48 48 48 48 /"
    " 65 47 57 47 57 47 52 46 69 55 47 52 47 57 62",
    ("ffn", 3.0, True): "62 44 49 51 61 47 61 57 63 52 49 49 48 48 49 /"
    " 65 63 47 57 62 47 60 59 65 52 47 69 52 47 47",
    ("ffn-1:3", 1.0, False): "51 55 44 51 51 44 44 44 44 44 44 44 62 57 60 /"
    " 56 44 60 60 60 60 60 60 60 60 60 60 60 60 60",
    ("ffn-1:3", 1.0, True): "44 51 54 44 51 44 48 51 54 60 45 44 44 62 60 /"
    " 66 67 60 53 59 61 44 60 60 62 60 60 60 60 60",
    ("ffn-1:3", 3.0, False): "51 55 44 51 54 44 48 51 57 61 51 54 48 54 44 /"
    " 66 55 45 56 44 51 66 66 66 66 58 60 67 44 51",
    ("ffn-1:3", 3.0, True): "51 55 44 51 54 51 57 61 48 48 48 51 57 61 55 /"
    " 66 51 51 58 57 54 61 60 67 56 48 62 44 60 60",
}  # fmt: skip


def config(kind: str = "mammothmoda2_qwen3_vl", **changes: Any) -> MammothModa2Config:
    text = {**SIZES, **DECODERS[kind], "gen_vocab_size": IMAGE, "gen_vocab_start_index": TEXT, **changes}
    return MammothModa2Config({"model_type": kind, "text_config": text})


def weights(model: torch.nn.Module) -> None:
    """The same weights for the same names: the official class was given these too."""
    for name, parameter in model.named_parameters():
        draw = (
            torch.rand(parameter.shape, generator=torch.Generator().manual_seed(crc32(name.encode()))) - 0.5
        )
        norm = name.endswith("norm.weight")
        parameter.data = (draw * 0.4 + 1 if norm else draw * (0.6 if "gen_head" not in name else 2.0)).to(
            parameter
        )


def tiny(kind: str = "mammothmoda2_qwen3_vl", **changes: Any) -> Any:
    model = MammothModa2(config(kind, **changes)).double().eval()
    weights(model)
    model.generation_config = GenerationConfig(
        visual_token_start_id=44, visual_token_end_id=60, eol_token_id=40, do_sample=True, top_k=0
    )
    return model


def pairs(count: int = 2, guided: bool = True) -> dict[str, torch.Tensor]:
    """Prompts that end in ten tokens, some of them image tokens; padded on the left, and repeated for guidance."""
    rows = [
        [1] * (3 - row) + [5 + row, *range(10, 13 + row), 20, 21, 41, 22, 23, 42, 24, 25, 43, 41]
        for row in range(count)
    ]
    ids = torch.tensor(rows)
    mask = (ids != 1).long()
    return dict(input_ids=ids.repeat(1 + guided, 1), attention_mask=mask.repeat(1 + guided, 1))


def drawn(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> torch.Tensor:
    torch.manual_seed(3)
    ids, mask = model.generate(**inputs, ar_height=3, ar_width=5, **settings)
    assert mask.shape == ids.shape and (mask[:, -18:] == 1).all()
    return ids


@pytest.mark.parametrize(("moe_type", "cfg_scale", "sample"), OFFICIAL)
def test_tokens_are_those_that_the_official_code_drew(moe_type, cfg_scale, sample):
    model = tiny(moe_type=moe_type)
    visual_spec.accelerate(model, "speculative-jacobi:window=6")
    ids = drawn(model, pairs(guided=cfg_scale > 1), cfg_scale=cfg_scale, do_sample=sample)
    pictures = ids[:2, -18:].view(2, 3, 6)
    assert (pictures[..., 5] == 40).all()
    want = [list(map(int, row.split())) for row in OFFICIAL[moe_type, cfg_scale, sample].split("/")]
    assert pictures[..., :5].flatten(1).tolist() == want
    assert (model.last_trace.target_calls <= 15).all() and (model.last_trace.target_calls < 15).any()


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("moe_type", ["ffn", "ffn-1:3"])
@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_tokens_are_those_of_the_official_loop(kind, moe_type, cfg_scale):
    """Greedy and sampled, a token a call and by windows; PyTorch's generator moves as far."""
    inputs = pairs(guided=cfg_scale > 1)
    for sample, top_k in ((False, 0), (True, 0), (True, 5)):
        model = tiny(kind, moe_type=moe_type)
        torch.manual_seed(3)
        want = straight(model, inputs["input_ids"], inputs["attention_mask"], 3, 5, cfg_scale, sample, top_k)
        state = torch.get_rng_state()
        for sampler in ("autoregressive", "speculative-jacobi:window=4", "speculative-jacobi:window=13"):
            visual_spec.accelerate(model, sampler)
            ids = drawn(model, inputs, cfg_scale=cfg_scale, do_sample=sample, top_k=top_k)
            assert torch.equal(ids, want), (sampler, sample)
            assert not sample or torch.equal(torch.get_rng_state(), state)
        assert len(want[:, -18:].unique()) > 5


def test_projections_are_joined_in_both_experts():
    model = tiny(moe_type="ffn-1:3")
    visual_spec.accelerate(model, "speculative-jacobi:window=6")
    want = drawn(model, pairs(), cfg_scale=3.0)
    visual_spec.fuse_projections(model)
    joined = [
        type(layer.gen_mlp.gate_proj).__name__ for layer in model.llm_model.model.language_model.layers[1:]
    ]
    assert joined == ["JoinedProjections"] * 2
    assert torch.equal(drawn(model, pairs(), cfg_scale=3.0), want)


def test_a_release_is_read(tmp_path):
    """Files as released: the stage's weights among those of the other stages, its sizes in `llm_config`, and the
    settings of pictures in a file of their own."""
    model = tiny()
    others = {
        "llm_model.model.visual.w": torch.ones(2),
        "llm_model.lm_head.weight": torch.ones(2),
        "gen_vae.w": torch.ones(2),
    }
    save_file({**model.state_dict(), **others}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = {**model.config.llm_config["text_config"], "model_type": "mammothmoda2_qwen3_vl_text"}
    shared = {name: text.pop(name) for name in ("gen_vocab_size", "gen_vocab_start_index")}
    stage = {"model_type": "mammothmoda2_qwen3_vl", "vision_config": {}, "text_config": text, **shared}
    written = {"model_type": "mammothmoda2", "gen_vae_config": {}, "llm_config": stage}
    (tmp_path / "config.json").write_text(json.dumps(written))
    settings = {
        name: getattr(model.generation_config, name)
        for name in ("visual_token_start_id", "visual_token_end_id", "eol_token_id")
    }
    (tmp_path / "t2i_generation_config.json").write_text(
        json.dumps({**settings, "do_sample": True, "top_k": 0})
    )
    read = MammothModa2.from_pretrained(tmp_path, dtype=torch.float64)
    for one in (read, model):
        visual_spec.accelerate(one, "autoregressive")
    assert torch.equal(drawn(read, pairs(), cfg_scale=3.0), drawn(model, pairs(), cfg_scale=3.0))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gen_vocab_start_index": 50}, "gen_vocab_start_index=50 and vocab_size=40"),
        ({"extra_gen_vocab": False}, "a table of their own"),
    ],
)
def test_other_vocabularies_are_refused(changes, match):
    refuses(ValueError, match, MammothModa2, config(**changes))


def test_what_does_not_fit_is_refused():
    model, inputs = tiny(), pairs()
    refuses(TypeError, "call visual_spec.accelerate", model.generate, **inputs)
    visual_spec.accelerate(model)
    refuses(ValueError, "the second half has to repeat the first", model.generate, **pairs(guided=False))
    refuses(ValueError, "keeps 3 ids at least", model.generate, **inputs, top_p=0.5)
    with pytest.raises(ValueError, match="leave pixel_values and gen_pixel_values out"):
        model.generate(**inputs, gen_pixel_values=[torch.ones(1)])
    short = {name: tensor[:, -10:] for name, tensor in inputs.items()}
    refuses(ValueError, "ends in 10 tokens that open the picture", model.generate, **short)
    refuses(ValueError, "ar_height=0", model.generate, **inputs, ar_height=0)
    refuses(ValueError, "repetition_penalty=1.2", model.generate, **inputs, repetition_penalty=1.2)
    model.generation_config = GenerationConfig()
    refuses(ValueError, "t2i_generation_config.json", model.generate, **inputs)
    refuses(TypeError, "diffusion stage", model.decode_images, inputs["input_ids"])
