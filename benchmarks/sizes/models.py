"""Models of official size without their checkpoints: built and counted on the meta device, filled with random weights.

LlamaGen is our own class. Janus-Pro, Lumina-mGPT and Emu3 are transformers' classes under the adapters that
`visual_spec.accelerate` uses. Sizes are as in the released configurations; the text before a picture is 64 ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from visual_spec.eval.speed.call_cost import CallCost, of_llamagen
from visual_spec.models.next_token import llamagen
from visual_spec.models.next_token import llamagen_checkpoint as checkpoints
from visual_spec.models.next_token.llamagen import LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import feed_forward_width

TEXT_LENGTH = 64
# Float32 arrays of the size of the logits that are alive at the peak of a step: guided and filtered logits, two laws,
# their exponentials, the residual, and noise.
LAW_ARRAYS = 8
# Arrays of the size of the widest layer that are alive in the forward of a prompt.
_WIDE_ARRAYS = 4


@dataclass(frozen=True)
class OfficialModel(CallCost):
    """A model of official size, on the meta device until it is filled.

    Attributes:
        name: as `--model` names it.
        image_size: pixels a side.
        spare: places after the picture, as (fixed, for every slot of the window).
        widest: width of the widest layer.
        text_vocab: ids of text and pictures, where plain programs score all of them; else of pictures.
        guidance_scale, top_k: what the official program draws with.
    """

    name: str
    image_size: int
    spare: tuple[int, int]
    widest: int
    text_vocab: int
    guidance_scale: float
    top_k: int

    @property
    def parameters(self) -> int:
        """Return how many there are, with the picture's decoder where it is part of the released model."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    def needed_bytes(
        self, *, dtype: torch.dtype, batch_size: int, window: int, guided: bool, baseline: bool = False
    ) -> dict[str, int]:
        """Bytes of weights, cache, logits with what is made of them, and the forward of the prompt.

        Args:
            baseline: of a row of `benchmarks.sizes.baselines`, which begins after half of the picture, and
                scores all ids.
        """
        size, rows = dtype.itemsize, batch_size * (2 if guided else 1)
        places = self.prefix + self.length + self.spare[0] + self.spare[1] * window
        scored = max(window * self.model.vocab_size, self.text_vocab if baseline else 0)
        read = self.prefix + (self.length // 2 if baseline else 0)
        return {
            "weights": self.parameters * size,
            "cache": rows * places * self.cached * size,
            "logits": rows * scored * 4 * LAW_ARRAYS,
            "prompt": rows * read * self.widest * size * _WIDE_ARRAYS,
        }


def fill(
    official: OfficialModel, *, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> OfficialModel:
    """Give a model random weights, made on the device it runs on."""
    fill_at_random(official.module, dtype=dtype, device=device, seed=seed)
    for module in official.module.modules():
        if hasattr(
            module, "original_inv_freq"
        ):  # of a rotary embedding; what is no parameter is not there yet
            made: Any = type(module)(module.config)  # pyright: ignore
            for name, buffer in made.named_buffers():
                setattr(module, name, buffer.to(device))
    return official


def fill_at_random(model: Any, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """A model that is on the meta device, with random weights on another."""
    nn.Module.to(model, dtype)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)
    return model.eval()


def official_model(name: str, image_size: int | None = None) -> OfficialModel:
    """The model called "llamagen-xxl", "llamagen-xl-t2i", "janus-pro-7b", "lumina-mgpt-7b" or "emu3-8b".

    Args:
        image_size: pixels; None: what it was released for.

    Raises:
        ValueError: another name, or a size that the model does not draw; lists those there are.
    """
    if name in TRANSFORMERS:
        return TRANSFORMERS[name](image_size)
    presets = {f"llamagen-{preset.lower()}": preset for preset in llamagen.PRESETS}
    text = name.endswith("-t2i")
    base = name.removesuffix("-t2i")
    if base not in presets:
        raise ValueError(
            f"--model {name}; pass one of {', '.join(presets)}, with -t2i after it for the "
            f"text-conditional one, or {', '.join(TRANSFORMERS)}."
        )
    if text:
        chosen = checkpoints.transformer_architecture(
            presets[base],
            num_classes=None,
            caption_dim=checkpoints.CAPTION_DIM,
            prefix_length=checkpoints.CAPTION_LENGTH,
        )
    else:
        chosen = checkpoints.transformer_architecture(presets[base], num_classes=checkpoints.NUM_CLASSES)
    side = _side(image_size, 512 if text else 384, 16, "officially 256, 384 or 512")
    with torch.device("meta"):
        model = LlamaGenTransformer(**chosen.config, grid_size=side)
    defaults = checkpoints.official_defaults(model)
    return OfficialModel(
        **of_llamagen(model),
        name=name,
        image_size=16 * model.grid.width,
        spare=(0, 1),
        widest=feed_forward_width(model.config["dim"]),
        text_vocab=model.vocab_size,
        guidance_scale=defaults["default_guidance_scale"],
        top_k=defaults["default_top_k"],
    )


# -- models of transformers ------------------------------------------------------------------------------------------


def janus_pro_7b(image_size: int | None = None) -> OfficialModel:
    """Janus-Pro-7B: the decoder of DeepSeek-LLM-7B, 576 tokens of 16384 codes, a head and an embedding of their own."""
    if image_size not in (None, 384):
        raise ValueError(f"--image-size {image_size}; Janus-Pro draws 384 pixels only, leave it out")
    return janus(
        "janus-pro-7b",
        text_config=dict(
            model_type="llama",
            vocab_size=102400,
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=30,
            num_attention_heads=32,
            num_key_value_heads=32,
            max_position_embeddings=16384,
            bos_token_id=100000,
            eos_token_id=100001,
            pad_token_id=100002,
        ),
        vision_config=dict(image_size=384, patch_size=16, num_image_tokens=24 * 24, projection_dim=4096),
        vq_config=dict(num_embeddings=16384, projection_dim=4096, image_token_embed_dim=4096),
        start_of_image=100016,
    )


def janus(
    name: str,
    *,
    text_config: dict[str, Any],
    vision_config: dict[str, Any],
    vq_config: dict[str, Any],
    start_of_image: int,
) -> OfficialModel:
    """A Janus of these configurations; `start_of_image` is the id that ends its prompt."""
    from transformers import JanusConfig, JanusForConditionalGeneration

    config = JanusConfig(
        text_config=text_config, vision_config=vision_config, vq_config=vq_config, tie_word_embeddings=False
    )
    with torch.device("meta"):
        module = JanusForConditionalGeneration(config)
    settings: Any = module.generation_config
    settings.bos_token_id, settings.pad_token_id = text_config["bos_token_id"], text_config["pad_token_id"]
    settings.generation_kwargs = {"boi_token_id": start_of_image}
    size, first = vision_config["image_size"], text_config["bos_token_id"]
    return of_transformers(name, size, module, top_k=0, first=first, last=start_of_image)


def lumina_mgpt_7b(image_size: int | None = None) -> OfficialModel:
    """Lumina-mGPT-7B, which is of Chameleon's sizes: 48 x 48 tokens of 8192 codes at 768 pixels, with row ends."""
    from transformers import ChameleonConfig, ChameleonForConditionalGeneration

    side = _side(image_size, 768, 32, "officially 512, 768 or 1024") * 2
    names = {"<image>": 8711, "<s>": 0, "<eoss>": 8196, "<racm3:break>": 8197, "<reserved08799>": 8803}
    names |= {f"<reserved{8800 + half:05d}>": 8804 + half for half in range(1, 65)}
    letters = str.maketrans("0123456789", "ABCDEFGHIJ")
    names |= {f"IMGIMG{str(code).translate(letters)}Z": 4 + code for code in range(8192)}
    with torch.device("meta"):
        module = ChameleonForConditionalGeneration(ChameleonConfig(vocabulary_map=names, vq_config={}))
    return of_transformers(
        "lumina-mgpt-7b",
        16 * side,
        module,
        guidance_scale=3.0,
        top_k=2000,
        first=0,
        last=8710,
        layout="lumina-mgpt",
        image_sizes=(side, side),
    )


def emu3_8b(image_size: int | None = None) -> OfficialModel:
    """Emu3-Gen: 90 x 90 tokens of 32768 codes at 720 pixels, with row ends, in a vocabulary of 184622."""
    from transformers import Emu3Config, Emu3ForConditionalGeneration

    side = _side(image_size, 720, 8, "officially 720")
    names = {"<image>": 151851, "<|extra_200|>": 151846, "<|extra_201|>": 151847, "<|image end|>": 151853}
    names |= {f"<|visual token {code:06d}|>": 151854 + code for code in range(32768)}
    config = Emu3Config(text_config={}, vq_config={}, vocabulary_map=names)
    with torch.device("meta"):
        module = Emu3ForConditionalGeneration(config)
    return of_transformers(
        "emu3-8b",
        8 * side,
        module,
        guidance_scale=3.0,
        top_k=2048,
        first=151849,
        last=151851,
        image_sizes=(side, side),
    )


def of_transformers(
    name: str,
    image_size: int,
    module: Any,
    *,
    first: int,
    last: int,
    top_k: int,
    guidance_scale: float | None = None,
    **inputs: Any,
) -> OfficialModel:
    """The description of a model of transformers.

    Args:
        first, last: ids at the ends of the prompt.
        guidance_scale: None: the adapter's own.
        inputs: what else the adapter's `plan` takes.
    """
    from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
    from visual_spec.pipelines.accelerate.images import image_model_class

    kind = image_model_class(module)
    assert kind is not None

    def plan(batch_size: int) -> tuple[Any, ImagePrompt]:
        ids = torch.full((batch_size, TEXT_LENGTH), 7)
        ids[:, 0], ids[:, -1] = first, last
        return kind.plan(module, Prompt(ids, torch.ones_like(ids)), guided=True, **inputs)

    model, condition = plan(1)
    text = module.config.get_text_config()
    heads = text.num_attention_heads
    each = getattr(text, "head_dim", None) or text.hidden_size // heads
    return OfficialModel(
        name=name,
        image_size=image_size,
        model=model,
        module=module,
        condition=lambda batch_size: plan(batch_size)[1],
        prefix=condition.prompt.ids.shape[1],
        length=model.length,
        spare=(1, 2),  # a tree may hold two columns a node, and one place takes what is not wanted
        cached=2 * text.num_hidden_layers * text.num_key_value_heads * each,
        attended=text.num_hidden_layers * heads * each,
        widest=max(text.intermediate_size, text.hidden_size),
        # A plain linear head is not run: its image rows are read, the others are not.
        read_apart=model.vocab_size * text.hidden_size if type(model.head) is nn.Linear else 0,
        text_vocab=text.vocab_size,
        guidance_scale=kind.guidance_scale if guidance_scale is None else guidance_scale,
        top_k=top_k,
    )


TRANSFORMERS: dict[str, Callable[[int | None], OfficialModel]] = {
    "janus-pro-7b": janus_pro_7b,
    "lumina-mgpt-7b": lumina_mgpt_7b,
    "emu3-8b": emu3_8b,
}


def _side(image_size: int | None, default: int, multiple: int, officially: str) -> int:
    """`image_size` in multiples; ValueError for one that is none."""
    size = default if image_size is None else image_size
    if size < multiple or size % multiple:
        raise ValueError(f"--image-size {size}; pass a multiple of {multiple}, {officially}")
    return size // multiple
