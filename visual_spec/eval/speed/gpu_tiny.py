"""Tiny stand-ins for the models of `gpu_stages`, with which its dry run walks every stage on a CPU."""

from __future__ import annotations

from typing import Any

from visual_spec.eval.speed import measure, official_sizes, scale_cost
from visual_spec.models.core.calls import MASKED
from visual_spec.models.next_scale import var
from visual_spec.models.next_token import llamagen

# What stands for which model.
SIZES = {
    "llamagen-xl-t2i": "llamagen-tiny-t2i",
    "janus-pro-7b": "janus-tiny",
    "var-d30+var-d16": "var-tiny+var-tiny",
}
MAR = dict(
    grid_size=3,
    token_dim=4,
    dim=16,
    num_layers=1,
    num_heads=2,
    head_width=16,
    head_depth=1,
    num_classes=5,
    buffer_size=2,
)
_SIDE, _SECONDS = 3, 0.1


def shorter(pipe: Any) -> Any:
    """An embedded pipeline with the same weights, whose pictures have 3 x 3 tokens, or whose clips take 0.1 s.

    One of continuous tokens, or a masked one, stays as it is: its weights know its grid.
    """
    if pipe.stored_as == "canvas" or pipe.facts.calls == (MASKED,):
        return pipe
    if pipe.medium == "audio":
        pipe.register_to_config(max_audio_length_in_s=_SECONDS)
        return pipe
    pixels = pipe.vq_model.config["image_size"] // pipe.transformer.config["grid_size"] * _SIDE
    changes = {
        "transformer": {"grid_size": _SIDE},
        "drafter": {"grid_size": _SIDE},
        "vq_model": {"image_size": pixels},
    }
    for name, change in changes.items():
        whole = getattr(pipe, name)
        small = type(whole).from_config({**whole.config, **change})
        small.load_state_dict(whole.state_dict())
        pipe.register_modules(**{name: small.to(whole.device, whole.dtype).eval()})
    return pipe


def add_sizes() -> None:
    """Make the sizes of `SIZES` known, and measure the machine by small buffers. For the process of a dry run only."""
    llamagen.PRESETS["tiny"] = {"num_layers": 2, "num_heads": 2, "dim": 16}
    official_sizes.TRANSFORMERS["janus-tiny"] = _janus
    official = official_sizes.official_model
    official_sizes.official_model = lambda name, size=None: official(  # pyright: ignore
        name, 64 if "llamagen-tiny" in name else size
    )
    var.PRESETS["tiny"] = {
        "num_layers": 1, "num_heads": 2, "dim": 16, "vocab_size": 12, "code_dim": 2, "num_classes": 5,
        "scales": (1, 2, 3, 4),
    }  # fmt: skip
    build = scale_cost.pipeline_on_meta
    vq = dict(base_channels=4, channel_multipliers=(1, 1), blocks_per_level=1, codebook_size=12, code_dim=2)

    def small(transformer: Any, vq_model: Any, refiner: Any = None, **settings: Any) -> Any:
        return build(transformer, {**vq, "norm_groups": None, **vq_model}, refiner, **settings)

    scale_cost.pipeline_on_meta = small  # pyright: ignore
    measure.copy_bandwidth = lambda device, mebibytes=None: 1e10  # pyright: ignore
    measure.matmul_peak = lambda device, dtype: 1e11  # pyright: ignore


def _janus(image_size: int | None = None) -> official_sizes.OfficialModel:
    return official_sizes.janus(
        "janus-tiny",
        text_config=dict(
            model_type="llama",
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
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
            projection_dim=32,
            num_patches=4,
            image_token_embed_dim=32,
        ),
        start_of_image=3,
    )
