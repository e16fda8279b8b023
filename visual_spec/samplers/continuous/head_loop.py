"""The plain chains of the tokens of a call: where a decode of continuous tokens spends most of its time.

What does not change from level to level is computed before the loop: the modulations of all levels in one product each
layer, all noise in one launch, and the laws of the levels as a table. Left over are levels, each one `head_step`, or
the head and a few operations where its kernels cannot run. Nothing waits for the host or is copied from it, so the
whole is recorded as part of a call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from visual_spec.kernels.head_step import head_step, law_step, takes
from visual_spec.models.core.continuous import ContinuousModel, LevelSchedule
from visual_spec.samplers.core.noise import CHAIN, CounterNoise

# Bytes of the modulations that are computed at once; longer chains are computed in stretches of levels.
AT_ONCE = 2**28


class HeadLoop:
    """Draws tokens by the chains of one head.

    Args:
        model: whose head it is.
        schedules: of the chains, which differ in their number of levels.
        temperature: multiplies the noise of the steps; of a deterministic chain, its start.
        final_noise: standard deviation of the noise of the last level.
        guided: whether conditions hold unconditional rows.
    """

    def __init__(
        self,
        model: ContinuousModel,
        schedules: Iterable[LevelSchedule],
        *,
        temperature: float = 1.0,
        final_noise: float = 0.0,
        guided: bool = False,
    ) -> None:
        self.model, self.temperature, self.guided = model, temperature, guided
        # By the number of levels, all tables on the device before the first call.
        self.schedules = {schedule.num_steps: schedule for schedule in schedules}
        self.laws: dict[tuple[int, torch.dtype], Tensor] = {}
        self.rounds: dict[int, Tensor] = {}
        for count, schedule in self.schedules.items():
            laws, device = schedule.laws.clone(), schedule.times.device
            laws[0, 2:] = torch.tensor([0.0, 0.0, final_noise])
            laws[:, 4] *= temperature
            for dtype in (torch.float32, torch.float64):
                self.laws[count, dtype] = laws.to(device, dtype)
            self.rounds[count] = torch.arange(count + 1, device=device)
            # The law whose mean is the head's prediction, and whose width is exp(v / 2): speculation asks for both.
            law = torch.tensor([0.0, 1.0, -1.0, 1.0, 1.0], device=device)
            self.output_law = {dtype: law.to(dtype) for dtype in (torch.float32, torch.float64)}

    def __call__(
        self, z: Tensor, scales: Tensor, noise: CounterNoise, places: Tensor, levels: int, stream: int = CHAIN
    ) -> Tensor:
        """Tokens [B, N, d], in at least float32, of conditions `z [R, N, dim]`.

        Args:
            scales: [B, N], of guidance.
            places: long [B, N], whose noise of `stream` the tokens are drawn with.
            levels: T, of the chains.
        """
        head: Any = self.model.head
        dtype = torch.promote_types(z.dtype, torch.float32)
        schedule, laws = self.schedules[levels], self.laws[levels, dtype]
        flat = z.flatten(0, 1)
        guidance = scales.flatten().to(dtype) if self.guided else None
        drawn = self._noise(noise, places, levels, stream, dtype)  # [T + 1, B N, d]
        x = drawn[-1] * self.temperature if schedule.deterministic else drawn[-1]
        weights = head.step_weights() if hasattr(head, "step_weights") else None
        kept = weights if weights is not None and takes(x, len(flat), weights) else None
        top = levels
        while top:
            first = max(0, top - self._at_once(flat))
            modulations = head.modulations(flat, schedule.times[first:top])  # [levels, R N, M]
            for level in reversed(range(first, top)):
                here = modulations[level - first]
                if kept is not None:
                    x, _, _ = head_step(x, here, kept, guidance, laws[level], drawn[level])
                    continue
                points = x.to(here.dtype)
                output = head.denoise(torch.cat([points, points]) if self.guided else points, here)
                x, _, _ = law_step(x, output.to(dtype), guidance, laws[level], drawn[level])
            top = first
        return x.view(*places.shape, x.shape[-1])

    def _noise(
        self, noise: CounterNoise, places: Tensor, levels: int, stream: int, dtype: torch.dtype
    ) -> Tensor:
        """The noise of all levels, [T + 1, B N, d]; at T the start."""
        count = levels + 1
        each = places.repeat_interleave(count, 1)  # [B, N (T + 1)]
        rounds = self.rounds[levels].repeat(places.shape[1]).expand_as(each)
        drawn = noise.normal(each, self.model.token_dim, stream, rounds, dtype)
        return drawn.reshape(-1, count, drawn.shape[-1]).transpose(0, 1).contiguous()

    def _at_once(self, flat: Tensor) -> int:
        """Levels whose modulations are computed at once, of conditions [R N, dim]."""
        numbers = getattr(self.model.head, "modulation_size", flat.shape[-1])
        return max(1, AT_ONCE // (max(1, len(flat)) * numbers * flat.element_size()))
