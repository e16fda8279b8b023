"""BitDance of texts: a Qwen3 that reads a prompt, then draws square patches of 16 or 64 tokens of bits.

Prompt, the size of the picture and learned queries are ids of the language model. Positions of one patch see each
other, and all before them. Place embeddings, sines and cosines of column and row, are added to what a token is fed as
and to its condition. See `visual_spec.models.continuous.bitdance` for the family.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from visual_spec.models.continuous.bitdance_head import HEAD_KEYS, BinaryHead, EulerMaruyamaSchedule
from visual_spec.models.continuous.blocks import ConditionedState
from visual_spec.models.core.cache import seen_causally
from visual_spec.models.core.continuous import ChainSettings
from visual_spec.models.core.layouts import KeyLayout, count_parts, loaded
from visual_spec.models.core.offload import check_cache_fits
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.core.transformers_cache import (
    ImagePrompt,
    SlotCache,
    attention_mask,
    cache_argument,
    joined_prompts,
)

_HEAD = 128  # numbers of an attention head of the diffusion head


@dataclass
class BitDanceTextState(ConditionedState):
    """One decode; `conditions` belong to slot 0.

    Attributes:
        cache: places of a row: the prompt, the tokens of the picture, a window.
        prompt_mask: bool [R, T]; start: long [R], the position after the prompt.
        table: what is added by place, [L P, dim].
    """

    cache: SlotCache
    prompt_mask: Tensor
    start: Tensor
    table: Tensor

    def select(self, samples: Tensor) -> None:
        """Keep only some samples, long [N], in this order."""
        rows = self.rows(samples)
        self.cache.select(rows)
        self.conditions, self.prompt_mask = self.conditions[rows], self.prompt_mask[rows]
        self.start = self.start[rows]

    def buffers(self) -> list[Tensor]:
        """Return what calls read and write in place."""
        return [*self.cache.buffers(), self.prompt_mask, self.start, self.table]


class BitDanceTextTransformer(SavedModel):
    """A `CausalContinuousModel` whose slots are patches of tokens, conditioned on an `ImagePrompt`.

    The ids of a prompt end in those of the picture: its start, height and width, and a query for each token of a patch
    but the first. A slot's vector is as of `BitDanceTransformer`.

    Args:
        decoder: settings of the language model, as of `Qwen3Config`.
        grid_size: tokens per side of the pictures, unless `with_grid` says another size.
        bits: numbers of a token.
        patch: tokens per side of a slot; their square P is drawn in one call.
        head_width, head_depth, head_modulated, head_gated: of `BinaryHead`; its attention heads have 128 numbers.
        head_steps, time_shift: the chain of a slot unless a sampler sets otherwise, see `EulerMaruyamaSchedule`.

    Raises:
        ValueError: a patch that does not divide the grid, or as `BinaryHead`.
    """

    _repeated_blocks = ["Qwen3DecoderLayer", "BinaryHeadBlock"]
    _no_split_modules = ["Qwen3DecoderLayer", "BinaryHeadBlock"]

    @register_to_config
    def __init__(
        self,
        decoder: Mapping[str, Any],
        grid_size: Count = 64,
        bits: Count = 32,
        patch: Count = 8,
        head_width: Count = 5120,
        head_depth: Count = 6,
        head_modulated: Count = 2,
        head_gated: bool = True,
        head_steps: int = 51,
        time_shift: float = 1.0,
    ):
        super().__init__()
        side, rest = divmod(grid_size, patch)
        if rest or patch < 2:
            raise ValueError(f"grid_size={grid_size}, patch={patch}; a patch of 2 or more divides the grid.")
        EulerMaruyamaSchedule(head_steps, shift=time_shift)
        self.chain = ChainSettings(head_steps)
        self.grid, self.patch, self.patch_tokens = TokenGrid(side, side), patch, patch * patch
        settings = Qwen3Config(**decoder)
        dim, self.token_dim = settings.hidden_size, bits * self.patch_tokens
        self.condition_dim = dim * self.patch_tokens
        self.trunk = Qwen3Model(settings)
        with torch.device("cpu"):  # computed, never loaded
            self.trunk.rotary_emb = Qwen3RotaryEmbedding(settings)
        layers = {"fc1": nn.Linear(bits, dim), "act": nn.GELU(approximate="tanh"), "fc2": nn.Linear(dim, dim)}
        self.projector = nn.Sequential()
        for name, layer in layers.items():
            self.projector.add_module(name, layer)
        heads = max(1, head_width // _HEAD)
        sizes = (bits, self.patch_tokens, dim, head_width, head_depth, heads, head_modulated, head_gated)
        self.head = BinaryHead(*sizes, bounded=True)

    @property
    def places(self) -> Tensor:
        """Slots stand in raster order; one more after the last."""
        return torch.arange(self.grid.num_tokens + 1, device=self.device)

    def with_grid(self, height: int, width: int) -> Self:
        """Return this model over pictures of `height x width` slots, with the same weights."""
        other = copy.copy(self)
        other.grid = TokenGrid(height, width)
        return other

    def schedule(self, num_steps: int, eta: float | None = None) -> EulerMaruyamaSchedule:
        """The chain of so many levels, where the model is; see `ContinuousModel.schedule`."""
        return EulerMaruyamaSchedule(num_steps, shift=self.config["time_shift"], eta=eta).to(self.device)

    @torch.no_grad()
    def prefill(
        self, condition: ImagePrompt, *, batch_size: int, guided: bool, window: int
    ) -> BitDanceTextState:
        """Run the prompts; see `CausalContinuousModel.prefill`.

        Raises:
            TypeError, ValueError: as `joined_prompts`; or a prompt without the ids of a picture.
        """
        prompt = joined_prompts(condition, batch_size, guided, self.device, "BitDance")
        if int(prompt.mask.sum(-1).min()) < self.patch_tokens:
            raise ValueError(
                f"a prompt has less than the {self.patch_tokens} ids that ask for a patch; end it in a picture's."
            )
        settings: Any = self.trunk.config
        rows, length = prompt.ids.shape
        room = length + (self.grid.num_tokens + window) * self.patch_tokens
        each = settings.num_hidden_layers * settings.num_key_value_heads * settings.head_dim
        size = 2 * each * room * self.dtype.itemsize * rows // batch_size
        check_cache_fits(size, batch_size, self.device)
        cache, table = SlotCache(settings.num_hidden_layers, room), self._table()
        seen = seen_causally(prompt.mask)
        seen[:, -self.patch_tokens :, -self.patch_tokens :] = True
        places = torch.arange(length, device=self.device).expand(rows, -1)
        positions, start = prompt.where
        hidden = self._run(cache, self.trunk.embed_tokens(prompt.ids), positions, places, seen)
        conditions = (hidden[:, -self.patch_tokens :] + table[: self.patch_tokens]).flatten(1)
        return BitDanceTextState(conditions, guided, cache, prompt.mask, start, table)

    @torch.no_grad()
    def forward(self, state: BitDanceTextState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Feed the signs of tokens [B, W, P bits] at slots [B, W]; see `BitDanceTransformer.forward`."""
        if state.guided:
            tokens, slots = tokens.repeat(2, 1, 1), slots.repeat(2, 1)
        width, prompt, last = slots.shape[1], state.prompt_mask.shape[1], len(state.table) - 1
        each = torch.arange(self.patch_tokens, device=slots.device)
        offsets = (slots[..., None] * self.patch_tokens + each).flatten(1)
        bits = tokens.sign().unflatten(-1, (self.patch_tokens, -1)).flatten(1, 2)
        fed = self.projector(bits) + state.table[offsets.clamp_max(last)]
        ends = (offsets // self.patch_tokens + 1) * self.patch_tokens  # of the own patch
        room = state.cache.layers[0].get_max_length() - prompt  # pyright: ignore[reportAttributeAccessIssue]
        seen = torch.arange(room, device=slots.device) < ends[..., None]
        seen = torch.cat([state.prompt_mask[:, None].expand(-1, width * self.patch_tokens, -1), seen], -1)
        positions = state.start[:, None] + offsets
        hidden = self._run(state.cache, fed, positions, prompt + offsets, seen)
        hidden = hidden + state.table[(offsets + self.patch_tokens).clamp_max(last)]
        return hidden.unflatten(1, (width, -1)).flatten(2)

    def _run(self, cache: SlotCache, fed: Tensor, positions: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """The decoder's output [R, N, dim] of `fed [R, N, dim]`, cached at places [R, N]; bool `seen [R, N, S]`."""
        cache.at(places, seen.shape[-1])
        mask = attention_mask(seen[:, None], fed, self.trunk.config._attn_implementation or "sdpa")
        inputs: dict[str, object] = dict(inputs_embeds=fed, position_ids=positions, attention_mask=mask)
        inputs[cache_argument(self.trunk)] = cache
        return self.trunk(**inputs, use_cache=True).last_hidden_state

    def _table(self) -> Tensor:
        """What is added by place [L P, dim]: of the column, then of the row, sines, then cosines."""
        height, width = self.grid.height * self.patch, self.grid.width * self.patch
        half = self.trunk.config.hidden_size // 2
        speeds = 10000.0 ** -(torch.arange(half // 2, device=self.device).float() / (half / 2))
        angles = torch.arange(max(height, width), device=self.device).float()[:, None] * speeds
        waves = torch.cat([angles.sin(), angles.cos()], -1)
        columns, rows = waves[None, :width].expand(height, -1, -1), waves[:height, None].expand(-1, width, -1)
        table = torch.cat([columns, rows], -1)
        shape = "(h p) (w q) c -> (h w p q) c"
        return rearrange(table, shape, p=self.patch, q=self.patch).to(self.dtype)


# -- official folders ------------------------------------------------------------------------------------------------

_SETTINGS = "vision_head_config.json"
_FOLDER = KeyLayout(
    "BitDance of texts",
    "the folder BitDance-14B-64x or BitDance-14B-16x",
    needed={
        "trunk.embed_tokens.weight": 2,
        "projector.fc1.weight": 2,
        "head.input_proj.weight": 2,
        "head.final_layer.linear.weight": 2,
    },
    dropped=(r"lm_head\..*",),
    renamed={r"^model\.": "trunk.", r"^net\.": "head.", r"^fc": "projector.fc", **HEAD_KEYS},
)
_NOT_OF_THE_MODEL = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype")


def load_bitdance_text(folder: Path, *, dtype: torch.dtype | None = None) -> BitDanceTextTransformer:
    """The model of an official folder: Qwen3 as transformers saves it, `vision_head` and `projector` beside it.

    Args:
        dtype: of all weights; None: the language model's.

    Raises:
        ValueError, OSError: a file is missing, or holds other weights; names it.
    """
    files = [*sorted(folder.glob("model*.safetensors")), folder / "vision_head.safetensors"]
    files = [*files, folder / "projector.safetensors"]
    missing = [
        path.name for path in (folder / _SETTINGS, folder / "config.json", *files) if not path.is_file()
    ]
    if missing or len(files) < 3:
        named = ", ".join(missing) or "model*.safetensors"
        raise ValueError(f"{folder} is no folder of BitDance: it lacks {named}; pass {_FOLDER.file}.")
    official = {key: value for path in files for key, value in load_file(path).items()}
    weights = _FOLDER.translated(official, str(folder))
    head = json.loads((folder / _SETTINGS).read_text())
    decoder = Qwen3Config.from_pretrained(folder).to_diff_dict()
    tokens = int(head["parallel_num"])
    patch = math.isqrt(tokens)
    if patch * patch != tokens:
        raise ValueError(f"{folder / _SETTINGS}: parallel_num={tokens}, which is no square.")
    width, bits = weights["head.input_proj.weight"].shape
    config = {
        "decoder": {key: value for key, value in decoder.items() if key not in _NOT_OF_THE_MODEL},
        "bits": bits,
        "patch": patch,
        "head_width": width,
        "head_depth": count_parts(weights, "head.res_blocks."),
        "head_modulated": count_parts(weights, "head.ada_ln_blocks."),
        "head_gated": "head.res_blocks.0.mlp.w1.weight" in weights,
        "time_shift": float(head.get("time_shift", 1.0)),
    }
    dtype = dtype or weights["trunk.embed_tokens.weight"].dtype
    what = "BitDance of texts"
    return loaded(BitDanceTextTransformer, config, weights, str(folder), what=what, dtype=dtype)
