"""How near the laws of samplers of continuous tokens are to the target's, and how many drafts each rule keeps.

Target and drafter are models whose heads know their laws, two mixtures of three normal laws. Distances are Kolmogorov
and Smirnov's, from chains that are written out; in several dimensions the largest along eight directions.

    PYTHONPATH=. python benchmarks/continuous_laws.py --draws 100000 --out benchmarks/results/continuous-laws.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.exactness import mixtures
from tests.exactness.mixtures import MaskedMixtureModel, Mixture, MixtureModel, directions
from visual_spec.files.documents import json_text, write_json
from visual_spec.samplers.continuous.drafted import SpeculativeContinuousSampler
from visual_spec.samplers.continuous.head import HeadSpeculativeSampler
from visual_spec.samplers.core.law import TokenLaw

NOISY = dict(head_steps=20, eta=1.0, final_noise=0.05)
PUBLISHED = dict(
    head_steps=20, final_noise=0.05
)  # a diffusion head: target and draft have learned other widths
RULES: dict[str, dict[str, Any]] = {
    "chain": NOISY,
    "path": NOISY,
    "chain, learned widths": PUBLISHED,
    "ode": dict(head_steps=20, eta=0.0, final_noise=0.0),
    "cspd": PUBLISHED,
    "cspd-release": {**PUBLISHED, "final_noise": 0.0},
    "head speculation, 6 levels": NOISY,
}
DRAFTED = list(RULES)[:-1]


def laws(dim: int) -> list[Mixture]:
    """Of target and draft. In more than one dimension means are drawn, and the draft's are 0.35 away."""
    if dim == 1:
        target = Mixture([0.3, 0.5, 0.2], [-1.2, 0.2, 1.4], [0.25, 0.3, 0.2])
        return [target, Mixture([0.35, 0.45, 0.2], [-1.1, 0.25, 1.3], [0.3, 0.3, 0.25])]
    generator = torch.Generator().manual_seed(0)
    means, moved = torch.randn(2, 3, dim, generator=generator, dtype=torch.float64)
    moved = means + 0.35 * moved / moved.norm(dim=1, keepdim=True)
    return [Mixture([0.3, 0.4, 0.3], part.tolist(), [0.3, 0.35, 0.25]) for part in (means, moved)]


def bound(dim: int, final_noise: float, count: int = 200_000) -> float:
    """1 - TV of the mixtures, with the noise of the last level: the mean of min(1, target / draft) under the draft."""

    def log(law: Mixture, x: Tensor) -> Tensor:
        weights, means, spreads = law.tensors()
        wide = (spreads**2 + final_noise**2).sqrt()
        squares = (x[:, None] - means).square().sum(-1) / wide**2
        return (weights.log() - 0.5 * squares - dim * wide.log()).logsumexp(1)

    generator, (target, draft) = torch.Generator().manual_seed(1), laws(dim)
    x = draft.draw(count, generator)
    x = x + final_noise * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return float((log(target, x) - log(draft, x)).exp().clamp_max(1).mean())


def row(name: str, dim: int, count: int) -> dict[str, Any]:
    """The figures of one rule. Tokens are independent pairs, of which the second is drafted."""
    settings, learned, masked = RULES[name], "eta" not in RULES[name], name.startswith("cspd")
    kind, order = (MaskedMixtureModel, "raster") if masked else (MixtureModel, None)
    models: list[Any] = []
    for law, share in zip(laws(dim), (0.6, 0.3), strict=True):
        models.append(kind([law, law], *([law] if masked else []), flow=not learned, share=share))
    sampler, parts = HeadSpeculativeSampler(6, **settings), {}
    if name in DRAFTED:
        sampler = SpeculativeContinuousSampler(name.partition(",")[0], 1, order=order, **settings)
        parts = {"drafter": models[1]}
    generator = torch.Generator().manual_seed(2)
    drawn = sampler(models[0], None, law=TokenLaw(), generator=generator, batch_size=count, **parts)
    trace: Any = drawn.trace
    shift, ends = torch.zeros(4 * count, dim, dtype=torch.float64), []
    for model in models:
        ends.append(mixtures.straight_chain(model, 1, shift, torch.Generator().manual_seed(3), **settings))
    axes = [directions(x) for x in (drawn.tokens[:, 1], *ends)]  # of sampler, target, draft
    far = [max(map(mixtures.kolmogorov, one, axes[1])) for one in (axes[0], axes[2])]
    limit = mixtures.critical(count, 4 * count, 0.01 / len(axes[0]))
    facts = dict(rule=name, dim=dim, draws=count, distance=far[0], critical=limit, draft_distance=far[1])
    return facts | dict(acceptance=trace.acceptance, bound=bound(dim, settings["final_noise"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Distances and acceptance of the rules of continuous tokens."
    )
    parser.add_argument("--draws", type=int, default=100_000)
    parser.add_argument("--out", type=Path, required=True)
    asked, rows = parser.parse_args(), []
    for dim, names in ((1, list(RULES)), (16, ["chain", "path"])):
        for name in names:
            count = min(asked.draws, 20_000) if name == "ode" else asked.draws // dim
            rows.append(row(name, dim, count))
            print(json_text(rows[-1]), flush=True)
    write_json(asked.out, {"rows": rows}, indent=1)
