"""Official LlamaGen files: every preset's layout, every container, and what is refused."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.helpers.llamagen import on_meta
from tests.helpers.llamagen_releases import SIZES, releases
from tests.helpers.official import (
    CLASS_SHAPES,
    TEXT_SHAPES,
    VQ_SHAPES,
    add_tiny_presets,
    random_weights,
    tokenizer_shapes,
    transformer_shapes,
)
from tests.helpers.refusals import refuses
from visual_spec.models.core.checkpoints import Checkpoint
from visual_spec.models.next_token import llamagen
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import (
    find_image_size,
    load_pair,
    load_tokenizer,
    load_transformer,
    official_defaults,
    recognise,
)
from visual_spec.models.next_token.llamagen_vq import VQModel

TOKENIZERS = {"vq-16": (1, 1, 2, 2, 4), "vq-8": (1, 2, 2, 4)}


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch):
    add_tiny_presets(monkeypatch)
    # Whole presets are built on the meta device here, where filling tensors takes longer than making them.
    for name in ("kaiming_uniform_", "normal_", "uniform_"):
        fill = getattr(torch.nn.init, name)

        def skip(tensor, *args, fill=fill, **kwargs):
            return tensor if tensor.is_meta else fill(tensor, *args, **kwargs)

        monkeypatch.setattr(torch.nn.init, name, skip)


def write(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


# -- the official layouts ----------------------------------------------------------------------------------------------


def test_the_table_of_sizes_is_the_official_one():
    assert {
        name: (size["num_layers"], size["dim"]) for name, size in llamagen.PRESETS.items() if name != "tiny"
    } == SIZES


@pytest.mark.parametrize(
    ("name", "official", "more"), [*releases()], ids=lambda one: one if str(one) == one else ""
)
def test_no_key_of_an_official_transformer_is_missing_or_left_over(name, official, more):
    architecture = recognise(on_meta(official | more))
    assert architecture.name == name and architecture.shapes() == official  # made of one layer
    if name.startswith("LlamaGen"):
        with torch.device("meta"):
            model = LlamaGenTransformer(**architecture.config)
        assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == official


@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_key_of_an_official_tokenizer_is_missing_or_left_over(name):
    official = tokenizer_shapes(TOKENIZERS[name])
    architecture = recognise(on_meta(official))
    assert architecture.preset == name
    with torch.device("meta"):
        model = VQModel(**architecture.config)
    assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == official
    if name == "vq-16":  # 344 tensors in the file, one of which is a usage counter; 71.9 M parameters
        assert len(official) == 343
        assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == 71.9


# -- containers --------------------------------------------------------------------------------------------------------

CONTAINERS = {
    "DDP": lambda w: {"model": w, "optimizer": {"step": 3}, "steps": 10, "args": argparse.Namespace(lr=1e-4)},
    "DeepSpeed": lambda w: {"module": w},
    "state_dict": lambda w: {"state_dict": w},
    "FSDP": lambda w: w,
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_model(name, tmp_path):
    weights = random_weights(CLASS_SHAPES)
    extra = {**weights, "freqs_cis": torch.zeros(1 + 16, 4, 2)}
    model = load_transformer(write(tmp_path / "c2i.pt", CONTAINERS[name](extra)), patch_size=2)
    assert set(model.state_dict()) == set(weights)
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert (model.grid.height, model.vocab_size, model.config["num_classes"]) == (4, 12, 7)
    assert not model.training


def test_older_and_safetensors_files_are_read_too(tmp_path):
    weights = random_weights(TEXT_SHAPES)
    torch.save({"model": weights}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file(weights, tmp_path / "new.safetensors")
    for path in tmp_path.iterdir():
        model = load_transformer(path, image_size=8, patch_size=2)
        assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
        assert model.config["caption_dim"] == 8 and model.prefix_length == 6


def test_dtype_is_kept_or_chosen(tmp_path):
    path = write(tmp_path / "c2i.pt", random_weights(CLASS_SHAPES, torch.bfloat16))
    assert load_transformer(path, image_size=8, patch_size=2).dtype == torch.bfloat16
    chosen = load_transformer(path, image_size=8, patch_size=2, dtype=torch.float32)
    assert {parameter.dtype for parameter in chosen.parameters()} == {torch.float32}


# -- the size of the pictures ------------------------------------------------------------------------------------------


def size_of(name="weights.pt", *, asked=None, patch=16, table=None, **arguments) -> int:
    weights = {} if table is None else {"freqs_cis": torch.zeros(table, 4, 2)}
    if table and table > 1000:
        weights["cls_embedding.uncond_embedding"] = torch.zeros(120, 8)
    return find_image_size(Checkpoint(Path(name), weights, arguments), patch, asked)


def test_the_size_of_the_pictures_is_found_where_it_is_told():
    assert size_of("c2i_L_384.pt") == 384 and size_of("t2i_XL_stage2_512.pt") == 512
    assert size_of("c2i_B_256.pt", asked=512) == 512
    assert size_of(table=1 + 24 * 24) == 384 and size_of(table=120 + 32 * 32) == 512
    assert size_of(image_size=384, downsample_size=16) == 384
    # What the training run says counts for more than the name.
    assert size_of("other_256.pt", image_size=512) == 512
    assert size_of("c2i_256.pt", patch=8) == 256


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"image_size \(256, 384, 512"),
        ({"name": "c2i_1384.pt"}, r"c2i_1384\.pt.*tell"),
        ({"asked": 100}, "image_size=100.*16"),
        ({"asked": -16}, "image_size=-16"),
        ({"asked": 256, "table": 1 + 24 * 24}, "image_size=256.*384.*384"),
        ({"asked": 512, "image_size": 256}, "image_size=512.*256"),
    ],
)
def test_sizes_that_are_not_told_or_contradicted_are_refused(settings, message):
    refuses(ValueError, message, size_of, **settings)


def test_a_pair_agrees_on_the_size(tmp_path):
    transformer = write(tmp_path / "c2i.pt", random_weights(CLASS_SHAPES))
    tokenizer = write(tmp_path / "vq.pt", {"model": random_weights(VQ_SHAPES)})
    model, vq_model = load_pair(transformer, tokenizer, image_size=16)
    assert model.grid.width == vq_model.tokens_per_side == 8
    with torch.no_grad():
        assert vq_model.decode_tokens(torch.zeros(1, 64, dtype=torch.long)).shape == (1, 3, 16, 16)


@pytest.mark.parametrize(
    ("size", "scale"), [("B", 2.0), ("L", 2.0), ("XL", 1.75), ("XXL", 1.75), ("3B", 1.65)]
)
def test_defaults_are_the_published_ones(size, scale):
    with torch.device("meta"):
        classes = LlamaGenTransformer(**dict[str, Any](llamagen.PRESETS[size]))
    assert official_defaults(classes) == {"default_guidance_scale": scale, "default_top_k": 0}


def test_defaults_of_captions_are_those_of_the_official_script():
    with torch.device("meta"):
        text = LlamaGenTransformer(**dict[str, Any](llamagen.PRESETS["B"]), num_classes=None, caption_dim=8)
    assert official_defaults(text) == {"default_guidance_scale": 7.5, "default_top_k": 1000}


# -- bad files ---------------------------------------------------------------------------------------------------------


def recognise_changed(shapes, **changes):
    """Recognise official shapes with some changed, or removed (None)."""
    changed = {**shapes, **{name.replace("__", "."): shape for name, shape in changes.items()}}
    return recognise(on_meta({key: shape for key, shape in changed.items() if shape is not None}))


def test_missing_left_over_and_misshaped_keys_are_listed():
    shapes = transformer_shapes(36, 1280, classes=1000)
    closest = "weights.pt is of no known architecture; the closest is LlamaGen-XL, class-conditional, with "
    refuses(ValueError, closest + r"1 missing: norm.weight\.$", recognise_changed, shapes, norm__weight=None)
    refuses(ValueError, closest + r"1 unexpected: extra.bias\.$", recognise_changed, shapes, extra__bias=(3,))
    with pytest.raises(
        ValueError,
        match=closest + r"1 of another shape: output.weight \[7, 1280\] instead of \[16384, 1280\]",
    ):
        recognise_changed(shapes, output__weight=(7, 1280))
    many = {f"layers__{i}__attention__wo__weight": None for i in range(36)}
    refuses(ValueError, r"36.*layers\.0.*32", recognise_changed, shapes, **many)
    with pytest.raises(ValueError, match=r"LlamaGen.*vq-8.*2.*decoder\.conv_in\.bias"):
        changes: dict[str, Any] = {"decoder__conv_in__bias": None, "decoder__conv_in__weight": None}
        recognise_changed(tokenizer_shapes(TOKENIZERS["vq-8"]), **changes)


def test_sizes_outside_the_table_name_the_closest_and_what_to_do():
    with pytest.raises(ValueError, match="LlamaGen.*LlamaGenTransformer"):
        recognise(on_meta(transformer_shapes(12, 512, caption=(120, 2048))))
    with pytest.raises(ValueError, match=r"LlamaGen.*layers\.20"):
        recognise(on_meta(transformer_shapes(20, 1024, classes=1000)))


@pytest.mark.parametrize(
    ("keys", "looks_like"),
    [
        (["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"], "transformers.*Janus"),
        (["blocks.0.ada_lin.1.weight"], "like VAR"),
        (["diffloss.net.input_proj.weight"], "like MAR"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight"], "text_encoder"),
        (["something.else"], "1 keys"),
    ],
)
def test_weights_of_other_families_are_named(keys, looks_like):
    refuses(ValueError, looks_like, recognise, on_meta(dict.fromkeys(keys, (2, 2))))


def test_a_file_in_the_wrong_place_is_told(tmp_path):
    transformer = write(tmp_path / "c2i.pt", random_weights(CLASS_SHAPES))
    tokenizer = write(tmp_path / "vq.pt", {"model": random_weights(VQ_SHAPES)})
    refuses(ValueError, r"vq\.pt.*LlamaGen", load_transformer, tokenizer, image_size=8)
    refuses(ValueError, r"c2i\.pt.*LlamaGen", load_tokenizer, transformer)
