"""CSM, Moshi, Qwen3-Omni's and Qwen3-TTS's talkers, MiniMax-Music 3: real classes, tiny and random."""

from typing import Any

import torch
import transformers
from diffusers.models.transformers.minimax_music3_rvq_depth_decoder import MiniMaxMusic3RVQDepthDecoder
from diffusers.modular_pipelines.minimax_music3.modular_blocks_minimax_music3 import (
    MiniMaxMusic3SemanticGenerationStep,
)
from diffusers.modular_pipelines.minimax_music3.modular_pipeline import MiniMaxMusic3ModularPipeline
from torch import Tensor, nn
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    MoshiConfig,
    MoshiForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorConfig,
    Qwen3OmniMoeTalkerConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration,
    Qwen3OmniMoeTalkerForConditionalGeneration,
)

from tests.models.next_token.tiny_transformers import _ready

transformers.logging.set_verbosity_error()

MUSIC_WIDTH = 16
MIMI: dict[str, Any] = dict(
    model_type="mimi", hidden_size=16, num_filters=2, upsampling_ratios=[2, 2], codebook_size=32, codebook_dim=8,
    vector_quantization_hidden_dimension=8, num_quantizers=4, upsample_groups=16, num_hidden_layers=1,
    intermediate_size=16, num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip


def tiny_csm(dtype: torch.dtype = torch.float64, codebooks: int = 4, width: int = 16, **changes: Any) -> Any:
    """Ids 1 to 19 of codes, 0 the end; `width` is half the backbone's."""
    sizes: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    depth: dict[str, Any] = dict(num_codebooks=codebooks, backbone_hidden_size=2 * width, vocab_size=20)
    depth |= dict(hidden_size=width, intermediate_size=2 * width, max_position_embeddings=codebooks + 1)
    ids: dict[str, Any] = dict(pad_token_id=1, codebook_pad_token_id=19, codebook_eos_token_id=0)
    ids |= dict(bos_token_id=2, audio_token_id=3, audio_eos_token_id=4)
    config = CsmConfig(
        num_codebooks=codebooks,
        vocab_size=20,
        text_vocab_size=30,
        hidden_size=2 * width,
        intermediate_size=3 * width,
        depth_decoder_config=depth | sizes,
        codec_config=dict(MIMI, num_quantizers=max(4, codebooks)),
        **ids,
        **sizes,
        **changes,
    )
    return _ready(CsmForConditionalGeneration(config), dtype)


def tiny_moshi(dtype: torch.dtype = torch.float64, width: int = 16) -> Any:
    sizes: dict[str, Any] = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
    config = MoshiConfig(
        vocab_size=30,
        hidden_size=2 * width,
        ffn_dim=4 * width,
        num_codebooks=4,
        audio_encoder_config=MIMI,
        depth_decoder_config=dict(hidden_size=width, ffn_dim=4 * width, max_position_embeddings=5, **sizes),
        max_position_embeddings=64,
        sliding_window=64,
        pad_token_id=29,
        **sizes,
    )
    return _ready(MoshiForConditionalGeneration(config), dtype)


def tiny_talker(dtype: torch.dtype = torch.float32) -> Any:
    sizes: dict[str, Any] = dict(
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, hidden_size=32
    )
    read: dict[str, Any] = dict(spatial_merge_size=2)  # no field of its own
    config = Qwen3OmniMoeTalkerConfig(
        num_code_groups=4,
        thinker_hidden_size=24,
        code_predictor_config=dict(vocab_size=20, intermediate_size=32, num_code_groups=4, **sizes),
        text_config=dict(
            vocab_size=24,
            intermediate_size=32,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 1, 1]),
            **sizes,
        ),
        codec_eos_token_id=23,
        codec_pad_id=22,
        codec_bos_id=21,
        **read,
    )
    return _ready(Qwen3OmniMoeTalkerForConditionalGeneration(config), dtype)


