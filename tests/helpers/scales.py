"""Tiny models of scales, the plain loop that draws from them, and FastVAR by its definition: no caches."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import FormulaTokenizer
from tests.helpers.var import normed
from visual_spec.models.next_scale.infinity import InfinityTransformer
from visual_spec.models.next_token.llamagen_blocks import turns_of
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.scales.scales import ScaleWiseSampler

# (layer, part, row): the square side and the outputs [n * n, dim] of a sub-layer at the last whole map.
Held = dict[tuple[int, int, int], tuple[int, Tensor]]


def chosen_places(x: Tensor, count: int) -> list[int]:
    """The `count` places of `x [n, dim]` farthest from the mean, the first of equal ones."""
    mean = sum(x) / len(x)
    scores = [float(((place - mean) ** 2).sum()) for place in x]
    return sorted(sorted(range(len(x)), key=lambda place: (-scores[place], place))[:count])


def enlarged(outputs: Tensor, side: int, large: int) -> Tensor:
    """A map [side * side, dim] at another size: each new place is the mean of the old ones that it touches."""
    grid = outputs.view(side, side, -1)

    def touched(place: int) -> slice:
        return slice(place * side // large, -(-(place + 1) * side // large))

    rows = [
        grid[touched(down), touched(across)].mean((0, 1)) for down in range(large) for across in range(large)
    ]
    return torch.stack(rows)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [1, H, n, D] to k, v [1, H, S, D]: [1, n, H * D]."""
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)


def sublayers(
    model: Any, layer: int, modulation: Tensor, text: Any, seen: list[tuple[Tensor, Tensor]]
) -> list:
    """The sub-layers of a layer for one row: functions of x [n, dim] and its positions' table [n, D / 2, 2]."""
    block = model.blocks[layer]
    gain1, gain2, scale1, scale2, shift1, shift2 = modulation  # [dim] each
    infinity = isinstance(model, InfinityTransformer)
    inner = block.sa if infinity else block.attn

    def attention(x: Tensor, table: Tensor) -> Tensor:
        turns = (turns_of(table[None]),) if infinity else ()
        q, k, v = inner.project(normed(x, scale1, shift1)[None], *turns)
        seen.append((k, v))
        return inner.proj(attended(q, *(torch.cat(one, 2) for one in zip(*seen, strict=True))))[0] * gain1

    def feed_forward(x: Tensor, table: Tensor) -> Tensor:
        return block.ffn(normed(x, scale2, shift2)) * gain2

    def cross(x: Tensor, table: Tensor) -> Tensor:
        return block.ca(block.ca_norm(x)[None], *text)[0]

    return [attention, cross, feed_forward] if infinity else [attention, feed_forward]


@torch.no_grad()
def straight_logits(
    model: Any,
    maps: Sequence[Tensor],
    condition: Any,
    kept: Sequence[int],
    layers: Collection[int],
    *,
    null: bool = False,
    watch: Callable[[int, int, int], None] = lambda scale, layer, count: None,
) -> Tensor:
    """Logits [B, n * n * T, V] of scale len(maps), from maps [B, D, n, n] of the scales 1 on.

    Args:
        model: a `VARTransformer` or an `InfinityTransformer`.
        condition: labels, or captions.
        kept: places of each scale that go through the pruned layers.
        layers: those.
        null: of the unconditional rows.
        watch: told scale, layer and number of places of every row and sub-layer.
    """
    size = len(getattr(condition, "mask", condition))
    dropped = torch.full((size,), null)
    infinity = isinstance(model, InfinityTransformer)
    if infinity:
        pooled, words, mask = model.embed_condition(condition, dropped=dropped)
        table = model._rotations(torch.device("cpu"))
    else:
        pooled = model.embed_condition(condition, dropped=dropped)
        table = torch.zeros(model.offsets[-1])
    modulations = model._modulations(pooled)
    found = []
    for row in range(size):
        held: Held = {}
        seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in model.blocks]
        own = [map[row : row + 1] for map in maps]
        inputs = model._embed(pooled[row : row + 1], own)[0]  # [places, dim]
        for scale in range(len(maps) + 1):
            first, stop = model.offsets[scale], model.offsets[scale + 1]
            x, side = inputs[first:stop], model.scales[scale]
            for layer, block in enumerate(model.blocks):
                text = None
                if infinity:
                    text = (*block.ca.read(words[row : row + 1]), mask[row : row + 1, None, None])
                parts = sublayers(model, layer, modulations[layer, row], text, seen[layer])
                for part, run in enumerate(parts):
                    count = kept[scale] if layer in layers else len(x)
                    watch(scale, layer, count)
                    if count == len(x):
                        output = run(x, table[first:stop])
                        held[layer, part, row] = side, output
                    else:
                        places = chosen_places(x, count)
                        small, before = held[layer, part, row]
                        output = enlarged(before, small, side)
                        output[places] = run(x[places], table[first:stop][places])
                    x = x + output
        found.append(model._logits(x[None], model.head_nm.modulation(pooled[row : row + 1])))
    return torch.cat(found)


SIDES = (1, 2, 3, 4)
STARTS = (0, 1, 5, 14, 30)
GUIDED = TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=8, top_p=0.95)
LABELS = torch.tensor([3, 0, 4, 1, 2])
TOKENIZER = FormulaTokenizer(SIDES, 12)


def decode(model: Any, rows: Tensor, law: TokenLaw = GUIDED, tokenizer: Any = TOKENIZER, **options):
    sampler = ScaleWiseSampler(**options)
    generator = seeded(*(100 + row for row in rows.tolist()))
    return sampler(
        model, LABELS[rows], tokenizer=tokenizer, law=law, generator=generator, batch_size=len(rows)
    )


def plain_loop(models: list, laws: list[TokenLaw], rows: Tensor, tokenizer: Any, ramp: bool = True) -> Tensor:
    """Tokens of a decode without caches: every scale from scratch, guidance by its formula, one slot after another."""
    noise = CounterNoise(draw_keys(seeded(*(100 + row for row in rows.tolist())), len(rows)), "cpu")
    canvas = torch.zeros(len(rows), 2, 4, 4, dtype=torch.float64)
    maps: list[Tensor] = []
    tokens = []
    for k, (model, law) in enumerate(zip(models, laws, strict=True)):
        conditional = model.teacher_forced(maps, LABELS[rows])[:, STARTS[k] :]
        dropped = torch.ones(len(rows), dtype=torch.bool)
        null = model.teacher_forced(maps, LABELS[rows], dropped)[:, STARTS[k] :]
        t = max(law.guidance_scale - 1, 0) * (k / 3 if ramp else 1)
        logits = (1 + t) * conditional - t * null
        plain = TokenLaw(1.0, law.temperature, law.top_k, law.top_p)
        drawn = []
        for place in range(SIDES[k] ** 2):
            slot = torch.full((len(rows), 1), STARTS[k] + place)
            drawn.append(noise.categorical(plain(logits[:, place, None], False), slot, TOKEN))
        tokens.append(torch.cat(drawn, 1))
        canvas = tokenizer.accumulate(canvas, k, tokens[-1])
        if k < 3:
            maps.append(tokenizer.next_map(canvas, k + 1))
    return torch.cat(tokens, 1)
