"""ImagePipeline: what diffusers users expect of it, bad input, accelerate and restore. The models are real and tiny."""

import io
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tqdm import tqdm

import visual_spec
from tests.helpers.refusals import refuses
from tests.helpers.tiny import seeded, tiny_pipeline, tiny_transformer, tiny_vq_model
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.pipelines.steps import DecodeProgress
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

PROMPT = "a red circle"


@pytest.fixture
def pipe() -> Any:
    return tiny_pipeline()


# -- drawing --


def test_pictures_of_prompts_of_different_length_see_their_own_words(pipe):
    prompts = ["red", PROMPT]
    condition = pipe.make_condition(prompts, num_images_per_prompt=2)
    lengths = [int(pipe.make_condition(prompt).mask.sum()) for prompt in prompts]
    assert lengths[0] < lengths[1]
    assert condition.mask.sum(1).tolist() == [lengths[0], lengths[0], lengths[1], lengths[1]]
    for row in range(4):
        alone = pipe.make_condition(prompts[row // 2])
        torch.testing.assert_close(condition.features[row][condition.mask[row]], alone.features[alone.mask])
    told = pipe(prompts, num_images_per_prompt=2, generator=seeded(1, 2, 3, 4)).tokens
    for row, prompt in enumerate(["red", "red", PROMPT, PROMPT]):
        assert pipe(prompt, generator=seeded(row + 1)).tokens[0].equal(told[row])
    given = dict(
        zip(("prompt_embeds", "prompt_attention_mask"), pipe.encode_prompt(prompts)[:2], strict=True)
    )
    assert pipe(num_images_per_prompt=2, generator=seeded(1, 2, 3, 4), **given).tokens.equal(told)


def test_height_and_width_of_the_model_are_accepted(pipe):
    assert pipe.image_size == (8, 8)
    assert pipe(PROMPT, height=8, width=8).images[0].size == (8, 8)


def test_unknown_words_are_named_and_still_drawn(pipe):
    with pytest.warns(UserWarning, match="does not know 'giraffe', 'plaid'; the picture will not show"):
        assert pipe("a giraffe on plaid").images
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe(PROMPT)


def test_progress_counts_no_scratch_slots():
    bar = tqdm(total=8, file=io.StringIO())
    progress = DecodeProgress(bar, 4)
    progress(0, torch.tensor([1, 1]))
    assert bar.n == 2
    progress(1, torch.tensor([4, 6]))
    assert bar.n == 8 and bar.postfix == "2 calls, 2.00 tokens per call"


def test_compiled_transformer_survives(pipe, tmp_path):
    plain = pipe(PROMPT, generator=seeded(3)).tokens
    pipe.transformer = torch.compile(pipe.transformer, backend="eager")
    assert pipe(PROMPT, generator=seeded(3)).tokens.equal(plain)
    pipe.save_pretrained(tmp_path)
    assert ImagePipeline.from_pretrained(tmp_path)(PROMPT, generator=seeded(3)).tokens.equal(plain)


# -- bad input, refused before any computation --


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(prompt=[PROMPT, " !? "]), r"' !\? '.*words"),  # no known sign
        (dict(prompt=PROMPT, height=512), "height=512.*8 x 8 pixels.*4 x 4"),
        (dict(prompt_embeds=torch.zeros(1, 6, 9)), r"features \(1, 6, 9\) .* takes \(1, 6, 8\)"),
    ],
)
def test_what_the_model_does_not_read_or_draw_is_refused(pipe, given, message):
    refuses(ValueError, message, pipe, **given)


def test_tokenizer_of_another_model_is_refused():
    with pytest.raises(ValueError, match="4 x 4.*12.*4 x 4.*13"):
        ImagePipeline(tiny_transformer(), tiny_vq_model(codebook_size=13), None, AutoregressiveSampler())
    with pytest.raises(ValueError, match="8 x 8.*12"):
        ImagePipeline(tiny_transformer(), tiny_vq_model(image_size=16), None, AutoregressiveSampler())


# -- accelerate, restore --


def test_what_is_said_before_the_first_call_has_the_limit_of_what_is_said_after_it(pipe):
    limit = "the same tokens up to near-ties (bfloat16)"
    pipe.transformer.bfloat16()
    assert visual_spec.summary(pipe) == "AutoregressiveSampler, the same tokens; nothing decoded yet"
    visual_spec.accelerate(pipe)
    assert visual_spec.summary(pipe) == f"SpeculativeJacobiSampler, {limit}; nothing decoded yet"
    visual_spec.accelerate(pipe, SpeculativeJacobiSampler(exact_width=True))
    assert visual_spec.summary(pipe) == "SpeculativeJacobiSampler, the same tokens; nothing decoded yet"
    visual_spec.accelerate(pipe, SpeculativeJacobiSampler())
    pipe(PROMPT)
    assert "same tokens as autoregressive sampling up to near-ties (bfloat16; none" in visual_spec.summary(
        pipe
    )