def tiny_minimax_music(kind: Any = MiniMaxMusic3ModularPipeline) -> Any:
    """The stage that writes codes, with a vocabulary of the real size, since its ids are constants of diffusers."""
    config = Qwen3Config(
        vocab_size=168064, hidden_size=MUSIC_WIDTH, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    sizes: dict[str, Any] = dict(num_layers=2, num_attention_heads=2, intermediate_size=24)
    decoder = MiniMaxMusic3RVQDepthDecoder(hidden_size=MUSIC_WIDTH, audio_vocab_size=32, **sizes)
    pipe = kind(MiniMaxMusic3SemanticGenerationStep())
    pipe.update_components(language_model=_ready(Qwen3ForCausalLM(config)), rvq_depth_decoder=_ready(decoder))
    return pipe


class Qwen3TTSTalkerForConditionalGeneration(nn.Module):
    """The part of Qwen3-TTS's talker that draws a frame's codes, named as in the package `qwen-tts` 0.1.1.

    Its code predictor is Qwen3-Omni's, with a projection from the wider talker before it. Weights follow a formula, so
    that codes which the public code draws with the same weights can stand in a test.
    """

    def __init__(self) -> None:
        super().__init__()
        config = Qwen3OmniMoeTalkerCodePredictorConfig(
            vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, num_code_groups=5,
        )  # fmt: skip
        predictor: Any = Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration(config)
        predictor.small_to_mtp_projection = nn.Linear(40, 32)
        predictor.model.codec_embedding = nn.ModuleList(nn.Embedding(48, 40) for _ in range(4))
        predictor.model.register_forward_pre_hook(
            lambda _, args, read: (
                args,
                read | dict(inputs_embeds=predictor.small_to_mtp_projection(read["inputs_embeds"])),
            ),
            with_kwargs=True,
        )
        self.code_predictor = predictor.double().eval()
        with torch.no_grad():
            for index, (name, weight) in enumerate(sorted(predictor.named_parameters())):
                places = torch.arange(weight.numel(), dtype=torch.float64) + 1000 * index
                noise = (places * 12.9898).sin().mul(43758.5453).frac().view_as(weight)
                weight.copy_(1 + 0.1 * noise if "norm" in name else 0.4 * noise)


IDS = torch.tensor([[1, 5, 9, 2], [2, 7, 6, 11], [2, 8, 8, 3]])


FRAMES = 5


LAWS: dict[str, dict[str, Any]] = dict(
    greedy=dict(do_sample=False),
    sampled=dict(do_sample=True),
    filtered=dict(do_sample=True, top_k=5, temperature=0.7),
    nucleus=dict(do_sample=True, top_p=0.8, repetition_penalty=1.3),
)


def inputs(name: str, rows: int) -> dict[str, Any]:
    ids = IDS[:rows]
    if name == "csm":
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=FRAMES)
    generator = torch.Generator().manual_seed(3)
    if name == "moshi":
        codes = torch.randint(0, 20, (2, rows, 4, 4), generator=generator)
        asked = dict(max_new_tokens=FRAMES, return_audio_waveforms=False, return_audio_codes=True)
        return dict(input_ids=ids, moshi_audio_codes=codes[0], user_audio_codes=codes[1], **asked)
    return dict(
        inputs_embeds=torch.randn(rows, 5, 32, generator=generator),
        trailing_text_hidden=torch.randn(rows, 3, 32, generator=generator),
        tts_pad_embed=torch.randn(1, 1, 32, generator=generator),
        talker_input_ids=torch.ones(rows, 5, dtype=torch.long),
        max_new_tokens=FRAMES,
        output_hidden_states=True,
        return_dict_in_generate=True,
        eos_token_id=23,
        pad_token_id=22,
    )


def drawn(model: Any, name: str, law: str, rows: int = 2, seed: int = 0) -> list[Tensor]:
    """All codes of a `generate`, those of the depth decoder included."""
    settings = dict(LAWS[law])
    if name == "talker":
        settings = {}  # fixed in its class
    else:
        settings = {f"depth_decoder_{key}": value for key, value in settings.items()}
    torch.manual_seed(seed)
    read = {
        key: value.to(model.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in inputs(name, rows).items()
    }
    result = model.generate(**read, do_sample=LAWS[law]["do_sample"], **settings)
    if name == "csm":
        return [result]
    if name == "moshi":
        return [result.sequences, result.audio_codes]
    return [result.sequences, *(states[-1] for states in result.hidden_states[1:])]
