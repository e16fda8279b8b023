"""Relaxed acceptance rules, written out for one slot."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import AcceptanceRule, Relaxation, residual
from visual_spec.samplers.core.law import TokenLaw


def pairs(vocab_size: int, count: int = 300) -> tuple[Tensor, Tensor]:
    """Target and draft laws [count, 1, V]: full, cut to part of the vocabulary, uniform, point, equal, disjoint."""
    generator = torch.Generator().manual_seed(vocab_size)
    shape = (count, 1, vocab_size)
    scale = 4 * torch.rand(count, 1, 1, generator=generator, dtype=torch.float64)
    laws = []
    for _ in range(2):
        logits = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        forbidden = torch.rand(shape, generator=generator) < 0.3
        forbidden[: count // 2] = False
        forbidden.scatter_(-1, logits.argmax(-1, keepdim=True), False)
        laws.append(logits.masked_fill(forbidden, -torch.inf).log_softmax(-1))
    target, draft = laws
    uniform = torch.full((1, vocab_size), -math.log(vocab_size), dtype=torch.float64)
    point = torch.full((vocab_size, 1, vocab_size), -torch.inf, dtype=torch.float64)
    point[torch.arange(vocab_size), 0, torch.arange(vocab_size)] = 0
    same = target[:vocab_size]
    target = torch.cat([target, target, same, same, point, same, point])
    draft = torch.cat(
        [draft, uniform.expand(count, 1, -1), point, same, same, point.roll(1, 0), point.roll(1, 0)]
    )
    return target, draft


# Of three tokens; the last one is far from the others.
CODEBOOK = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]])
RELAXATIONS = {
    "grouped": Relaxation("grouped", group_size=3, probability_gap=0.3, code_distance=3.0),
    "raised": Relaxation("grouped", 2, probability_gap=0.4, code_distance=None, delta=1.0, bounded=True),
    "clustered": Relaxation("clustered", group_size=2),
    "lantern": Relaxation("lantern", delta=0.3, neighbours=2),
    "lantern++": Relaxation("lantern", factor=2.0, neighbours=2),
    "bounded": Relaxation("lantern", delta=0.05, neighbours=2, factor=4.0, bounded=True),
}
# Rules that keep no draft less often than the exact one and replace refused ones from the plain residual.
ONE_SIDED = ("raised", "bounded")


def settings_of(relaxation: Relaxation) -> dict[str, Any]:
    """A relaxation as samplers take it."""
    numbers = {name: value for name, value in vars(relaxation).items() if name != "acceptance"}
    return {"acceptance": relaxation.acceptance, "relaxation": numbers}


def codes(vocab_size: int, seed: int = 0) -> Tensor:
    """Unit codes [V, 3]; some tokens share one, as the dead codes of a trained codebook may."""
    generator = torch.Generator().manual_seed(1000 * seed + vocab_size)
    values = torch.randn(vocab_size, 3, generator=generator)
    values[vocab_size // 2] = values[0]
    return torch.nn.functional.normalize(values, dim=-1)


def every_draft(law: Tensor) -> tuple[Tensor, Tensor]:
    """A law [N, V] and all its drafts as a window of V slots: [N, V, V], [N, V]."""
    size = law.shape[-1]
    return law[:, None].expand(-1, size, -1), torch.arange(size).expand(len(law), -1)


def one_slot(rule: AcceptanceRule, target: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance of every draft, and the law of the committed token: [N, V] each."""
    wide, drafts = every_draft(target)
    draft_law, _ = every_draft(draft)
    chance = draft.exp()
    keep = torch.where(chance > 0, rule.probability(wide, draft_law, drafts), 0)
    replaced = residual(rule.refused_target(wide, drafts), draft_law).exp()  # [N, V, V], by the refused draft
    law = chance * keep + ((chance * (1 - keep))[..., None] * replaced).sum(1)
    return keep, law


def tv(law: Tensor, target: Tensor) -> Tensor:
    return (law - target.exp()).abs().sum(-1) / 2


def check_reports(sampler: Any, model: Any, expected: Any, **parts: Any) -> None:
    """A trace of 20,000 samples says what an `Enumeration` does."""
    generator = torch.Generator().manual_seed(0)
    law, parts = TokenLaw(), {"codebook": CODEBOOK, **parts}
    result = sampler(model, None, law=law, generator=generator, batch_size=20_000, **parts)
    trace = result.trace
    assert not trace.lossless and trace.moved_mass is not None and trace.moved_mass.shape == (20_000,)
    assert trace.divergence == pytest.approx(expected.moved / expected.tested, rel=0.05)
    assert trace.moved_mass.mean().item() == pytest.approx(expected.moved, rel=0.05)
    assert trace.target_calls.double().mean().item() == pytest.approx(expected.calls, rel=0.01)
    measured = torch.bincount(result.tokens @ 3 ** torch.arange(3, -1, -1), minlength=81) / 20_000
    # 0.026 is what 20,000 samples give of 81 cells alike.
    assert (measured - expected.law).abs().sum().item() / 2 < 0.03


def gsd_acceptance(
    log_p: list, q: list, x: int, size: int, gap: float, limit: float | None, code: list
) -> float:
    p = [math.exp(value) for value in log_p]
    if p[x] == 0:
        return 0
    order = sorted((v for v in range(len(p)) if p[v] > 0), key=lambda v: (log_p[v], v))
    place = order.index(x)
    group = order[max(0, place - size // 2) : place + (size - 1) // 2 + 1]
    near = [y for y in group if y == x or abs(p[y] - p[x]) < gap]
    if limit is not None:
        near = [
            y
            for y in near
            if y == x or sum((a - b) ** 2 for a, b in zip(code[x], code[y], strict=True)) < limit
        ]
    return min(1, sum(p[y] for y in near) / sum(q[y] for y in near))


def nearest(code: list, x: int) -> list:
    others = [y for y in range(len(code)) if y != x]
    return sorted(others, key=lambda y: (math.dist(code[x], code[y]), y))


def lent(p: list, x: int, near: list, delta: float, factor: float | None) -> list:
    """The tokens whose mass LANTERN lends to x."""
    limit = delta if factor is None else (factor - 1) * p[x]
    tokens, total = [], 0.0
    for y in near if p[x] > 0 else []:
        total += p[y]
        if total > limit:
            break
        tokens.append(y)
    return tokens


def many_laws(vocab_size: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Pairs [count, V] of any sharpness and likeness, down to disjoint and equal ones."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    sharp, apart = 3 * random(count, 1).abs(), 3 * random(count, 1).abs() * (random(count, 1) > -1.5)
    target = sharp * random(count, vocab_size)
    draft = target + apart * random(count, vocab_size)
    cut = random(count, vocab_size) < 0.3 - 2 * (random(count, 1) < 0.5)
    target, draft = target.masked_fill(cut, -9.0), draft.masked_fill(~cut & (apart > 4), -9.0)
    return target.log_softmax(-1), draft.log_softmax(-1)
