"""Tiny models of scales, and the plain loop that draws from them."""

from typing import Any

import torch
from torch import Tensor

from tests.helpers.tiny import seeded
from tests.helpers.tiny_scales import FormulaTokenizer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.scales.scales import ScaleWiseSampler

SIDES = (1, 2, 3, 4)
STARTS = (0, 1, 5, 14, 30)
GUIDED = TokenLaw(guidance_scale=3.0, temperature=0.9, top_k=8, top_p=0.95)
LABELS = torch.tensor([3, 0, 4, 1, 2])
TOKENIZER = FormulaTokenizer(SIDES, 12)


def real_tokenizer() -> MultiscaleVQModel:
    torch.manual_seed(1)
    model = MultiscaleVQModel(
        base_channels=4,
        channel_multipliers=(1, 1),
        blocks_per_level=1,
        codebook_size=12,
        code_dim=2,
        scales=SIDES,
        norm_groups=None,
    )
    model.quantize.embedding.weight.data.normal_()
    return model.eval()


def decode(model: Any, rows: Tensor, law: TokenLaw = GUIDED, tokenizer: Any = TOKENIZER, **options):
    sampler = ScaleWiseSampler(**options)
    generator = seeded(*(100 + row for row in rows.tolist()))
    return sampler(model, tokenizer, LABELS[rows], law=law, generator=generator, batch_size=len(rows))


def plain_loop(models: list, laws: list[TokenLaw], rows: Tensor, tokenizer: Any, ramp: bool = True) -> Tensor:
    """Tokens of a decode without caches: every scale from scratch, guidance by its formula, one slot after another."""
    noise = CounterNoise(draw_keys(seeded(*(100 + row for row in rows.tolist())), len(rows)), "cpu")
    canvas = torch.zeros(len(rows), 2, 4, 4, dtype=torch.float64)
    maps: list[Tensor] = []
    tokens = []
    for k, (model, law) in enumerate(zip(models, laws, strict=True)):
        conditional = model.teacher_forced(maps, LABELS[rows])[:, STARTS[k] :]
        null = model.teacher_forced(maps, LABELS[rows], torch.ones(len(rows), dtype=torch.bool))[
            :, STARTS[k] :
        ]
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
