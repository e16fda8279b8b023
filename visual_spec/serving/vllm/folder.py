"""A pipeline as a folder that vLLM serves, and prompts as its token ids. Needs no vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from visual_spec.files.documents import json_text
from visual_spec.models.core.protocol import RASTER_ORDER
from visual_spec.models.core.settings import Within, whole
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.text.caption_encoder import CaptionEncoder

if TYPE_CHECKING:
    from visual_spec.pipelines.base import VisualPipeline

# The sizes of heads that vLLM's attention on CPUs has; its other backends' are among them.
_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
_LONGEST_WINDOW = 129  # vLLM tests at most 128 drafts


class PromptIds:
    """Prompts of a LlamaGen as token ids, above its codebook's.

    Captions: the ids of the caption encoder's words, padding first; then the places of the learned prefix that stands
    for no caption. Classes: their numbers; the last is no class.

    Attributes:
        first: the id of padding, or of class 0.
        words: number of the encoder's ids; 0 for classes.
        padding: the id that no other position sees; -1 for classes.
        end: the first id past all of them. No prompt or picture holds it; a request that fails ends with it.
    """

    def __init__(self, transformer: LlamaGenTransformer, text_encoder: CaptionEncoder | None) -> None:
        self.encoder, self.length = text_encoder, transformer.prefix_length
        self.first = transformer.vocab_size
        if text_encoder is None:
            self.words, self.padding = 0, -1
            self.end = self.first + transformer.config["num_classes"] + 1
        else:
            self.words, self.padding = text_encoder.word_embedding.num_embeddings, self.first
            self.end = self.first + self.words + self.length

    def of(self, prompt: str | int) -> tuple[list[int], list[int]]:
        """Return the ids of a prompt, and of the prompt that guidance leads away from: none.

        Args:
            prompt: a caption, or the number of a class.

        Raises:
            ValueError: the caption has no words, or there is no such class.
        """
        if self.encoder is None:
            none = self.end - 1
            return [self.first + whole("class", prompt, Within(0, none - self.first - 1))], [none]
        if not isinstance(prompt, str):
            raise ValueError(f"prompt {prompt!r}; pass a caption.")
        ids = (self.encoder.word_ids([prompt])[0] + self.first).tolist()
        places = range(self.first + self.words, self.end)
        none = [place if own != self.padding else own for own, place in zip(ids, places, strict=True)]
        return ids, none


def save_for_vllm(pipe: VisualPipeline, folder: str | os.PathLike) -> Path:
    """Write the transformer of an `ImagePipeline` or `ClassImagePipeline`, and its caption encoder, for vLLM.

    Returns:
        The folder, to be passed to vLLM as its model.

    Raises:
        ValueError: the transformer is no raster-order LlamaGen of one frame, or reads captions of another encoder.
    """
    model, encoder = pipe.transformer, getattr(pipe, "text_encoder", None)
    if (
        not isinstance(model, LlamaGenTransformer)
        or model.trained_order != RASTER_ORDER
        or model.grid.frames > 1
    ):
        order = getattr(model, "trained_order", None)
        raise ValueError(
            f"a {type(model).__name__} of order {order!r}; vLLM serves a raster-order LlamaGen of one frame."
        )
    reads = isinstance(encoder, CaptionEncoder)
    if reads != (model.config["caption_dim"] is not None):
        raise ValueError(
            f"the text encoder is a {type(encoder).__name__}; as prompt tokens vLLM serves classes, or captions of a "
            "CaptionEncoder."
        )
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    weights = named("transformer", model)
    if isinstance(encoder, CaptionEncoder):
        weights |= named("text_encoder", encoder)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json_text(_config(model, encoder if reads else None), indent=1))
    return path


def named(prefix: str, module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights of a module under a prefix."""
    return {f"{prefix}.{name}": value.contiguous() for name, value in module.state_dict().items()}


def _config(model: LlamaGenTransformer, encoder: CaptionEncoder | None) -> dict[str, object]:
    """The configuration, with the names by which vLLM knows the sizes of a model."""
    ids, grid, heads = PromptIds(model, encoder), model.grid, model.config["num_heads"]
    width = model.config["dim"] // heads
    fits = [size for size in _HEADS if size > width] if encoder else [width]
    return {
        "architectures": ["VisualSpecLlamaGen"],
        "model_type": "llama",
        "hidden_size": model.config["dim"],
        "intermediate_size": model.layers[0].feed_forward.w1.out_features,  # type: ignore[union-attr]
        "num_hidden_layers": model.config["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": fits[0],
        "vocab_size": ids.end + 1,
        "max_position_embeddings": model.prefix_length + grid.num_tokens + 3 * _LONGEST_WINDOW,
        "eos_token_id": ids.end,
        "bos_token_id": None,
        "tie_word_embeddings": False,
        "torch_dtype": str(model.dtype).removeprefix("torch."),
        "visual_spec": {
            "transformer": _plain(model),
            "text_encoder": _plain(encoder) if encoder else None,
            "grid": [grid.height, grid.width],
            "image_ids": [0, model.vocab_size],
            "prompt_tokens": model.prefix_length,
            "exact_prompt": True,
        },
    }


def _plain(module: LlamaGenTransformer | CaptionEncoder) -> dict[str, object]:
    return {name: value for name, value in dict(module.config).items() if not name.startswith("_")}
