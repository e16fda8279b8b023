"""Log-probabilities of drawn tokens against a teacher-forced pass over the finished pictures."""

from typing import Any

import pytest
import torch

from tests.helpers import columns
from tests.helpers.tiny import tiny_pipeline
from visual_spec.pipelines.texts import as_condition
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.prototype.proactive import ProactiveJacobiSampler
from visual_spec.samplers.core.history import NoRepeatNgram, NotBefore, RepetitionPenalty
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler
from visual_spec.samplers.raster.tree import TreeSampler

PIPE = tiny_pipeline()
PROMPTS = ["a red circle", "a blue square on a", "a circle", "red on blue", "square"]
SAMPLERS = [
    AutoregressiveSampler(),
    AutoregressiveSampler(exact_width=True),
    SpeculativeJacobiSampler(),
    SpeculativeJacobiSampler(window=5),
    SpeculativeJacobiSampler(window=5, exact_width=True),
    SpeculativeJacobiSampler(window=4, acceptance="exact"),
    SpeculativeJacobiSampler(window=4, acceptance="exact", coupling="independent"),
    DraftedSampler(3),
    DraftedSampler(3, acceptance="exact"),
    DraftedSampler(3, acceptance="block"),
    TreeSampler(3, 3),
    TreeSampler(3, 3, acceptance="identical"),
    TreeSampler(3, 3, 6, "top-k"),
    ProactiveJacobiSampler(4, 3),
    ProactiveJacobiSampler(5, 2, 1, "gumbel", "identical"),
]
LAWS = [
    TokenLaw(guidance_scale=1.0),
    TokenLaw(guidance_scale=2.5, temperature=0.7, top_k=5, top_p=0.9),
    TokenLaw(guidance_scale=2.0, guidance_until=6),
    TokenLaw(guidance_scale=1.5, temperature=0.0),
]


def drawn(sampler, law, **more):
    """Five pictures, and their condition; the model itself drafts where drafts are asked for."""
    condition = PIPE.encode_prompt(PROMPTS)
    parts = {"drafter": PIPE.transformer} if sampler.needs_drafter else {}
    seeds = [torch.Generator().manual_seed(seed) for seed in range(5)]
    result = sampler(
        PIPE.transformer, as_condition(*condition), law=law, generator=seeds, batch_size=5, **parts, **more
    )
    return result, as_condition(*condition)


def expected(tokens, condition, law):
    """Both log-probabilities [B, L], of logits of a teacher-forced pass."""
    with torch.no_grad():
        rows = [
            PIPE.transformer.teacher_forced(tokens, condition, torch.full((len(tokens),), dropped))
            for dropped in (False, True)
        ]
    under = law(torch.cat(rows), True, torch.arange(tokens.shape[1]).expand(len(tokens), -1))
    return (part.gather(-1, tokens[..., None])[..., 0] for part in (under, rows[0].log_softmax(-1)))


@pytest.mark.parametrize("law", LAWS, ids=["plain", "cut", "until", "greedy"])
@pytest.mark.parametrize("sampler", SAMPLERS, ids=lambda one: f"{type(one).__name__}{dict(one.config)}"[:60])
def test_they_are_those_of_a_teacher_forced_pass(sampler, law):
    result, condition = drawn(sampler, law, output_logprobs=True)
    trace = result.trace
    under, own = expected(result.tokens, condition, law)
    assert trace.logprobs_law == "drawn"
    torch.testing.assert_close(trace.logprobs, under, rtol=0, atol=2e-5)
    torch.testing.assert_close(trace.model_logprobs, own, rtol=0, atol=2e-5)


GROUPED: Any = dict(acceptance="grouped", relaxation={"code_distance": None})
LOSSY = [
    SpeculativeJacobiSampler(window=4, coupling="independent", **GROUPED),
    DraftedSampler(3, **GROUPED),
    TreeSampler(3, 3, **GROUPED),
    TreeSampler(3, 3, 6, "top-k", "lantern", relaxation={"delta": 0.3, "neighbours": 3}),
]


