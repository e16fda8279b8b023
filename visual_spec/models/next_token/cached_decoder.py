"""The decoder of a transformers model as a next-token model.

The image generators of transformers (Janus, Chameleon, Emu3, GLM-Image) share one structure. A causal decoder reads a
text prompt, then image tokens in raster order; some models have a forced token after every row of the picture.
`CachedDecoder` implements this structure. Each family's file defines the modules that embed and score a token, the
image ids, and the unconditional prompt.

Forced row ends are not slots. Samplers see height x width image tokens. When a call feeds the last token of a row, it
also feeds the row end, at a position of its own, and the row end predicts the first token of the next row. The model's
own loop computes the same, with one more call for every row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from visual_spec.kernels.window_attention import takes
from visual_spec.models.core.cache import (
    on_host,
    repeats,
    seen_causally,
    seen_in_order,
    seen_in_tree,
    seen_up_to,
)
from visual_spec.models.core.offload import check_cache_fits, loads_groups
from visual_spec.models.core.protocol import DecodeState, TokenGrid, check_raster, wide
from visual_spec.models.core.transformers_attention import window_calls
from visual_spec.models.core.transformers_cache import (
    ImagePrompt,
    Prompt,
    SlotCache,
    attention_mask,
    cache_argument,
    joined_prompts,
)
from visual_spec.models.next_token.length_limits import check_length


@dataclass
class CachedState(DecodeState):
    """One batch during decoding.

    Attributes:
        cache: places of a row: the T positions of the prompt, the tokens of the picture (row ends included), scratch.
        prompt_mask: bool [R, T].
        start: long [R], the position of the picture's first token.
        features: [R, W, dim], the head's input in the last call (prefill: W = 1).
        tree_size: nodes of the last tree call if it fed row ends, else 0.
        tapped: [R, W, len(taps) * dim], what the layers `taps` read in the last call (prefill: W = T), else None.
    """

    cache: SlotCache
    prompt_mask: Tensor
    start: Tensor
    features: Tensor
    tree_size: int = 0
    tapped: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits, self.prompt_mask = self.logits[rows], self.prompt_mask[rows]
        self.start, self.features = self.start[rows], self.features[rows]
        self.tapped = None if self.tapped is None else self.tapped[rows]

    def buffers(self) -> list[Tensor]:
        return [*self.cache.buffers(), self.prompt_mask, self.start]

    def narrow(self, width: int) -> None:
        self.features = self.features[:, :width]
        self.tapped = None if self.tapped is None else self.tapped[:, :width]


def consecutive(ids: list[int]) -> slice | Tensor:
    """Return an index of these rows of a table: a slice, so that indexing is a view, if the ids are consecutive."""
    if ids == list(range(ids[0], ids[0] + len(ids))):
        return slice(ids[0], ids[0] + len(ids))
    return torch.tensor(ids)


class CachedDecoder:
    """A `TreeModel` and `OrderModel` around the decoder of a transformers model, which does not change.

    Token t of the sampler's vocabulary is the t-th image id. Only the head's rows of image ids are read; all other ids
    are forbidden at image slots.

    Args:
        decoder: the module that maps `inputs_embeds` to `last_hidden_state`.
        table: embedding of the text vocabulary.
        head: scores the decoder's output.
        image_ids: ids of the image tokens in the vocabulary of `table` and `head`, ascending.
        grid: tokens of the picture.
        row_end: id of the token after every row, or None.

    Attributes:
        length: number of tokens of the picture, row ends included.
        new_tokens: number of tokens that `generate` must make, without those that close the picture.

    Raises:
        ValueError: the attention implementation does not take our mask.
    """

    family = "this model"
    writes_text = False  # whether `generate` of the model writes text, whatever it is asked for
    returns_prompt = True  # `output` starts with the prompt
    guidance_scale = 1.0  # default, if neither call nor generation config sets it
    least_kept = 1  # ids that top-k and top-p of its program keep at least
    # Where `generate` draws one slot a step by `torch.multinomial`: among how many ids, which of them are the tokens'
    # (long [V]), and in which precision. None: it draws otherwise.
    plain_draws: tuple[int, Tensor, torch.dtype] | None = None
    draws_pairs = False  # whether it then draws the unconditional rows too
    taps: tuple[int, ...] = ()  # layers whose inputs a state hands out as `tapped`, for a drafter

    def __init__(
        self,
        decoder: nn.Module,
        table: nn.Module,
        head: nn.Module,
        image_ids: list[int],
        grid: TokenGrid,
        row_end: int | None = None,
    ) -> None:
        self.decoder: Any = decoder
        self.table: Any = table
        self.head: Any = head
        self.image_rows = consecutive(image_ids)
        self.grid = grid
        self.vocab_size = len(image_ids)
        self.row_end = row_end
        self.length = self.new_tokens = grid.num_tokens + (0 if row_end is None else grid.height)
        if self._attention not in ("sdpa", "eager"):
            raise ValueError(
                f"{self.family} runs with attn_implementation={self._attention!r}, which takes no mask of one row a "
                "sample; load it with attn_implementation='sdpa' (or call model.set_attn_implementation('sdpa'))."
            )

    # What a family may override ---------------------------------------------------------------------------------------

    @staticmethod
    def asks_for_pictures(asked: Mapping[str, object]) -> bool:
        """Whether a call of `generate` with these arguments draws pictures."""
        return True

    @staticmethod
    def lays_out(asked: Mapping[str, object]) -> bool:
        """Whether its arguments lay out the picture token by token, see `constraint`."""
        return False

    def of_text(self, ids: Tensor) -> Tensor:
        """Return embeddings [R, T, C] of a prompt's ids, long [R, T]."""
        return self.table(ids)

    def of_prompt(self, ids: Tensor) -> dict[str, Tensor]:
        """Return what the decoder takes beside the embeddings of a prompt's ids, long [R, T]."""
        return {}

    def embed(self, tokens: Tensor) -> Tensor:
        """Return embeddings [R, W, dim] of image tokens [R, W]."""
        return self.table(self.ids(tokens))

    def score(self, features: Tensor) -> Tensor:
        """Return logits [R, W, V] over the image tokens, from features [R, W, dim]."""
        # A head that is more than a matrix (quantised, offloaded, adapted) is called as a whole, then cut.
        if type(self.head) is nn.Linear and not hasattr(self.head, "_hf_hook"):
            bias = self.head.bias
            return F.linear(
                features, self.head.weight[self.image_rows], None if bias is None else bias[self.image_rows]
            )
        return self.head(features)[..., self.image_rows]

    def positions(self, start: Tensor, offsets: Tensor) -> Tensor:
        """Rotary positions [R, W] (or [3, R, W]) of the picture's tokens `offsets` [R, W]; `start` is long [R]."""
        return start[:, None] + offsets

    @classmethod
    def plan(
        cls, model: Any, prompt: Prompt, *, guided: bool, **inputs: Any
    ) -> tuple[CachedDecoder, ImagePrompt]:
        """Return the image model for a request, and its condition.

        Args:
            model: the transformers model.
            prompt: the processor's output for the captions.
            guided: also make the unconditional prompt.
            inputs: the processor's other outputs; each family names its own.
        """
        raise NotImplementedError

    def output(self, condition: ImagePrompt, tokens: Tensor) -> Tensor:
        """Return what the model's `generate` returns for image tokens [B, height * width]."""
        raise NotImplementedError

    @staticmethod
    def pixels(model: Any, ids: Tensor, **inputs: Any) -> Tensor:
        """Return pictures [B, 3, H, W] in [-1, 1] from the result of `output`."""
        raise NotImplementedError

    def next_stage(self, condition: ImagePrompt, tokens: Tensor) -> tuple[CachedDecoder, ImagePrompt] | None:
        """Return the model and condition of the next grid after these tokens [B, height * width], if there is one."""
        return None

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _attention(self) -> str:
        return self.decoder.config._attn_implementation

    @property
    def _head_dim(self) -> int:
        config = self.decoder.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def device(self) -> torch.device:
        """The device of the input tokens: the embedding's, or the one that offloading moves it to."""
        target = getattr(getattr(self.table, "_hf_hook", None), "execution_device", None)
        return self.table.weight.device if target is None else torch.device(target)

    def settled_ids(self, tokens: int) -> int:
        """Ids of `sequence` that the first `tokens` of a picture settle: a row end follows the last one of a row."""
        return tokens + (tokens // self.grid.width if self.row_end is not None else 0)

    def ids(self, tokens: Tensor) -> Tensor:
        """Return the text-vocabulary ids of image tokens."""
        if isinstance(self.image_rows, slice):
            return tokens + self.image_rows.start
        return self.image_rows.to(tokens.device)[tokens]

    def sequence(self, tokens: Tensor) -> Tensor:
        """Return ids [B, length] of image tokens [B, height * width], with row ends."""
        ids = self.ids(tokens)
        if self.row_end is None:
            return ids
        by_row = rearrange(ids, "b (h w) -> b h w", h=self.grid.height)
        return rearrange(F.pad(by_row, (0, 1), value=self.row_end), "b h w -> b (h w)")

    @loads_groups
    def prefill(self, condition: ImagePrompt, *, batch_size: int, guided: bool, window: int) -> CachedState:
        """Run the prompts, followed by the unconditional ones; see `NextTokenModel.prefill`."""
        prompt = self.prompt_of(condition, batch_size=batch_size, guided=guided)
        return self.run_prompt(prompt, guided=guided, window=window)

    def prompt_of(self, condition: ImagePrompt, *, batch_size: int, guided: bool) -> tuple[Tensor, ...]:
        """Return ids and mask [R, T] of the prompts, positions, and start [R]; see `PromptModel`."""
        prompt = joined_prompts(condition, batch_size, guided, self.device, self.family)
        return (prompt.ids, prompt.mask, *prompt.where)

    @loads_groups
    def run_prompt(
        self, prompt: tuple[Tensor, ...], *, guided: bool, window: int, held: CachedState | None = None
    ) -> CachedState:
        """Run checked prompts, see `PromptModel`.

        Raises:
            ValueError: prompt and new tokens are longer than the decoder takes (`check_length`).
        """
        ids, mask, positions, start = prompt
        rows, length = ids.shape
        samples = rows // (1 + guided)
        check_length(self.decoder, self.table, length + self.length, window=window, samples=samples)
        if held is None:
            cache = self._allocate(rows, samples, length, window)
        else:
            cache = held.cache
            cache.clear()
        axis = positions.dim() - 2  # of the rows
        shared = repeats(ids, mask, positions.movedim(axis, 0)) if held is None else None
        whole_mask = mask
        if shared is not None:
            ids, mask = ids[shared[0]], mask[shared[0]]
            positions = positions.index_select(axis, shared[0])
        places = torch.arange(length, device=self.device).expand(len(ids), -1)
        # Padding sees itself, because attention over no position gives nan.
        embeddings, seen = self.of_text(ids), seen_causally(mask)
        hidden = self._forward(cache, embeddings, positions, places, seen, mask, **self.of_prompt(ids))
        hidden, tapped = self._apart(hidden)
        features = hidden[:, -1:]
        logits = self._logits(features)[:, 0]
        if shared is not None:
            cache.select(shared[1])
            logits, features = logits[shared[1]], features[shared[1]]
            tapped = None if tapped is None else tapped[shared[1]]
        return CachedState(
            logits=logits,
            guided=guided,
            window=window,
            cache=cache,
            prompt_mask=whole_mask,
            start=start,
            features=features,
            tapped=tapped,
        )

    def _allocate(self, rows: int, batch_size: int, length: int, window: int) -> SlotCache:
        """Return an empty cache for prompts of this length, and the picture after them."""
        # Slots run up to num_tokens + window - 1, with at most one row end per slot; a tree uses two places a node.
        config, num_places = self.decoder.config, length + self.length + 2 * window + 1
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        numbers = 2 * config.num_hidden_layers * heads * self._head_dim * num_places
        sample_bytes = numbers * self.decoder.dtype.itemsize * (rows // batch_size)
        check_cache_fits(sample_bytes, batch_size, self.device)
        return SlotCache(config.num_hidden_layers, num_places)

    @loads_groups
    def __call__(
        self,
        state: CachedState,
        tokens: Tensor,
        slots: Tensor,
        visible: Tensor | None = None,
        seen: Tensor | None = None,
        predicted: Tensor | None = None,
    ) -> Tensor:
        """Feed `tokens [B, W]` at `slots [B, W]`; logits `[R, W, V]`, position w predicting slot `slots[b, w] + 1`.

        See `NextTokenModel.__call__`. With `visible`, tokens are nodes of a tree, see `TreeModel`. With `seen`, slots
        come in any order, see `OrderModel`. A position that sees the last token of a row also sees its row end.
        """
        check_raster(slots, predicted, self.grid.num_tokens)
        if state.guided:
            tokens, slots = tokens.repeat(2, 1), slots.repeat(2, 1)
            visible = None if visible is None else visible.repeat(2, 1, 1)
            seen = None if seen is None else seen.repeat(2, 1, 1)
        if visible is not None:
            hidden = self._tree(state, tokens, slots, visible)
        elif seen is not None:
            hidden = self._ordered(state, tokens, slots, seen)
        else:
            hidden = self._window(state, tokens, slots)
        state.features, state.tapped = self._apart(hidden)
        return self._logits(state.features)

    @torch.no_grad()
    def keep(self, state: CachedState, nodes: Tensor, slots: Tensor) -> None:
        """Copy the cache entries of `nodes [B, D]` of the last tree call to `slots [B, D]`."""
        if state.guided:
            nodes, slots = nodes.repeat(2, 1), slots.repeat(2, 1)
        prompt = state.prompt_mask.shape[1]
        sources, targets = prompt + self.length + nodes, prompt + self._offsets(slots)
        state.cache.copy(sources, targets)
        if state.tree_size:
            last = self._ends_row(slots)
            state.cache.copy(sources + torch.where(last, state.tree_size, 0), targets + last)

    def _window(self, state: CachedState, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return the features [R, W, dim] that predict `slots + 1`, for a window of consecutive slots."""
        offsets, width = self._offsets(slots), slots.shape[1]
        embeddings = self.embed(tokens)
        answers = None
        if self.row_end is not None:
            first_row = slots[:, :1] // self.grid.width  # [R, 1]
            count = -(-width // self.grid.width)  # at most this many rows can end in a window
            if on_host(slots) and not state.fixed:  # the true number
                count = int(((slots[:, -1:] + 1) // self.grid.width - first_row).max())
            if count:
                rows = first_row + torch.arange(count, device=slots.device)
                # [R, E]; where fewer rows end, the surplus is written where nothing here sees it.
                ends = rows * (self.grid.width + 1) + self.grid.width
                # The row end predicts the slot after the last token of a picture row.
                answers = torch.arange(width, device=slots.device).expand_as(slots)
                answers = torch.where(
                    self._ends_row(slots), width + slots // self.grid.width - first_row, answers
                )
                offsets = torch.cat([offsets, ends.clamp_max(self.length + 2 * state.window)], 1)
                embeddings = torch.cat([embeddings, self._end_embedding(len(slots), count)], 1)
        seen = seen_up_to(offsets, self.length + 2 * state.window + 1, state.fixed)  # [R, W + E, S - T]
        hidden = self._picture_forward(state, embeddings, offsets, offsets, seen, in_order=True)
        if answers is None:
            return hidden
        return hidden[torch.arange(len(slots), device=slots.device)[:, None], answers]

    def _tree(self, state: CachedState, tokens: Tensor, slots: Tensor, visible: Tensor) -> Tensor:
        """Return the features [R, N, dim] that predict the slot after each node of a tree."""
        offsets, size = self._offsets(slots), slots.shape[1]
        embeddings = self.embed(tokens)
        last = self._ends_row(slots)
        state.tree_size = 0
        if self._feeds_ends(last):  # a place for each node's row end; the node's descendants see it
            state.tree_size = size
            itself = torch.eye(size, dtype=torch.bool, device=slots.device)
            passed = visible & ~itself & last[:, None]  # [R, N, N], [n, m]: a row ended at m, on the way to n
            visible = torch.cat(
                [torch.cat([visible, passed], -1), torch.cat([visible, passed | itself], -1)], 1
            )
            offsets = torch.cat([offsets, offsets + 1], 1)
            embeddings = torch.cat([embeddings, self._end_embedding(len(slots), size)], 1)
        places = self.length + torch.arange(offsets.shape[1], device=slots.device).expand_as(offsets)
        seen = seen_in_tree(offsets, visible, self.length)
        hidden = self._picture_forward(state, embeddings, offsets, places, seen)
        return torch.where(last[..., None], hidden[:, size:], hidden[:, :size]) if state.tree_size else hidden

    def _ordered(self, state: CachedState, tokens: Tensor, slots: Tensor, seen: Tensor) -> Tensor:
        """The features [R, W, dim] that predict `slots + 1`, for slots in any order that see the slots `seen`."""
        offsets, size = self._offsets(slots), slots.shape[1]
        embeddings = self.embed(tokens)
        scratch = 2 * state.window + 1
        if self.row_end is not None:
            by_row = seen.unflatten(-1, (self.grid.height, -1))
            seen = torch.cat([by_row, by_row[..., -1:]], -1).flatten(2)  # [R, W, length]
        seen = seen_in_order(offsets, seen, scratch)
        last = self._ends_row(slots)
        if not self._feeds_ends(last):
            return self._picture_forward(state, embeddings, offsets, offsets, seen)
        nowhere = self.length + scratch - 1  # the last place of the scratch
        ends = (offsets + 1).where(last, nowhere)
        offsets = torch.cat([offsets, ends], 1)
        seen = torch.cat([seen, seen.scatter(2, ends[..., None], True)], 1)
        embeddings = torch.cat([embeddings, self._end_embedding(len(slots), size)], 1)
        hidden = self._picture_forward(state, embeddings, offsets, offsets, seen)
        return torch.where(last[..., None], hidden[:, size:], hidden[:, :size])

    def _picture_forward(
        self,
        state: CachedState,
        embeddings: Tensor,
        offsets: Tensor,
        places: Tensor,
        seen: Tensor,
        in_order: bool = False,
    ) -> Tensor:
        """The decoder output for the picture's tokens `offsets [R, W]`, cached at `places [R, W]` after the prompt.

        `in_order`: `seen` shows every place up to the own one.
        """
        prompt = state.prompt_mask.shape[1]
        visible = torch.cat([state.prompt_mask[:, None].expand(-1, seen.shape[1], -1), seen], -1)
        positions = self.positions(state.start, offsets.clamp_max(self.length - 1))
        prefix_mask = state.prompt_mask if in_order else None
        return self._forward(state.cache, embeddings, positions, prompt + places, visible, prefix_mask)

    def _forward(
        self,
        cache: SlotCache,
        embeddings: Tensor,
        positions: Tensor,
        places: Tensor,
        visible: Tensor,
        prefix_mask: Tensor | None,
        **more: Tensor,
    ) -> Tensor:
        """Return the decoder output [R, W, dim], behind it what was tapped (`_joined`).

        Bool `visible [R, W, S]` masks the places that each position sees.

        With `prefix_mask` [R, T], these are the places up to the own one, and of the prefix those that it shows: then
        a GPU needs no mask.
        """
        cache.at(places, visible.shape[-1])
        inputs: dict[str, object] = dict(
            inputs_embeds=embeddings, position_ids=positions, use_cache=True, **more
        )
        inputs[cache_argument(self.decoder)] = cache
        if prefix_mask is not None and takes(embeddings, self._head_dim):
            with window_calls(self.decoder, places, prefix_mask) as masks:
                return self._joined(**inputs, **masks)
        mask = attention_mask(visible[:, None], embeddings, self._attention)
        return self._joined(**inputs, attention_mask=mask)

    def _joined(self, **inputs: object) -> Tensor:
        """Call the decoder: its output, and behind it what is tapped, [R, W, (1 + len(taps)) * dim]."""
        if not self.taps:
            return self.decoder(**inputs).last_hidden_state
        output = self.decoder(**inputs, output_hidden_states=True)
        return torch.cat(
            [output.last_hidden_state, *(output.hidden_states[layer] for layer in self.taps)], -1
        )

    def _apart(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the decoder's output, and what was tapped."""
        if not self.taps:
            return hidden, None
        size = hidden.shape[-1] // (1 + len(self.taps))
        return hidden[..., :size], hidden[..., size:]

    def _logits(self, features: Tensor) -> Tensor:
        return wide(self.score(features))

    def _offsets(self, slots: Tensor) -> Tensor:
        """Return the places of slots among the picture's tokens, with row ends between them."""
        return slots if self.row_end is None else slots + slots // self.grid.width

    def _ends_row(self, slots: Tensor) -> Tensor:
        return slots % self.grid.width == self.grid.width - 1

    def _feeds_ends(self, last: Tensor) -> bool:
        """Return whether row ends must be fed; `last` [R, W] marks the last tokens of rows."""
        return self.row_end is not None and (not on_host(last) or bool(last.any()))

    def _end_embedding(self, rows: int, count: int) -> Tensor:
        assert self.row_end is not None
        return self.table(torch.full((rows, count), self.row_end, device=self.device))
