"""Prompts that are too long, and negative prompts, of every kind of pipeline that reads text."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.musicgen import musicgen
from tests.helpers.pipelines import ALL, KINDS
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_transformer
from tests.helpers.tiny_audio import tiny_decoder, tiny_musicgen
from tests.helpers.tiny_t5 import tiny_tokenizer
from visual_spec.models.columns.musicgen import MagnetModel, MusicgenColumnModel
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.pipelines.texts import check_words
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler

TEXT = ["captions", "video", "bits", "music", "masked music"]
READERS = [*TEXT, "masked captions", "frames", "students of captions", "chunks"]
# A prompt that fills the encoder, and what is more than it reads.
LONG = {
    "captions": ("a red circle on a blue", "square square", "6 words"),
    "video": ("a red circle on a blue", "square square", "6 words"),
    "bits": ("a red circle on a blue", "square square", "6 tokens"),
    "music": ("a slow sad organ melody in", "minor minor", "6 words"),
    "masked music": ("a slow sad organ melody in", "minor minor", "6 words"),
}
OTHER = {"captions": "blue square", "video": "blue square", "bits": "blue square"}
OTHER |= {"music": "melody", "masked music": "melody"}


def tokens_of(output: Any) -> torch.Tensor:
    return output.codes if hasattr(output, "codes") else output.tokens


@pytest.mark.parametrize("name", TEXT)
def test_a_prompt_that_is_too_long_is_cut_with_a_warning(name):
    kind, (kept, cut, limit) = KINDS[name], LONG[name]
    pipe = kind.make()
    want = pipe(kept, generator=seeded(1), output_type="latent")
    with pytest.warns(UserWarning, match=f"reads at most {limit}; '{cut}' at the end of the prompt '{kept}"):
        got = pipe(f"{kept} {cut}", generator=seeded(1), output_type="latent")
    assert torch.equal(tokens_of(got), tokens_of(want))
    with pytest.warns(UserWarning) as warned:
        pipe.make_condition(f"{kept} {cut}")
    assert len(warned) == 1


def test_tokenizers_of_transformers_say_how_long_a_prompt_may_be():
    model, tokenizer = tiny_musicgen(dtype=torch.float32), tiny_tokenizer()
    pipe = AudioPipeline.from_musicgen(model, tokenizer, ColumnAutoregressiveSampler())
    whole = pipe.make_condition(["a red circle on a blue square"])
    assert whole.mask.sum() == 8  # without a limit nothing is cut
    tokenizer.model_max_length = 5
    with pytest.warns(UserWarning, match="reads at most 4 tokens; 'a blue square' at the end of the prompt"):
        got = pipe.make_condition(["a red circle on a blue square", "a red"])
    want = pipe.make_condition(["a red circle on", "a red"])
    assert torch.equal(got.features, want.features) and torch.equal(got.mask, want.mask)


def test_unconditional_rows_are_those_of_the_negative_prompt():
    """Each half of a guided prefill equals a prefill without guidance of its own caption."""
    pipe: Any = KINDS["captions"].make()
    told = pipe.make_condition(["a red circle", "a"], negative_prompt=["blue", "a blue square"])
    plain = pipe.make_condition(["a red circle", "a"]), pipe.make_condition(["blue", "a blue square"])
    model = tiny_transformer()
    check_halves(
        lambda condition, guided: model.prefill(condition, batch_size=2, guided=guided, window=1).logits,
        told,
        plain,
    )


@pytest.mark.parametrize("longer_first", [True, False])
@pytest.mark.parametrize("padding", ["masked", "zeros"])
def test_music_leads_away_from_captions_of_another_length(padding, longer_first):
    torch.manual_seed(1)
    lengths = [5, 3] if longer_first else [3, 5]
    told, other = (
        TextCondition(torch.randn(2, length, 32), torch.arange(length) < torch.tensor([[length], [1]]))
        for length in lengths
    )
    parts = [told, other]
    if padding == "zeros":  # which attends to the padding: both are padded alike
        parts = [
            TextCondition(
                F.pad(part.features, (0, 0, 0, 5 - part.mask.shape[1])),
                F.pad(part.mask, (0, 5 - part.mask.shape[1])),
            )
            for part in parts
        ]
    told = TextCondition(told.features, told.mask, negative=other)
    columns = MusicgenColumnModel(tiny_decoder(), 4, padding=padding)
    masked, hidden = MagnetModel(tiny_decoder(), 4, padding=padding, reach=2), torch.full((2, 4, 3), 16)
    check_halves(
        lambda condition, guided: columns.prefill(condition, batch_size=2, guided=guided, window=1).logits,
        told,
        parts,
    )
    check_halves(
        lambda condition, guided: masked(masked.prepare(condition, batch_size=2, guided=guided), hidden, 0),
        told,
        parts,
    )


def check_halves(scores, told, plain):
    got, want = scores(told, True), torch.cat([scores(part, False) for part in plain])
    assert got.shape == want.shape and (got - want).abs().max() < 1e-5
    assert (got - scores(plain[0], True)).abs().max() > 1e-3  # the learned null caption is another one
    assert torch.equal(scores(told, False), scores(TextCondition(told.features, told.mask), False))


@pytest.mark.parametrize("name", TEXT)
def test_leading_away_from_the_prompt_itself_is_no_guidance(name):
    """`unconditional + s * (conditional - unconditional)` of two equal rows is either of them."""
    kind = KINDS[name]
    pipe = kind.make()
    want = kind.ask(pipe, seed=1, guidance_scale=1.0)
    got = kind.ask(pipe, seed=1, guidance_scale=3.0, negative_prompt=kind.asked)
    assert torch.equal(tokens_of(got), tokens_of(want))
    led = kind.ask(pipe, seed=1, guidance_scale=30.0)  # far, so that also tiny networks tell
    assert not torch.equal(tokens_of(led), tokens_of(want))


@pytest.mark.parametrize("name", TEXT)
def test_negative_prompts_of_a_batch(name):
    """One for all, one for each, and as features; a sample does not depend on the others."""
    kind, other = KINDS[name], OTHER[name]
    pipe = kind.make()
    prompts, each = [kind.asked, other], {kind.each: 2}

    def made(prompts, negatives, *seeds, **more):
        settings = {"guidance_scale": 3.0, "output_type": "latent", **each, **more}
        given = {} if negatives is None else {"negative_prompt": negatives}
        return tokens_of(pipe(prompts, generator=seeded(*seeds), **given, **settings))

    got = made(prompts, [other, kind.asked], 1, 2, 3, 4)
    assert torch.equal(got[:2], made(prompts[0], other, 1, 2))
    assert torch.equal(got[2:], made(prompts[1], kind.asked, 3, 4))
    assert torch.equal(made(prompts, other, 1, 2, 3, 4), made(prompts, [other, other], 1, 2, 3, 4))
    assert not torch.equal(got, made(prompts, None, 1, 2, 3, 4))
    told = pipe.make_condition(prompts, negative_prompt=[other, kind.asked])
    features = dict(
        prompt_embeds=told.features,
        prompt_attention_mask=told.mask,
        negative_prompt_embeds=told.negative.features,
        negative_prompt_attention_mask=told.negative.mask,
    )
    assert torch.equal(made(None, None, 1, 2, 3, 4, **features), got)


@pytest.mark.parametrize("name", TEXT)
def test_negative_prompts_that_do_not_fit_are_refused(name):
    kind = KINDS[name]
    pipe = kind.make()
    for given, error, message in [
        (dict(negative_prompt=["a", "a"]), ValueError, "2 negative.*1"),
        (dict(negative_prompt=3), TypeError, "negative_prompt=3"),
        (dict(negative_prompt=[]), ValueError, "negative_prompt.*empty"),
        (dict(negative_prompt=" "), ValueError, "prompt ' '"),
        (dict(negative_prompt="a", guidance_scale=1.0), ValueError, r"guidance_scale=1\.0"),
        (dict(negative_prompt_embeds=torch.zeros(2, 3)), ValueError, r"negative_prompt_embeds.*\(2, 3\)"),
        (
            dict(negative_prompt="a", negative_prompt_embeds=torch.zeros(1, 2, 3)),
            ValueError,
            "negative_prompt.*negative_prompt_embeds",
        ),
    ]:
        refuses(error, message, kind.ask, pipe, **{"guidance_scale": 3.0, **given})


@pytest.mark.every_set
@pytest.mark.parametrize("name", READERS)
def test_prompts_and_features_that_are_none_are_refused_before_any_computation(name, monkeypatch):
    kind = ALL[name]
    pipe = kind.make()
    width = pipe.make_condition(kind.asked).features.shape[-1]
    for part in (pipe.transformer, pipe.text_encoder):
        monkeypatch.setattr(part, "forward", lambda *_, **__: pytest.fail("it computed"))
    features = torch.zeros(1, 6, width)
    for given, error, message in [
        (dict(prompt=None), ValueError, "neither.*prompt_embeds"),
        (dict(prompt_embeds=features), ValueError, "both of prompt.*prompt_embeds"),
        (dict(prompt=""), ValueError, "no words"),
        (dict(prompt=[kind.asked, " "]), ValueError, "no words"),
        (dict(prompt=[]), ValueError, "prompt.*empty"),
        (dict(prompt=3), TypeError, "prompt=3"),
        (dict(prompt=[kind.asked, None]), TypeError, "None.*string"),
        (dict(prompt=None, prompt_embeds=features[0]), ValueError, rf"shape \(6, {width}\); pass \[prompts"),
        (
            dict(prompt=None, prompt_embeds=features, prompt_attention_mask=torch.ones(1, 5)),
            ValueError,
            r"prompt_attention_mask.*\(1, 6\)",
        ),
    ]:
        if given.keys() <= inspect.signature(type(pipe).__call__).parameters.keys():
            refuses(error, message, pipe, **{"prompt": kind.asked, **kind.settings, **given})
    pipe.text_encoder = None
    refuses(ValueError, "prompt_embeds", kind.ask, pipe)


@pytest.mark.parametrize("name", ["classes", "scales"])
def test_models_without_text_refuse_a_negative_prompt_by_name(name):
    refuses(TypeError, "'negative_prompt'", KINDS[name].ask, KINDS[name].make(), negative_prompt="a")


def test_a_text_encoder_of_transformers_works_alone():
    whole = musicgen(1, dtype=torch.float32)
    alone = AudioPipeline(None, None, whole.text_encoder, None, tiny_tokenizer())
    ids = torch.tensor([[3, 4, 1]])  # a red, and the end
    want = whole.text_encoder(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    assert (alone.make_condition("a red").features - want).abs().max() < 1e-5


@pytest.mark.parametrize(
    "tokenizer, texts, message",
    [(None, ["a red circle"], "prompt_embeds"), (object(), ["a", " "], "' '.*words")],
)
def test_an_encoder_of_transformers_needs_a_tokenizer_and_words(tokenizer, texts, message):
    check_words(object(), tokenizer, ["a red circle"] if tokenizer else [])  # which is enough
    refuses(ValueError, message, check_words, object(), tokenizer, texts)
