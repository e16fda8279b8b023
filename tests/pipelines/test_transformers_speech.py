"""`accelerate` on transformers' VibeVoice and PocketTTS: the latents of their own `generate`, in fewer calls."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import visual_spec
from tests.helpers.copies import check_copy, unpickled
from tests.helpers.recordings import traced
from tests.helpers.refusals import refuses
from tests.helpers.tiny_speech import (
    AUDIO,
    END,
    IDS,
    LATENT,
    MASK,
    PAD,
    SCRIPTS,
    Script,
    frames,
    speak,
    tiny_pocket,
    tiny_vibevoice,
)
from tests.helpers.without_numbers import NoHost, without_numbers
from visual_spec.models.continuous.dpm_solver import read_solver
from visual_spec.models.continuous.speech_heads import PocketTTSHead, VibeVoiceHead
from visual_spec.models.core.transformers_cache import CACHE
from visual_spec.pipelines.accelerate import speech, speech_model, vibevoice

COSINE: dict[str, Any] = dict(beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction")


def compare(found: Any, want: Any, tolerance: float = 1e-10) -> None:
    assert found.sequences.equal(want.sequences) and len(want.latents)
    torch.testing.assert_close(found.latents, want.latents, rtol=tolerance, atol=tolerance)
    assert [audio is None for audio in found.audio] == [audio is None for audio in want.audio]
    for mine, theirs in zip(found.audio, want.audio, strict=True):
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def calls_of(module: Any, run: Callable[[], Any]) -> tuple[Any, int]:
    """The result of a function, and how often it called a module."""
    calls: list[int] = []
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    try:
        return run(), len(calls)
    finally:
        handle.remove()


# -- VibeVoice: the same latents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)], ids=["one", "three"])
@pytest.mark.parametrize("scale", [1.0, 1.3])
@pytest.mark.parametrize("script", SCRIPTS)
def test_latents_are_those_of_generate(script, scale, rows):
    model = tiny_vibevoice()
    want = speak(model, script, rows, guidance_scale=scale)
    assert visual_spec.accelerate(model) is model
    found = speak(model, script, rows, guidance_scale=scale)
    compare(found, want)
    spoken = (want.sequences[:, IDS.shape[1] :] == AUDIO).sum(1)
    assert model.last_trace.latents.equal(spoken) and model.last_trace.head_calls == 10 * len(want.latents)
    for mine, theirs in zip(found[CACHE].layers, want[CACHE].layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-10, atol=1e-10)
        assert mine.values.untyped_storage().nbytes() == mine.values.nbytes  # of this text alone


def test_noise_prompt_and_guidance_matter():
    """What the test above compares would differ."""
    model = tiny_vibevoice()
    want = speak(model, rows=slice(0, 1))
    for other in (
        speak(model, rows=slice(0, 1), guidance_scale=1.2),
        speak(model, rows=slice(0, 1), num_diffusion_steps=9),
        speak(model, rows=slice(1, 2)),
    ):
        assert (other.latents[1] - want.latents[1]).abs().max() > 1e-3


def test_tokens_that_the_model_chooses_itself():
    """The text guidance decides here, which is answered from the joint call."""
    model = tiny_vibevoice()
    model.lm_head.weight.data[AUDIO] += 0.02 * torch.arange(32)
    want = speak(model, "", max_new_tokens=12)
    spoken = want.sequences[:, IDS.shape[1] :]
    assert len(spoken.unique()) > 2 and (spoken == AUDIO).any()
    visual_spec.accelerate(model)
    compare(speak(model, "", max_new_tokens=12), want)


def test_float32():
    model = tiny_vibevoice(torch.float32)
    want = speak(model)
    visual_spec.accelerate(model)
    compare(speak(model), want, 1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        dict(noise_scheduler=lambda: DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++", **COSINE)),
        dict(noise_scheduler=lambda: DDIMScheduler(**COSINE)),
        dict(
            noise_scheduler=lambda: DPMSolverMultistepScheduler(solver_order=3, **COSINE),
            num_diffusion_steps=7,
        ),
        dict(output_scores=True, output_logits=True, output_hidden_states=True),
        {CACHE: DynamicCache},
        dict(
            negative_prompt_ids=lambda: torch.tensor([[3, 4, 5]]).repeat(3, 1),
            negative_prompt_attention_mask=lambda: torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]]),
        ),
        dict(cache_implementation="static"),
    ],
    ids=["noise in every step", "DDIM", "order 3", "scores", "a cache given", "a negative prompt", "static"],
)
def test_settings_of_generate(settings):
    model = tiny_vibevoice()

    def made() -> dict[str, Any]:
        return {name: value() if callable(value) else value for name, value in settings.items()}

    want = speak(model, **made())
    visual_spec.accelerate(model)
    found = speak(model, **made())
    compare(found, want)
    for name in ("scores", "logits", "hidden_states"):
        torch.testing.assert_close(getattr(found, name), getattr(want, name), rtol=1e-10, atol=1e-10)


def test_eager_attention_and_sliding_windows():
    eager = tiny_vibevoice()
    eager.set_attn_implementation("eager")
    sliding = tiny_vibevoice(use_sliding_window=True, sliding_window=4, max_window_layers=1)
    # transformers' eager attention takes no padding in float64, and its softmax is one of float32: how a joint call
    # rounds there depends on the processor. A wrong mask or position changes outputs by more than 1e-2.
    cases = ((eager, slice(1, 2), True, 1e-5), (sliding, slice(None), False, 1e-10))
    for model, rows, joint, tolerance in cases:
        want = speak(model, rows=rows)
        visual_spec.accelerate(model)
        found, calls = calls_of(model.model.language_model, lambda: speak(model, rows=rows))  # noqa: B023
        compare(found, want, tolerance)
        assert (calls < 14) == joint


DYNAMIC: dict[str, Any] = dict(rope_type="dynamic", rope_theta=100.0, factor=4.0)


@pytest.mark.parametrize(("longest", "joint"), [(14, True), (7, False)])
def test_texts_beyond_the_limit_of_a_rotary_embedding_are_called_by_themselves(longest, joint):
    """A text of five tokens and nine more; the texts of guidance are shorter, so they stay below the limit longer."""
    model = tiny_vibevoice(max_position_embeddings=longest, rope_parameters=DYNAMIC)
    want = speak(model, "stops")
    own = calls_of(model.model.language_model, lambda: speak(model, "stops"))[1]
    visual_spec.accelerate(model)
    found, calls = calls_of(model.model.language_model, lambda: speak(model, "stops"))
    compare(found, want)
    assert calls < own - 4 if joint else own - 4 <= calls < own


def test_streamers_and_lists_of_audio():
    class Streamer(BaseStreamer):
        def __init__(self) -> None:
            self.told: list[Tensor] = []

        def put(self, value: Tensor) -> None:
            self.told.append(value)

        def end(self) -> None:
            self.told.append(torch.tensor(-1))

    model = tiny_vibevoice()
    want = speak(model)
    visual_spec.accelerate(model)
    torch.manual_seed(0)
    streamer = Streamer()
    audio = model.generate(
        IDS,
        attention_mask=MASK,
        max_new_tokens=9,
        guidance_scale=1.3,
        logits_processor=[Script(SCRIPTS["restarts"])],
        streamer=streamer,
    )
    torch.testing.assert_close(audio, want.audio, rtol=1e-10, atol=1e-10)
    assert torch.stack(streamer.told[1:-1], 1).equal(want.sequences[:, IDS.shape[1] :])


# -- VibeVoice: fewer calls --------------------------------------------------------------------------------------------


def test_calls_of_the_language_model():
    model = tiny_vibevoice()
    language = model.model.language_model
    alone = [AUDIO] * 7 + [END]
    settings: Any = dict(rows=slice(0, 1), max_new_tokens=9)
    for scale, own, ours in [(1.3, 3, 1), (1.0, 2, 1)]:
        script: dict[str, Any] = dict(logits_processor=[Script([alone])], guidance_scale=scale)
        # Seven latents, the end of audio and of text; only what yields audio asks the negative text.
        _, before = calls_of(language, lambda: speak(model, **settings, **script))  # noqa: B023
        assert before == 9 * (own - 1) + 7
        visual_spec.accelerate(model)
        _, after = calls_of(language, lambda: speak(model, **settings, **script))  # noqa: B023
        first = 2 if scale != 1 else 0  # the other two texts start in a call of their own
        assert after == 9 * ours + first == model.last_trace.language_calls
        visual_spec.restore(model)


def test_a_text_that_starts_beside_one_that_speaks_is_called_again():
    model = tiny_vibevoice()
    visual_spec.accelerate(model)
    speak(model, "stops")
    without = model.last_trace.language_calls
    steps = speak(model, "stops").sequences.shape[1] - IDS.shape[1]
    assert without == steps + 2
    steps = speak(model, "restarts").sequences.shape[1] - IDS.shape[1]
    # The third sample starts at tokens 2 and 3, the first at token 3, while the second speaks.
    assert model.last_trace.language_calls == steps + 2 + 2


# -- VibeVoice: the loop of the head -----------------------------------------------------------------------------------


@pytest.fixture
def recordings(monkeypatch) -> list[Any]:
    monkeypatch.setattr(speech_model, "wants_graph", lambda *_: True)
    return traced(monkeypatch)


def test_the_loop_is_recorded_once_for_each_number_of_speakers(recordings):
    model = tiny_vibevoice()
    want = [speak(model, num_diffusion_steps=steps) for steps in (2, 1)]
    visual_spec.accelerate(model)
    for _ in range(2):
        compare(speak(model, num_diffusion_steps=2), want[0])
        assert len(recordings) == 3  # one, two, and three that speak
    compare(speak(model, num_diffusion_steps=1), want[1])
    assert len(recordings) == 6


def test_pocket_is_recorded(recordings):
    model = tiny_pocket()
    want = frames(model, 4)
    visual_spec.accelerate(model)
    for _ in range(2):
        torch.testing.assert_close(frames(model, 4).audio_latents, want.audio_latents, rtol=1e-10, atol=1e-10)
        assert len(recordings) == 1


def test_nothing_in_the_loop_reads_or_writes_the_host():
    solver = read_solver(DPMSolverMultistepScheduler(**COSINE), 10)
    assert solver is not None
    speaking, pocket = tiny_vibevoice().model.diffusion_head, tiny_pocket().flow_head
    with FakeTensorMode(), torch.no_grad():
        heads = VibeVoiceHead(without_numbers(speaking)), PocketTTSHead(without_numbers(pocket))
        noise, condition, embedded = (
            torch.empty(size, dtype=torch.float64, device="cuda") for size in ((3, LATENT), (6, 32), (10, 32))
        )
        with NoHost():
            found = vibevoice._solve(heads[0], solver, 1.3, noise, condition, embedded)
            assert found.shape == noise.shape
            found = speech._flow(heads[1], 10, noise, condition[:3], embedded[:, :24])
            assert found.shape == noise.shape


# -- PocketTTS ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(0, 1), slice(None)], ids=["one", "three"])
@pytest.mark.parametrize(("flow", "steps"), [("lsd", 1), ("lsd", 4), ("drifting", 4)])
def test_pocket_latents_are_those_of_generate(flow, steps, rows):
    model = tiny_pocket(flow)
    want = frames(model, steps, rows)
    plain = frames(model, steps, rows, return_dict_in_generate=False, do_sample=False)
    visual_spec.accelerate(model)
    found = frames(model, steps, rows)
    torch.testing.assert_close(found.audio_latents, want.audio_latents, rtol=1e-10, atol=1e-10)
    trace = model.last_trace
    assert trace.latents.equal(want.audio_latents_mask.sum(-1)) and trace.latents.unique().numel() > (
        rows.stop is None
    )
    most = int(trace.latents.max())
    assert trace.language_calls == most and trace.head_calls == most * (1 if flow == "drifting" else steps)
    again = frames(model, steps, rows, return_dict_in_generate=False, do_sample=False)
    torch.testing.assert_close(again, plain, rtol=1e-10, atol=1e-10)
    assert model.last_trace.latents.tolist() == [len(one) for one in plain]


# -- the object --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [tiny_vibevoice, tiny_pocket])
def test_in_bfloat16_the_promise_names_the_type_and_latents_are_as_near(make):
    """Nothing is chosen by comparing two numbers here, so there are no near-ties: every latent is off by rounding."""
    run = speak if make is tiny_vibevoice else lambda model: frames(model, 4)

    def latents(model: Any) -> Tensor:
        output = run(model)
        made = output.latents if make is tiny_vibevoice else [output.audio_latents]
        return torch.cat([one.flatten() for one in made]).double()

    low = make(dtype=torch.bfloat16)
    own = latents(low)
    visual_spec.accelerate(low)
    assert visual_spec.summary(low).endswith("up to rounding (bfloat16); nothing decoded yet")
    found = latents(low)
    assert low.last_trace.low_precision == "bfloat16"
    assert visual_spec.summary(low).endswith("the latents of its own generate up to rounding (bfloat16)")
    first = 3 * LATENT  # later ones follow from these
    assert (found - own)[:first].abs().max() <= 4 * 2**-8 * own.abs().max()


@pytest.mark.parametrize("make", [tiny_vibevoice, tiny_pocket])
def test_restore_leaves_the_model_as_it_was(make):
    model = make()
    run = speak if make is tiny_vibevoice else lambda model: frames(model, 2)
    before = run(model)
    names, state = set(vars(model)), copy.deepcopy(model.state_dict())
    settings = model.generation_config.to_dict()
    own = model.generate = model.generate  # of the object, as a user's patch is
    assert visual_spec.summary(model).endswith("not accelerated")
    visual_spec.accelerate(model)
    assert visual_spec.summary(model).endswith("up to rounding; nothing decoded yet")
    first = dict(vars(model))
    assert visual_spec.accelerate(model) is model and vars(model) == first
    run(model)
    assert "calls of the language model" in visual_spec.summary(model)
    assert visual_spec.restore(model) is model and model.generate is own
    del model.generate
    assert set(vars(model)) == names and model.generation_config.to_dict() == settings
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    after = run(model)
    assert after.sequences.equal(before.sequences)
    for mine, theirs in zip(after[CACHE].layers, before[CACHE].layers, strict=True):
        assert mine.keys.equal(theirs.keys)
    assert visual_spec.restore(model) is model


def test_outside_of_generate_the_model_is_its_own():
    model = tiny_vibevoice()
    inputs: Any = dict(input_ids=IDS, attention_mask=MASK)
    want = model(**inputs).logits
    visual_spec.accelerate(model)
    assert model(**inputs).logits.equal(want)


def test_after_a_failure_the_model_speaks_as_before():
    class Fails(Exception):
        pass

    def fail(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == IDS.shape[1] + 3:
            raise Fails
        return Script(SCRIPTS["stops"])(input_ids, scores)

    model = tiny_vibevoice()
    want = speak(model, "stops")
    visual_spec.accelerate(model)
    with pytest.raises(Fails):
        speak(model, logits_processor=[fail])
    assert model.last_trace is None
    compare(speak(model, "stops"), want)


@pytest.mark.parametrize("copied", [copy.deepcopy, unpickled])
@pytest.mark.parametrize("make", [tiny_vibevoice, tiny_pocket])
def test_a_copy_is_plain_and_stands_alone(make, copied):
    run = speak if make is tiny_vibevoice else lambda model: frames(model, 2)
    name = "latents" if make is tiny_vibevoice else "audio_latents"
    check_copy(make(), lambda model: getattr(run(model), name), copied)


def test_what_does_not_fit_is_refused(monkeypatch):
    model = tiny_vibevoice()
    with pytest.raises(TypeError, match="SpeculativeJacobiSampler.*VibeVoiceForConditionalGeneration"):
        visual_spec.accelerate(model, "speculative-jacobi")
    with pytest.raises(TypeError, match="VibeVoiceModel.*VibeVoiceForConditionalGeneration"):
        visual_spec.accelerate(model.model)
    monkeypatch.delattr(
        "transformers.models.vibevoice.generation_vibevoice.VibeVoiceGenerationMixin._sample_audio_latent"
    )
    refuses(TypeError, r"_sample_audio_latent.*5\.20", visual_spec.accelerate, model)
    assert "last_trace" not in vars(model) and PAD == 0
