"""What the tests of the verification kernel share: windows with drafts and their laws, and the test step by step."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.laws import Window, window
from visual_spec.kernels.law import (
    NO_DRAFT,
    POINT_LAW,
    UNIFORM_LAW,
    LawNumbers,
    finite_reference,
    law_reference,
)
from visual_spec.samplers.core.acceptance import exact_acceptance, residual
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, CounterNoise

ROUND, DRAW_ROUND = 7, 4  # of every case


@dataclass
class Case:
    """A window, its drafts, and the laws they were drawn from."""

    window: Window
    drafts: Tensor
    stored: Tensor
    kinds: Tensor
    draw_stream: int

    @property
    def arguments(self) -> tuple:
        """Of `verify_triton`."""
        here, rounds = self.window, (torch.tensor(ROUND), torch.tensor(DRAW_ROUND))
        streams = (ACCEPT, RESIDUAL, self.draw_stream)
        given = (here.logits, self.drafts, self.stored, self.kinds, here.keys, here.slots)
        return (*given, *rounds, *streams, here.numbers)

    def ask(self, verify: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The case by `kernels.verify.verify`, or by `verify_by_parts`."""
        here = self.window
        return verify(
            here.logits,
            self.drafts,
            self.stored,
            self.kinds,
            here.keys,
            here.slots,
            here.numbers,
            round=ROUND,
            accept_stream=ACCEPT,
            residual_stream=RESIDUAL,
            draw_stream=None if self.draw_stream < 0 else self.draw_stream,
            draw_round=DRAW_ROUND,
        )

    @property
    def expected(self) -> tuple[Tensor, ...]:
        """What the kernel should find."""
        return self.ask(verify_by_parts)


def case(
    law: TokenLaw,
    batch_size: int = 2,
    width: int = 4,
    vocab_size: int = 37,
    *,
    columns: int = 3,
    seed: int = 0,
    draw_stream: int = DRAFT,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Drafts from stored laws that are near the target, from point laws and the uniform one, and none at the end."""
    here = window(law, batch_size, width, vocab_size, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    noisy = here.target + 0.3 * torch.randn(here.target.shape, generator=generator)
    stored = noisy.log_softmax(-1)[:, torch.arange(columns) % width]
    kinds = torch.randint(UNIFORM_LAW, columns, (batch_size, width), generator=generator)
    kinds = torch.where(kinds == NO_DRAFT, 0, kinds)
    kinds[:, : min(columns, width)] = torch.arange(columns)[:width]
    kinds[:, -1] = NO_DRAFT
    if width > 4:
        kinds[:, -3:-1] = torch.tensor([POINT_LAW, UNIFORM_LAW])
    drafts = torch.randint(here.numbers.first, here.numbers.stop, (batch_size, width), generator=generator)
    likely = stored.exp().flatten(0, 1).multinomial(1, generator=generator).view(batch_size, columns)
    drafts = torch.where(kinds >= 0, likely.gather(1, kinds.clamp(min=0)), drafts)
    return Case(here, drafts, stored, kinds, draw_stream)


def verify_by_parts(
    logits: Tensor,
    drafts: Tensor,
    stored_laws: Tensor,
    draft_laws: Tensor,
    keys: Tensor,
    slots: Tensor,
    law: LawNumbers,
    *,
    round: int | Tensor,
    accept_stream: int,
    residual_stream: int,
    draw_stream: int | None = None,
    draw_round: int | Tensor = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `kernels.verify.verify` computes, by the parts that samplers take on a CPU."""
    noise = CounterNoise(keys, slots.device)
    target = law_reference(logits, slots, law)  # [B, W, V]
    label = torch.full_like(target, -torch.inf)
    for sample, kinds in enumerate(draft_laws.tolist()):
        for column, kind in enumerate(kinds):
            if kind >= 0:
                label[sample, column] = stored_laws[sample, kind]
            elif kind == POINT_LAW:
                label[sample, column, drafts[sample, column]] = 0
            elif kind == UNIFORM_LAW:
                label[sample, column, law.first : law.stop] = -math.log(law.stop - law.first)
    accept = noise.bernoulli(exact_acceptance(target, label, drafts), slots, accept_stream, round)
    accept &= draft_laws != NO_DRAFT

    def inside(tokens: Tensor) -> Tensor:
        return tokens.clamp(law.first, law.stop - 1)  # also of logits that define no law

    replacement = inside(noise.categorical(residual(target, label), slots, residual_stream, round))
    drawn = drafts[:, :0]
    if draw_stream is not None:
        drawn = inside(noise.categorical(target, slots, draw_stream, draw_round))
    return target, accept, torch.where(accept, drafts, replacement), drawn, finite_reference(logits, law)


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Decisions equal, laws to float32 rounding, with one support."""
    assert torch.equal(found[0].isneginf(), expected[0].isneginf())
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one, other)
