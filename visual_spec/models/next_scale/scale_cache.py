"""Key and value caches of next-scale transformers: one that keeps everything, and one that evicts most (ScaleKV).

After each scale, ScaleKV (Li et al. 2025, arXiv 2505.19602) keeps the cached tokens with the most attention from the
newest map, within a budget per layer (`scale_budget.py`). `CompressedVAR(model, budget)` is a `ScaleModel` like the
model itself, so the sampler, and the stages of collaborative decoding, accept either.

Departures from the published code, all towards the paper: observers are the queries that attention used, normalised
and scaled, not a second projection without either; their scores go through the softmax; pooling is an average.
One of our own: small maps are not pooled, because five neighbours are a third of a row (`pool_of`; docs/LOG.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.core.cache import EvictingCache, KeyValues, StaticCache
from visual_spec.models.core.protocol import ScaleModel, ScaleState, ScaleTokenizer, Side, area_of, shape_of
from visual_spec.models.next_scale.scale_budget import WINDOW, ScaleBudget, check_budget, offsets_of
from visual_spec.models.next_scale.scale_pruning import PrunedMaps

_POOL, _POOLED_SIDE = 5, 32


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend every query `[R, H, W, D]` to all of `k, v [R, H, S, D]`."""
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def block_causal(q: Tensor, k: Tensor, v: Tensor, offsets: Sequence[int]) -> Tensor:
    """Attend every scale to itself and earlier scales, in one call a scale, so that no mask is needed."""
    bounds = [bound for bound in offsets if bound <= q.shape[2]]
    return torch.cat([attend(q[:, :, a:b], k[:, :, :b], v[:, :, :b]) for a, b in pairwise(bounds)], 2)


