"""The table of models and samplers, recomputed on the meta device and from the source."""

from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from transformers import (
    ChameleonConfig,
    ChameleonModel,
    Emu3Config,
    GlmImageConfig,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    T5Config,
    T5EncoderModel,
)
from transformers.models.emu3.modeling_emu3 import Emu3TextModel
from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel

from visual_spec import families
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.continuous import mar
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.continuous.mar_checkpoint import KL16
from visual_spec.models.core.protocol import area_of
from visual_spec.models.masked import mage, maskgit
from visual_spec.models.masked.mage import MageTransformer
from visual_spec.models.masked.mage_vq import MageVQModel
from visual_spec.models.masked.maskgct import AcousticNetwork, SemanticNetwork
from visual_spec.models.masked.maskgct_codec import AcousticCodec, SemanticCodec
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_scale import flexvar, infinity, var
from visual_spec.models.next_scale.flexvar import FlexVARTransformer
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_scale.infinity_scales import scales_for
from visual_spec.models.next_scale.scale_budget import cache_bytes
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.models.next_token.llamagen import PRESETS
from visual_spec.models.next_token.llamagen_checkpoint import known_architectures
from visual_spec.pipelines import continuous_image
from visual_spec.prototype.acdit import model as acdit
from visual_spec.prototype.acdit.model import ACDiTTransformer
from visual_spec.prototype.controlar import ControlARTransformer
from visual_spec.prototype.flowar import model as flowar
from visual_spec.prototype.flowar.model import FlowARTransformer
from visual_spec.prototype.students import llamagen as llamagen_student
from visual_spec.prototype.students import var as var_student
from visual_spec.prototype.students.llamagen import LlamaGenStudent
from visual_spec.prototype.students.var import VARStudent
from visual_spec.samplers.registry import CONTINUOUS, DENOISED, DISTILLED, FLOW_SCALES, MASKED, SCALES


@pytest.fixture(scope="module")
def architectures():
    return {a.name: sum(torch.Size(s).numel() for s in a.shapes().values()) for a in known_architectures()}