def test_accelerate_refuses_what_it_cannot_speed_up(pipe):
    refuses(TypeError, "Linear.*visual_spec", visual_spec.accelerate, torch.nn.Linear(1, 1))
    refuses(ValueError, "'medusa'", visual_spec.accelerate, pipe, "medusa")
    assert isinstance(pipe.sampler, AutoregressiveSampler)


class Unready(AutoregressiveSampler):
    """A sampler that cannot be asked what it needs."""

    @property
    def needs_drafter(self):
        raise RuntimeError("not yet")


@pytest.mark.parametrize(
    ("sampler", "error", "message"),
    [
        ("tree", ValueError, "TreeSampler"),
        ("scale-wise", TypeError, "ScaleWiseSampler"),
        (Unready(), RuntimeError, "not yet"),
    ],
)
def test_a_refused_sampler_changes_nothing(pipe, sampler, error, message):
    plain = pipe.sampler
    refuses(error, message, visual_spec.accelerate, pipe, sampler)
    assert pipe.sampler is plain and pipe.config["sampler"][1] == "AutoregressiveSampler"
    assert visual_spec.restore(pipe).sampler is plain
    fast = visual_spec.accelerate(pipe).sampler
    refuses(error, message, visual_spec.accelerate, pipe, sampler)
    assert pipe.sampler is fast
    assert visual_spec.restore(pipe).sampler is plain


def test_accelerate_takes_text_and_keeps_a_fast_sampler_as_it_is(pipe):
    assert visual_spec.accelerate(pipe, "speculative-jacobi:window=3").sampler.config["window"] == 3
    fast = pipe.sampler
    assert visual_spec.accelerate(pipe).sampler is fast
    assert isinstance(visual_spec.restore(pipe).sampler, AutoregressiveSampler)


def test_samplers_swap_as_diffusers_schedulers_do(pipe):
    swapped: Any = SpeculativeJacobiSampler.from_config(pipe.sampler.config, window=4)
    pipe.sampler = swapped
    assert pipe.sampler.config["window"] == 4
    assert pipe.config["sampler"][1] == "SpeculativeJacobiSampler"


def test_a_component_is_an_object_not_its_name(pipe):
    plain = pipe.sampler
    refuses(
        TypeError, r"sampler is 'tree'; pass the object itself.*accelerate", setattr, pipe, "sampler", "tree"
    )
    refuses(TypeError, "vq_model is 3", setattr, pipe, "vq_model", 3)
    assert pipe.sampler is plain and visual_spec.restore(pipe).sampler is plain


@pytest.mark.parametrize(
    ("name", "fits"), [("shapes_any", "AnyOrderSampler, Spec"), ("shapes_nar", "OrderedSampler.$")]
)
def test_a_sampler_of_another_kind_is_told_which_fit_the_model(name, fits):
    """Also where only the pipeline's own sampler says what kind of calls its model answers."""
    pipe = ImagePipeline.from_pretrained(name)
    pipe.sampler = MaskedSampler()
    for ask in (pipe.check_sampler, partial(pipe, "red circle")):
        refuses(TypeError, f"MaskedSampler, which does not fit this model; those that fit: {fits}", ask)


def test_lantern_may_compare_the_codes_as_they_are_stored(pipe):
    """As LANTERN's public code, which takes distances between rows of `quantize.embedding.weight`."""
    lantern: dict[str, Any] = dict(coupling="maximal", acceptance="lantern")
    found = {}
    for codes in ("decoded", "raw"):
        pipe.sampler = SpeculativeJacobiSampler(**lantern, relaxation={"neighbours": 3, "codes": codes})
        found[codes] = pipe.sampler_parts()["codebook"]
    assert torch.equal(found["raw"], pipe.vq_model.quantize.embedding.weight)
    assert torch.equal(found["decoded"], pipe.vq_model.quantize.codes)
    assert not torch.allclose(found["raw"].norm(dim=1), torch.ones(len(found["raw"])))
    refuses(ValueError, "codes='unit'", SpeculativeJacobiSampler, **lantern, relaxation={"codes": "unit"})
