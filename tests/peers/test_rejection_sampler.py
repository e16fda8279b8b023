"""The cases of vLLM's rejection samplers, for our `verify`.

Restated from vllm-project/vllm, `tests/v1/sample/`: `test_rejection_sampler.py` (drafts, what the target draws, what
is expected; filters; the distribution; replacements), `test_rejection_sampler_block_verify.py` and
`test_topk_topp_sampler.py`. vLLM's `test_tree_rejection_sampler.py` compares implementations of top-k and top-p, and
has no tree. Where vLLM is installed, its own sampler gets the same inputs.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from visual_spec.samplers.core.acceptance import EXACT, IDENTICAL, residual
from visual_spec.samplers.core.checks import CheckedLaw
from visual_spec.samplers.core.drafts import NO_DRAFT, Draft, Label
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import CounterNoise
from visual_spec.samplers.core.verification import verify
from visual_spec.samplers.raster.block import BLOCK

pytestmark = pytest.mark.peers
ROOT = Path(__file__).parents[2]

# Drafts, what the target would draw with the bonus token last, and what is committed.
GREEDY = {
    "perfect match": ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    "early mismatch": ([1, 2, 3], [1, 5, 3, 4], [1, 5]),
    "single token": ([1], [1, 2], [1, 2]),
    "no drafts": ([], [5], [5]),
    "first mismatch": ([1], [2, 3], [2]),
    "mismatch at the end": ([1, 2, 3], [1, 2, 7, 6], [1, 2, 7]),
    "mismatch in the middle": ([4, 5, 6], [4, 8, 6, 9], [4, 8]),
    "two drafts": ([3, 4], [3, 4, 7], [3, 4, 7]),
}
TOGETHER = [["perfect match", "early mismatch", "mismatch at the end", "mismatch in the middle"],
            ["single token", "first mismatch"]]  # fmt: skip


def committed(
    logits: Tensor, drafts: Tensor, rule: Any, keys: Tensor, law: TokenLaw | None = None, label: Any = None
) -> tuple[Tensor, Tensor]:
    """Tokens [B, N] of a call, and how many of them count. `drafts`: [B, N - 1]."""
    batch, count, vocab = logits.shape
    held = torch.cat([drafts, torch.full((batch, 1), -1)], 1)
    draft = Draft.points(held, vocab, "") if label is None else Draft(held, label, "")
    slots = torch.arange(count).expand(batch, -1)
    checked = CheckedLaw(law or TokenLaw(), count)
    verdict = verify(checked, CounterNoise(keys, "cpu"), logits, slots, draft, False, rule=rule)
    return verdict.tokens, verdict.kept + 1


def pointed(drawn: list[list[int]], vocab: int = 100) -> Tensor:
    """Logits whose law has all mass on these tokens."""
    logits = torch.full((len(drawn), len(drawn[0]), vocab), -100.0)
    return logits.scatter(2, torch.tensor(drawn)[..., None], 100.0)


def drafted(law: Tensor, drafts: Tensor) -> Label:
    """The label of drafts that were drawn from the same law [V] at all slots."""
    rows = torch.zeros(len(drafts), drafts.shape[1] + 1, dtype=torch.long)
    rows[:, -1] = NO_DRAFT
    return Label(law.log().expand(len(drafts), 1, -1), rows, (0, len(law)))


@pytest.mark.parametrize("rule", [IDENTICAL, EXACT], ids=["identical", "exact"])
@pytest.mark.parametrize("case", GREEDY)
def test_greedy(case, rule):
    drafts, drawn, wanted = GREEDY[case]
    given = torch.tensor([drafts], dtype=torch.long).view(1, -1)
    tokens, count = committed(pointed([drawn]), given, rule, torch.tensor([7]))
    assert tokens[0, : int(count)].tolist() == wanted


@pytest.mark.parametrize("rule", [IDENTICAL, EXACT], ids=["identical", "exact"])
@pytest.mark.parametrize("cases", TOGETHER)
def test_greedy_requests_together(cases, rule):
    drafts, drawn, wanted = zip(*(GREEDY[case] for case in cases), strict=True)
    keys = torch.arange(len(cases))
    tokens, count = committed(pointed(list(drawn)), torch.tensor(drafts), rule, keys)
    assert [row[:kept].tolist() for row, kept in zip(tokens, count.tolist(), strict=True)] == list(wanted)


@pytest.mark.parametrize("rule", [IDENTICAL, EXACT], ids=["identical", "exact"])
@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("batch", [1, 4, 8])
def test_deterministic_when_seeded(batch, count, rule):
    """And, which vLLM does not ask for, whatever else is in the batch."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.rand(batch, count + 1, 1000, generator=generator)
    drafts, keys = torch.randint(1000, (batch, count), generator=generator), torch.arange(batch)
    tokens, kept = committed(logits, drafts, rule, keys)
    for order in (torch.arange(batch), torch.arange(batch).flip(0), torch.tensor([batch - 1])):
        again, count_again = committed(logits[order], drafts[order], rule, keys[order])
        assert torch.equal(again, tokens[order]) and torch.equal(count_again, kept[order])