@pytest.mark.parametrize(
    "model", [m for m in families.models() if m.name.startswith("LlamaGen")], ids=lambda m: m.name
)
def test_sizes_of_llamagen(model, architectures):
    preset, kind, pixels = model.name.removeprefix("LlamaGen-").split()
    assert model.parameters == architectures[f"LlamaGen-{preset}, {kind}-conditional"]
    assert (model.tokens, model.pixels) == ((int(pixels) // 16) ** 2, int(pixels))
    assert model.prefix == {"class": 1, "text": 120}[kind]
    assert model.cached == 2 * PRESETS[preset]["num_layers"] * PRESETS[preset]["dim"]
    assert model.weights == "" or str(model.pixels) in model.weights and f"_{preset}_" in model.weights


def test_every_preset_is_listed():
    assert {
        m.name.split()[0].removeprefix("LlamaGen-") for m in families.models() if "LlamaGen" in m.name
    } == set(PRESETS)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_sizes_of_the_models_of_transformers():
    emu3: Any = Emu3Config().text_config
    glm: Any = GlmImageConfig().text_config
    chameleon = ChameleonConfig(vocabulary_map={"<image>": 8711})
    with torch.device("meta"):
        text = ChameleonModel(chameleon)
        del text.vqmodel
        found = {
            "Chameleon-7B, Anole-7B": (text, chameleon, chameleon.vocab_size),
            "Lumina-mGPT-7B 768": (text, chameleon, chameleon.vocab_size),
            "Emu3-Gen": (Emu3TextModel(emu3), emu3, emu3.vocab_size),
            "GLM-Image, its token stage": (GlmImageTextModel(glm), glm, glm.vision_vocab_size),
        }
    own = (
        "LlamaGen ControlAR DD1 FlexVAR VAR MusicGen MAGNeT Infinity MAR- FlowAR ACDiT- MaskGIT MAGE MaskGCT"
    )
    others = {one.name: one for one in families.models() if not one.name.startswith(tuple(own.split()))}
    assert set(others) == set(found)
    for name, (module, config, head) in found.items():
        assert others[name].parameters == parameters(module) + head * config.hidden_size, name
        width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
        assert others[name].cached == 2 * config.num_hidden_layers * width, name


@pytest.mark.parametrize("channels", [1, 2])
def test_sizes_of_musicgen(channels):
    """The published sizes of the decoder, what lies between the text encoder and it included."""
    for size, layers, width, heads in [
        ("small", 24, 1024, 16),
        ("medium", 48, 1536, 24),
        ("large", 48, 2048, 32),
    ]:
        config = MusicgenDecoderConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            num_attention_heads=heads,
            ffn_dim=4 * width,
            audio_channels=channels,
            num_codebooks=4 * channels,
        )
        with torch.device("meta"):
            decoder, between = MusicgenForCausalLM(config), torch.nn.Linear(768, width)
        name = f"MusicGen-{size}{' stereo' if channels == 2 else ''} 30 s"
        (model,) = (model for model in families.models() if model.name == name)
        assert model.parameters == parameters(decoder) + parameters(between)
        assert model.cached == 2 * layers * width
        assert model.tokens == CodebookPattern.delay([0, 1, 2, 3]).steps(1500)
        # MAGNeT has the same modules.
        same = [m for m in families.models() if m.name.startswith(f"MAGNeT-{size} ")] if channels == 1 else []
        assert all(m.parameters == model.parameters for m in same)
        assert sorted(m.tokens for m in same) == ([500, 1500] if same else [])


@pytest.mark.parametrize("name", ["Infinity-2B", "Infinity-8B", "Infinity-8B 512"])
def test_sizes_of_infinity(name):
    (model,) = (model for model in families.models() if model.name == name)
    scales = scales_for(model.pixels)
    with torch.device("meta"):
        network = InfinityTransformer(**infinity.PRESETS["2b" if "2B" in name else "8b"], scales=scales)
    width, layers = network.config["dim"], network.config["num_layers"]
    assert model.parameters == parameters(network)
    assert (model.tokens, model.uncached) == (sum(map(area_of, scales)), area_of(scales[-1]))
    assert (model.cached, model.calls) == (2 * layers * width, (SCALES,))


SIZES_OF_VAR = [("VAR", VARTransformer, var.PRESETS[name], name) for name in var.PRESETS]
SIZES_OF_VAR += [("FlexVAR", FlexVARTransformer, flexvar.PRESETS[name], name) for name in flexvar.PRESETS]


@pytest.mark.parametrize(("family", "kind", "size", "name"), SIZES_OF_VAR)
def test_sizes_of_var(family, kind, size, name):
    with torch.device("meta"):
        network = kind(**size)
    (model,) = (m for m in families.models() if m.name.split()[0].rstrip(",") == f"{family}-{name}")
    assert model.parameters == parameters(network)
    assert (model.tokens, model.prefix) == (network.offsets[-1], 0)
    assert var.SCALES[model.pixels] == network.scales and model.calls == (SCALES,)
    # Weights and the cache that decoding allocates.
    cache = cache_bytes(dict(network.config), None, 3, True, torch.bfloat16).held
    assert model.memory(2, batch_size=3) == 2 * model.parameters + cache


def test_size_of_controlar():
    """LlamaGen-XL with DINOv2 base: 12 layers, heads of 64."""
    captions: dict[str, Any] = dict(num_classes=None, caption_dim=2048, prefix_length=120, grid_size=32)
    dino = dict(hidden_size=768, num_hidden_layers=12, num_attention_heads=12, image_size=518, patch_size=14)
    with torch.device("meta"):
        network = ControlARTransformer({**PRESETS["XL"], **captions}, dino)
    (model,) = (m for m in families.models() if m.name == "ControlAR text 512")
    assert (model.parameters, model.tokens) == (parameters(network), network.grid.num_tokens)
    assert (model.prefix, model.cached) == (network.prefix_length, 2 * 36 * 1280)


@pytest.mark.parametrize("name", llamagen_student.STUDENTS)
def test_sizes_of_students(name):
    with torch.device("meta"):
        network = LlamaGenStudent(**llamagen_student.STUDENTS[name])  # pyright: ignore[reportArgumentType]
    (model,) = (m for m in families.models() if m.name.startswith(f"DD1 student {name} "))
    assert model.parameters == parameters(network)
    assert (model.tokens, model.prefix) == (network.grid.num_tokens, 1)
    assert (model.cached, model.calls) == (0, (DISTILLED,))


@pytest.mark.parametrize("name", var_student.STUDENTS)
def test_sizes_of_students_of_var(name):
    with torch.device("meta"):
        network = VARStudent(**var_student.STUDENTS[name])
    (model,) = (m for m in families.models() if m.name.startswith(f"DD1 student VAR-{name} "))
    assert model.parameters == parameters(network)
    assert (model.tokens, model.calls) == (network.grid.num_tokens, (DISTILLED,))


@pytest.mark.parametrize("name", mar.PRESETS)
def test_sizes_of_mar(name):
    with torch.device("meta"):
        network = MARTransformer(**mar.PRESETS[name])  # pyright: ignore[reportArgumentType]
    (model,) = (model for model in families.models() if model.name.startswith(f"MAR-{name} "))
    assert model.parameters == parameters(network)
    assert (model.tokens, model.prefix) == (network.grid.num_tokens, network.config["buffer_size"])
    assert (model.cached, model.calls) == (0, (CONTINUOUS,))


@pytest.mark.parametrize("name", flowar.PRESETS)
def test_sizes_of_flowar(name):
    with torch.device("meta"):
        network = FlowARTransformer(**flowar.PRESETS[name])
        state = network.prefill(None, batch_size=1, guided=False)
    (model,) = (model for model in families.models() if model.name.startswith(f"FlowAR-{name} "))
    assert (model.parameters, model.weights) == (parameters(network), f"FlowAR-{name}.pth")
    assert (model.tokens, model.uncached, model.calls) == (network.offsets[-1], 256, (FLOW_SCALES,))
    held = (model.tokens - model.uncached) * model.cached
    assert held == state.cache.keys.numel() + state.cache.values.numel()


@pytest.mark.parametrize("name", ["XL", "H"])
def test_sizes_of_acdit(name):
    with torch.device("meta"):
        network = ACDiTTransformer(**acdit.PRESETS[name])  # pyright: ignore[reportArgumentType]
    (model,) = (model for model in families.models() if model.name.startswith(f"ACDiT-{name} "))
    assert model.parameters == parameters(network)
    assert (model.tokens, model.prefix, model.calls) == (network.grid.num_tokens, 0, (DENOISED,))
    with torch.device("meta"):
        tiny = ACDiTTransformer(grid_size=4, block_size=4, dim=64, num_layers=3, num_heads=1)
    state = tiny.to_empty(device="cpu").prefill(None, batch_size=2, guided=True, window=1)
    assert state.keys.numel() + state.values.numel() == 4 * 16 * 2 * 3 * 64  # rows x slots x `cached`


@pytest.mark.parametrize(
    ("made", "size", "sampler", "guidance"),
    [  # of MAR with 256 calls
        (MARTransformer, mar.PRESETS["B"], "ContinuousSampler", 2.9),
        (MARTransformer, mar.PRESETS["L"], "ContinuousSampler", 3.0),
        (MARTransformer, mar.PRESETS["H"], "ContinuousSampler", 3.2),
        (FlowARTransformer, flowar.PRESETS["S"], "FlowScaleSampler", 4.3),
        (FlowARTransformer, flowar.PRESETS["L"], "FlowScaleSampler", 2.4),
        (FlowARTransformer, flowar.PRESETS["H"], "FlowScaleSampler", 2.4),
        (ACDiTTransformer, acdit.PRESETS["XL"], "BlockDiffusionSampler", 1.5),
        (ACDiTTransformer, acdit.PRESETS["H"], "BlockDiffusionSampler", 1.5),
    ],
)
def test_a_model_starts_with_the_published_settings_of_its_size(made, size, sampler, guidance):
    chosen: Any
    with torch.device("meta"):
        chosen, scale = continuous_image._published(made(**size))
    assert (type(chosen).__name__, scale) == (sampler, guidance)
    if sampler == "FlowScaleSampler":
        largest = size == flowar.PRESETS["H"]
        assert (chosen.config["levels"], chosen.config["guided_from"]) == (
            (50, 0.7) if largest else (25, 0.9)
        )


@pytest.mark.parametrize(
    "model", [m for m in families.models() if m.name.startswith(("MaskGIT", "MAGE"))], ids=lambda m: m.name
)
def test_sizes_of_masked_models(model):
    family, size = model.name.split()[0].split("-")
    with torch.device("meta"):
        if family == "MAGE":
            network: Any = MageTransformer(**mage.PRESETS[size])
        else:
            preset = {"T": "tiny", "S": "small", "B": "base", "L": "large"}[size]
            network = MaskedImageTransformer(**maskgit.PRESETS[preset], grid_size=model.pixels // 16)
            assert model.weights == f"ImageNet_{model.pixels}_{preset}.pth"
    assert (model.parameters, model.tokens) == (parameters(network), network.grid.num_tokens)
    assert model.calls == (MASKED,) and model.cached == 0


def test_sizes_of_maskgct():
    (model,) = (model for model in families.models() if model.name.startswith("MaskGCT"))
    with torch.device("meta"):
        networks = SemanticNetwork(), AcousticNetwork(codebooks=1), AcousticNetwork()
    assert model.parameters == sum(map(parameters, networks))
    assert (model.calls, model.tokens) == ((MASKED,), 10 * 50)


def test_sizes_of_what_comes_on_top(architectures):
    sizes: dict[str, Any] = dict(
        vocab_size=32128, d_model=2048, d_kv=64, d_ff=5120, num_layers=24, num_heads=32,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    base: dict[str, Any] = dict(
        vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12
    )
    with torch.device("meta"):
        encoder, small = T5EncoderModel(T5Config(**sizes)), T5EncoderModel(T5Config(**base))
        vq, mage_vq, kl16 = MultiscaleVQModel(), MageVQModel(), AutoencoderKL(**KL16)
        speech = AcousticCodec(), SemanticCodec()
    assert families.EXTRAS == {
        "VQ-16 tokenizer": architectures["LlamaGen's tokenizer vq-16"],
        "VQ-8 tokenizer": architectures["LlamaGen's tokenizer vq-8"],
        "VAR tokenizer": parameters(vq),
        "KL-16 tokenizer": parameters(kl16),
        "flan-t5-xl encoder": parameters(encoder),
        "t5-base encoder": parameters(small),
        "MAGE tokenizer": parameters(mage_vq),
        "MaskGCT codecs": sum(map(parameters, speech)),
    }


def test_memory_is_weights_and_cache():
    model = families.KnownModel("m", "", 32, tokens=4, prefix=2, parameters=100, cached=10)
    assert model.memory(4) == (100 + 2 * 6 * 10) * 4
    assert model.memory(2, batch_size=3, guided=False) == (100 + 3 * 6 * 10) * 2


def test_every_way_of_verifying_is_explained():
    assert {model.verified for model in families.models()} <= set(families.VERIFIED)