@pytest.mark.parametrize("law", LAWS[:3], ids=["plain", "cut", "until"])
@pytest.mark.parametrize("sampler", LOSSY, ids=lambda one: f"{type(one).__name__}{dict(one.config)}"[:60])
def test_a_lossy_sampler_gives_those_of_the_law_that_it_leaves_and_says_so(sampler, law):
    more = {"codebook": torch.randn(12, 4)} if sampler.needs_codebook else {}
    result, condition = drawn(sampler, law, output_logprobs=True, **more)
    assert result.trace.logprobs_law == "target" and not result.trace.lossless
    under, own = expected(result.tokens, condition, law)
    torch.testing.assert_close(result.trace.logprobs, under, rtol=0, atol=2e-5)
    torch.testing.assert_close(result.trace.model_logprobs, own, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sampler", [one for one in SAMPLERS if one.reads_text and not one.needs_drafter])
@pytest.mark.parametrize("guidance", [1.0, 2.0])
def test_laws_that_read_the_text(sampler, guidance):
    """Repetition, n-grams, and an end that some pictures reach: by a loop over texts, from raw logits."""
    end, rules = 3, (RepetitionPenalty(1.8), NoRepeatNgram(2), NotBefore(3, 4))
    law = TokenLaw(guidance, temperature=0.8, top_k=4, history=rules, end=end)
    result, condition = drawn(sampler, law, output_logprobs=True)
    trace = result.trace
    texts = [row[: row.index(end) + 1] if end in row else row for row in result.tokens.tolist()]
    assert any(text[-1] == end for text in texts)
    whole = [torch.full(result.tokens.shape, torch.nan) for _ in range(2)]
    with torch.no_grad():
        cond, uncond = (
            PIPE.transformer.teacher_forced(result.tokens, condition, torch.full((5,), dropped))
            for dropped in (False, True)
        )
    for row, text in enumerate(texts):
        for slot, token in enumerate(text):
            scores = uncond[row, slot] + guidance * (cond[row, slot] - uncond[row, slot])
            for seen in set(text[:slot]):
                scores[seen] *= 1.8 if scores[seen] < 0 else 1 / 1.8
            for first, second in zip(text[: slot - 1], text[1:slot], strict=False):
                if slot and first == text[slot - 1]:
                    scores[second] = -torch.inf
            if slot < 4:
                scores[end] = -torch.inf
            scores = scores / 0.8
            scores[scores < scores.topk(4).values[-1]] = -torch.inf
            whole[0][row, slot] = scores.log_softmax(-1)[token]
            whole[1][row, slot] = cond[row, slot].log_softmax(-1)[token]
    same: dict[str, Any] = dict(rtol=0, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(trace.logprobs, whole[0], **same)
    torch.testing.assert_close(trace.model_logprobs, whole[1], **same)


def test_pipelines_take_the_word():
    output = tiny_pipeline(SpeculativeJacobiSampler(window=4))(
        PROMPTS, output_type="latent", output_logprobs=True
    )
    under = output.trace.logprobs
    assert under is not None and under.shape == output.tokens.shape and (under <= 0).all()


COLUMN_SAMPLERS = [
    ColumnAutoregressiveSampler(),
    ColumnAutoregressiveSampler(exact_width=True),
    ColumnJacobiSampler(window=6),
    *(
        ColumnJacobiSampler(window=6, acceptance="exact", unit=unit, coupling=coupling)
        for unit in ("column", "codebook")
        for coupling in ("gumbel", "independent")
    ),
    DraftedColumnSampler(3),
    DraftedColumnSampler(3, acceptance="exact"),
]


@pytest.mark.parametrize("law", columns.LAWS.values(), ids=columns.LAWS.keys())
@pytest.mark.parametrize("pattern", ["musicgen", "gap", "coarse first"])
@pytest.mark.parametrize(
    "sampler", COLUMN_SAMPLERS, ids=lambda one: f"{type(one).__name__}{dict(one.config)}"[:70]
)
def test_each_token_of_a_column_has_its_own(sampler, pattern, law):
    model: Any = columns.MODELS[pattern]
    parts = {"drafter": columns.poor(pattern)} if sampler.needs_drafter else {}
    result = columns.decode(sampler, model, law, output_logprobs=True, **parts)
    steps = model.grid.num_tokens
    state = model.prefill(torch.tensor([0, 1, 2, 0]), batch_size=4, guided=law.guided, window=steps)
    later = model(state, result.tokens, torch.arange(steps).expand(4, -1))[:, : steps - 1]
    logits = torch.cat([state.logits[:, None], later], 1)  # [R, S, K, V]
    chosen = result.tokens.clamp(max=model.vocab_size - 1)[..., None]
    own = logits[:4].log_softmax(-1).gather(-1, chosen)[..., 0].where(model.valid, 0)
    under = torch.stack(
        [
            law(logits[:, step], law.guided, torch.full((4, model.grid.codebooks), step)).gather(
                -1, chosen[:, step]
            )
            for step in range(steps)
        ],
        1,
    )[..., 0].where(model.valid, 0)
    tolerant: dict[str, Any] = dict(rtol=0, atol=2e-5, check_dtype=False)
    torch.testing.assert_close(result.trace.model_logprobs, own, **tolerant)
    torch.testing.assert_close(result.trace.logprobs, under, **tolerant)