@pytest.mark.parametrize("rule", [EXACT, BLOCK], ids=["exact", "block"])
def test_the_distribution_is_that_of_the_target(rule):
    """The first two tokens, from drafts of another law: chi-square at 1e-4 over 40,000 samples."""
    generator, vocab, size = torch.Generator().manual_seed(1), 10, 40_000
    law, target = (torch.rand(vocab, generator=generator).softmax(0) for _ in range(2))
    drafts = torch.multinomial(law.expand(size, -1), 2, replacement=True, generator=generator)
    logits = target.log().expand(size, 3, -1)
    tokens, count = committed(logits, drafts, rule, torch.arange(size), label=drafted(law, drafts))
    first = torch.bincount(tokens[:, 0], minlength=vocab)
    second = torch.bincount(tokens[count > 1, 1], minlength=vocab)
    for seen in (first, second):
        wanted = target * seen.sum()
        assert ((seen - wanted) ** 2 / wanted).sum() < 33.7  # nine degrees of freedom
    assert 0.3 < (count > 1).float().mean() < 1


@pytest.mark.parametrize("rule", [IDENTICAL, EXACT], ids=["identical", "exact"])
@pytest.mark.parametrize("top_k", [1, 5, 99])
def test_top_k(top_k, rule):
    """The k tokens lead the others by 0.1 only."""
    generator = torch.Generator().manual_seed(2)
    best = torch.rand(100, 4, 100, generator=generator).topk(top_k).indices
    logits = torch.zeros(100, 4, 100).scatter(2, best, 0.1)
    drafts = torch.randint(100, (100, 3), generator=generator)
    tokens, count = committed(logits, drafts, rule, torch.arange(100), TokenLaw(top_k=top_k))
    for row in range(100):
        for place in range(int(count[row])):
            assert int(tokens[row, place]) in best[row, place].tolist()


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
def test_top_p(top_p):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(100, 4, 100, generator=generator)
    ascending, order = logits.softmax(-1).sort(-1)
    outside = ascending.cumsum(-1) <= 1 - top_p - 1e-6
    outside[..., -1] = False
    allowed = torch.ones(100, 4, 100, dtype=torch.bool).scatter(2, order, ~outside)
    drafts = torch.randint(100, (100, 3), generator=generator)
    tokens, count = committed(logits, drafts, EXACT, torch.arange(100), TokenLaw(top_p=top_p))
    there = torch.arange(4) < count[:, None]
    assert allowed.gather(2, tokens[..., None])[..., 0][there].all()


def test_allowed_ids():
    """A draft outside the range is refused, and what replaces it lies inside."""
    logits = pointed([[1, 2, 10, 5], [10, 5, 3, 5], [7, 10, 12, 5]])
    logits[..., 15] = 0.0
    tokens, count = committed(
        logits,
        torch.tensor([[1, 2, 10], [10, 5, 3], [7, 10, 12]]),
        EXACT,
        torch.arange(3),
        TokenLaw(allowed=(5, 100)),
    )
    rows = [row[:kept].tolist() for row, kept in zip(tokens, count.tolist(), strict=True)]
    assert rows == [[15], [10, 5, 15], [7, 10, 12, 5]]


