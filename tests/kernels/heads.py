"""Heads at one level: random, with what kernel and definition must return, computed row by row."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.models.continuous import straight
from visual_spec.models.continuous.head import DiffusionHead


@dataclass
class Case:
    """Arguments of `head_step`, and what it returns in float64."""

    arguments: tuple[Any, ...]
    expected: tuple[Tensor, Tensor, Tensor]
    head: DiffusionHead


@torch.no_grad()
def case(
    count: int,
    dim: int,
    width: int,
    depth: int,
    *,
    guided: bool = True,
    learned: bool = True,
    one_law: bool = False,
    noisy: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    head = DiffusionHead(dim, 6, width, depth, dim * (1 + learned))
    for parameter in head.parameters():
        wide = random(*parameter.shape) / parameter.shape[-1] ** 0.5
        # Rounded first: what is compared are the computations, not what weights lose.
        parameter.copy_((wide if parameter.dim() == 2 else 0.5 + 0.3 * random(*parameter.shape)).to(dtype))
    rows = count * (1 + guided)
    z, times = random(rows, 6).to(dtype).float(), torch.zeros(1)
    law = torch.cat(
        [random(count, 2), -3 + random(count, 1), -1 + random(count, 1), random(count, 1).abs()], 1
    )
    law = law[0] if one_law else law
    x, noise = random(count, dim), random(count, dim)
    scales = 1 + random(count).abs() if guided else None

    weights = {f"head.{name}": value.double() for name, value in head.state_dict().items()}
    outputs = torch.stack(
        [straight.head(weights, "head", x[row % count].double(), 0.0, z[row].double()) for row in range(rows)]
    )
    expected = [by_hand(x, outputs, scales, law, row) for row in range(count)]
    means, sigmas = (torch.stack(parts) for parts in zip(*expected, strict=True))
    points = means + sigmas * noise if noisy else means
    modulations = head.double().modulations(z.double(), times.double())[0].to(dtype)
    head = head.to(dtype)
    arguments = (x, modulations, head.step_weights(), scales, law, noise if noisy else None)
    return Case(arguments, (points, means, sigmas), head)


def by_hand(
    x: Tensor, outputs: Tensor, scales: Tensor | None, law: Tensor, row: int
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a point, [d] each, from the outputs of the rows [R, outputs]."""
    count, dim = x.shape
    of_x, of_output, low, high, width = (law if law.dim() == 1 else law[row]).double()
    found = outputs[row, :dim]
    if scales is not None:
        found = outputs[count + row, :dim] * (1 - scales[row]) + scales[row] * found
    mean = of_x * x[row] + of_output * found
    if outputs.shape[1] == dim:
        return mean, width.expand(dim)
    v = outputs[row, dim:]
    log_variance = (1 + v) / 2 * high + (1 - v) / 2 * low
    return mean, width * log_variance.exp().sqrt()
