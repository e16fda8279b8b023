"""The one verification against loops over single tokens."""

import math

import pytest
import torch
from torch import Tensor

from visual_spec.kernels.law import NO_DRAFT, POINT_LAW, UNIFORM_LAW
from visual_spec.samplers.core.acceptance import EXACT, IDENTICAL, AcceptanceRule
from visual_spec.samplers.core.drafts import Draft, Label, with_bonus
from visual_spec.samplers.core.noise import ACCEPT, RESIDUAL, TOKEN, CounterNoise, draw_keys
from visual_spec.samplers.core.trace import DivergenceMeter
from visual_spec.samplers.core.verification import verify_laws
from visual_spec.samplers.raster.siblings import final_noise, sibling_stream, verify_siblings

BATCH, VOCAB, ROUND = 40, 5, 3
KEYS = draw_keys(torch.Generator().manual_seed(0), BATCH)


def laws(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64).log_softmax(-1)


# -- chains and groups -------------------------------------------------------------------------------------------------


class Slot:
    """Noise of one slot of one sample, one number at a time."""

    def __init__(self, sample: int, slot: int) -> None:
        self.noise, self.slot = CounterNoise(KEYS[sample, None], "cpu"), torch.tensor([[slot]])

    def accepts(self, probability: float, stream: int = ACCEPT) -> bool:
        return float(self.noise.uniform(self.slot, stream, ROUND, torch.float64)) < probability

    def draw(self, mass: list[float], stream: int = RESIDUAL, round: int = ROUND) -> int:
        """By the Gumbel rule, from masses that need not be normalised."""
        gumbel = self.noise.gumbel(self.slot, VOCAB, stream, round, torch.float64)[0, 0].tolist()
        scores = [math.log(m) + g if m > 0 else -math.inf for m, g in zip(mass, gumbel, strict=True)]
        return scores.index(max(scores))


