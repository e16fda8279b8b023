"""Official sizes: counted on the meta device, against the catalogue, sums by hand, and what small models allocate."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.sizes import models
from benchmarks.sizes.models import official_model
from tests.helpers.official_sizes import tiny
from tests.helpers.refusals import refuses
from tests.models.next_token import tiny_transformers
from visual_spec import families

CPU = torch.device("cpu")


def known(name):
    (found,) = (model for model in families.models() if model.name == name)
    return found


def parts(official):
    """Parameters by the name of the part."""
    counts: dict[str, int] = {}
    for name, parameter in official.module.named_parameters():
        part = next(
            (key for key in ("vqmodel", "vision_model", "generation_", "aligner") if key in name), "decoder"
        )
        counts[part] = counts.get(part, 0) + parameter.numel()
    return counts


# -- counted on the meta device ----------------------------------------------------------------------------------------


def test_lumina_and_emu3_are_those_of_the_catalogue():
    for name, entry in (("lumina-mgpt-7b", "Lumina-mGPT-7B 768"), ("emu3-8b", "Emu3-Gen")):
        official, model = official_model(name), known(entry)
        counts = parts(official)
        assert counts["decoder"] == model.parameters and set(counts) == {"decoder", "vqmodel"}
        assert official.parameters == sum(counts.values())
        told = official.length, official.image_size, official.cached
        assert told == (model.tokens, model.pixels, model.cached)
        assert next(official.module.parameters()).is_meta
        # Text, and what a Lumina-mGPT puts between it and the picture: start, height and width.
        assert official.prefix == model.prefix + (3 if name.startswith("lumina") else 0)
        module: Any = official.module
        assert official.text_vocab == module.config.get_text_config().vocab_size
        assert official.model.vocab_size == {"lumina-mgpt-7b": 8192, "emu3-8b": 32768}[name]


def test_janus_pro_7b_is_the_sum_of_its_parts():
    official = official_model("janus-pro-7b")
    counts = parts(official)
    layer = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
    assert counts["decoder"] == 2 * 102400 * 4096 + 30 * layer + 4096  # embedding and head of the text too
    aligner = 8 * 4096 + 4096 + 4096**2 + 4096
    head = 4096**2 + 4096 + 4096 * 16384 + 16384
    assert counts["generation_"] == 16384 * 8 + aligner + head
    assert official.model.grid.num_tokens == official.length == 576
    assert official.cached == 2 * 30 * 4096 and official.model.vocab_size == 16384
    # The released file has 14.84 GB in two bytes a number: these, and the pooling of the picture encoder.
    assert 2 * official.parameters == pytest.approx(14.84e9, rel=2e-3)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("llamagen-xxl", "LlamaGen-XXL class 384"),
        ("llamagen-3b", "LlamaGen-3B class 384"),
        ("llamagen-xl-t2i", "LlamaGen-XL text 512"),
    ],
)
def test_llamagen_is_that_of_the_catalogue(name, entry):
    official, model = official_model(name), known(entry)
    assert official.parameters == model.parameters
    told = official.prefix, official.length, official.image_size, official.cached
    assert told == (model.prefix, model.tokens, model.pixels, model.cached)
    needed = official.needed_bytes(dtype=torch.bfloat16, batch_size=3, window=1, guided=True)
    held = model.memory(2, batch_size=3)
    # And the place after the picture.
    assert needed["weights"] + needed["cache"] == held + 2 * 6 * model.cached


# -- what a small one allocates, and does ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["janus", "chameleon", "emu3"])
@pytest.mark.parametrize(("window", "guided"), [(1, True), (6, False)])
def test_the_cache_is_as_large_as_was_said(family, window, guided):
    official = tiny(family)
    needed = official.needed_bytes(dtype=torch.float32, batch_size=2, window=window, guided=guided)
    state = official.model.prefill(official.condition(2), batch_size=2, guided=guided, window=window)
    assert needed["cache"] == sum(layer.keys.nbytes + layer.values.nbytes for layer in state.cache.layers)
    assert needed["weights"] == sum(parameter.nbytes for parameter in official.module.parameters())
    assert needed["logits"] >= 4 * len(state.logits) * window * official.model.vocab_size
    baseline = official.needed_bytes(
        dtype=torch.float32, batch_size=2, window=1, guided=guided, baseline=True
    )
    assert baseline["logits"] >= 4 * len(state.logits) * official.text_vocab


@pytest.mark.parametrize("family", ["janus", "chameleon", "emu3"])
def test_bytes_of_a_call_are_the_weights_it_reads_and_half_the_cache(family):
    official = tiny(family)
    weights, cache = official.call_bytes(batch_size=3, guided=True)
    not_read = ("embed_tokens", "lm_head", "generation_embeddings")
    elsewhere = (*not_read, "vqmodel", "vision_model", "model.aligner")
    read = {
        name: parameter.numel()
        for name, parameter in official.module.named_parameters()
        if not any(part in name for part in elsewhere)
    }
    apart = 0 if family == "janus" else 24 * 32  # the image rows of the head
    assert weights == 4 * (sum(read.values()) + apart)
    prefix = 64 + (3 if family == "chameleon" else 0)
    length = {"janus": 16, "chameleon": 4 * 5, "emu3": 3 * 6}[family]
    # Rows, places, layers, keys and values, channels.
    assert cache == 4 * 6 * (prefix + length // 2) * 2 * 2 * 16


@pytest.mark.parametrize("family", ["janus", "emu3"])
def test_operations_of_a_call_are_those_that_pytorch_counts(family):
    official = tiny(family)
    official.model.decoder.set_attn_implementation("eager")  # products that are counted
    condition = official.condition(2)
    state = official.model.prefill(condition, batch_size=2, guided=True, window=3)
    weights, _ = official.call_bytes(batch_size=2, guided=True)
    slots = torch.arange(3).expand(2, -1) + 1
    with FlopCounterMode(display=False) as counter:
        official.model(state, torch.zeros(2, 3, dtype=torch.long), slots)
    fed, layers, width = 4 * 3, 2, 32
    wanted = official.call_flops(weights, batch_size=2, guided=True, window=3)
    # The call at hand reads the prompt and four places of the picture, the formula half of the picture.
    read = state.prompt_mask.shape[1] + 4
    wanted -= 4 * fed * layers * width * (official.prefix + official.length // 2 - read)
    # Norms and biases are no products; they are a small part of the weights.
    parts = ("model.language_model", "model.generation_", "model.text_model")
    named = official.module.named_parameters()
    small = sum(p.numel() for name, p in named if p.ndim == 1 and name.startswith(parts))
    assert counter.get_total_flops() == wanted - 2 * fed * small


def test_weights_are_random_and_rotary_tables_are_not():
    official = models.fill(tiny("emu3"), dtype=torch.bfloat16, device=CPU, seed=1)
    wanted = tiny_transformers.emu3().model.text_model.rotary_emb.inv_freq
    module: Any = official.module
    found = module.model.text_model.rotary_emb
    assert found.inv_freq.dtype == torch.float32 and found.inv_freq.equal(wanted.float())
    assert found.original_inv_freq.equal(wanted.float())
    again = models.fill(tiny("emu3"), dtype=torch.bfloat16, device=CPU, seed=1)
    for one, other in zip(official.module.parameters(), again.module.parameters(), strict=True):
        assert one.dtype == torch.bfloat16 and one.isfinite().all() and one.equal(other)
    assert module.model.text_model.layers[0].mlp.up_proj.weight.float().std() < 0.03


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("janus-pro-1b", None, "janus-pro-7b, lumina-mgpt-7b, emu3"),
        ("janus-pro-7b", 512, "Janus-Pro.*384"),
        ("lumina-mgpt-7b", 500, "--image-size 500.*32"),
        ("emu3-8b", 4, "multiple.*8"),
    ],
)
def test_sizes_that_are_not_are_refused(name, size, message):
    refuses(ValueError, message, official_model, name, size)
