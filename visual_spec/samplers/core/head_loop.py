"""The plain chains of the tokens of a call: where a decode of continuous tokens spends most of its time.

What does not change from level to level is computed before the loop: the modulations of all levels in one product each
layer, all noise in one launch, and the laws of the levels as numbers. Left over are levels, each one `head_step`, or
the head and a few operations where the kernel cannot run. On CUDA the whole is recorded as a graph, one for each number
of tokens that a call draws; nothing in it waits for the host or is copied from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from visual_spec.kernels.head_step import head_step, law_step, takes
from visual_spec.samplers.core.graph import recorded, wants_graph
from visual_spec.samplers.core.noise import CHAIN, CounterNoise

# Bytes of the modulations that are computed at once; longer chains are computed in stretches of levels.
_AT_ONCE = 2**28


@dataclass
class HeadCall:
    """What one call reads and writes, as large as the widest call of the decode.

    Attributes:
        width: N, tokens that the call draws for each sample.
        z: [R, widest, dim], conditions of the tokens; R = 2B when guided, the conditional rows first.
        scales: [B, widest], of guidance.
        places: long [B, widest], whose noise the tokens are drawn with.
        tokens: [B, widest, d], what is drawn.
    """

    width: int
    z: Tensor
    scales: Tensor
    places: Tensor
    tokens: Tensor

    @property
    def lengths(self) -> Tensor:
        """Tells `recorded` the device."""
        return self.places


class HeadLoop:
    """Draws the tokens of calls by the chains of one head.

    Args:
        model: has a `head` and a `token_dim` (`visual_spec.models.core.latents`).
        schedule: of the chain.
        temperature: multiplies the noise of the steps; of a deterministic chain, its start.
        final_noise: standard deviation of the noise of the last level.
        guided: whether conditions hold unconditional rows.
        widest: the most tokens that a call draws for a sample.
        graph: as samplers take it: True, False or "auto".
        stream: of the noise.

    Raises:
        ValueError: a graph where none can be recorded.
    """

    def __init__(
        self,
        model: Any,
        schedule: Any,
        *,
        temperature: float = 1.0,
        final_noise: float = 0.0,
        guided: bool = False,
        widest: int = 1,
        graph: bool | str = "auto",
        stream: int = CHAIN,
    ) -> None:
        self.model, self.schedule, self.guided, self.widest, self.stream = model, schedule, guided, widest, stream
        self.strict, self.records = graph is True, wants_graph(graph, model)
        self.start = temperature if schedule.deterministic else 1.0
        laws = schedule.laws()  # float64 [T, 5]
        laws[0, 2:] = laws.new_tensor([0.0, 0.0, final_noise])
        laws[:, 4] *= temperature
        # Tables on the device, before the first call.
        self.laws = {
            dtype: laws.to(schedule.times.device, dtype) for dtype in (torch.float32, torch.float64)
        }
        self.levels = torch.arange(len(laws) + 1, device=schedule.times.device)
        self.key = (
            *("head", len(laws), guided, widest, stream, self.start),
            *laws.flatten().tolist(),  # all that a graph keeps of the chain
        )
        self._fixed: HeadCall | None = None
        self._advance: Any = None

    @torch.no_grad()
    def __call__(self, z: Tensor, scales: Tensor, noise: CounterNoise, places: Tensor) -> Tensor:
        """Tokens [B, N, d], in at least float32, of conditions `z [R, N, dim]`.

        Args:
            scales: [B, N].
            places: long [B, N].
        """
        if not self.records:
            return self.chains(z, scales, noise, places)
        width = places.shape[1]
        call = self._fixed or self._begin(z, scales, noise, places)
        call.width = width
        call.z[:, :width], call.scales[:, :width], call.places[:, :width] = z, scales, places
        self._advance()
        return call.tokens[:, :width].clone()  # the next call writes there

    def chains(self, z: Tensor, scales: Tensor, noise: CounterNoise, places: Tensor) -> Tensor:
        """The same, one operation after the other."""
        dtype = torch.promote_types(z.dtype, torch.float32)
        laws, (size, width), dim = self.laws[dtype], places.shape, self.model.token_dim
        count = len(self.levels)
        each = places.repeat_interleave(count, 1)  # [B, N (T + 1)]
        drawn = noise.normal(each, dim, self.stream, self.levels.repeat(width).expand_as(each), dtype)
        drawn = drawn.view(size * width, count, dim).transpose(0, 1).contiguous()  # [T + 1, B N, d]
        x, flat = drawn[-1] * self.start, z.flatten(0, 1)
        guidance = scales.flatten().to(dtype) if self.guided else None
        head = self.model.head
        weights = head.step_weights() if hasattr(head, "step_weights") else None
        fused = weights is not None and takes(x, len(flat), weights)
        top, stretch = len(laws), self._stretch(flat)
        while top:
            first = max(0, top - stretch)
            modulations = head.modulations(flat, self.schedule.times[first:top])  # [levels, R N, M]
            for level in reversed(range(first, top)):
                here, law, step = modulations[level - first], laws[level], drawn[level]
                if fused:
                    x = head_step(x, here, weights, guidance, law, step)[0]
                    continue
                points = x.to(here.dtype)
                output = head.denoise(torch.cat([points, points]) if self.guided else points, here)
                x = law_step(x, output.to(dtype), guidance, law, step)[0]
            top = first
        return x.view(size, width, dim)

    def _stretch(self, flat: Tensor) -> int:
        """Levels whose modulations are computed at once."""
        head = self.model.head
        numbers = getattr(head, "modulation_size", flat.shape[-1])
        return max(1, _AT_ONCE // max(1, len(flat) * numbers * flat.element_size()))

    def _begin(self, z: Tensor, scales: Tensor, noise: CounterNoise, places: Tensor) -> HeadCall:
        """The call at the addresses of a recording."""

        def widened(value: Tensor) -> Tensor:
            return value.new_zeros(len(value), self.widest, *value.shape[2:])

        dtype = torch.promote_types(z.dtype, torch.float32)
        tokens = z.new_zeros(len(places), self.widest, self.model.token_dim, dtype=dtype)
        call = HeadCall(places.shape[1], widened(z), widened(scales), widened(places), tokens)

        def step(call: HeadCall, _: Any, noise: CounterNoise) -> None:
            width = call.width
            z, scales, places = call.z[:, :width], call.scales[:, :width], call.places[:, :width]
            call.tokens[:, :width] = self.chains(z, scales, noise, places)

        # The sampler's own clock times the call.
        silent: Any = SimpleNamespace(lap=lambda *_: None)
        parts: Any = (call, SimpleNamespace(), CounterNoise(noise.keys, noise.keys.device))
        (self._fixed, *_), self._advance = recorded(  # pyright: ignore
            self.model, self.key, step, parts, silent, strict=self.strict
        )
        assert self._fixed is not None
        return self._fixed
