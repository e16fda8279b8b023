"""Chameleon, Anole and Lumina-mGPT as next-token models, around transformers' `ChameleonForConditionalGeneration`.

Image tokens are ids of the text vocabulary. Chameleon (Chameleon Team 2024) and Anole (Chern et al. 2024) draw one
square. Lumina-mGPT (Liu et al. 2024) states the size in two tokens before the picture and ends every row with a token.
Lumina-mGPT 2.0 (arXiv 2507.17801) does so too, with codes of MoVQGAN, of 8 pixels each, and a vocabulary of its own.
All use one class of weights. transformers' own `forward` forbids image tokens, so its `generate` cannot draw pictures;
this module calls the decoder and the head's image rows directly.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt, filled, one_size
from visual_spec.models.next_token.cached_decoder import CachedDecoder

LAYOUTS = ("chameleon", "lumina-mgpt", "lumina-mgpt-2")

_SECOND_IDS = range(155000, 171384)  # the picture tokens of Lumina-mGPT 2.0, by code (its item processor)
_START, _END, _ROW_END = "<racm3:break>", "<eoss>", "<reserved08799>"


class ChameleonImageModel(CachedDecoder):
    """The image half of a `ChameleonForConditionalGeneration`.

    Args:
        model: the transformers model; it is not changed.
        size: (height, width) in tokens for the layouts of Lumina-mGPT, whose size tokens count 32 pixels: both even,
            and of 2.0 multiples of 4. None is the layout of Chameleon, one square picture without row ends.
        second: whether the model is a Lumina-mGPT 2.0.

    Raises:
        ValueError: the size has no size token, or the vocabulary map lacks the tokens around a picture.
    """

    family = "Chameleon"
    writes_text = True

    def __init__(self, model: Any, size: tuple[int, int] | None = None, second: bool = False) -> None:
        self.model = model
        names = model.config.vocabulary_map or {}
        opening = [_START]
        if size is None:
            vq = model.config.vq_config
            side = vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)
            height = width = side
        else:
            (height, width), unit = size, 4 if second else 2
            if height % unit or width % unit:
                numbers = "multiples of 4" if second else "even numbers of"
                raise ValueError(
                    f"{height} x {width} tokens; Lumina-mGPT draws {numbers} tokens (multiples of 32 pixels)."
                )
            opening += [f"<reserved{8800 + side // unit:05d}>" for side in size]
        missing = sorted({*opening, _END, *([] if size is None else [_ROW_END])} - set(names))
        if missing:
            raise ValueError(
                f"config.vocabulary_map lacks {', '.join(missing)}, which pictures of {height} x {width} tokens need. "
                "If the tokenizer has them, load the model with vocabulary_map=tokenizer.get_vocab()."
            )
        super().__init__(
            decoder=model.model,
            table=model.get_input_embeddings(),
            head=model.lm_head,
            image_ids=list(_codes(model, second)),
            grid=TokenGrid(height, width),
            row_end=None if size is None else names[_ROW_END],
        )
        self.opening = [names[name] for name in opening]
        self.closing = names[_END]

    @classmethod
    def plan(
        cls,
        model: Any,
        prompt: Prompt,
        *,
        guided: bool,
        layout: str | None = None,
        image_sizes: object = None,
        negative: Prompt | None = None,
        pixel_values: Tensor | None = None,
    ) -> tuple[ChameleonImageModel, ImagePrompt]:
        """Return the image model, and its condition.

        Args:
            prompt: text; the start of the picture (in Lumina-mGPT also its size) is added if the prompt lacks it.
            layout: one of `LAYOUTS`; None takes the one of the checkpoint's config.
            image_sizes: (height, width) in tokens, for Lumina-mGPT only.
            negative: the unconditional prompt. None is the official programs': the start of the text and of
                the picture (Chameleon), or the start of the picture and its size (Lumina-mGPT).
            pixel_values: pictures in the prompt, as the processor makes them. Not for Lumina-mGPT 2.0.

        Raises:
            ValueError: the layout is unknown or not this checkpoint's, a size is given for a layout without one, a
                needed size is missing, or a Lumina-mGPT 2.0 gets `pixel_values`.
        """
        layout = _layout(model.config, layout)
        second = layout == "lumina-mgpt-2"
        if layout == "chameleon" and image_sizes is not None:
            raise ValueError(
                f"image_sizes={image_sizes}, but Chameleon and Anole draw one size only; leave it out, "
                "or pass layout='lumina-mgpt' if the checkpoint is a Lumina-mGPT."
            )
        image_model = cls(model, None if layout == "chameleon" else one_size(image_sizes), second)
        if pixel_values is not None and second:
            raise ValueError(
                "pixel_values are read by Chameleon's tokenizer, which Lumina-mGPT 2.0 does not use; pass the ids of "
                f"the pictures in input_ids: MoVQGAN's codes + {_SECOND_IDS.start}."
            )
        if pixel_values is not None:
            drawn = model.model.get_image_tokens(pixel_values).flatten()
            prompt = Prompt(filled(prompt.ids, drawn, model.config.vocabulary_map["<image>"]), prompt.mask)
        if negative is None and guided:
            before = []
            if layout == "chameleon":
                before = [model.config.vocabulary_map.get("<s>", model.config.bos_token_id)]
            ids = prompt.ids.new_tensor([*before, *image_model.opening]).repeat(len(prompt.ids), 1)
            negative = Prompt(ids, torch.ones_like(ids, dtype=torch.bool))
        return image_model, ImagePrompt(
            image_model.opened(prompt), None if negative is None else image_model.opened(negative)
        )

    def opened(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the tokens that open a picture at its end; adds them if they are missing.

        Raises:
            ValueError: only some of the prompts are opened.
        """
        opening = prompt.ids.new_tensor(self.opening)
        for count in range(min(len(opening), prompt.ids.shape[1]), -1, -1):
            begun = (prompt.ids[:, prompt.ids.shape[1] - count :] == opening[:count]).all(1)
            if count and begun.any() and not begun.all():
                raise ValueError(
                    f"some prompts end with the opening of a picture ({self.opening[:count]}) and some do not; "
                    "leave it out of all of them."
                )
            if begun.all():
                break
        added = opening[count:].expand(len(prompt.ids), -1)
        return Prompt(
            torch.cat([prompt.ids, added], 1),
            torch.cat([prompt.mask, torch.ones_like(added, dtype=torch.bool)], 1),
        )

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """The prompt with the picture's opening, the picture (in Lumina-mGPT with row ends), and the image end."""
        ids = torch.cat([condition.prompt.ids.to(tokens.device), self.sequence(tokens)], 1)
        return torch.cat([ids, ids.new_full((len(ids), 1), self.closing)], 1)

    @staticmethod
    @torch.no_grad()
    def pixels(
        model: Any, ids: Tensor, vq_decoder: Any = None, layout: str | None = None, image_sizes: object = None
    ) -> Tensor:
        """Return pictures [B, 3, H, W] in [-1, 1] from the result of `output`.

        Args:
            vq_decoder: a `visual_spec.models.next_token.chameleon_vq.ChameleonVQDecoder`, or for Lumina-mGPT 2.0 a
                `visual_spec.models.next_token.movq.MoVQDecoder`; transformers has only the encoder.
            layout, image_sizes: as in `plan`.

        Raises:
            ValueError: there is no decoder, or the ids are not a picture.
        """
        layout = _layout(model.config, layout)
        second = layout == "lumina-mgpt-2"
        if vq_decoder is None:
            decoder, where = (
                "ChameleonVQDecoder",
                "the checkpoint's vqgan.ckpt or an Anole checkpoint that holds it",
            )
            if second:
                decoder, where = "MoVQDecoder", "movqgan_270M.ckpt"
            raise ValueError(
                f"transformers' Chameleon has no picture decoder; pass vq_decoder={decoder}.from_file(...), read from "
                f"{where}."
            )
        codes_of = _codes(model, second)
        if layout != "chameleon":
            height, width = one_size(image_sizes)
            picture = rearrange(ids[:, -(height * (width + 1) + 1) : -1], "b (h w) -> b h w", h=height)[
                ..., :-1
            ]
        else:
            vq = model.config.vq_config
            height = width = vq.resolution // 2 ** (len(vq.channel_multiplier) - 1)
            picture = rearrange(ids[:, -(height * width + 1) : -1], "b (h w) -> b h w", h=height)
        strangers = set(picture.unique().tolist()) - set(codes_of)
        if strangers:
            raise ValueError(
                f"ids {sorted(strangers)} are no image tokens; pass what generate_images returned."
            )
        codes = torch.zeros(max(codes_of) + 1, dtype=torch.long)
        codes[list(codes_of)] = torch.tensor(list(codes_of.values()))
        return vq_decoder.decode_codes(codes.to(picture.device)[picture])


