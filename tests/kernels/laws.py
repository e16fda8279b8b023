"""What the tests of the law kernels share: laws, windows of random logits, and the law computed by `TokenLaw`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from visual_spec.kernels.law import LawNumbers
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise

# Temperatures are powers of two: the kernels multiply by the inverse, and only then is that a division.
LAWS = {
    "plain": TokenLaw(),
    "guided": TokenLaw(guidance_scale=3.0, temperature=2.0),
    "top_k": TokenLaw(top_k=9),
    "top_p": TokenLaw(top_p=0.7, temperature=0.5),
    "both": TokenLaw(guidance_scale=2.0, top_k=20, top_p=0.8),
    "range": TokenLaw(allowed=(3, 31), top_k=5),
    "until": TokenLaw(guidance_scale=4.0, guidance_until=50, allowed=(1, 37)),
    "greedy": TokenLaw(temperature=0, guidance_scale=1.5, allowed=(2, 36)),
}


@dataclass
class Window:
    """Logits of a window, and the noise of its slots."""

    logits: Tensor
    keys: Tensor
    slots: Tensor
    numbers: LawNumbers
    law: TokenLaw

    @property
    def noise(self) -> CounterNoise:
        return CounterNoise(self.keys, "cpu")

    @property
    def target(self) -> Tensor:
        """The laws of the slots by `TokenLaw`, [B, W, V]."""
        return self.law(self.logits, self.law.guided, self.slots)


def window(
    law: TokenLaw,
    batch_size: int = 2,
    width: int = 3,
    vocab_size: int = 37,
    *,
    seed: int = 0,
    scale: float = 2.0,
    dtype: torch.dtype = torch.float32,
) -> Window:
    """A window of normal logits, a few of them forbidden."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * batch_size if law.guided else batch_size
    logits = scale * torch.randn(rows, width, vocab_size, generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = -torch.inf
    return Window(
        logits.to(dtype),
        torch.randint(-(2**63), 2**63 - 1, (batch_size,), generator=generator),
        torch.randint(0, 100, (batch_size, width), generator=generator),
        law.numbers(law.guided, vocab_size),
        law,
    )
