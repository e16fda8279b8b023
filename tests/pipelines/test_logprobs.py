"""Log-probabilities of what pipelines and accelerated models draw: beside those of transformers' `generate`."""

from typing import Any

import pytest
import torch
from torch import Tensor

import visual_spec
from tests.helpers.code_texts import LAWS, LLAMA, NEGATIVE, PROMPTS, SAMPLERS, ours, theirs
from tests.helpers.mage import mage_pipeline
from tests.helpers.musicgen import IDS, MASK
from tests.helpers.pipelines import ALL
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline
from tests.helpers.tiny_audio import BOOKS, tiny_audio_pipeline, tiny_musicgen
from tests.helpers.transformers_models import INPUTS, MODELS, draw
from tests.models.next_token import tiny_transformers as tiny
from tests.models.next_token.tiny_languages import CODES, END
from visual_spec.pipelines.accelerate.music import _delayed
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.columns_jacobi import ColumnJacobiSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

NEAR: dict[str, Any] = dict(rtol=0, atol=2e-5, check_dtype=False, equal_nan=True)


@pytest.mark.parametrize("name", ALL)
def test_every_pipeline_of_tokens_takes_the_word(name):
    """It changes nothing that is drawn. Pipelines of other samples do not know the word."""
    kind = ALL[name]
    pipe = kind.make()
    if not pipe.sampler.gives_logprobs:
        refuses((TypeError, ValueError), "output_logprobs", kind.ask, pipe, output_logprobs=True)
        return
    plain, found = kind.ask(pipe), kind.ask(pipe, output_logprobs=True)
    assert torch.equal(torch.as_tensor(found.to_tuple()[0]), torch.as_tensor(plain.to_tuple()[0]))
    assert torch.equal(found.trace.target_calls, plain.trace.target_calls)
    assert plain.trace.logprobs is plain.trace.model_logprobs is None
    shape = (found.codes if "music" in name else found.tokens).shape
    for values in (found.trace.logprobs, found.trace.model_logprobs):
        assert values.numel() >= shape.numel() and values.shape[0] == shape[0]
        assert values.isfinite().all() and (values <= 0).all() and (values < 0).any()


def test_mage_takes_the_word():
    pipe: Any = mage_pipeline()
    asked: dict[str, Any] = dict(num_images=2, output_type="latent")
    plain = pipe(**asked, generator=seeded(1, 2))
    found = pipe(**asked, generator=seeded(1, 2), output_logprobs=True)
    assert torch.equal(found.tokens, plain.tokens) and plain.trace.logprobs is None
    assert found.trace.logprobs.shape == found.trace.model_logprobs.shape == found.tokens.shape
    assert found.trace.logprobs.isfinite().all() and (found.trace.model_logprobs < 0).any()


def test_a_stream_knows_those_of_what_is_committed():
    pipe = tiny_pipeline(SpeculativeJacobiSampler(4))
    asked: dict[str, Any] = dict(output_type="latent", output_logprobs=True, generator=seeded(3))
    *parts, last = pipe.stream("a red circle", **asked)
    assert len(parts) > 2
    for part in parts:
        done = part.trace.commit_call >= 0
        assert torch.equal(part.trace.logprobs[done], last.trace.logprobs[done])
        assert part.trace.logprobs[~done].isnan().all() and bool((~done).any() or part is parts[-1])


def test_windows_of_a_clip_follow_each_other():
    """Those of the second window are of its own steps, given what is left of the first."""
    pipe: Any = tiny_audio_pipeline(ColumnJacobiSampler(4))
    asked: dict[str, Any] = dict(output_type="latent", output_logprobs=True, generator=seeded(3))
    longest = pipe.config["max_audio_length_in_s"]
    whole = pipe("a slow organ", audio_length_in_s=1.5 * longest, extend_stride_in_s=longest / 2, **asked)
    first = pipe("a slow organ", audio_length_in_s=longest, **asked | {"generator": seeded(3)})
    steps, trace = first.trace.commit_call.shape[1], whole.trace
    assert trace.logprobs.shape == trace.model_logprobs.shape == (*trace.commit_call.shape, BOOKS)
    assert torch.equal(trace.logprobs[:, :steps], first.trace.logprobs) and trace.logprobs.isfinite().all()


