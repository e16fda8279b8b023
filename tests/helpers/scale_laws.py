"""Exact laws of samplers of scales, by enumeration."""

import itertools

import torch
from torch import Tensor

from tests.exactness.enumeration import PLAIN, Enumeration, Enumerator
from tests.helpers.tiny_scales import FormulaTokenizer, TableScaleModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage

LAWS = {
    "plain": PLAIN,
    "guidance": TokenLaw(guidance_scale=2.5),
    "temperature": TokenLaw(temperature=0.7),
    "top-k": TokenLaw(top_k=2),
    "top-p": TokenLaw(top_p=0.8),
    "greedy": TokenLaw(temperature=0.0),
    "allowed": TokenLaw(allowed=(1, 3)),
    "guided at first": TokenLaw(guidance_scale=3.0, guidance_until=3),
    "all": TokenLaw(guidance_scale=1.7, temperature=1.3, top_k=2, top_p=0.9),
}
SHAPES = {"3 ** 5": ((1, 2), 3), "2 ** 9": ((1, 2, 2), 2)}


def enumerated(
    model: TableScaleModel | list[Stage],
    tokenizer: FormulaTokenizer,
    law: TokenLaw,
    sampler: ScaleWiseSampler | None = None,
) -> Enumeration:
    stages = model if isinstance(model, list) else [Stage(model, range(len(tokenizer.scales)))]
    return Enumerator(sampler or ScaleWiseSampler(), stages, law, tokenizer=tokenizer).run()


def every_sequence(tokenizer: FormulaTokenizer) -> Tensor:
    """[V ** L, L]; a sequence's index is its tokens read as a number in base V."""
    length = sum(n * n for n in tokenizer.scales)
    return torch.tensor(list(itertools.product(range(tokenizer.codebook_size), repeat=length)))


def known_maps(tokenizer: FormulaTokenizer, sequences: Tensor) -> list[list[Tensor]]:
    """The input maps that are known at each scale of these pictures."""
    canvas = torch.zeros(len(sequences), 2, tokenizer.scales[-1], tokenizer.scales[-1], dtype=torch.float64)
    known: list[list[Tensor]] = [[]]
    start = 0
    for k, side in enumerate(tokenizer.scales[:-1]):
        canvas = tokenizer.accumulate(canvas, k, sequences[:, start : start + side * side])
        known.append([*known[-1], tokenizer.next_map(canvas, k + 1)])
        start += side * side
    return known


def product_law(
    tokenizer: FormulaTokenizer, models: list[TableScaleModel], laws: list[TokenLaw], ramp: bool = True
) -> Tensor:
    """The same from the definition: model and law of each scale, slot after slot, for every sequence."""
    count = len(tokenizer.scales)
    sequences = every_sequence(tokenizer)
    rows, slot = len(sequences), 0
    probability = torch.ones(rows, dtype=torch.float64)
    for k, maps in enumerate(known_maps(tokenizer, sequences)):
        law = laws[k]
        conditional = models[k].logits(torch.zeros(rows, dtype=torch.long), maps)
        unconditional = models[k].logits(torch.full((rows,), models[k].conditions), maps)
        filters = TokenLaw(1.0, law.temperature, law.top_k, law.top_p, allowed=law.allowed)
        for place in range(tokenizer.scales[k] ** 2):
            logits = conditional[:, place]
            if law.guidance_scale > 1 and (law.guidance_until is None or slot < law.guidance_until):
                t = (law.guidance_scale - 1) * (k / (count - 1) if ramp else 1)
                logits = (1 + t) * conditional[:, place] - t * unconditional[:, place]
            chances = filters(logits[:, None], False)[:, 0].exp()  # [V ** L, V]
            probability = probability * chances.gather(1, sequences[:, slot, None])[:, 0]
            slot += 1
    return probability


def parts(shape: str, count: int = 1, **changes) -> tuple[FormulaTokenizer, list[TableScaleModel]]:
    scales, vocab_size = SHAPES[shape]
    return FormulaTokenizer(scales, vocab_size), [
        TableScaleModel(scales, vocab_size, seed=seed, **changes) for seed in range(count)
    ]
