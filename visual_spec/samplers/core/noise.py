"""Noise as a pure function of (sample key, slot, token id or element, stream, round).

Every sample gets one 64-bit key, drawn from its `torch.Generator`. All noise of that sample comes from a
counter-based generator (`visual_spec.kernels.philox`) under that key, so a sample does not depend on the
batch it was drawn in, on the window, or on the order in which slots were visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from visual_spec.kernels.launch import on_host
from visual_spec.kernels.philox import SCALAR_BLOCK, philox_log_exponential, philox_normal, philox_uniform

# Purposes of draws. Two draws of one sample and slot are independent when their stream or round differs.
TOKEN: Final = 0  # the slot's own noise: shared by plain AR, Gumbel coupling and the identical mode
DRAFT: Final = 1  # fresh drafts
ACCEPT: Final = 2  # accept or reject a draft
RESIDUAL: Final = 3  # the replacement of a refused draft
PROPOSAL: Final = 4  # attempts at the residual of a whole column (`product_residual`)
MIXTURE: Final = 5  # and the component that each attempt is drawn from
CHOICE: Final = 6  # which tokens of a masked decode are kept
# The normal noise of a continuous token. The level of its chain goes to `round`, which may differ from slot to slot and
# is not a constant of a kernel. A second chain of the same slot, such as a draft's own, uses another stream.
CHAIN: Final = 7
ORDER: Final = 8  # in which order a sample's slots are decoded
REDRAFT: Final = 9  # drafts of a second source, in place of drafts of the same call
UNCONDITIONAL: Final = 10  # the chain of a slot that unconditional rows hold for themselves


def draw_keys(
    generator: torch.Generator | Sequence[torch.Generator] | CounterNoise | None, batch_size: int
) -> Tensor:
    """Return one 64-bit key for each sample of a batch.

    All 64 bits of a seed count. PyTorch's generator on the CPU looks at the low 32 bits only; the high ones are mixed
    into the keys here. A generator without a seed has PyTorch's default seed, 67280421310721, and gives its keys.

    Args:
        generator: one generator (sample `b` gets its `b`-th draw, whatever the batch size), a list of one generator a
            sample, or None for PyTorch's default CPU generator. The generator's device need not be the model's. Noise
            has keys already.
        batch_size: number of samples, at least 1.

    Returns:
        int64 [B] on the CPU.

    Raises:
        TypeError, ValueError: as `check_generators`.
    """
    if isinstance(generator, CounterNoise):
        return generator.keys
    check_generators(generator, batch_size)
    listed: Any = generator if isinstance(generator, (list, tuple)) else [generator] * batch_size
    return torch.cat([_draw_key(item) for item in listed])


def check_generators(generator: Any, samples: int, noun: str = "sample") -> None:
    """Refuse what is neither None, one `torch.Generator`, nor a list of one a sample.

    Args:
        noun: what a sample is, for the message.

    Raises:
        TypeError, ValueError: names what was given, and what to pass.
    """
    if generator is None or isinstance(generator, torch.Generator):
        return
    if not isinstance(generator, (list, tuple)):
        raise TypeError(
            f"generator is a {type(generator).__name__}; pass a torch.Generator, or a list of them, one a {noun}. For "
            "a fixed seed: torch.Generator().manual_seed(seed)."
        )
    if len(generator) != samples:
        raise ValueError(
            f"{len(generator)} generators for {samples} {noun}s; pass one a {noun}, or a single one for all."
        )
    for index, item in enumerate(generator):
        if not isinstance(item, torch.Generator):
            raise TypeError(
                f"generator[{index}] is a {type(item).__name__}; every entry of the list must be a torch.Generator."
            )


def _draw_key(generator: torch.Generator | None) -> Tensor:
    # One draw per call, not one call of B draws: on CUDA generators the two give different numbers, and a
    # sample's key must not depend on the batch size.
    generator = torch.default_generator if generator is None else generator
    device = generator.device
    key = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=device, dtype=torch.int64)
    return key.cpu() if device.type != "cpu" else key ^ _scrambled(generator.initial_seed() >> 32)


def _scrambled(number: int) -> int:
    """Return the finaliser of SplitMix64 of a number, as a signed integer of 64 bits. It is one to one; 0 stays 0."""
    mask = 2**64 - 1
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    number ^= number >> 31
    return number - 2**64 if number >= 2**63 else number


class CounterNoise:
    """The noise of a batch of samples. Samplers draw through these methods only.

    Args:
        keys: int64 [B], one key a sample (`draw_keys`).
        device: where the noise is made; must be the device of the `slots` given later.
        keep: slots of a row whose own noise (stream `TOKEN`, round 0) is drawn at once and kept, for calls that ask for
            some of them again, or for the next ones. Only on the host: there a draw for a few slots costs nearly as
            much as one for many. 0: none.

    `slots` are grid slots, int64 [B, W], at least 0 (the low 32 bits count). `stream` is the purpose of the draw.
    `round` gives fresh numbers to repeated draws for one slot: an int, or an int64 tensor [], [B], or [B, W].
    """

    keyed: ClassVar[bool] = True  # whether a kernel can draw the own noise of slots from the keys

    def __init__(self, keys: Tensor, device: torch.device | str, *, keep: int = 0) -> None:
        if keys.dim() != 1 or keys.dtype != torch.int64:
            raise ValueError(
                f"keys are {keys.dtype} of shape {tuple(keys.shape)}; pass int64 [B], as from draw_keys."
            )
        self.keys = keys.to(device)
        self.keep = keep
        # The first slot [B, 1], and minus Gumbel noise [B, keep, V].
        self._kept: tuple[Tensor, Tensor] | None = None

    def select(self, samples: Tensor) -> None:
        """Continue with the samples long [N] only."""
        self.keys = self.keys[samples]
        if self._kept is not None:
            first, times = self._kept
            self._kept = first[samples], times[samples]

    def uniform(
        self, slots: Tensor, stream: int, round: int | Tensor = 0, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Uniform numbers in (0, 1), both ends excluded: [B, W]."""
        return philox_uniform(self.keys, slots, 1, stream, round, SCALAR_BLOCK, dtype).squeeze(-1)

    def gumbel(
        self,
        slots: Tensor,
        vocab_size: int,
        stream: int,
        round: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard Gumbel noise for every token id: [B, W, V], always finite."""
        return philox_log_exponential(self.keys, slots, vocab_size, stream, round, dtype).neg_()

    def normal(
        self,
        slots: Tensor,
        dim: int,
        stream: int,
        round: int | Tensor = 0,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Standard normal noise for every element of a continuous token: [B, W, dim], always finite.

        Element i does not depend on `dim`. float32 noise is rounded float64 noise. It uses the same numbers as `gumbel`
        and `categorical` of the same stream and round, so a stream must serve either those or normal noise, not both.
        """
        return philox_normal(self.keys, slots, dim, stream, round, 0, dtype)

    def categorical(self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        """Draw tokens from laws by the Gumbel-max rule: argmax(log_probs + gumbel), LongTensor [B, W].

        `log_probs`: [B, W, V] float32 or float64, -inf outside the support; need not be normalised. The noise of the
        two types agrees up to rounding.
        """
        own = stream == TOKEN and isinstance(round, int) and round == 0
        times = self._own_times(log_probs, slots) if own else None
        if times is None:
            vocab_size, dtype = log_probs.shape[-1], log_probs.dtype
            times = philox_log_exponential(self.keys, slots, vocab_size, stream, round, dtype)
        # A race: each token has an exponential time, divided by its probability, and the least time wins.
        times.sub_(log_probs)
        # NumPy looks for it with vector instructions.
        return torch.from_numpy(times.detach().numpy().argmin(-1)) if on_host(times) else times.argmin(-1)

    def _own_times(self, log_probs: Tensor, slots: Tensor) -> Tensor | None:
        """A copy of the kept noise of `slots`, as minus a Gumbel [B, W, V]; None where they are too many to keep."""
        if not 0 < slots.shape[1] <= self.keep or not on_host(slots):
            return None
        vocab_size, dtype = log_probs.shape[-1], log_probs.dtype
        first, times = self._kept or (slots.amin(1, keepdim=True), log_probs[:, :0])
        if (times.shape[2], times.dtype) != (vocab_size, dtype):
            first, times = slots.amin(1, keepdim=True), log_probs[:, :0]
        places = slots - first
        least, most = map(int, places.aminmax())
        if least < 0 or most - least >= self.keep:  # rows went back, or far apart: nothing kept serves all
            first, times = slots.amin(1, keepdim=True), log_probs[:, :0]
            places = slots - first
            least, most = 0, int(places.max())
            if most >= self.keep:
                return None
        if most >= times.shape[1]:  # forget the slots that all rows have passed, and draw as many ahead
            first, times, places = first + least, times[:, least:], places - least
            ahead = first + torch.arange(times.shape[1], self.keep)
            drawn = philox_log_exponential(self.keys, ahead, vocab_size, TOKEN, 0, dtype)
            times = torch.cat([times, drawn], 1)
            self._kept = first, times
        if len(slots) > 1:
            places = places + torch.arange(0, len(slots) * self.keep, self.keep)[:, None]
        return times.flatten(0, 1).index_select(0, places.flatten()).view(log_probs.shape)

    def race(
        self, log_probs: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0
    ) -> tuple[Tensor, Tensor]:
        """As `categorical`, and by how much the drawn token's score exceeds the second best: [B, W], inf if alone."""
        from visual_spec.kernels.draw import race_reference

        return race_reference(log_probs, self.keys, slots, stream, round)

    def ranking(
        self, log_probs: Tensor, slots: Tensor, count: int, stream: int, round: int | Tensor = 0
    ) -> Tensor:
        """Draw `count` different tokens, each from the law without the tokens before it: long [B, W, count].

        They are the largest values of log_probs + gumbel, in descending order; the first is what `categorical` draws.
        If the support holds fewer than `count` tokens, tokens outside it follow, in any order.
        """
        noise = philox_log_exponential(self.keys, slots, log_probs.shape[-1], stream, round, log_probs.dtype)
        return noise.sub_(log_probs).topk(count, largest=False, sorted=True).indices

    def bernoulli(self, probability: Tensor, slots: Tensor, stream: int, round: int | Tensor = 0) -> Tensor:
        """Return True with the given probability: BoolTensor [B, W]. 0 is never and 1 always true."""
        return self.uniform(slots, stream, round, probability.dtype) < probability


def rounds_of(level: int | Tensor, attempts: Tensor | None) -> int | Tensor:
    """The noise's round for a level, at most 1000, of attempts at one chain; None: there is one attempt."""
    return level if attempts is None else attempts * 1024 + level
