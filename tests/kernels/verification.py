"""What the tests of the verification kernel share: windows with drafts and their laws."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.kernels.laws import Window, window
from visual_spec.kernels.verify import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL


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
        """Of `verify_reference` and `verify_triton`."""
        here, rounds = self.window, (torch.tensor(7), torch.tensor(4))
        streams = (ACCEPT, RESIDUAL, self.draw_stream)
        given = (here.logits, self.drafts, self.stored, self.kinds, here.keys, here.slots)
        return (*given, *rounds, *streams, here.numbers)


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


def compare(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Decisions equal, laws to float32 rounding, with one support."""
    assert torch.equal(found[0].isneginf(), expected[0].isneginf())
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-6)
    for one, other in zip(found[1:], expected[1:], strict=True):
        assert torch.equal(one, other)
