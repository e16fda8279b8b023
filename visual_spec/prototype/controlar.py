"""ControlAR: LlamaGen that draws along a control picture, such as edges or depth (Li et al. 2024, arXiv 2410.02705).

A DINOv2 makes one vector of each patch of the control picture, and a patch is as large as a token. What predicts a slot
reads the vector of this slot: three projections of it are added to the hidden states, before layers 0, n / 3 and
2 n / 3. So the control belongs to slots, not to calls, and every sampler of LlamaGen decodes it as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model

from visual_spec.files.pictures import unit_pixels
from visual_spec.models.core.checkpoints import Checkpoint, Source, fill, read_checkpoint
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, OneOf, register_to_config
from visual_spec.models.next_token.llamagen import LlamaGenState, LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_blocks import CaptionProjection
from visual_spec.models.next_token.llamagen_checkpoint import recognise
from visual_spec.pipelines.repaint import Pictures
from visual_spec.pipelines.steps import check_each, listed

GROUPS = 3  # side embeddings of a slot, one for each third of the layers
PATCH, TOKEN = 14, 16  # pixels per side of a patch of DINOv2, and of a token of the releases
RESAMPLES = ("nearest", "bicubic")
_HEAD_DIM = 64  # of DINOv2 small and base


@dataclass
class ControlledCondition(TextCondition):
    """Caption features and a control picture for each row.

    Attributes:
        control: `[B, 3, H, W]` in [-1, 1], of the size of the picture that is drawn.
        strength: what the side embeddings are multiplied by; 0 is no control, 1 the trained one.
    """

    control: Tensor = field(kw_only=True)
    strength: float = field(default=1.0, kw_only=True)


class ControlProjection(nn.Module):
    """What the control of a slot becomes, and what stands for no control (training drops it, for guidance)."""

    def __init__(self, dim: int, length: int):
        super().__init__()
        self.cap_proj = CaptionProjection(dim, dim)
        self.uncond_embedding = nn.Parameter(torch.zeros(length, dim))


class ControlARTransformer(SavedModel):
    """A `NextTokenModel`, `TreeModel` and `OrderModel`: LlamaGen with side embeddings of a control picture.

    Args:
        transformer_config: of a text-conditional `LlamaGenTransformer` in raster order, of one frame.
        adapter_config: of transformers' `Dinov2Config`; official: small (384) and base (768).
        control_resample: how a control picture is made smaller for DINOv2's patches of 14 pixels: "nearest" for lines
            and classes (Canny, segmentation), "bicubic" for what varies smoothly (depth, soft edges).
        token_size: pixels per side of a token; 16 in the releases.
        guides: what the unconditional rows of guidance lack: "both", caption and control, as in the releases; or
            "control", where guidance strengthens the control alone. Such a model was trained without control, too, and
            draws without where none is given.

    Raises:
        ValueError: a transformer of another kind, a number of layers that is no multiple of three, patches of another
            size than 14, or another `control_resample`.
    """

    _no_split_modules = ["TransformerBlock"]
    official_defaults = {"default_guidance_scale": 4.0, "default_top_k": 2000}  # of its sampling programs

    @register_to_config
    def __init__(
        self,
        transformer_config: dict[str, Any],
        adapter_config: dict[str, Any],
        control_resample: Annotated[str, OneOf(tuple(RESAMPLES))] = "bicubic",
        token_size: Count = TOKEN,
        guides: Annotated[str, OneOf(("both", "control"))] = "both",
    ):
        super().__init__()
        self.transformer = LlamaGenTransformer(**transformer_config)
        own = self.transformer.config
        if own["caption_dim"] is None or own["order"] != "raster" or own["num_frames"] != 1:
            raise ValueError(
                f"a transformer of order {own['order']!r}, caption_dim={own['caption_dim']}, {own['num_frames']} "
                "frames given; ControlAR is a text-conditional LlamaGen in raster order, of one frame"
            )
        if own["num_layers"] % GROUPS:
            raise ValueError(f"num_layers={own['num_layers']}; pass a multiple of {GROUPS}")
        dino = Dinov2Config(**adapter_config)
        if dino.patch_size != PATCH:
            raise ValueError(f"a DINOv2 with patches of {dino.patch_size} pixels; pass one of {PATCH}")
        dim, self.grid = own["dim"], self.transformer.grid
        self.vocab_size, self.prefix_length = self.transformer.vocab_size, self.transformer.prefix_length
        self.adapter = Dinov2Model(dino)
        self.adapter_mlp = CaptionProjection(dino.hidden_size, dim)
        self.condition_mlp = ControlProjection(dim, (own["rotary_size"] or own["grid_size"]) ** 2)
        self.condition_layers = nn.ModuleList(CaptionProjection(dim, dim) for _ in range(GROUPS))

    @property
    def control_size(self) -> tuple[int, int]:
        """Height and width of a control picture in pixels."""
        return self.config["token_size"] * self.grid.height, self.config["token_size"] * self.grid.width

    def with_grid(self, height: int, width: int) -> ControlARTransformer:
        """As `LlamaGenTransformer.with_grid`: this model over pictures of another size."""
        drawing = self.transformer.with_grid(height, width)
        if drawing is self.transformer:
            return self
        other = copy(self)
        other._modules, other.grid = {**self._modules, "transformer": drawing}, drawing.grid
        return other

    # -- decoding: the contract of next-token models ------------------------------------------------------------------

    def check_control(
        self, control: Pictures | None, strength: float, count: int, height: int | None, width: int | None
    ) -> tuple[int | None, int | None]:
        """Height and width of the control pictures, and of what is drawn along them; as asked for where there are none.

        Args:
            control, strength, height, width: as `control`, `control_strength`, `height` and `width` of `ImagePipeline`.
            count: prompts.

        Raises:
            ValueError: control pictures that are missing or do not fit each other or the call, or no strength.
        """
        if control is None and self.config["guides"] == "control":
            if strength != 1.0:
                raise ValueError(f"control_strength={strength} without a control picture; pass control too.")
            return height, width
        if control is None:
            raise ValueError("this model draws along a control picture; pass control.")
        if not math.isfinite(strength):
            raise ValueError(f"control_strength={strength}; pass a finite number, 1 for the trained one.")
        pictures = listed(control)
        check_each(len(pictures), "control pictures", count)
        sizes = {tuple(unit_pixels(picture, "control").shape[-2:]) for picture in pictures}
        if len(sizes) > 1:
            raise ValueError(f"control pictures of several sizes, {sorted(sizes)}; resize them to one.")
        (own,) = sizes
        if height not in (None, own[0]) or width not in (None, own[1]):
            raise ValueError(
                f"control of {own[0]} x {own[1]} pixels for a picture of height={height}, width={width}; resize it, or "
                "leave height and width out."
            )
        return own[0], own[1]

    def controlled(
        self, condition: TextCondition, control: Pictures | None, strength: float
    ) -> TextCondition:
        """The condition with the control pictures of its rows, and with what guidance leads away from."""
        if condition.negative is None and self.config["guides"] == "control":
            condition = replace(condition, negative=condition)
        if control is None:
            return condition
        pictures = torch.stack([unit_pixels(picture, "control") for picture in listed(control)])
        rows = len(condition.features)
        each = rows if len(pictures) == 1 else rows // len(pictures)
        return ControlledCondition(
            condition.features,
            condition.mask,
            negative=condition.negative,
            control=(2 * pictures - 1).repeat_interleave(each, 0).to(condition.features.device),
            strength=strength,
        )

    def check_condition(self, condition: Any, batch_size: int) -> None:
        """Refuse a condition without a control picture (TypeError), where one is needed, with one of another shape, or
        with a strength that is no finite number (ValueError); or as `LlamaGenTransformer.check_condition`.
        """
        if not isinstance(condition, ControlledCondition):
            if self.config["guides"] == "control":
                return self.transformer.check_condition(condition, batch_size)
            raise TypeError(
                f"{type(condition).__name__} given; this model takes a ControlledCondition(features, mask, control=...)"
            )
        self.transformer.check_condition(condition, batch_size)
        wanted = (batch_size, 3, *self.control_size)
        if tuple(condition.control.shape) != wanted:
            raise ValueError(
                f"control pictures {tuple(condition.control.shape)} given; this model takes {wanted}"
            )
        if not -float("inf") < condition.strength < float("inf"):
            raise ValueError(f"strength={condition.strength} given; pass a finite number")

    def read(self, control: Tensor) -> Tensor:
        """Return what is seen of control pictures `[B, 3, H, W]` at each slot, `[B, L, dim]`. Gradients flow."""
        size = (PATCH * self.grid.height, PATCH * self.grid.width)
        resample = self.config["control_resample"]
        corners = True if resample == "bicubic" else None
        control = control.to(self.device, torch.promote_types(self.dtype, torch.float32))
        small = F.interpolate(control, size=size, mode=resample, align_corners=corners)
        # [B, L, A]: without the class token
        return self.adapter_mlp(self.adapter(small.to(self.dtype)).last_hidden_state[:, 1:])

    def side_embeddings(
        self, condition: TextCondition, *, guided: bool = False, dropped: Tensor | None = None
    ) -> Tensor:
        """Return `[R, 3, L + 1, dim]` by slot, see `llamagen_blocks.entered`; unconditional rows last when `guided`.

        `dropped`, bool `[B]`: rows whose control is replaced by the unconditional one. Gradients flow.
        """
        null = self.condition_mlp.uncond_embedding[: self.grid.num_tokens].expand(
            len(condition.features), -1, -1
        )
        controlled = isinstance(condition, ControlledCondition)
        seen = self.read(condition.control) if controlled else null
        if dropped is not None:
            seen = torch.where(dropped[:, None, None], null, seen)
        if guided:
            seen = torch.cat([seen, null])
        seen = self.condition_mlp.cap_proj(seen)
        groups = torch.stack([layer(seen) for layer in self.condition_layers], 1)  # [R, 3, L, dim]
        return F.pad((condition.strength if controlled else 1.0) * groups, (0, 0, 0, 1))

    @decodes
    def prefill(
        self, condition: TextCondition, *, batch_size: int, guided: bool, window: int
    ) -> LlamaGenState:
        """As `LlamaGenTransformer.prefill`, with the control of slot 0 at the last position of the prefix."""
        self.check_condition(condition, batch_size)
        side = self.side_embeddings(condition, guided=guided)
        return self.transformer.prefill(
            condition, batch_size=batch_size, guided=guided, window=window, side=side
        )

    @decodes
    def forward(
        self,
        state: LlamaGenState,
        tokens: Tensor,
        slots: Tensor,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """As `LlamaGenTransformer.forward`: what is fed at a slot gets the control of the next slot."""
        return self.transformer(state, tokens, slots, visible, seen, predicted)

    def keep(self, state: LlamaGenState, nodes: Tensor, slots: Tensor) -> None:
        """As `LlamaGenTransformer.keep`."""
        self.transformer.keep(state, nodes, slots)

    def teacher_forced(
        self,
        tokens: Tensor,
        condition: ControlledCondition,
        dropped: Tensor | None = None,
        hidden_tokens: Tensor | None = None,
    ) -> Tensor:
        """As `LlamaGenTransformer.teacher_forced`; `dropped` rows lose caption and control together."""
        side = self.side_embeddings(condition, dropped=dropped)
        return self.transformer.teacher_forced(tokens, condition, dropped, hidden_tokens, side)


# -- official checkpoints --------------------------------------------------------------------------------------------

_OWN = ("adapter.", "adapter_mlp.", "condition_mlp.", "condition_layers.")
_TABLE = "condition_mlp.uncond_embedding"
_UNREAD = "condition_embeddings.weight"  # [codes, dim]: the official network makes it and never reads it
# Weights that DINOv2 has in files of older versions of transformers, and their names today.
_RENAMED = {
    r"attention\.attention\.(query|key|value)\.": lambda found: f"attention.{found[1][0]}_proj.",
    r"attention\.output\.dense\.": lambda found: "attention.o_proj.",
}


def is_controlar(weights: Mapping[str, Any]) -> bool:
    """Return whether these keys are of a ControlAR."""
    return "adapter_mlp.fc1.weight" in weights and "condition_layers.0.fc1.weight" in weights


def load_controlar_checkpoint(
    source: Source,
    *,
    image_size: int | None = None,
    dtype: torch.dtype | None = None,
    control_resample: str | None = None,
) -> ControlARTransformer:
    """Return the model of an official file, e.g. `canny_MR.safetensors`.

    `source`, `dtype` and errors: see `visual_spec.models.core.layouts`.

    Args:
        image_size: side of the pictures in pixels, where a call names no other size; None: what the file was trained
            for, 768 for multi-resolution files, and never more than that.
        control_resample: see the class; None: "nearest" for a file that is named after Canny edges or segmentation,
            else "bicubic".
    """
    checkpoint = source if isinstance(source, Checkpoint) else read_checkpoint(source)
    name = str(checkpoint.path)
    if not is_controlar(checkpoint.weights):
        raise ValueError(
            f"{name} is no ControlAR: it lacks adapter_mlp or condition_layers; pass a file such as "
            "canny_MR.safetensors."
        )
    weights = {new_key(key): value for key, value in checkpoint.weights.items() if key.startswith(_OWN)}
    drawing = {key: value for key, value in checkpoint.weights.items() if not key.startswith(_OWN)}
    codes = drawing.get("tok_embeddings.weight")
    if codes is not None and _UNREAD in drawing and drawing[_UNREAD].shape == codes.shape:
        del drawing[_UNREAD]
    renamed = Checkpoint(checkpoint.path, drawing, checkpoint.arguments)
    architecture = recognise(renamed)
    rotary = _trained_side(weights.get(_TABLE), name)
    size = TOKEN * rotary if image_size is None else image_size
    if size % TOKEN or not 0 < size <= TOKEN * rotary:
        raise ValueError(
            f"image_size={size}, and {name} was trained for pictures of up to {TOKEN * rotary} pixels; pass a multiple "
            f"of {TOKEN} up to that, or leave image_size out."
        )
    if control_resample is None:
        sharp = re.search(r"canny|seg", checkpoint.path.stem.lower())
        control_resample = "nearest" if sharp else "bicubic"
    with torch.device("meta"):
        model = ControlARTransformer(
            {**architecture.config, "grid_size": size // TOKEN, "rotary_size": rotary},
            _adapter_config(weights, name),
            control_resample,
        )
    drawing.pop("freqs_cis", None)
    weights |= {f"transformer.{key}": value for key, value in drawing.items()}
    return fill(model, weights, name, what=f"ControlAR, {architecture.name}", dtype=dtype)


def new_key(key: str) -> str:
    """Return our name of an official key of the control: transformers' present name of a weight of DINOv2."""
    if not key.startswith("adapter."):
        return key
    key = "adapter." + key.removeprefix("adapter.").removeprefix("model.")
    for old, new in _RENAMED.items():
        key = re.sub(old, new, key)
    return key


def _adapter_config(weights: Mapping[str, Tensor], name: str) -> dict[str, Any]:
    table = weights.get("adapter.embeddings.position_embeddings")
    if table is None or table.ndim != 3:
        raise ValueError(f"{name} holds no DINOv2: it lacks adapter.model.embeddings.position_embeddings.")
    width, layers = (
        table.shape[2],
        {key.split(".")[3] for key in weights if key.startswith("adapter.encoder.layer.")},
    )
    return {
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // _HEAD_DIM),
        "image_size": PATCH * round((table.shape[1] - 1) ** 0.5),
        "patch_size": PATCH,
    }


def _trained_side(table: Tensor | None, name: str) -> int:
    """Tokens per side of the largest picture of the training, for which the official rotary table is made."""
    shape = () if table is None else tuple(table.shape)
    side = math.isqrt(shape[0]) if shape else 0
    if len(shape) != 2 or side * side != shape[0]:
        raise ValueError(
            f"{name}: {_TABLE} has the shape {shape}; it needs a row for each token of a square picture."
        )
    return side
