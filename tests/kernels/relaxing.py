"""What the tests of relaxed acceptance share: laws with ties and forbidden tokens, drafts of every kind, and codes."""

import torch
from torch import Tensor


def laws(
    batch_size: int = 2, width: int = 4, vocab_size: int = 37, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Target laws, draft laws, and drafts: [B, N, V] twice, and [B, N]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, batch_size, width, vocab_size, generator=generator) * 1.5
    logits[0] = (logits[0] * 2).round() / 2  # many equal ones
    logits[0][torch.rand(logits[0].shape, generator=generator) < 0.2] = -torch.inf
    target, draft_law = logits.log_softmax(-1)
    drafts = draft_law.exp().flatten(0, 1).multinomial(1, generator=generator).view(batch_size, width)
    drafts[0, 0] = target[0, 0].argmax()  # an end of the order
    drafts[0, 1] = target[0, 1].masked_fill(target[0, 1].isneginf(), torch.inf).argmin()  # the other one
    drafts[-1, -1] = target[-1, -1].isneginf().long().argmax()  # a forbidden token
    return target, draft_law, drafts


def codes(vocab_size: int = 37, dim: int = 3, seed: int = 5) -> Tensor:
    """A codebook, [V, D]."""
    return torch.randn(vocab_size, dim, generator=torch.Generator().manual_seed(seed))
