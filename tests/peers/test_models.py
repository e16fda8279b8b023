"""Cases of diffusers' mixins of model tests, for our models.

Restated from huggingface/diffusers, `tests/models/testing_utils/` (common, memory, training), which are not in its
wheel. What those of attention, cache, compile, parallelism and quantization ask for needs a GPU, or parts that
our models do not have.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.training_utils import EMAModel

from tests.helpers.tiny import (
    tiny_frame_transformer,
    tiny_masked_transformer,
    tiny_text_encoder,
    tiny_transformer,
    tiny_vq_model,
)

pytestmark = pytest.mark.peers

MODELS = {
    "LlamaGenTransformer": tiny_transformer,
    "MaskedImageTransformer": tiny_masked_transformer,
    "FrameMaskedTransformer": tiny_frame_transformer,
    "VQModel": tiny_vq_model,
    "CaptionEncoder": tiny_text_encoder,
}


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def same(one: Any, other: Any) -> bool:
    own, theirs = one.state_dict(), other.state_dict()
    return own.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in own.items()
    )


def settings(model: Any) -> set[str]:
    return {name for name in model.config if not name.startswith("_")}


def test_from_save_pretrained(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert same(model, again) and settings(again) == settings(model)
    assert not again.training


def test_from_save_pretrained_variant(model, tmp_path):
    model.save_pretrained(tmp_path, variant="fp16")
    assert same(model, type(model).from_pretrained(tmp_path, variant="fp16"))
    with pytest.raises(OSError, match="diffusion_pytorch_model"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_from_save_pretrained_dtype(model, dtype, tmp_path):
    model.to(dtype).save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path, torch_dtype=dtype).dtype == dtype
    assert type(model).from_pretrained(tmp_path, torch_dtype=torch.float32).dtype == torch.float32


def test_from_config_is_of_the_same_shapes(model):
    again = type(model).from_config(model.config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in again.state_dict().items()} == shapes


def test_sharded_checkpoints(model, tmp_path):
    """Parts of at most 40 % of the weights, with an index."""
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    model.save_pretrained(tmp_path, max_shard_size=int(0.4 * size))
    index = json.loads((tmp_path / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and index["metadata"]["total_size"] == size
    assert same(model, type(model).from_pretrained(tmp_path))


def test_the_config_names_its_class(model, tmp_path):
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["_class_name"] == type(model).__name__ and "_diffusers_version" in config


def test_a_copy_is_a_model_of_its_own(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(other.parameters())).add_(1)
    assert not same(model, other)


def test_training_step_and_averaged_weights(model):
    """`test_training` and `test_ema_training`, with the sum of squares of the weights as the loss."""
    if not isinstance(model, ModelMixin):
        pytest.skip("no ModelMixin")
    model.train()
    average = EMAModel(model.parameters(), decay=0.5)
    before = [parameter.clone() for parameter in model.parameters()]
    torch.stack([(parameter.float() ** 2).sum() for parameter in model.parameters()]).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.step()
    average.step(model.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    moved = [bool((now != then).any()) for now, then in zip(model.parameters(), before, strict=True)]
    assert any(moved)
    for shadow, now, then in zip(average.shadow_params, model.parameters(), before, strict=True):
        low, high = torch.minimum(now, then), torch.maximum(now, then)
        assert ((shadow >= low - 1e-6) & (shadow <= high + 1e-6)).all()


def test_weights_stored_in_8_bits_are_computed_in_float32(model):
    """`test_layerwise_casting`: what is stored is small, what is computed is of the model's kind."""
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    kinds = {parameter.dtype for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert torch.float8_e4m3fn in kinds
