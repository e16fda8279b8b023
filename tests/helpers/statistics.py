"""The test of drawn samples against an exact law."""

import torch
from torch import Tensor

LEAST_P = 1e-4


def p_value(observed: Tensor, law: Tensor) -> float:
    """Chi-square test; cells that expect fewer than 5 are pooled."""
    expected = law.double() * observed.sum()
    rare = expected < 5
    observed = torch.cat([observed[~rare], observed[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if expected[-1] < 5:  # the pool itself: join the smallest cell
        smallest = int(expected[:-1].argmin())
        observed[smallest] += observed[-1]
        expected[smallest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(len(expected) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))
