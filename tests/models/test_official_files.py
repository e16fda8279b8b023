"""What every reader of official files refuses: keys, shapes and values that are not those of its model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from tests.helpers import flexvar, tiny_wan
from tests.helpers.audiocraft_files import (
    CODEC_SETTINGS,
    HEADS,
    SETTINGS,
    codec_weights,
    language_model_weights,
)
from tests.helpers.mar import ldm_shapes
from tests.helpers.mar import random_weights as random_kl16
from tests.helpers.official import CLASS_SHAPES, VQ_SHAPES, add_tiny_presets, random_weights
from tests.helpers.tiny_infinity import tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import SIDES, TINY_VQ, tiny_var, tiny_var_vq
from tests.models.continuous.tiny import tiny_mar
from tests.models.masked import maskgct_straight
from visual_spec.models.columns.audiocraft_codec import load_audiocraft_codec
from visual_spec.models.continuous.mar_checkpoint import load_kl16_checkpoint, load_mar_checkpoint
from visual_spec.models.masked.magnet_checkpoint import load_magnet
from visual_spec.models.masked.maskgct_checkpoint import load_semantic_network
from visual_spec.models.next_scale.flexvar import load_flexvar
from visual_spec.models.next_scale.infinity_checkpoint import load_infinity_checkpoint
from visual_spec.models.next_scale.infinity_vq import load_infinity_vq_checkpoint
from visual_spec.models.next_scale.var import load_var_checkpoint
from visual_spec.models.next_scale.var_vq import load_var_vq_checkpoint
from visual_spec.models.next_token.llamagen_checkpoint import load_tokenizer, load_transformer
from visual_spec.models.video.self_forcing_checkpoint import load_self_forcing


@dataclass(frozen=True)
class Official:
    """Weights in an official layout, how a file holds them and is read, and a key by which nothing is recognised."""

    weights: Callable[[], dict[str, Tensor]]
    load: Callable[[Path], Any]
    key: str
    within: str | None = "model"  # the entry of the file with the weights
    more: dict[str, Any] | None = None


def audiocraft(settings: dict[str, Any]) -> dict[str, Any]:
    return dict(
        within="best_state", more={"xp.cfg": yaml.safe_dump(settings), "version": "1.4.0a1", "exported": True}
    )


FILES = {
    "LlamaGen": Official(
        lambda: random_weights(CLASS_SHAPES),
        partial(load_transformer, image_size=32),
        "layers.1.ffn_norm.weight",
    ),
    "LlamaGen's tokenizer": Official(
        lambda: random_weights(VQ_SHAPES), load_tokenizer, "decoder.norm_out.bias"
    ),
    "VAR": Official(
        lambda: dict(tiny_var(dtype=torch.float32).state_dict()),
        partial(load_var_checkpoint, scales=SIDES),
        "blocks.0.attn.proj.bias",
        None,
    ),
    "VAR's tokenizer": Official(
        lambda: dict(tiny_var_vq().state_dict()),
        partial(load_var_vq_checkpoint, **{**TINY_VQ, "scales": SIDES}),
        "post_quant_conv.bias",
        None,
    ),
    "FlexVAR": Official(
        lambda: flexvar.official_weights() | flexvar.buffers(), load_flexvar, "head.bias", None
    ),
    "Infinity's tokenizer": Official(
        lambda: dict(tiny_bits(dtype=torch.float32).state_dict()),
        partial(load_infinity_vq_checkpoint, scales=SIDES, norm_groups=2),
        "decoder.conv_out.bias",
        None,
    ),
    "Infinity": Official(
        lambda: dict(tiny_infinity(dtype=torch.float32).state_dict()),
        partial(load_infinity_checkpoint, scales=SIDES),
        "text_norm.weight",
        None,
    ),
    "MAR": Official(
        lambda: dict(tiny_mar().state_dict()),
        partial(load_mar_checkpoint, num_heads=2),
        "mask_token",
        "model_ema",
    ),
    "KL-16": Official(
        lambda: random_kl16(ldm_shapes(32, (1, 1, 2, 2, 4), 16, attention_at=4)),
        partial(load_kl16_checkpoint, block_out_channels=(32, 32, 64, 64, 128)),
        "decoder.conv_out.bias",
    ),
    "MAGNeT": Official(
        language_model_weights, partial(load_magnet, num_heads=HEADS), "out_norm.bias", **audiocraft(SETTINGS)
    ),
    "EnCodec": Official(
        codec_weights, load_audiocraft_codec, "decoder.model.0.conv.conv.bias", **audiocraft(CODEC_SETTINGS)
    ),
    "Self-Forcing": Official(
        tiny_wan.official,
        partial(load_self_forcing, head_dim=tiny_wan.HEAD_DIM),
        "patch_embedding.bias",
        None,
    ),
    "MaskGCT": Official(
        lambda: maskgct_straight.random_weights(maskgct_straight.semantic_shapes(), 0),
        partial(load_semantic_network, num_heads=maskgct_straight.HEADS),
        "to_logit.bias",
        None,
    ),
}
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor], str], Any], str]] = {
    "missing": (lambda w, key: w.pop(key), "1 missing: "),
    "unexpected": (
        lambda w, key: w.update({"extra.weight": torch.zeros(2)}),
        r"1 unexpected: .*extra\.weight",
    ),
    "another shape": (lambda w, key: w.update({key: torch.zeros(7, 5)}), r"1 of another shape: .*\[7, 5\]"),
    "nan": (lambda w, key: w[key].flatten()[:1].fill_(torch.nan), "1 of .* values of .* nan"),
    "whole numbers": (lambda w, key: w.update({key: w[key].to(torch.int8)}), "torch.int8"),
    "sparse": (lambda w, key: w.update({key: w[key].to_sparse()}), "sparse"),
}


@pytest.fixture(params=FILES)
def official(request, monkeypatch) -> Official:
    add_tiny_presets(monkeypatch)
    return FILES[request.param]


def saved(folder: Path, official: Official, weights: dict[str, Tensor], **more: Any) -> Path:
    content = {official.within: weights} if official.within else weights
    torch.save({**content, **(official.more or {}), **more}, folder / "official.pth")
    return folder / "official.pth"


def test_it_loads_as_it_is(official, tmp_path):
    assert official.load(saved(tmp_path, official, official.weights())) is not None


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_the_file(official, fault, tmp_path):
    (damage, message), weights = FAULTS[fault], official.weights()
    damage(weights, official.key)
    with pytest.raises(ValueError, match=f"official.pth.*{message}") as error:
        official.load(saved(tmp_path, official, weights))
    assert "\n" not in str(error.value)


def test_what_needs_pickle_is_refused(official, tmp_path):
    with pytest.raises(ValueError, match="official.pth.* pickle"):
        official.load(saved(tmp_path, official, official.weights(), trainer=SimpleNamespace(a=1)))


def test_weights_of_another_model_are_refused(official, tmp_path):
    with pytest.raises(ValueError, match="official.pth"):
        official.load(saved(tmp_path, official, {"something.else": torch.zeros(3, 2)}))
