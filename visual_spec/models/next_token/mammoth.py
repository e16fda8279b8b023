"""The autoregressive stage of MammothModa2 (ByteDance 2025), read from its released files, as a next-token model.

The stage is a Qwen3-VL decoder (`-Preview`: Qwen2.5-VL) with a second feed-forward layer for image tokens, and tables
of their own for these. Image tokens come in raster order, and a forced token ends every row. The diffusion stage makes
the pixels: hand it the ids.

    model = MammothModa2.from_pretrained("bytedance-research/MammothModa2-Dev", dtype=torch.bfloat16, device_map="cuda")
    visual_spec.accelerate(model, "speculative-jacobi")
    ids, mask = model.generate(**inputs, ar_height=32, ar_width=32, cfg_scale=7.0)

Source: https://github.com/bytedance/mammothmoda (`mamoda2/`, for transformers 4); vLLM-Omni 0.30 for the older decoder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen2_5_vl
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.cached_decoder import CachedDecoder

_CLOSING = 10  # the last tokens of a prompt say the size and open the picture; the unconditional prompt is these alone


def _of_image_tokens(moe_type: str, layer: int) -> bool:
    """Whether a layer has a feed-forward layer for image tokens; "ffn-14:28" names the first, and the one after the
    last."""
    kind, _, layers = moe_type.partition("-")
    first, _, stop = layers.partition(":")
    return "ffn" in kind and (not layers or int(first) <= layer < int(stop))


class _TwoExperts:
    """A decoder layer of transformers whose second feed-forward layer reads image tokens."""

    self_attn: nn.Module
    mlp: nn.Module
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)  # pyright: ignore[reportCallIssue]
        self.gen_mlp = type(self.mlp)(config) if _of_image_tokens(config.moe_type, layer) else None

    def forward(self, hidden_states: Tensor, gen_token_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Run the layer; `gen_token_mask` is bool [B, L], true at image tokens, None where all are."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **inputs)[0]
        normed = self.post_attention_layernorm(hidden_states)
        if self.gen_mlp is None:
            return hidden_states + self.mlp(normed)
        drawn = self.gen_mlp(normed)
        if gen_token_mask is not None:
            drawn = torch.where(gen_token_mask[..., None], drawn, self.mlp(normed))
        return hidden_states + drawn


class _Layer3(_TwoExperts, qwen3_vl.Qwen3VLTextDecoderLayer): ...


class _Layer2_5(_TwoExperts, qwen2_5_vl.Qwen2_5_VLDecoderLayer): ...


# By `llm_config.model_type`: the configuration and decoder of transformers, and our layer in it.
_DECODERS: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel], type[_Layer3 | _Layer2_5]]] = {
    "mammothmoda2_qwen3_vl": (Qwen3VLTextConfig, qwen3_vl.Qwen3VLTextModel, _Layer3),
    "mammothmoda2_qwen2_5_vl": (Qwen2_5_VLTextConfig, qwen2_5_vl.Qwen2_5_VLTextModel, _Layer2_5),
}


class MammothModa2Config(PretrainedConfig):
    """`config.json` of a release; `llm_config` describes the stage that draws tokens, the rest is not read."""

    model_type = "mammothmoda2"

    def __init__(self, llm_config: dict[str, Any] | None = None, **others: Any) -> None:
        self.llm_config = llm_config or {}
        super().__init__(**others)

    def text_config(self) -> Any:
        """Return the configuration of the decoder.

        Raises:
            ValueError: an unknown decoder, or image tokens that do not follow the text's vocabulary.
        """
        kind = self.llm_config.get("model_type")
        if kind not in _DECODERS:
            raise ValueError(f"llm_config.model_type={kind!r}; known are {', '.join(_DECODERS)}.")
        inherited = {
            name: self.llm_config[name]
            for name in ("extra_gen_vocab", "gen_vocab_size", "gen_vocab_start_index", "moe_type")
            if name in self.llm_config
        }
        text = {"extra_gen_vocab": True, "moe_type": "ffn", **inherited, **self.llm_config["text_config"]}
        text.pop("model_type", None)
        if not text["extra_gen_vocab"] or text.get("gen_vocab_start_index") != text["vocab_size"]:
            raise ValueError(
                f"extra_gen_vocab={text['extra_gen_vocab']}, gen_vocab_start_index="
                f"{text.get('gen_vocab_start_index')} and vocab_size={text['vocab_size']}; image tokens need a table "
                "of their own, whose ids start where those of text end."
            )
        config = _DECODERS[kind][0](**text)
        config._attn_implementation = self._attn_implementation or "sdpa"
        return config


class MammothModa2(PreTrainedModel):
    """The weights of the stage, under the names of the release; load it with `from_pretrained`.

    `generation_config` is the release's `t2i_generation_config.json`, with `visual_token_start_id`,
    `visual_token_end_id` and `eol_token_id`.
    """

    generate_images: Callable[..., Tensor]  # hung here by `accelerate`
    config_class = MammothModa2Config
    _supports_sdpa = True
    _keys_to_ignore_on_load_unexpected = [r"^gen_", r"^llm_model\.model\.visual\.", r"^llm_model\.lm_head\."]

    def __init__(self, config: MammothModa2Config) -> None:
        super().__init__(config)
        text = config.text_config()
        _, decoder, layer = _DECODERS[config.llm_config["model_type"]]
        language_model = decoder(text)
        language_model.layers = nn.ModuleList(layer(text, index) for index in range(text.num_hidden_layers))
        language_model.gen_embed_tokens = nn.Embedding(text.gen_vocab_size, text.hidden_size)
        self.llm_model = nn.Module()
        self.llm_model.model = nn.Module()
        self.llm_model.model.language_model = language_model
        self.llm_model.gen_head = nn.Linear(text.hidden_size, text.gen_vocab_size, bias=False)
        self.generation_config = GenerationConfig()
        self.post_init()

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike, *args: Any, **kwargs: Any) -> Self:
        """Read a release, see `PreTrainedModel.from_pretrained`."""
        model = super().from_pretrained(folder, *args, **kwargs)
        model.generation_config = GenerationConfig.from_pretrained(
            folder, config_file_name="t2i_generation_config.json"
        )
        return model

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        ar_height: int = 16,
        ar_width: int = 16,
        cfg_scale: float = 6.0,
        **inputs: object,
    ) -> tuple[Tensor, Tensor]:
        """Draw pictures as the official `generate` does, by the sampler of `visual_spec.accelerate`.

        Args:
            input_ids, attention_mask: [B, T], left-padded, from the official processor, which repeats every prompt for
                guidance: with `cfg_scale` above 1 the second half of the rows must repeat the first.
            ar_height, ar_width: tokens of the picture.
            inputs: see `generate_images`.

        Returns:
            ids long [B, T + ar_height * (ar_width + 1)] and their mask, in both halves.

        Raises:
            TypeError: the model is not accelerated.
            ValueError: rows that are not pairs; and what `generate_images` raises.
        """
        if not hasattr(self, "generate_images"):
            raise TypeError(
                'this model has no sampler; call visual_spec.accelerate(model), or (model, "autoregressive").'
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.clone()
        rows, guided = len(input_ids), cfg_scale > 1
        if guided and (rows % 2 or not input_ids[: rows // 2].equal(input_ids[rows // 2 :])):
            raise ValueError(
                f"{rows} rows with cfg_scale={cfg_scale}: the second half has to repeat the first; pass cfg_scale to "
                "the processor too, or 1 to both."
            )
        count = rows // 2 if guided else rows
        ids = self.generate_images(
            input_ids[:count],
            mask[:count],
            ar_height=ar_height,
            ar_width=ar_width,
            guidance_scale=max(1.0, cfg_scale),
            **inputs,
        )
        mask[count:, :-_CLOSING] = 0
        mask = torch.cat([mask, mask.new_ones(rows, ids.shape[1] - mask.shape[1])], 1)
        return ids.repeat(rows // count, 1), mask


class _Tables(nn.Module):
    """Embeddings of ids [B, L] of text and of image tokens."""

    def __init__(self, text: nn.Embedding, image: nn.Embedding) -> None:
        super().__init__()
        self.text, self.image = text, image

    @property
    def weight(self) -> Tensor:
        return self.image.weight

    def forward(self, ids: Tensor) -> Tensor:
        first = self.text.num_embeddings
        image = self.image((ids - first).clamp_min(0))
        return torch.where((ids >= first)[..., None], image, self.text(ids.clamp_max(first - 1)))


class MammothModa2Stage(CachedDecoder):
    """The picture of a `MammothModa2`.

    Args:
        model: which does not change.
        height, width: image tokens of the picture.

    Raises:
        ValueError: the ids of its generation config are missing, or no image tokens.
    """

    family = "MammothModa2"
    guidance_scale = 6.0  # the default of `generate`
    least_kept = 3
    draws_pairs = True

    def __init__(self, model: Any, height: int, width: int) -> None:
        self.model, decoder, config = model, model.llm_model.model.language_model, model.generation_config
        self.first_image_id = first = decoder.embed_tokens.num_embeddings
        num_ids = first + decoder.gen_embed_tokens.num_embeddings
        names = ("visual_token_start_id", "visual_token_end_id", "eol_token_id")
        numbers: list[Any] = [getattr(config, name, None) for name in names]
        if not all(isinstance(number, int) and first <= number < num_ids for number in numbers):
            given = ", ".join(f"{name}={number}" for name, number in zip(names, numbers, strict=True))
            raise ValueError(
                f"generation_config has {given}; ids of image tokens are {first} to {num_ids - 1}. Load the model from "
                "a release with t2i_generation_config.json."
            )
        start, end, row_end = numbers
        stop = min(start + end, num_ids)  # the official program allows as many ids as the last one's number
        super().__init__(
            decoder=decoder,
            table=_Tables(decoder.embed_tokens, decoder.gen_embed_tokens),
            head=model.llm_model.gen_head,
            image_ids=list(range(start - first, stop - first)),
            grid=TokenGrid(height, width),
            row_end=row_end,
        )
        self.plain_draws = (num_ids, torch.arange(start, stop), torch.float32)

    def ids(self, tokens: Tensor) -> Tensor:
        return super().ids(tokens) + self.first_image_id

    def of_prompt(self, ids: Tensor) -> dict[str, Tensor]:
        return {"gen_token_mask": ids >= self.first_image_id}

    @classmethod
    def plan(
        cls,
        model: MammothModa2,
        prompt: Prompt,
        *,
        guided: bool,
        ar_height: int = 16,
        ar_width: int = 16,
        pixel_values: Tensor | None = None,
        gen_pixel_values: Tensor | None = None,
        negative_ids: Tensor | None = None,
        negative_mask: Tensor | None = None,
    ) -> tuple[MammothModa2Stage, ImagePrompt]:
        """Return the stage, and its condition.

        Args:
            prompt: the processor's output.
            ar_height, ar_width: tokens of the picture.
            negative_ids, negative_mask: for the diffusion stage; not read.

        Raises:
            ValueError: pictures in the prompt, a picture without tokens, or a guided prompt without the tokens that
                open the picture.
        """
        if pixel_values is not None or gen_pixel_values is not None:
            raise ValueError(
                "MammothModa2 draws from text here; leave pixel_values and gen_pixel_values out."
            )
        if not all(isinstance(side, int) and side > 0 for side in (ar_height, ar_width)):
            raise ValueError(f"ar_height={ar_height!r}, ar_width={ar_width!r}; pass two numbers of tokens.")
        negative = None
        if guided:
            if prompt.ids.shape[1] <= _CLOSING or not prompt.mask[:, -_CLOSING:].all():
                raise ValueError(
                    f"a guided prompt ends in {_CLOSING} tokens that open the picture, after its words; pass what the "
                    "official processor makes with t2i_generate=True."
                )
            mask = prompt.mask.clone()
            mask[:, :-_CLOSING] = False
            negative = Prompt(prompt.ids, mask)
        return cls(model, ar_height, ar_width), ImagePrompt(prompt, negative)

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """Return what `generate` returns: the prompt, and the picture with row ends."""
        return torch.cat([condition.prompt.ids.to(tokens.device), self.sequence(tokens)], 1)

    @staticmethod
    def asks_for_pictures(asked: Mapping[str, object]) -> bool:
        return False  # `MammothModa2.generate` calls `generate_images` itself

    @staticmethod
    def pixels(model: object, ids: Tensor) -> Tensor:
        """Raise TypeError: this stage makes tokens for a diffusion stage, not pixels."""
        raise TypeError(
            "MammothModa2's tokens are no pixels yet: its diffusion stage makes them (`decode_diffusion_image` of the "
            "official program); hand it the ids."
        )
