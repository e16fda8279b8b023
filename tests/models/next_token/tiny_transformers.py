"""transformers' image generators, real classes but tiny and random, in float64. Nothing is downloaded."""

from typing import Any

import torch
import transformers
from transformers import (
    ChameleonConfig,
    ChameleonForConditionalGeneration,
    Emu3Config,
    Emu3ForConditionalGeneration,
    GlmImageConfig,
    GlmImageForConditionalGeneration,
    JanusConfig,
    JanusForConditionalGeneration,
)

transformers.logging.set_verbosity_error()

DECODER: dict[str, Any] = dict(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
)


def _ready(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    """Weights large enough that the laws differ from slot to slot, and that leaks show."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        scale = 0.25 if parameter.ndim >= 2 else 0.1
        noise = torch.randn(parameter.shape, generator=generator) * scale
        parameter.data = (
            noise if parameter.ndim >= 2 else noise + ("norm" in name and name.endswith("weight"))
        )
    return model.to(dtype).eval()


def janus(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    decoder = {**DECODER, **changes}
    config = JanusConfig(
        text_config=dict(
            model_type="llama", vocab_size=48, bos_token_id=1, eos_token_id=2, pad_token_id=0, **decoder
        ),
        vision_config=dict(
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            projection_dim=32,
            num_image_tokens=16,
        ),
        vq_config=dict(
            embed_dim=8,
            num_embeddings=24,
            latent_channels=32,
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=1,
            projection_dim=decoder["hidden_size"],
            num_patches=4,
            image_token_embed_dim=decoder["hidden_size"],
        ),
        image_token_id=5,
    )
    model = _ready(JanusForConditionalGeneration(config), dtype)
    settings = model.generation_config
    settings.bos_token_id, settings.pad_token_id = 1, 0
    settings.generation_kwargs = {"boi_token_id": 3}
    settings._from_model_config = False  # as in a checkpoint; else it would not be read back from a file
    return model


def chameleon(
    dtype: torch.dtype = torch.float64, *, scattered: bool = False, vocab_size: int = 80, **changes: Any
) -> Any:
    """`scattered`: image ids with gaps, and in another order than their codes. 171384 ids: a Lumina-mGPT 2.0."""
    names = {"<image>": 8, "<racm3:break>": 9, "<eoss>": 10, "<s>": 0, "<reserved08799>": 11}
    names |= {f"<reserved{8800 + n:05d}>": 11 + n for n in range(1, 5)}
    for code in range(24):
        digits = "".join(chr(ord("A") + int(digit)) for digit in str(code))
        names[f"IMGIMG{digits}Z"] = 20 + (2 * ((7 * code) % 24) if scattered else code)
    config = ChameleonConfig(
        vocab_size=vocab_size,
        vocabulary_map=names,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
        vq_config=dict(
            embed_dim=8,
            num_embeddings=24,
            latent_channels=8,
            resolution=8,
            base_channels=32,
            channel_multiplier=[1, 2],
            num_res_blocks=1,
        ),
        **{**DECODER, **changes},
    )
    return _ready(ChameleonForConditionalGeneration(config), dtype)


def emu3(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    names = {"<image>": 8, "<|extra_200|>": 9, "<|extra_201|>": 10, "<|image end|>": 11}
    names |= {f"<|visual token {code:06d}|>": 20 + code for code in range(24)}
    config = Emu3Config(
        text_config=dict(
            vocab_size=64, pad_token_id=1, bos_token_id=0, eos_token_id=2, **{**DECODER, **changes}
        ),
        vq_config=dict(
            codebook_size=24,
            embed_dim=4,
            latent_channels=4,
            base_channels=32,
            channel_multiplier=[1, 1],
            num_res_blocks=1,
            hidden_size=32,
            attn_resolutions=[],
            temporal_downsample_factor=1,
        ),
        vocabulary_map=names,
    )
    return _ready(Emu3ForConditionalGeneration(config), dtype)


def glm_image(dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    decoder = {**DECODER, **changes}
    part = decoder["hidden_size"] // decoder["num_attention_heads"] // 8  # of the turned pairs of channels
    sections = [2 * part, part, part]
    rotary = dict(rope_type="default", rope_theta=1e4, mrope_section=sections, partial_rotary_factor=1.0)
    config = GlmImageConfig(
        text_config=dict(
            vocab_size=64,
            vision_vocab_size=28,
            pad_token_id=50,
            eos_token_id=27,
            max_position_embeddings=256,
            rope_parameters=rotary,
            **decoder,
        ),
        image_token_id=51,
        image_start_token_id=26,
        image_end_token_id=27,
        vision_config=dict(
            depth=1, hidden_size=32, num_heads=4, image_size=32, patch_size=8, intermediate_size=64
        ),
        vq_config=dict(embed_dim=16, num_embeddings=24, latent_channels=32),
    )
    return _ready(GlmImageForConditionalGeneration(config), dtype)


def prompts(
    lengths: list[int], *, low: int, high: int, pad: int, last: int, first: int
) -> dict[str, torch.Tensor]:
    """Left-padded random prompts of these lengths, `first` and `last` at their ends."""
    generator = torch.Generator().manual_seed(3)
    longest = max(lengths)
    ids = torch.randint(low, high, (len(lengths), longest), generator=generator)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    ids = ids.where(mask, pad)
    ids[torch.arange(len(lengths)), longest - torch.tensor(lengths)] = first
    ids[:, -1] = last
    return dict(input_ids=ids, attention_mask=mask.long())


def one(inputs: dict[str, torch.Tensor], row: int) -> dict[str, torch.Tensor]:
    """A row of such prompts alone, without its padding."""
    length = int(inputs["attention_mask"][row].sum())
    return {name: tensor[row : row + 1, -length:] for name, tensor in inputs.items()}
