"""The table of models and samplers, recomputed on the meta device and from the source."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.minimax_music3_vocoder import MiniMaxMusic3Vocoder
from diffusers.models.condition_embedders.condition_embedder_minimax_music3 import (
    MiniMaxMusic3ConditionEncoder,
)
from diffusers.models.transformers.minimax_music3_rvq_depth_decoder import MiniMaxMusic3RVQDepthDecoder
from diffusers.models.transformers.transformer_minimax_music3 import MiniMaxMusic3Transformer1DModel
from diffusers.modular_pipelines.minimax_music3.modular_blocks_minimax_music3 import (
    MiniMaxMusic3SemanticGenerationStep,
)
from diffusers.modular_pipelines.minimax_music3.modular_pipeline import MiniMaxMusic3ModularPipeline
from transformers import (
    ChameleonConfig,
    ChameleonModel,
    CsmConfig,
    CsmForConditionalGeneration,
    Emu3Config,
    GlmImageConfig,
    JanusConfig,
    JanusForConditionalGeneration,
    MimiConfig,
    MimiModel,
    MoshiConfig,
    MoshiForConditionalGeneration,
    MusicgenDecoderConfig,
    MusicgenForCausalLM,
    PocketTTSConfig,
    PocketTTSForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    VibeVoiceConfig,
    VibeVoiceForConditionalGeneration,
)
from transformers.models.emu3.modeling_emu3 import Emu3TextModel
from transformers.models.glm_image.modeling_glm_image import GlmImageTextModel
from transformers.models.pocket_tts_audio_tokenizer.configuration_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerConfig,
)
from transformers.models.pocket_tts_audio_tokenizer.modeling_pocket_tts_audio_tokenizer import (
    PocketTTSAudioTokenizerModel,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from tests.helpers.nextstep import FlowMatchingHead
from visual_spec import families
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.continuous import bitdance, mar
from visual_spec.models.continuous.binary_autoencoder import BinaryAutoencoder
from visual_spec.models.continuous.bitdance import BitDanceTransformer
from visual_spec.models.continuous.bitdance_text import BitDanceTextTransformer
from visual_spec.models.continuous.mar import MARTransformer
from visual_spec.models.continuous.mar_checkpoint import KL16
from visual_spec.models.core.protocol import area_of
from visual_spec.models.masked import mage, maskgit
from visual_spec.models.masked.dimoo import DimooTransformer
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
from visual_spec.models.next_token import arpg, lpd
from visual_spec.models.next_token.arpg import ARPGTransformer
from visual_spec.models.next_token.llamagen import PRESETS, LlamaGenTransformer
from visual_spec.models.next_token.llamagen_checkpoint import (
    CAPTION_DIM,
    CAPTION_LENGTH,
    NUM_CLASSES,
    known_architectures,
    transformer_architecture,
)
from visual_spec.models.next_token.lpd import LPDTransformer
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


@pytest.mark.parametrize(
    "model",
    [m for m in families.models() if m.name.startswith(("NAR-", "PAR-", "RandAR-"))],
    ids=lambda m: m.name,
)
def test_sizes_of_models_of_other_orders(model):
    name, kind, pixels = model.name.split()
    family, preset, *regions = name.split("-")
    changes: dict[str, Any] = {
        "NAR": dict(order="nar", branch_layers=1),
        "PAR": dict(order="par" + "".join(regions).removesuffix("x")),
        "RandAR": dict(order="any"),
    }[family]
    if kind == "class":
        changes |= dict(num_classes=NUM_CLASSES)
    else:
        changes |= dict(num_classes=None, caption_dim=CAPTION_DIM, prefix_length=CAPTION_LENGTH)
    with torch.device("meta"):
        network: Any = LlamaGenTransformer(
            **transformer_architecture(preset, **changes).config, grid_size=int(pixels) // 16
        )
    assert model.parameters == parameters(network)
    assert (model.tokens, model.pixels) == (network.grid.num_tokens, int(pixels))
    assert model.prefix == network.config["prefix_length"] + network.learned_tokens
    places = (network.num_places(0) - network.learned_tokens) // model.tokens
    assert model.cached == 2 * places * len(network.layers) * network.config["dim"]


@pytest.mark.parametrize(
    "model", [m for m in families.models() if m.name.startswith(("ARPG-", "LPD-"))], ids=lambda m: m.name
)
def test_sizes_of_models_of_position_queries(model):
    name, _, pixels = model.name.split()
    family, preset = name.split("-")
    kind, presets = {"ARPG": (ARPGTransformer, arpg.PRESETS), "LPD": (LPDTransformer, lpd.PRESETS)}[family]
    with torch.device("meta"):
        network: Any = kind(**presets[preset], grid_size=int(pixels) // 16)
    assert (model.parameters, model.tokens) == (parameters(network), network.grid.num_tokens)
    depth = network.config["num_layers"]
    # Of an ARPG one more holds what queries attend to.
    layers = {"ARPG": depth // 2 + 1, "LPD": depth}[family]
    assert (model.prefix, model.cached) == (1, 2 * layers * network.config["dim"])


def head_of(config: Any, size: int) -> torch.nn.Module:
    return torch.nn.Linear(config.hidden_size, size, bias=False)


def pictures() -> dict[str, tuple[list[torch.nn.Module], Any]]:
    """What draws pictures: {name: (its modules, the configuration of its language model)}."""
    emu3: Any = Emu3Config().text_config
    glm: Any = GlmImageConfig().text_config
    chameleon = ChameleonConfig(vocabulary_map={"<image>": 8711})
    text = ChameleonModel(chameleon)
    del text.vqmodel
    of_chameleon = [text, head_of(chameleon, chameleon.vocab_size)], chameleon
    found: dict[str, Any] = {
        "Chameleon-7B, Anole-7B": of_chameleon,
        "Lumina-mGPT-7B 768": of_chameleon,
        "Emu3-Gen": ([Emu3TextModel(emu3), head_of(emu3, emu3.vocab_size)], emu3),
        "GLM-Image, its token stage": ([GlmImageTextModel(glm), head_of(glm, glm.vision_vocab_size)], glm),
    }
    for size, width, inner, layers in [("1B", 2048, 5632, 24), ("7B", 4096, 11008, 30)]:
        sizes = dict(hidden_size=width, intermediate_size=inner, num_hidden_layers=layers, vocab_size=102400)
        config = JanusConfig(
            text_config=dict(model_type="llama", num_attention_heads=width // 128, **sizes),
            vision_config=dict(projection_dim=width),
            vq_config=dict(projection_dim=width, image_token_embed_dim=width, num_embeddings=16384),
            tie_word_embeddings=False,
        )
        janus: Any = JanusForConditionalGeneration(config)
        del janus.model.vision_model, janus.model.aligner, janus.model.vqmodel
        found[f"Janus-Pro-{size}"] = [janus], config.text_config
    qwen = qwen2(152064, 5120, 13824, 48, 40, 8)  # Qwen2.5-14B
    between = [torch.nn.Linear(inputs, 5120) for inputs in (16 * 2 * 2, 5120)]
    head = FlowMatchingHead(16 * 2 * 2, 5120, 1536, 12)
    found["NextStep-1, NextStep-1.1 512"] = [Qwen2ForCausalLM(qwen), *between, head], qwen
    return found


def qwen2(
    vocabulary: int, width: int, inner: int, layers: int, heads: int, pairs: int, **more: Any
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=pairs,
        **more,
    )


def sounds() -> dict[str, tuple[list[torch.nn.Module], Any]]:
    """What speaks and plays, likewise, without its codecs."""
    csm: Any = CsmForConditionalGeneration(CsmConfig())
    moshi: Any = MoshiForConditionalGeneration(MoshiConfig(audio_vocab_size=2048))
    del csm.codec_model, moshi.audio_encoder
    read: dict[str, Any] = dict(spatial_merge_size=2)  # no field of its own
    talker: Any = Qwen3OmniMoeTalkerConfig(
        num_code_groups=16,
        code_predictor_config=dict(num_code_groups=16),
        text_config=dict(head_dim=128, shared_expert_intermediate_size=768),
        **read,
    )
    found: dict[str, Any] = {
        "CSM-1B 30 s": ([csm], csm.config),
        "Moshiko, Moshika 30 s": ([moshi], moshi.config),
        "Qwen3-Omni-30B, talker 30 s": (
            [Qwen3OmniMoeTalkerForConditionalGeneration(talker)],
            talker.text_config,
        ),
    }
    for size, text in [
        ("1.5B", qwen2(151936, 1536, 8960, 28, 12, 2, tie_word_embeddings=True)),
        ("7B (Large)", qwen2(152064, 3584, 18944, 28, 28, 4, tie_word_embeddings=False)),
    ]:
        head = dict(intermediate_size=3 * text.hidden_size)
        vibevoice: Any = VibeVoiceForConditionalGeneration(
            VibeVoiceConfig(text_config=text, diffusion_head_config=head)
        )
        del vibevoice.model.audio_tower, vibevoice.model.semantic_tokenizer_encoder
        found[f"VibeVoice-{size} 30 s"] = [vibevoice], text
    for name, layers in [("PocketTTS 30 s", 6), ("PocketTTS 24 layers 30 s", 24)]:
        pocket = PocketTTSConfig(num_hidden_layers=layers)
        found[name] = [PocketTTSForConditionalGeneration(pocket)], pocket
    qwen = Qwen3Config(
        vocab_size=200000,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    found["MiniMax-Music 3 30 s"] = [Qwen3ForCausalLM(qwen), MiniMaxMusic3RVQDepthDecoder()], qwen
    return found


def test_sizes_of_models_of_other_libraries():
    with torch.device("meta"):
        found = pictures() | sounds()
    others = {
        one.name: one
        for one in families.models()
        if one.verified in ("transformers", "own code") and not one.name.startswith("MusicGen")
    }
    assert set(others) == set(found)
    for name, (modules, config) in found.items():
        assert others[name].parameters == sum(map(parameters, modules)), name
        each = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        assert others[name].cached == 2 * config.num_hidden_layers * config.num_key_value_heads * each, name


def test_frames_of_speech_and_music():
    """Of 30 seconds, by the rates of the codecs."""
    downsampling: Any = VibeVoiceConfig().audio_config
    rates = {
        ("CSM", "Moshiko", "Qwen3"): MimiConfig().frame_rate,
        ("VibeVoice",): 24000 / math.prod(downsampling.downsampling_ratios),
        ("PocketTTS",): PocketTTSConfig().frame_rate,
        ("MiniMax",): MiniMaxMusic3ModularPipeline(MiniMaxMusic3SemanticGenerationStep()).frame_rate,
    }
    for names, rate in rates.items():
        models = [model for model in families.models() if model.name.startswith(names)]
        assert models and all(model.tokens == 30 * rate for model in models)


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


BITDANCE = [m for m in families.models() if m.name.startswith("BitDance-")]


@pytest.mark.parametrize("tokens", [16, 64])
def test_sizes_of_bitdance_of_texts(tokens):
    """Qwen3-14B with ids for 256 sizes and the queries after its 151,669."""
    sizes = dict(hidden_size=5120, intermediate_size=17408, num_hidden_layers=40, num_attention_heads=40)
    sizes |= dict(vocab_size=151669 + 256 + tokens - 1, num_key_value_heads=8, head_dim=128)
    with torch.device("meta"):
        network = BitDanceTextTransformer(sizes, patch=round(tokens**0.5))
    (model,) = (m for m in BITDANCE if m.name.startswith(f"BitDance-14B-{tokens}x "))
    assert (model.parameters, model.calls) == (parameters(network), (CONTINUOUS,))
    assert (model.tokens, model.prefix) == (network.grid.num_tokens * tokens, 64 + 2 + tokens)
    assert model.cached == 2 * 40 * 8 * 128


@pytest.mark.parametrize("model", [m for m in BITDANCE if "14B" not in m.name], ids=lambda m: m.name)
def test_sizes_of_bitdance(model):
    _, size, calls = model.name.split(" ")[0].split("-")
    with torch.device("meta"):
        network = BitDanceTransformer(**bitdance.PRESETS[size], patch=round(int(calls[:-1]) ** 0.5))
    tokens = network.grid.num_tokens * network.patch_tokens
    assert (model.parameters, model.tokens) == (parameters(network), tokens)
    depth = network.config["num_layers"]
    assert (model.prefix, model.cached) == (63 + network.patch_tokens, 2 * depth * network.config["dim"])
    assert (model.weights, model.calls) == (f"BitDance_{size}_{calls}.pt", (CONTINUOUS,))
    sampler, guidance = continuous_image._published(network)
    assert (type(sampler).__name__, guidance) == ("ContinuousSampler", model.published[1])


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
    "model",
    [m for m in families.models() if m.name.startswith(("MaskGIT", "MAGE", "Lumina-DiMOO"))],
    ids=lambda m: m.name,
)
def test_sizes_of_masked_models(model):
    family, size = model.name.split()[0].split("-")
    with torch.device("meta"):
        if family == "MAGE":
            network: Any = MageTransformer(**mage.PRESETS[size])
        elif size == "DiMOO":
            network = DimooTransformer()
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
        binary = BinaryAutoencoder()
        speech = AcousticCodec(), SemanticCodec()
        vibevoice: Any = VibeVoiceForConditionalGeneration(VibeVoiceConfig()).model
        mimi, pocket = MimiModel(MimiConfig()), PocketTTSAudioTokenizerModel(PocketTTSAudioTokenizerConfig())
        music = MiniMaxMusic3ConditionEncoder(), MiniMaxMusic3Transformer1DModel(), MiniMaxMusic3Vocoder()
    assert families.EXTRAS == {
        "VQ-16 tokenizer": architectures["LlamaGen's tokenizer vq-16"],
        "VQ-8 tokenizer": architectures["LlamaGen's tokenizer vq-8"],
        "VAR tokenizer": parameters(vq),
        "KL-16 tokenizer": parameters(kl16),
        "BitDance tokenizer": parameters(binary),
        "flan-t5-xl encoder": parameters(encoder),
        "t5-base encoder": parameters(small),
        "MAGE tokenizer": parameters(mage_vq),
        "MaskGCT codecs": sum(map(parameters, speech)),
        "Mimi codec": sum(one.numel() for one in mimi.state_dict().values()),  # its codes are no parameters
        "VibeVoice codecs": parameters(vibevoice.audio_tower)
        + parameters(vibevoice.semantic_tokenizer_encoder),
        "PocketTTS codec": parameters(pocket),
        "MiniMax-Music 3's flow and vocoder": sum(map(parameters, music)),
    }


def test_memory_is_weights_and_cache():
    model = families.KnownModel("m", "", 32, tokens=4, prefix=2, parameters=100, cached=10)
    assert model.memory(4) == (100 + 2 * 6 * 10) * 4
    assert model.memory(2, batch_size=3, guided=False) == (100 + 3 * 6 * 10) * 2
    assert replace(model, rows=1).memory(2, batch_size=3) == (100 + 3 * 6 * 10) * 2


def test_every_way_of_verifying_is_explained():
    assert {model.verified for model in families.models()} <= set(families.VERIFIED)