def by_loops(
    target: Tensor, label: Tensor, drafts: list[int], slots: list[int], sample: int, *, rule: str,
    coupled: bool, chains: int, group: int,
) -> tuple[list[int], list[int], list[bool]]:  # fmt: skip
    """One sample: tokens, kept positions of each chain, and which entries were tested (up to the first refusal)."""
    p, q = target.exp().tolist(), label.exp().tolist()
    size = len(drafts) // chains
    tokens, kept, tested = list(drafts), [], [False] * len(drafts)
    for chain in range(chains):
        stopped, count = False, 0
        for position in range(size // group):
            entries = [chain * size + position * group + k for k in range(group)]
            passes = []
            for entry in entries:
                noise, draft = Slot(sample, slots[entry]), drafts[entry]
                if rule == "identical":
                    tokens[entry] = noise.draw(p[entry], TOKEN, 0)
                    passes.append(tokens[entry] == draft)
                    continue
                chance = min(1.0, p[entry][draft] / q[entry][draft]) if draft >= 0 else 0.0
                if rule == "generous" and draft >= 0:
                    chance = 0.5 + chance / 2
                exact = min(1.0, p[entry][draft] / q[entry][draft]) if draft >= 0 else 0.0
                accepted = noise.accepts(chance)
                passes.append(accepted)
                left = [max(a - b, 0.0) for a, b in zip(p[entry], q[entry], strict=True)]
                left = left if sum(left) > 0 else p[entry]
                if not stopped:
                    tested[entry] = True
                    tokens[entry] = draft if accepted else noise.draw(left)
                elif coupled:
                    # Behind the refusal a lossy rule leaves the test to the exact one, with noise of its own.
                    stays = accepted if rule == "exact" else noise.accepts(exact, RESIDUAL)
                    tokens[entry] = draft if stays else noise.draw(left)
                else:
                    tokens[entry] = max(draft, 0)
            count += not stopped and all(passes)
            stopped = stopped or not all(passes)
        kept.append(count)
    return tokens, kept, tested


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("rule", ["exact", "generous", "identical"])
@pytest.mark.parametrize("chains, group, positions", [(1, 1, 5), (3, 1, 3), (1, 3, 4), (2, 2, 3)])
def test_verification_is_what_a_loop_over_tokens_says(chains, group, positions, rule, coupled):
    size = chains * positions * group
    target, stored = laws(BATCH, size, seed=1), laws(BATCH, 4, seed=2)
    generator = torch.Generator().manual_seed(3)
    kinds = torch.tensor([0, 1, 2, 3, POINT_LAW, UNIFORM_LAW])
    rows = kinds[torch.randint(len(kinds), (BATCH, size), generator=generator)]
    drafts = torch.randint(1, 4, (BATCH, size), generator=generator)  # all of them in the uniform law
    likely = target.argmax(-1).clamp(1, 3)  # drafts that are kept now and then, two in three
    drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.67, likely, drafts)
    if rule == "identical":
        drawn = CounterNoise(KEYS, "cpu").categorical(target, torch.arange(size).expand(BATCH, -1), TOKEN)
        drafts = torch.where(torch.rand(drafts.shape, generator=generator) < 0.7, drawn, drafts)
    # The last position of every chain has no draft.
    last = (torch.arange(size) // group) % positions == positions - 1
    drafts, rows = drafts.masked_fill(last, -1), rows.masked_fill(last, NO_DRAFT)
    label = Label(stored, rows, (1, 4))

    def generous(target: Tensor, law: Tensor, drafts: Tensor) -> Tensor:
        at = drafts[..., None]
        return 0.5 + (target.gather(-1, at) - law.gather(-1, at)).exp().clamp(max=1)[..., 0] / 2

    rules = {"exact": EXACT, "identical": IDENTICAL, "generous": AcceptanceRule(generous, lossless=False)}
    slots = torch.arange(size).expand(BATCH, -1)
    meter = DivergenceMeter(BATCH, torch.device("cpu")) if rule == "generous" else None
    verdict = verify_laws(
        target, CounterNoise(KEYS, "cpu"), slots, Draft(drafts, label, "test"), rule=rules[rule], round=ROUND,
        coupled=coupled, meter=meter, chains=chains, group=group,
    )  # fmt: skip
    dense = label.dense(drafts)
    assert verdict.laws is target and verdict.drawn is None
    assert verdict.kept.shape == ((BATCH, chains) if chains > 1 else (BATCH,))
    seen = set()
    for sample in range(BATCH):
        tokens, kept, tested = by_loops(
            target[sample], dense[sample], drafts[sample].tolist(), slots[sample].tolist(), sample,
            rule=rule, coupled=coupled, chains=chains, group=group,
        )  # fmt: skip
        assert verdict.tokens[sample].tolist() == tokens
        assert verdict.kept[sample].view(-1).tolist() == kept
        seen |= set(kept)
        if meter is not None:
            asked = [entry for entry in range(size) if tested[entry] and drafts[sample, entry] >= 0]
            assert meter.tested[sample] == len(asked)
            p, q = target[sample].exp(), dense[sample].exp()
            exact = [min(1.0, float(p[e, drafts[sample, e]] / q[e, drafts[sample, e]])) for e in asked]
            moved = sum(0.5 + e / 2 - e for e in exact)  # the generous rule keeps more often, never less
            assert float(meter.moved[sample]) == pytest.approx(moved, abs=1e-9)
    assert len(seen) >= positions - 1  # all lengths of runs came up, or all but one


# -- siblings ----------------------------------------------------------------------------------------------------------


def test_identical_siblings_are_kept_where_they_are_what_the_noise_draws():
    target, noise = laws(BATCH, seed=4), CounterNoise(KEYS, "cpu")
    slots = torch.full((BATCH, 1), 7)
    siblings = torch.stack(
        [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(n))[:3] for n in range(BATCH)]
    )
    there = torch.rand(BATCH, 3, generator=torch.Generator().manual_seed(1)) < 0.8
    kept, left = verify_siblings(
        target, siblings, None, noise, slots, rule=IDENTICAL, round=ROUND, there=there
    )
    assert torch.equal(left, target) and final_noise(IDENTICAL, ROUND) == (TOKEN, 0)
    for sample in range(BATCH):
        drawn = Slot(sample, 7).draw(target[sample].exp().tolist(), TOKEN, 0)
        found = [k for k in range(3) if there[sample, k] and siblings[sample, k] == drawn]
        assert kept[sample] == (found[0] if found else 3)
    assert set(kept.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("independent", [False, True])
def test_one_exact_sibling_is_one_draft(independent):
    """Recursive rejection and K-SEQ of one sibling are the test of a chain of one."""
    target, label, noise = laws(BATCH, seed=5), laws(BATCH, 1, seed=6), CounterNoise(KEYS, "cpu")
    slots = torch.full((BATCH, 1), 2)
    draft = torch.randint(VOCAB, (BATCH, 1), generator=torch.Generator().manual_seed(7))
    kept, left = verify_siblings(
        target, draft, label, noise, slots, rule=EXACT, round=ROUND, independent=independent
    )
    stored = Label(label, torch.zeros_like(draft), (0, VOCAB))
    # The position after the draft has none, at another slot.
    verdict = verify_laws(
        target[:, None].repeat(1, 2, 1), noise, slots + torch.tensor([0, 5]),
        with_bonus(Draft(draft, stored, "test")), rule=EXACT, round=ROUND,
    )  # fmt: skip
    assert torch.equal(1 - kept, verdict.kept) and 0 < int(kept.sum()) < BATCH
    stream, round = final_noise(EXACT, ROUND)
    tokens = torch.where(kept[:, None] == 0, draft, noise.categorical(left[:, None], slots, stream, round))
    assert torch.equal(tokens, verdict.tokens[:, :1])


def test_recursive_rejection_takes_siblings_out_of_the_target_one_by_one():
    """Labels without replacement: each refused sibling leaves (left - label)+ to the next, against a loop."""
    target, first, noise = laws(BATCH, seed=8), laws(BATCH, seed=9), CounterNoise(KEYS, "cpu")
    siblings = torch.stack(
        [torch.randperm(VOCAB, generator=torch.Generator().manual_seed(n))[:3] for n in range(BATCH)]
    )
    there = torch.ones(BATCH, 3, dtype=torch.bool)
    there[::4, 2] = False
    labels = [first]
    for k in range(2):
        labels.append(labels[-1].scatter(1, siblings[:, k, None], -math.inf).log_softmax(-1))
    kept, left = verify_siblings(
        target, siblings, torch.stack(labels, 1), noise, torch.full((BATCH, 1), 1), rule=EXACT, round=ROUND,
        there=there,
    )  # fmt: skip
    refused_all = 0
    for sample in range(BATCH):
        p, chosen = target[sample].exp(), 3
        for k in range(3):
            if not there[sample, k]:
                continue
            q, x = labels[k][sample].exp(), int(siblings[sample, k])
            if chosen == 3 and Slot(sample, 1).accepts(float(p[x] / q[x]), sibling_stream(ACCEPT, k)):
                chosen = k
            rest = (p - q).clamp(min=0)
            p = rest / rest.sum() if float(rest.sum()) > 0 else p
        assert kept[sample] == chosen
        if chosen == 3:
            refused_all += 1
            torch.testing.assert_close(left[sample].exp(), p, rtol=0, atol=1e-12)
    assert refused_all > 3
