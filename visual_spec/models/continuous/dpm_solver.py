"""DPM-Solver++ (Lu et al. 2022) as numbers: what diffusers' scheduler does in a step, read off it once.

A multistep solver without noise is linear in the sample and in the last few predictions. The scheduler works out the
factors anew in every step, on the host. Here they are read before the loop, from the scheduler's own `step`, so that
every order, noise schedule and final step is what the scheduler makes of it. The loop is then arithmetic on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_SCHEDULER = "DPMSolverMultistepScheduler"
_ALGORITHMS = ("dpmsolver++", "dpmsolver")  # the others draw noise in every step


@dataclass(frozen=True)
class SolverStep:
    """prediction = keep * sample + take * output; next sample = weights . (sample, the last predictions, newest first).

    Attributes:
        keep, take: how the network's output becomes what the solver extrapolates.
        weights: of the sample, then of `solver_order` predictions.
    """

    keep: float
    take: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class LinearSolver:
    """A deterministic multistep solver.

    Attributes:
        times: the timestep of each step, as the network reads it.
        steps: their factors.
    """

    times: tuple[float, ...]
    steps: tuple[SolverStep, ...]

    def solve(self, noise: Tensor, output: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The sample at the end, in the shape of `noise`.

        Args:
            output: the network's output at (step, sample).
        """
        sample, predictions = noise, []
        for index in range(len(self.steps)):
            sample, predictions = self.step(index, sample, output(index, sample), predictions)
        return sample

    def step(
        self, index: int, sample: Tensor, output: Tensor, predictions: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """The sample after step `index`, and the predictions up to it, newest first.

        Args:
            output: the network's, at the sample.
            predictions: as the step before returned them; of step 0 none.
        """
        step, wide = self.steps[index], torch.promote_types(sample.dtype, torch.float32)
        prediction = step.keep * sample + step.take * output
        predictions = [prediction.to(wide), *predictions][: len(step.weights) - 1]
        moved = step.weights[0] * sample.float()  # float32 also of float64, as the scheduler has it
        for weight, earlier in zip(step.weights[1:], predictions, strict=False):
            if weight:
                moved = moved + weight * earlier
        return moved.to(sample.dtype), predictions


def read_solver(scheduler: Any, num_steps: int) -> LinearSolver | None:
    """The solver that a scheduler is, for a number of steps. None: it is not linear, or not one of a known kind.

    Known is `DPMSolverMultistepScheduler` of diffusers without noise (algorithm "dpmsolver++" or "dpmsolver"), without
    thresholding and without a learned variance. The scheduler is left as it is.

    Raises:
        IndexError: from the scheduler, whose timesteps are too close for this number of steps: it runs off their end.
    """
    kind = type(scheduler)
    if kind.__name__ != _SCHEDULER or not kind.__module__.startswith("diffusers."):
        return None
    config = scheduler.config
    if config.algorithm_type not in _ALGORITHMS or config.thresholding or config.variance_type is not None:
        return None
    probe = copy.deepcopy(scheduler)
    probe.set_timesteps(num_inference_steps=num_steps)
    steps = tuple(_read_step(probe, time) for time in probe.timesteps)
    solver = LinearSolver(tuple(float(time) for time in probe.timesteps), steps)
    return solver if _agrees(solver, scheduler, num_steps) else None


def _read_step(probe: Any, time: Tensor) -> SolverStep:
    """Factors of the next step: a step of unit vectors, one for the sample and one for each prediction."""
    order = probe.config.solver_order
    units = torch.eye(order + 1, dtype=torch.float64)
    probe.model_outputs = [
        None,
        *units[2:].flip(0),
    ]  # oldest first; the step drops the first and appends its own
    factors: list[float] = []

    def convert(output: Tensor, *args: object, **kwargs: object) -> Tensor:
        pair = torch.eye(2, dtype=torch.float64)
        factors.extend(type(probe).convert_model_output(probe, pair[1], sample=pair[0]).tolist())
        return units[1]

    probe.convert_model_output = convert
    weights = probe.step(units[1], time, units[0]).prev_sample.tolist()
    return SolverStep(*factors, weights=tuple(weights))


def _agrees(solver: LinearSolver, scheduler: Any, num_steps: int) -> bool:
    """Return whether the numbers do what the scheduler's own steps do, for outputs that depend on the sample."""
    own = copy.deepcopy(scheduler)
    own.set_timesteps(num_inference_steps=num_steps)
    slopes, offsets, noise = torch.linspace(-0.9, 1.1, 3 * 8, dtype=torch.float64).view(3, 8)
    want = noise
    for time in own.timesteps:
        want = own.step(slopes * want + offsets, time, want).prev_sample
    solved = solver.solve(noise, lambda index, sample: slopes * sample + offsets)
    return bool(torch.isclose(solved, want, rtol=1e-6, atol=1e-6).all())
