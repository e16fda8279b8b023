"""EAGLE: a one-layer drafter that extrapolates the features of its target (Li et al., "EAGLE: speculative sampling
requires rethinking feature uncertainty", ICML 2024, section 3.1).

The feature of a slot is the input of the target's output head that predicted the slot. The drafter reads the token at
slot i and the feature of slot i, and predicts the feature of slot i + 1; the target's own norm and head turn it into
logits. Where the target has not run yet, the drafter's own features are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache, seen_in_tree
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import DecodeState, TokenGrid, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.models.next_token.llamagen import LlamaGenState, LlamaGenTransformer
from visual_spec.models.next_token.llamagen_blocks import (
    RMSNorm,
    Shared,
    TransformerBlock,
    feed_forward_width,
    rotary_table,
    turns_of,
)


@dataclass
class EagleState(DecodeState):
    """The drafter's state of one decode.

    Attributes:
        target: the model whose embedding, norm and head the drafter uses.
        cache: cache of one layer and L + window slots; the nodes of a tree are in the last `window` ones.
        rotary: [L, D / 2, 2].
        features: [R, L + window + 1, dim], by slot: the target's where it has run, else the drafter's.
        tree: [R, N, dim], the drafter's features after the nodes of the last tree call.
    """

    target: LlamaGenTransformer
    cache: StaticCache
    rotary: Tensor
    features: Tensor
    tree: Tensor

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits, self.features, self.tree = self.logits[rows], self.features[rows], self.tree[rows]

    def buffers(self) -> list[Tensor]:
        return [*self.cache.buffers(), self.features]


def check_sizes(drafter: SavedModel, sizes: Mapping[str, object], trainer: str) -> None:
    """Refuse a target of other sizes than those that a drafter was made for, by ValueError.

    Args:
        sizes: the target's, by the names of the drafter's settings.
        trainer: the module of `visual_spec.training` that makes such drafters.
    """
    differing = {name: size for name, size in sizes.items() if drafter.config[name] != size}
    if differing:
        listed = ", ".join(f"{name}={size}" for name, size in differing.items())
        made = ", ".join(f"{name}={drafter.config[name]}" for name in differing)
        raise ValueError(
            f"this drafter was made for a target of {made}, and got one of {listed}; pass the drafter that was trained "
            f"for this target (python -m visual_spec.training.{trainer})."
        )


class EagleDrafter(SavedModel):
    """Drafts for a `LlamaGenTransformer`, on all rows of a batch: with guidance both branches are drafted.

    It owns a projection of [token embedding; feature] to one vector, and one block of the target's kind over the image
    tokens, with 2-D rotary positions. It needs no caption: the features already depend on it.

    Args:
        vocab_size, dim, num_heads, grid_size, norm_eps: the target's (`EagleDrafter.for_target`).
    """

    _no_split_modules = ["TransformerBlock"]

    stored_as = (torch.float8_e4m3fn,)  # the matrices of the embedded one (scripts/assemble.py)

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 16384,
        dim: Count = 768,
        num_heads: Count = 12,
        grid_size: Count = 16,
        norm_eps: float = 1e-5,
    ):
        super().__init__()
        # Embeddings are far smaller than features; without a norm the projection would at first hardly use them.
        self.embedding_norm = RMSNorm(dim, norm_eps)
        self.fc = nn.Linear(2 * dim, dim, bias=False)
        self.block = TransformerBlock(dim, num_heads, feed_forward_width(dim), norm_eps)
        self.grid = TokenGrid(grid_size, grid_size)
        self.vocab_size = vocab_size
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    @classmethod
    def for_target(cls, target: LlamaGenTransformer) -> EagleDrafter:
        """Return a fresh drafter of the target's size."""
        return cls(**{name: target.config[name] for name in _SHARED})

    def check_target(self, target: object) -> None:
        """Refuse a target that this drafter was not made for, by ValueError."""
        if not isinstance(target, LlamaGenTransformer):
            raise ValueError(
                f"this drafter reads the features of a LlamaGenTransformer, and got a {type(target).__name__}; "
                "use a draft model over the same tokens instead."
            )
        check_sizes(self, {name: target.config[name] for name in _SHARED}, "drafter")

    # -- decoding: the FeatureDrafter contract of the samplers -------------------------------------------------------

    @decodes
    def follow(self, model: LlamaGenTransformer, state: LlamaGenState, *, window: int) -> EagleState:
        """Return the drafter's cache beside a target that has just been prefilled: `state.features` [R, 1, dim].

        Raises:
            ValueError: as in `check_target`.
        """
        self.check_target(model)
        first = state.features
        rows, dim, heads = first.shape[0], self.config["dim"], self.config["num_heads"]
        places = self.grid.num_tokens + window
        features = F.pad(first.new_zeros(rows, places, dim), (0, 0, 1, 0))
        features[:, :1] = first
        return EagleState(
            logits=state.logits,
            guided=state.guided,
            window=window,
            target=model,
            cache=StaticCache.allocate(first, (1, rows, heads, places, dim // heads)),
            rotary=self.rotary_table().to(first.device),
            features=features,
            tree=first.new_zeros(rows, 1, dim),
        )

    @decodes
    def observe(self, state: EagleState, features: Tensor, slots: Tensor) -> None:
        """Record the target's features [R, W, dim] at slots [B, W]; each predicted the slot after its own."""
        if state.guided:
            slots = slots.repeat(2, 1)
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        state.features[rows, slots + 1] = features

    @decodes
    def forward(
        self, state: EagleState, tokens: Tensor, slots: Tensor, visible: Tensor | None = None
    ) -> Tensor:
        """Feed tokens [B, W] at slots [B, W]; logits [R, W, V], position w predicting slot `slots[b, w] + 1`.

        Reads the features of `slots` and writes its own for the slots after them, so that the next call can continue
        from there.

        With `visible`, bool [B, N, N], the tokens are nodes of a forest after the cached tokens, see `TreeModel`. It
        grows level by level: the nodes of the previous call come first, and new nodes have their parents among them.
        """
        if state.guided:
            tokens, slots = tokens.repeat(2, 1), slots.repeat(2, 1)
            visible = None if visible is None else visible.repeat(2, 1, 1)
        num_tokens, width = self.grid.num_tokens, slots.shape[1]
        rows = torch.arange(len(slots), device=slots.device)[:, None]
        features = state.features[rows, slots]  # [R, W, dim]
        if visible is None:
            seen = state.cache.causal(slots)
        else:
            seen = seen_in_tree(slots, visible, num_tokens)
            nodes = torch.arange(width, device=slots.device)
            state.cache.at(num_tokens + nodes.expand_as(slots), num_tokens + width)
            # The parent is the last node that a node sees before itself; the last call computed its feature.
            before = visible & ~torch.eye(width, dtype=torch.bool, device=slots.device)
            parent = (before * nodes).amax(-1).clamp_(max=state.tree.shape[1] - 1)
            features = torch.where(before.any(-1, keepdim=True), state.tree[rows, parent], features)
        hidden = self._mix(state.target, tokens, features)
        turns = turns_of(state.rotary[slots.clamp_max(num_tokens - 1)])
        no_prefix = seen[:, 0, :0]  # [R, 0]
        shared = Shared(turns, state.cache.places, seen[:, None], no_prefix)
        _, predicted = state.target.norm.after(*self.block(hidden, None, state.cache.layer(0), shared))
        if visible is None:
            state.features[rows, slots + 1] = predicted
        else:
            state.tree = predicted
        return logits_of(state.target, predicted)

    # -- parts -------------------------------------------------------------------------------------------------------

    def rotary_table(self) -> Tensor:
        """Return the target's table of angles: [L, D / 2, 2], float32, or float64 for a float64 model."""
        head_dim = self.config["dim"] // self.config["num_heads"]
        return rotary_table(self.grid.width, head_dim, dtype=torch.promote_types(self.dtype, torch.float32))

    def _mix(self, target: LlamaGenTransformer, tokens: Tensor, features: Tensor) -> Tensor:
        return self.fc(torch.cat([self.embedding_norm(target.tok_embeddings(tokens)), features], -1))

    def _finish(self, target: LlamaGenTransformer, hidden: Tensor) -> Tensor:
        return target.norm(hidden + self.block.feed_forward(self.block.ffn_norm(hidden)))

    # -- training ----------------------------------------------------------------------------------------------------

    def unrolled(
        self, target: LlamaGenTransformer, tokens: Tensor, features: Tensor, steps: int
    ) -> list[Tensor]:
        """Return the drafter's predictions on whole pictures when it continues from its own features, with gradients.

        Training-time test (Li et al., "EAGLE-3", NeurIPS 2025, section 3.1; harmonised context alignment in Zhang
        et al., "HASS", ICLR 2025): in step t every slot is t - 1 drafts away from the last feature of the target. It
        attends to the same keys as in decoding: keys of step 1 up to there, then one of each later step.

        Args:
            tokens: long [R, N], fed at slots 0 to N - 1.
            features: [R, N, dim], the target's features of these slots.
            steps: at least 1.

        Returns:
            One [R, N, dim] for each step: features of slots 1 to N. In step t the first t - 1 have no meaning.
        """
        length = tokens.shape[1]
        turns = turns_of(self.rotary_table()[None, :length].to(tokens.device))
        distance = torch.arange(length, device=tokens.device)
        distance = distance[:, None] - distance  # [N, N], query slot minus key slot
        outputs: list[Tensor] = []
        cached: list[tuple[Tensor, Tensor]] = []  # of each step, [R, H, N, D]
        for step in range(steps):
            if step:
                features = shift(outputs[-1], 1)
            hidden = self._mix(target, tokens, features)
            projected = self.block.attention.project(self.block.attention_norm(hidden), turns)
            q, k, v = (part.transpose(1, 2) for part in projected)
            cached.append((k, v))
            mixed = attend_unrolled(q, cached, distance)
            hidden = hidden + self.block.attention.wo(mixed.transpose(1, 2).flatten(2))
            outputs.append(self._finish(target, hidden))
        return outputs


_SHARED = ("vocab_size", "dim", "num_heads", "grid_size", "norm_eps")


def logits_of(target: LlamaGenTransformer, features: Tensor) -> Tensor:
    """Return the logits [..., V] of the target's head on features [..., dim], at least float32."""
    return wide(target.output(features))


def attend_unrolled(query: Tensor, cached: list[tuple[Tensor, Tensor]], distance: Tensor) -> Tensor:
    """Return values [R, H, N, D] mixed by attention as in the last step of `EagleDrafter.unrolled`.

    Args:
        query: [R, H, N, D].
        cached: keys and values of each step up to this one, [R, H, N, D] each.
        distance: [N, N], query slot minus key slot.
    """
    (first_keys, first_values), step = cached[0], len(cached) - 1
    if step == 0:
        return F.scaled_dot_product_attention(query, first_keys, first_values, is_causal=True)
    scale = query.shape[-1] ** -0.5
    scores = (query @ first_keys.mT * scale).masked_fill(distance < step, -torch.inf)
    # The key of step s at the place where this query's sequence was drafted in step s.
    later = [(shift(keys, step - s), shift(values, step - s)) for s, (keys, values) in enumerate(cached) if s]
    own = [(query * keys).sum(-1, keepdim=True) * scale for keys, _ in later]  # [R, H, N, 1] each
    weights = torch.cat([scores, *own], -1).softmax(-1)
    mixed = weights[..., : -len(own)] @ first_values
    for index, (_, values) in enumerate(later):
        mixed = mixed + weights[..., index - len(own), None] * values
    return mixed


def shift(values: Tensor, by: int) -> Tensor:
    """Shift values [..., N, D] by `by` slots to later ones, with zeros in front."""
    return values if by == 0 else F.pad(values[..., :-by, :], (0, 0, by, 0))
