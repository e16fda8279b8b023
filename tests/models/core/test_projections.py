"""Joined projections: the outputs of separate ones, in fewer products, without a second copy, under the same keys."""

import copy
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    JanusForConditionalGeneration,
    LlamaConfig,
    LlamaModel,
    MusicgenDecoderConfig,
    Qwen2Config,
    Qwen2Model,
    Qwen3Config,
    Qwen3Model,
)
from transformers.models.musicgen.modeling_musicgen import MusicgenModel

from tests.helpers.cached_decoders import case, text
from tests.helpers.llamagen import make, text_condition
from tests.helpers.refusals import refuses
from tests.helpers.tiny import tiny_transformer
from tests.models.next_token import tiny_transformers as tiny
from visual_spec.models.core.projections import JoinedProjections, fuse_projections
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NEAR = 1e-10  # transformers' norms go through float32, which could turn a rounding error of float64 into more


class Products(TorchDispatchMode):
    """Counts matrix products with weights, by the number of rows of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[int] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.rows[args[-1].shape[1]] += 1
        return func(*args, **(kwargs or {}))


def counted(call: Callable[[], Tensor]) -> tuple[Tensor, Counter[int]]:
    with Products() as products, torch.no_grad():
        return call(), products.rows


# -------------------------------------------------------------------------------------------------------- outputs


def run(model: Any, condition: Any, tokens: Tensor, guided: bool) -> Tensor:
    state = model.prefill(condition, batch_size=len(tokens), guided=guided, window=4)
    slots = torch.arange(4).expand(len(tokens), -1)
    return torch.cat([state.logits[:, None], model(state, tokens[:, :4], slots)], 1)


@pytest.mark.parametrize("guided", [False, True])
def test_llamagen_gives_the_same_logits(guided):
    model, condition = make(), text_condition(3, [2, 5, 1])
    tokens = torch.randint(0, 40, (3, 16), generator=torch.Generator().manual_seed(1))
    expected, before = counted(lambda: run(model, condition, tokens, guided))
    expected_loss = model.teacher_forced(tokens, condition)
    fuse_projections(model)
    found, after = counted(lambda: run(model, condition, tokens, guided))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(model.teacher_forced(tokens, condition), expected_loss, rtol=0, atol=1e-13)
    # Calls * layers (* projections).
    assert before[256] == 2 * 2 * 2 and after[256] == 0 and after[512] == 2 * 2


@pytest.mark.parametrize("name", ["janus", "chameleon", "lumina", "emu3", "glm small"])
def test_adapters_give_the_same_logits(name):
    """Keys and values are half as wide as the queries in all of them; Chameleon has norms after both."""
    cached, condition = case(name)
    model = copy.deepcopy(cached)
    tokens, guided = text(model), name != "glm small"
    expected, before = counted(lambda: run(model, condition, tokens, guided))
    fuse_projections(model.decoder)
    found, after = counted(lambda: run(model, condition, tokens, guided))
    assert (found - expected).abs().max() < NEAR
    gone = 2 if name == "glm small" else 3  # GLM's gated layer is one product as it is
    assert before.total() - after.total() == 2 * 2 * gone
    assert after[32 + 16 + 16] >= 4 and not any(layer._held for layer in joined_in(model.decoder))


def joined_in(model: nn.Module) -> list[JoinedProjections]:
    return [layer for layer in model.modules() if isinstance(layer, JoinedProjections)]


FAMILIES: dict[str, tuple[Any, Any, int]] = {
    "no bias": (LlamaModel, LlamaConfig(vocab_size=24, **tiny.DECODER), 4),
    "biases": (LlamaModel, LlamaConfig(vocab_size=24, attention_bias=True, mlp_bias=True, **tiny.DECODER), 4),
    "biases of attention": (Qwen2Model, Qwen2Config(vocab_size=24, **tiny.DECODER), 4),
    "norms": (Qwen3Model, Qwen3Config(vocab_size=24, head_dim=8, **tiny.DECODER), 4),
    # Its attention to the caption stays as it is.
    "attention to others": (
        MusicgenModel,
        MusicgenDecoderConfig(
            vocab_size=24, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4
        ),
        2,
    ),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_biases_norms_and_other_attention(name):
    kind, config, joined = FAMILIES[name]
    model = tiny._ready(kind(config))
    inputs: dict[str, Any] = dict(input_ids=torch.randint(0, 24, (2, 7)))
    if name == "attention to others":
        inputs = dict(input_ids=torch.randint(0, 24, (2 * 4, 7)))
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 32, dtype=torch.float64)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        fuse_projections(model)
        found = model(**inputs).last_hidden_state
    assert len(joined_in(model)) == joined
    assert (found - expected).abs().max() < NEAR and expected.std() > 0.1


def test_any_order_and_input_gives_the_right_part():
    separate: Any = make().layers[0].feed_forward
    layer = copy.deepcopy(separate)
    holder = nn.ModuleDict({"feed_forward": layer})
    fuse_projections(holder)
    one, other = torch.randn(2, 3, 32, dtype=torch.float64).unbind()
    calls = [
        ("w3", one),
        ("w1", one),
        ("w1", other),
        ("w3", one),
        ("w3", other),
        ("w1", other),
        ("w3", other),
    ]
    for name, x in calls:
        found, expected = getattr(layer, name)(x), getattr(separate, name)(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    x = torch.randn(2, 32, dtype=torch.float64)
    for _ in range(2):  # the same tensor with other numbers in it
        torch.testing.assert_close(layer(x), separate(x), rtol=0, atol=1e-13)
        x.normal_()


def test_gradients_are_those_of_the_separate_matrices():
    model: Any = make()
    condition = text_condition(2, [3, 5])
    tokens = torch.randint(0, 40, (2, 16))
    model.teacher_forced(tokens, condition).square().mean().backward()
    expected = [
        torch.cat([b.feed_forward.w1.weight.grad, b.feed_forward.w3.weight.grad]) for b in model.layers
    ]
    model.zero_grad()
    fuse_projections(model)
    model.teacher_forced(tokens, condition).square().mean().backward()
    for block, wanted in zip(model.layers, expected, strict=True):
        torch.testing.assert_close(block.feed_forward.w1.weight.grad, wanted, rtol=1e-9, atol=1e-13)


def test_compiles_without_a_break():
    model: Any = make()
    fuse_projections(model)
    layer, x = model.layers[0].feed_forward, torch.randn(2, 3, 32, dtype=torch.float64)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-13)
    assert not any(part._held for part in joined_in(model))


def test_samplers_stay_identical():
    model = tiny_transformer(num_classes=5, caption_dim=None, prefix_length=1)
    fuse_projections(model)
    options: dict[str, Any] = dict(law=TokenLaw(guidance_scale=2.0, top_k=8), batch_size=3)
    found, expected = (
        sampler(model, torch.tensor([1, 4, 0]), generator=torch.Generator().manual_seed(0), **options).tokens
        for sampler in (SpeculativeJacobiSampler(6), AutoregressiveSampler())
    )
    assert torch.equal(found, expected)


# ----------------------------------------------------------------------------------------------- weights and files


def test_no_weight_is_held_twice():
    model = tiny.janus()
    numbers = sum(parameter.numel() for parameter in model.parameters())
    decoder = model.model.language_model
    old = [weakref.ref(layer.self_attn.k_proj.weight) for layer in decoder.layers]
    old += [weakref.ref(layer.mlp.gate_proj.weight) for layer in decoder.layers]
    fuse_projections(decoder)
    assert not any(weight() is not None for weight in old)
    assert sum(parameter.numel() for parameter in model.parameters()) == numbers
    moved = copy.deepcopy(model).to(torch.float32)
    assert {parameter.dtype for parameter in moved.parameters()} == {torch.float32}
    layers = joined_in(moved), joined_in(model)
    assert len(layers[0]) == 4 and not {id(layer) for layer in layers[0]} & {id(layer) for layer in layers[1]}
    for layer in moved.model.language_model.layers:
        assert layer.self_attn.k_proj._joined[0] is layer.self_attn.q_proj


@pytest.mark.parametrize("build", [make, tiny.janus, tiny.glm_image])
def test_state_dicts_keep_the_keys_of_separate_projections(build):
    model = build()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fuse_projections(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())
    for value in before.values():  # other numbers, to be read
        if value.is_floating_point():
            value.mul_(2)
    fresh = build()
    fresh.load_state_dict(before)
    model.load_state_dict(before)
    fuse_projections(fresh)
    for (name, one), (_, other) in zip(model.named_parameters(), fresh.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_key_that_is_missing_is_missed():
    model = make()
    fuse_projections(model)
    state = model.state_dict()
    del state["layers.1.feed_forward.w3.weight"]
    refuses(RuntimeError, "layers.1.feed_forward.w1", model.load_state_dict, state)


@pytest.mark.parametrize("build", [tiny_transformer, tiny.janus])
def test_files_are_those_of_the_model_as_it_was(build, tmp_path):
    model = build()
    model.save_pretrained(tmp_path / "separate")
    fuse_projections(model)
    model.save_pretrained(tmp_path / "joined")
    kind = LlamaGenTransformer if build is tiny_transformer else JanusForConditionalGeneration
    states = [kind.from_pretrained(tmp_path / name).state_dict() for name in ("separate", "joined")]
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(states[1][key], value) for key, value in states[0].items())
    files = sorted((tmp_path / "joined").iterdir())
    assert [file.name for file in files] == sorted(file.name for file in (tmp_path / "separate").iterdir())
    for file in files:
        other = tmp_path / "separate" / file.name
        assert file.suffix != ".safetensors" or file.stat().st_size == other.stat().st_size


# ------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_joined_is_refused_and_left_as_it_was():
    def refused(message: str, change: Any) -> None:
        model = tiny.janus().model.language_model
        change(model.layers[1])
        keys = list(dict(model.named_parameters()))
        refuses(ValueError, message, fuse_projections, model)
        assert list(dict(model.named_parameters())) == keys and not joined_in(model)

    class Adapted(nn.Linear):
        pass

    def adapt(layer: Any) -> None:
        layer.mlp.up_proj = Adapted(32, 64, bias=False)

    def bias(layer: Any) -> None:
        layer.self_attn.k_proj = nn.Linear(32, 16, bias=True).double()

    refused(r"layers\.1.*up_proj.*Adapted.*Parameter", adapt)
    refused(r"layers\.1\.self_attn\.q_proj, k_proj, v_proj.*False, True, False", bias)
    refused(r"torch\.float64, torch\.float32", lambda layer: layer.mlp.up_proj.float())
    refused("True, False", lambda layer: layer.mlp.up_proj.requires_grad_(False))
    refused(
        "gate_proj.*Linear.*Parameter",
        lambda layer: layer.mlp.gate_proj.register_forward_hook(lambda *_: None),
    )
    model = make()
    fuse_projections(model)
    refuses(ValueError, "LlamaGenTransformer", fuse_projections, model)
    refuses(ValueError, "Linear", fuse_projections, nn.Linear(3, 3))


def test_one_order_is_for_llamagen_also_where_projections_are_joined_already():
    model: Any = tiny_transformer()
    fuse_projections(model)
    assert not model.one_order
    fuse_projections(model, kernel=True)
    layer = model.layers[0]
    assert model.one_order and layer.one_order and layer.attention.one_order
    with pytest.raises(ValueError, match="kernel=True is for LlamaGen, and Linear"):
        fuse_projections(nn.Linear(2, 2), kernel=True)