def _layout(config: Any, layout: str | None) -> str:
    """The layout that is asked for, or a checkpoint's own. The config of 2.0 names the class of 1.0."""
    if layout not in (None, *LAYOUTS):
        raise ValueError(f"layout={layout!r}; pass one of {', '.join(LAYOUTS)}.")
    second = config.vocab_size >= _SECOND_IDS.stop
    if layout is None:
        return "lumina-mgpt-2" if second else "lumina-mgpt" if _is_lumina(config) else "chameleon"
    if second != (layout == "lumina-mgpt-2"):
        raise ValueError(
            f"layout={layout!r} with vocab_size={config.vocab_size}: pictures of Lumina-mGPT 2.0, and no others, are "
            f"ids from {_SECOND_IDS.start} to {_SECOND_IDS.stop - 1}. Leave layout out."
        )
    return layout


def _codes(model: Any, second: bool) -> dict[int, int]:
    """Return the code of each image id, by ascending ids."""
    if second:
        return {index: code for code, index in enumerate(_SECOND_IDS)}
    return dict(sorted(model.model.vocabulary_mapping.bpe2img.items()))


def _is_lumina(config: object) -> bool:
    """Return whether a checkpoint is a Lumina-mGPT: its config names its class, and keeps its loss weight."""
    names = getattr(config, "architectures", None) or ()
    return any("XLLMX" in name for name in names) or getattr(config, "z_loss_weight", None) is not None