class ScaleCache(Protocol):
    """Keys and values of one decode.

    Attributes:
        repeatable: whether a scale may be fed again.
    """

    repeatable: bool

    @property
    def most_bytes(self) -> int:
        """The most bytes held from call to call over the whole decode."""
        ...

    def attend(self, layer: int, scales: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store what later scales may read, and return the attention output of every query.

        Args:
            layer: index of the layer; layers come in order.
            scales: the current scale, or in a prefill all scales from 0 on.
            q, k, v: scaled queries, keys and values `[R, H, W, D]` of their tokens.

        Returns:
            `[R, H, W, D]`.
        """
        ...

    def keep_rows(self, count: int) -> None:
        """Keep the first `count` rows only."""
        ...


class WholeCache:
    """A cache of everything, in slots that are allocated once and written by scale.

    Args:
        held: its slots belong to all scales before the last one to be predicted.
        offsets: the first slot of each scale.
        pruned: layers that get a part of the places of some scales; they leave their last slots unused.
    """

    repeatable = True

    def __init__(self, held: StaticCache, offsets: Sequence[int], pruned: PrunedMaps | None = None):
        self.held = held
        self._offsets, self._pruned = offsets, pruned

    @property
    def most_bytes(self) -> int:
        """Bytes of keys and values."""
        return self.held.nbytes

    def attend(self, layer: int, scales: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `ScaleCache.attend`."""
        offsets = self._offsets if self._pruned is None else self._pruned.offsets(layer)
        first, end = offsets[scales.start], offsets[scales.stop]
        keys, values = self.held.keys[layer], self.held.values[layer]
        kept = self._offsets[scales.stop] <= self.held.num_slots
        if kept:
            keys[:, :, first:end], values[:, :, first:end] = k, v
        if first == 0:
            return block_causal(q, k, v, self._offsets)
        if kept:
            return attend(q, keys[:, :, :end], values[:, :, :end])
        return attend(q, torch.cat([keys[:, :, :first], k], 2), torch.cat([values[:, :, :first], v], 2))

    def keep_rows(self, count: int) -> None:
        """See `ScaleCache.keep_rows`."""
        self.held.select(torch.arange(count))


# -- ScaleKV ---------------------------------------------------------------------------------------------------------


def observers(side: Side, device: torch.device | None = None) -> Tensor:
    """The places, long [n], of the observation window of a map: centres of a 4 x 4 grid, or all of a small map."""

    def centres(length: int) -> Tensor:
        cells = min(length, WINDOW)
        return (2 * torch.arange(cells, device=device) + 1) * length // (2 * cells)

    height, width = shape_of(side)
    return (width * centres(height)[:, None] + centres(width)).flatten()


def pool_of(scales: Sequence[Side]) -> int:
    """How many neighbours attention is averaged over: 5, as published, if the last map has a side >= 32, else 1."""
    return _POOL if min(shape_of(scales[-1])) >= _POOLED_SIDE else 1


def attention_scores(queries: Tensor, keys: Tensor, newest: Tensor, pool: int = _POOL) -> Tensor:
    """Return how much the observers attend to each token, `[R, H, S]`; inf for their own places, which always stay.

    The attention of the observers is summed, and averaged over `pool` neighbours (at the ends: those that exist).

    Args:
        queries: scaled queries `[R, H, O, D]` of the observers.
        keys: `[R, H, S, D]`.
        newest: long [O], the places of the observers in S.
        pool: an odd number.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    weights = (queries.to(wide) @ keys.to(wide).mT).softmax(-1).sum(2)  # [R, H, S]
    scores = F.avg_pool1d(weights, pool, stride=1, padding=pool // 2, count_include_pad=False)
    return scores.index_fill(-1, newest, torch.inf)


class CompressedCache(EvictingCache):
    """Keys and values cut to a budget: each layer allocates exactly as many tokens as it holds.

    The budget determines all shapes beforehand. Nothing is kept after the last scale to be predicted. A prefill evicts
    after each of its scales, like decoding scale by scale, so both give the same law. Keys are stored without their
    positions, which are not needed.

    Args:
        budget: budget of the model.
        known: number of input maps given to the prefill.
        stop: the first scale that will not be predicted.
    """

    repeatable = False  # tokens that earlier scales read may be evicted

    def __init__(self, budget: ScaleBudget, known: int, stop: int):
        super().__init__(budget.num_layers)
        self._sides = budget.scales
        self._held, self._stop, self._pool = budget.held(), stop, pool_of(budget.scales)
        self._most = max(map(sum, self._held[known + 1 : stop]), default=0)
        self._token_bytes = 0  # of one token in one layer

    @property
    def most_bytes(self) -> int:
        """The most bytes held from call to call over the whole decode."""
        return self._most * self._token_bytes

    def attend(self, layer: int, scales: range, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `ScaleCache.attend`."""
        self._token_bytes = 2 * k[:, :, 0].nelement() * k.element_size()
        sizes = [area_of(self._sides[scale]) for scale in scales]
        parts = zip(scales, q.split(sizes, 2), k.split(sizes, 2), v.split(sizes, 2), strict=True)
        seen = [self._attend(layer, scale, *part) for scale, *part in parts]
        return seen[0] if len(seen) == 1 else torch.cat(seen, 2)

    def keep_rows(self, count: int) -> None:
        """See `ScaleCache.keep_rows`."""
        self.select(torch.arange(count))

    def _attend(self, layer: int, scale: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        held = self.append(layer, KeyValues(k, v))
        seen = attend(q, held.keys, held.values)
        count = held.keys.shape[2]
        if scale == self._stop - 1:
            self.drop(layer)
        elif (budget := self._held[scale + 1][layer]) < count:
            places = observers(self._sides[scale], q.device)
            newest = places + (count - q.shape[2])
            scores = attention_scores(q[:, :, places], held.keys, newest, self._pool)
            self.evict(layer, scores, budget)
        return seen


class CachingModel(ScaleModel, Protocol):
    """A `ScaleModel` with `num_layers` in its `config`, whose `prefill` takes a `cache`."""

    @property
    def config(self) -> Mapping[str, Any]: ...

    def prefill(
        self,
        condition: Any,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
        cache: ScaleCache | None = None,
    ) -> ScaleState: ...


class CompressedVAR:
    """A next-scale transformer that decodes with a compressed cache: a `ScaleModel` over the same tokens.

    If the budget binds, its law is not the model's. Scale 0 reads no cache, so the distance is measured by
    `ScaleWiseSampler(measure=True)` with [Stage(model, range(1)), Stage(compressed, range(1, K))]. A scale cannot be
    fed twice.

    Args:
        model: a `VARTransformer`, or another `CachingModel`.
        budget: what its layers may keep: given by hand, by `ScaleBudget.from_share`, or by `calibrate`.

    Raises:
        ValueError: the budget is for other scales or another number of layers.

    Example:
        >>> small = CompressedVAR(refiner, ScaleBudget.from_share(refiner.scales, 16, 0.1))
        >>> sampler(code_stages(transformer, small), labels, tokenizer=tokenizer, law=law, batch_size=8)
    """

    def __init__(self, model: CachingModel, budget: ScaleBudget):
        check_budget(budget, model.scales, model.config["num_layers"])
        self.model, self.budget, self.num_layers = model, budget, budget.num_layers
        self.scales, self.vocab_size, self.code_dim = tuple(model.scales), model.vocab_size, model.code_dim

    @property
    def lossless(self) -> bool:
        """Return whether the budget never binds, so that this is the model itself."""
        return self.budget.held() == ScaleBudget.full(self.scales, self.budget.num_layers).held()

    def _cache(self, known: int, stop: int) -> ScaleCache:
        return CompressedCache(self.budget, known, stop)

    def prefill(
        self,
        condition: Any,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
    ) -> Any:
        """See `ScaleModel.prefill`."""
        cache = self._cache(len(maps), len(self.scales) if stop is None else stop)
        return self.model.prefill(
            condition, batch_size=batch_size, guided=guided, maps=maps, stop=stop, cache=cache
        )

    def __call__(self, state: Any, map: Tensor, scale: int) -> Tensor:
        """See `ScaleModel.__call__`.

        Raises:
            ValueError: also for a scale that was fed before.
        """
        return self.model(state, map, scale)


# -- which layers are drafters ---------------------------------------------------------------------------------------


class _WatchedCache(CompressedCache):
    """Evicts nothing; records the attention mass on the current map, and on the largest weights of earlier maps."""

    def __init__(self, budget: ScaleBudget, known: int, stop: int, top: int, masses: Tensor):
        super().__init__(budget, known, stop)
        self._top, self._masses = top, masses  # masses: [2, scales, layers]

    def _attend(self, layer: int, scale: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (before := self.layers[layer]) is not None:
            count = before.keys.shape[2]
            wide = torch.promote_types(q.dtype, torch.float32)
            keys = torch.cat([before.keys, k], 2).to(wide)
            for row in range(len(q)):  # one at a time: all weights of a large map take much memory
                weights = (q[row].to(wide) @ keys[row].mT).softmax(-1)  # [H, W, S]
                history = weights[..., :count].topk(min(self._top, count), -1).values.sum(-1)
                now = weights[..., count:].sum(-1)
                self._masses[0, scale, layer] += now.mean().cpu() / len(q)
                self._masses[1, scale, layer] += history.mean().cpu() / len(q)
        return super()._attend(layer, scale, q, k, v)


class _WatchedVAR(CompressedVAR):
    def __init__(self, model: CachingModel, top: int, masses: Tensor):
        super().__init__(model, ScaleBudget.full(model.scales, model.config["num_layers"]))
        self._top, self._masses = top, masses

    def _cache(self, known: int, stop: int) -> ScaleCache:
        return _WatchedCache(self.budget, known, stop, self._top, self._masses)


@torch.no_grad()
def layer_importance(
    model: CachingModel,
    tokenizer: ScaleTokenizer,
    condition: object,
    *,
    sampler: Callable[..., object],
    law: object,
    top: int,
    batch_size: int,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """Return the attention selectivity index of ScaleKV for each scale and layer, measured while pictures are drawn.

    It is the mean attention mass on the current map, times the mean mass of the `top` largest weights on earlier maps.
    Means are over pictures, heads and queries. Scale 0 has no earlier maps, and has 0.

    Args:
        model: as for `CompressedVAR`.
        tokenizer, condition, law, batch_size, generator: arguments of the sampler.
        sampler: draws the pictures, such as `ScaleWiseSampler()`.
        top: K', the number of weights on earlier maps that count.

    Returns:
        float64 [scales, layers], on the CPU.
    """
    masses = torch.zeros(2, len(model.scales), model.config["num_layers"], dtype=torch.float64)
    watched: ScaleModel = _WatchedVAR(model, top, masses)
    sampler(watched, condition, tokenizer=tokenizer, law=law, generator=generator, batch_size=batch_size)
    return masses[0] * masses[1]


def find_drafters(importance: Tensor, scales: Sequence[int], count: int) -> dict[int, list[int]]:
    """Return the `count` (scale, layer) pairs of least importance, in standard deviations within each scale.

    Args:
        importance: [scales, layers].
        scales: indices of the scales to choose from.
        count: number of pairs.
    """
    spread = importance.std(1, unbiased=False, keepdim=True).clamp(min=torch.finfo(importance.dtype).tiny)
    standard = (importance - importance.mean(1, keepdim=True)) / spread
    pairs = sorted(
        (float(standard[k, layer]), k, layer) for k in scales for layer in range(importance.shape[1])
    )
    drafters: dict[int, list[int]] = {}
    for _, scale, layer in pairs[:count]:
        drafters.setdefault(scale, []).append(layer)
    return {scale: sorted(drafters[scale]) for scale in sorted(drafters)}


def calibrate(
    model: CachingModel,
    tokenizer: ScaleTokenizer,
    condition: object,
    *,
    sampler: Callable[..., object],
    law: object,
    share: float,
    batch_size: int,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    num_drafters: int | None = None,
    decay: float = 0.1,
) -> ScaleBudget:
    """Return a budget for a share of the full cache; finds the drafters by drawing a few pictures (the paper: ten).

    Args:
        model, tokenizer, condition, sampler, law, batch_size, generator: as for `layer_importance`.
        share, decay: as for `ScaleBudget.from_share`. The number of weights on earlier maps that count is the number of
            tokens that a layer may keep on average.
        num_drafters: number of (scale, layer) pairs; None: one in sixteen at the scales where the budget binds, about
            as many as in the published tables.

    Raises:
        ValueError: as in `ScaleBudget.from_share`; or the number of drafters is negative.
    """
    if num_drafters is not None and num_drafters < 0:
        raise ValueError(f"num_drafters={num_drafters}; pass at least 0, or None.")
    scales, layers = tuple(model.scales), model.config["num_layers"]
    alike = ScaleBudget.from_share(scales, layers, share)
    offsets = offsets_of(scales)
    binding = [scale for scale in range(len(scales)) if sum(alike.tokens[scale]) < layers * offsets[scale]]
    if not binding:
        return alike
    importance = layer_importance(
        model,
        tokenizer,
        condition,
        sampler=sampler,
        law=law,
        top=min(alike.tokens[binding[0]]),
        batch_size=batch_size,
        generator=generator,
    )
    count = -(-len(binding) * layers // 16) if num_drafters is None else num_drafters
    drafters = find_drafters(importance, binding, count)
    return ScaleBudget.from_share(scales, layers, share, drafters=drafters, decay=decay)