# -- models of transformers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("sampler", ["plain", "window 4", "window 16"])
def test_texts_of_codes_have_the_scores_of_generate(sampler, law):
    """Sampled with one seed: both draw the same texts, and `generate` tells its scores and logits."""
    second = dict(
        negative_prompt_ids=NEGATIVE["input_ids"], negative_prompt_attention_mask=NEGATIVE["attention_mask"]
    )
    settings: dict[str, Any] = dict(do_sample=True, return_dict_in_generate=True, **LAWS[law])
    settings |= second if law == "all" else {}
    torch.manual_seed(1)
    want: Any = theirs(LLAMA, PROMPTS, output_scores=True, output_logits=True, **settings)
    torch.manual_seed(1)
    found: Any = ours(LLAMA, PROMPTS, SAMPLERS[sampler], output_logprobs=True, **settings)
    assert torch.equal(found.sequences, want.sequences)
    texts = want.sequences[:, PROMPTS["input_ids"].shape[1] :]
    allowed = torch.tensor([*range(*CODES), END])
    over = (texts == END).cumsum(1) - (texts == END).long() > 0
    for kept, steps in ((found.logprobs, want.scores), (found.model_logprobs, want.logits)):
        scores = torch.stack(steps, 1)[: len(texts)]  # [B, N, V]
        only = torch.full_like(scores, -torch.inf)
        only[..., allowed] = scores[..., allowed]
        values = only.log_softmax(-1).gather(-1, texts[..., None])[..., 0]
        torch.testing.assert_close(kept, values.masked_fill(over, torch.nan), **NEAR)


@pytest.mark.parametrize("sampler", ["autoregressive", "speculative-jacobi:window=4"])
def test_pictures_of_janus_have_what_its_own_generate_draws_from(sampler, monkeypatch):
    model, more = tiny.janus(), dict(do_sample=True, temperature=0.8, top_k=10, guidance_scale=3.0)
    laws: list[Tensor] = []
    draws = torch.multinomial

    def watched(probabilities: Tensor, *rest: Any, **named: Any) -> Tensor:
        laws.append(probabilities.log())
        return draws(probabilities, *rest, **named)

    torch.manual_seed(3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "multinomial", watched)
        want = model.generate(**INPUTS["janus"], generation_mode="image", **more)
    visual_spec.accelerate(model, sampler)
    torch.manual_seed(3)
    found: Any = model.generate_images(
        **INPUTS["janus"], return_dict_in_generate=True, output_logprobs=True, **more
    )
    assert torch.equal(found.sequences, want)
    values = torch.stack(laws, 1).gather(-1, found.sequences[..., None])[..., 0]
    torch.testing.assert_close(found.logprobs, values, **NEAR)
    assert torch.equal(model.last_trace.logprobs, found.logprobs)


@pytest.mark.parametrize("name", MODELS)
def test_pictures_of_other_models_have_the_same_by_every_sampler(name):
    model, kept = MODELS[name], []
    for sampler in (AutoregressiveSampler(), SpeculativeJacobiSampler(6)):
        made: Any = draw(model, name, sampler, output_logprobs=True, return_dict_in_generate=True)
        kept.append((made.logprobs, made.model_logprobs))
    for one, other in zip(*kept, strict=True):
        torch.testing.assert_close(one, other, **NEAR)
        assert one.isfinite().all() and (one < 0).any()


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sampler", ["columns", "column-jacobi:window=6"])
def test_music_has_those_of_a_teacher_forced_pass_of_transformers(sampler, channels):
    model = tiny_musicgen(channels)
    visual_spec.accelerate(model, sampler)
    law: dict[str, Any] = dict(do_sample=True, temperature=0.9, top_k=6, guidance_scale=1.0)
    made: Any = model.generate_audio(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=20, return_dict_in_generate=True,
        output_logprobs=True, generator=seeded(1, 2, 3)[: len(IDS)], **law,
    )  # fmt: skip
    steps = _delayed(model, model.last_codes, 21)[1]  # [B * K, S + 1]
    special = model.decoder.config.vocab_size
    logits = model(input_ids=IDS, attention_mask=MASK, decoder_input_ids=steps).logits  # [B * K, S + 1, V]
    drawn = steps[:, 1:]
    under = TokenLaw(temperature=0.9, top_k=6)(logits[:, :-1], False)
    for kept, laws in ((made.logprobs, under), (made.model_logprobs, logits[:, :-1].log_softmax(-1))):
        values = laws.gather(-1, drawn.clamp(max=special - 1)[..., None])[..., 0]
        values = values.masked_fill(drawn == special, 0).view(len(IDS), -1, drawn.shape[1]).transpose(1, 2)
        torch.testing.assert_close(kept, values[:, : kept.shape[1]], **NEAR)


def test_the_hook_of_transformers_takes_the_word():
    torch.manual_seed(1)
    inputs: dict[str, Any] = dict(**PROMPTS, do_sample=True, max_new_tokens=8, return_dict_in_generate=True)
    made: Any = LLAMA.generate(
        **inputs,
        custom_generate=visual_spec.custom_generate,
        codes=CODES,
        end=END,
        window=4,
        output_logprobs=True,
    )
    assert (
        made.logprobs.shape
        == made.model_logprobs.shape
        == (3, made.sequences.shape[1] - PROMPTS["input_ids"].shape[1])
    )


def test_a_sampler_that_keeps_none_is_refused_before_any_compute(monkeypatch):
    class Other(AutoregressiveSampler):
        gives_logprobs = False

    monkeypatch.setattr(torch.nn.Module, "__call__", None)
    with pytest.raises(ValueError, match="output_logprobs of a Other"):
        draw(MODELS["janus"], "janus", Other(), output_logprobs=True)
