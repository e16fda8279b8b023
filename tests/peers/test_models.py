"""Cases of diffusers' mixins of model tests, for our models.

Restated from huggingface/diffusers, `tests/models/testing_utils/` (common, memory, training), which are not in its
wheel. What those of attention, cache, compile, parallelism and quantization ask for needs a GPU, or parts that
our models do not have.
"""

import copy
import json
from collections.abc import Callable
from functools import partial
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
from tests.helpers.tiny_infinity import tiny_bits, tiny_infinity
from tests.helpers.tiny_scales import tiny_var, tiny_var_vq
from tests.helpers.tiny_students import tiny_student, tiny_text_student, tiny_var_student
from tests.models.continuous.tiny import tiny_acdit, tiny_causal, tiny_flowar, tiny_mar
from visual_spec.models.drafters.eagle import EagleDrafter
from visual_spec.models.next_token.arpg import ARPGTransformer
from visual_spec.models.next_token.chameleon_vq import ChameleonVQDecoder
from visual_spec.models.next_token.lpd import LPDTransformer
from visual_spec.models.next_token.movq import MoVQDecoder
from visual_spec.prototype.skipped import skip_layers

pytestmark = pytest.mark.peers

WIDE = (1, (2, 1), (3, 2), (5, 3))
SINGLE: dict[str, Any] = dict(dtype=torch.float32)
# One of each class, and of those that have several the ones that are built in another way.
MODELS: dict[str, Callable[[], Any]] = {
    "LlamaGen": tiny_transformer,
    "LlamaGen of clips": partial(tiny_transformer, num_frames=3, grid_size=2, zero_prefix_keys=False),
    "NAR": partial(tiny_transformer, order="nar", branch_layers=2),
    "NAR of clips": partial(tiny_transformer, order="nar", num_frames=3, zero_prefix_keys=False),
    "FlashAR": partial(tiny_transformer, order="flashar", branch_layers=2),
    "PAR": partial(tiny_transformer, order="par4"),
    "RandAR": partial(tiny_transformer, order="any"),
    "queries": partial(tiny_transformer, order="queries"),
    "ARPG": partial(ARPGTransformer, 12, 16, 4, 2, 4, 5),
    "LPD": partial(LPDTransformer, 12, 16, 2, 2, 4, 5),
    "Token-Shuffle": partial(tiny_transformer, order="blocks2"),
    "some blocks of LlamaGen": lambda: skip_layers(tiny_transformer(num_layers=4), (0, 2)),
    "EAGLE": partial(EagleDrafter, vocab_size=12, dim=16, num_heads=2, grid_size=4),
    "MaskGIT": tiny_masked_transformer,
    "frames": tiny_frame_transformer,
    "key frames": partial(tiny_frame_transformer, num_frames=7, key_frames=[2, 4, 6]),
    "VAR": partial(tiny_var, **SINGLE),
    "VAR that shares": partial(tiny_var, **SINGLE, shared_adaln=True),
    "Infinity": partial(tiny_infinity, **SINGLE, scales=WIDE),
    "MAR": tiny_mar,
    "continuous tokens in an order": partial(tiny_causal, order=[*range(15, -1, -1)]),
    "FlowAR": tiny_flowar,
    "ACDiT": tiny_acdit,
    "student": partial(tiny_student, **SINGLE),
    "student of captions": tiny_text_student,
    "student of VAR": partial(tiny_var_student, **SINGLE),
    "VQModel": tiny_vq_model,
    "VAR's tokenizer": tiny_var_vq,
    "Infinity's tokenizer": lambda: tiny_bits(**SINGLE, scales=WIDE, patchify=True).requires_grad_(),
    "Chameleon's decoder": partial(ChameleonVQDecoder, 32, (1, 2), 1, 8, codebook_size=24, codebook_dim=8),
    "MoVQGAN's decoder": partial(MoVQDecoder, 32, (1, 2), 1, codebook_size=24),
    "CaptionEncoder": tiny_text_encoder,
}


@pytest.fixture(params=MODELS)
def model(request: Any) -> Any:
    torch.manual_seed(0)
    return MODELS[request.param]().eval()


def same(one: Any, other: Any) -> bool:
    own, theirs = held(one), held(other)
    return own.keys() == theirs.keys() and all(
        torch.equal(value, theirs[name]) for name, value in own.items()
    )


def held(model: Any) -> dict[str, torch.Tensor]:
    """All tensors: weights, buffers that are saved or are not, and what modules keep beside them."""
    beside = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return dict(model.named_parameters()) | dict(model.named_buffers()) | beside


def settings(model: Any) -> dict[str, Any]:
    own = {name: value for name, value in model.config.items() if not name.startswith("_")}
    return json.loads(json.dumps(own))  # tuples are saved as lists


@pytest.mark.every_set
def test_from_save_pretrained(model, tmp_path):
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert type(again) is type(model) and same(model, again) and not again.training
    assert settings(again) == settings(model)


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
    # A matrix, or where there is none a convolution.
    by_dimensions = {dimensions: set() for dimensions in (2, 4)}
    for parameter in model.parameters():
        by_dimensions.setdefault(parameter.ndim, set()).add(parameter.dtype)
    kinds = by_dimensions[2] or by_dimensions[4]
    assert torch.float8_e4m3fn in kinds