@pytest.mark.parametrize("point", [True, False], ids=["no draft law", "draft law"])
def test_replacements_follow_what_the_drafts_left_over(point):
    """(target - draft)+, normalised; without a draft law the target without the draft."""
    generator = torch.Generator().manual_seed(4)
    target, law = (torch.rand(20, 50, generator=generator).softmax(-1) for _ in range(2))
    drafts = torch.randint(50, (20,), generator=generator)
    if point:
        law = torch.nn.functional.one_hot(drafts, 50).float()
    wanted = (target - law).clamp(min=0)
    torch.testing.assert_close(residual(target.log(), law.log()).exp(), wanted / wanted.sum(-1, keepdim=True))


def test_replacements_of_vllms_block_case():
    target = torch.tensor([[0.8, 0.1, 0.1], [0.3, 0.6, 0.1]]).log()
    law = torch.tensor([[0.6, 0.1, 0.3], [0.2, 0.7, 0.1]]).log()
    assert residual(target, law).argmax(-1).tolist() == [0, 0]


def test_a_block_whose_drafts_the_target_prefers_is_kept_with_its_bonus():
    """vLLM's first request: the target has 0.8 and 0.2 where the drafter has 0.6 and 0.1, so both drafts are sure."""
    target = torch.tensor([[0.0, 0.8, 0.0, 0.2], [0.2, 0.1, 0.3, 0.4], [0.25] * 4]).log()
    laws = torch.tensor([[0.0, 0.6, 0.0, 0.4], [0.1, 0.2, 0.3, 0.4]]).log()
    size = 200
    rows = torch.tensor([0, 1, NO_DRAFT]).expand(size, -1)
    label = Label(laws.expand(size, -1, -1), rows, (0, 4))
    drafts = torch.tensor([[1, 0]]).expand(size, -1)
    tokens, count = committed(target.expand(size, -1, -1), drafts, BLOCK, torch.arange(size), label=label)
    assert (count == 3).all() and (tokens[:, :2] == drafts).all()
    assert len(tokens[:, 2].unique()) == 4  # the bonus


THEIRS = """
from tests.serving import interpreted  # Triton's interpreter, before vLLM
import json, sys, torch
from types import SimpleNamespace
from vllm.v1.sample.rejection_sampler import rejection_sample
logits, drafts = torch.load(sys.argv[1])
batch, width = drafts.shape
print(json.dumps(rejection_sample(
    drafts.flatten().int(), [width] * batch, width, (width * torch.arange(1, batch + 1)).int(), None,
    logits[:, :-1].flatten(0, 1).contiguous(), logits[:, -1:].argmax(-1).int().contiguous(),
    SimpleNamespace(all_greedy=True, all_random=False, temperature=None, generators={}),
).tolist()))
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: run `make test-vllm`")
def test_vllms_own_sampler_commits_the_same_greedy_tokens(tmp_path):
    """300 random requests, the drafts partly right: vLLM's sampler at temperature 0, and ours on the same logits."""
    generator, batch, width, vocab = torch.Generator().manual_seed(5), 300, 4, 50
    logits = torch.randn(batch, width + 1, vocab, generator=generator)
    best = logits.argmax(-1)
    wrong = torch.rand(batch, width, generator=generator) < 0.3
    drafts = torch.where(wrong, torch.randint(vocab, (batch, width), generator=generator), best[:, :-1])
    torch.save((logits, drafts), tmp_path / "inputs.pt")
    command = [sys.executable, "-c", THEIRS, str(tmp_path / "inputs.pt")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    tokens, count = committed(pointed(best.tolist(), vocab), drafts, IDENTICAL, torch.arange(batch))
    there = torch.arange(width + 1) < count[:, None]
    assert torch.equal(tokens.masked_fill(~there, -1), theirs)
    assert len(count.unique()) == width + 1
