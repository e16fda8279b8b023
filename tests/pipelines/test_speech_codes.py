"""Accelerated models of speech codes: Qwen2.5-Omni's talker beside its own `generate`, Chatterbox and CosyVoice beside
codes that their public loops drew with the same weights."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TopPLogitsWarper

import visual_spec
from tests.helpers.musicgen import Heard
from tests.helpers.refusals import refuses
from tests.helpers.tiny_speech_codes import (
    CHATTERBOX,
    COSYVOICE,
    LAW,
    PROMPT,
    T3,
    TEXT,
    TURBO,
    VOICE,
    Qwen2LM,
    first_and_second,
    ras_sampling,
    tiny_talker,
)
from visual_spec.models.core import offload
from visual_spec.pipelines.accelerate.speech_codes import repetition_aware
from visual_spec.pipelines.accelerate.speech_rules import RepetitionAware, TopP
from visual_spec.samplers.core.history import Text

SAMPLERS = ("autoregressive", "speculative-jacobi", "speculative-jacobi:window=16")


def spoken(talker: Any, seed: int, rows: int = 2, padding: int = 0, **settings: Any) -> tuple[Tensor, float]:
    """The codes, and what the default generator draws next."""
    numbers = torch.Generator().manual_seed(5)
    ids = torch.tensor([[35] * 7 + [36, 37]] * rows)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    torch.manual_seed(seed)
    codes = talker.generate(
        input_ids=ids,
        input_text_ids=torch.randint(0, 27, ids.shape, generator=numbers),
        thinker_reply_part=torch.randn(rows, 6, 24, generator=numbers),
        inputs_embeds=torch.randn(rows, 9, 24, generator=numbers),
        attention_mask=mask if padding else None,
        **LAW | settings,
    )
    return codes, torch.rand(1).item()


@pytest.mark.fast_sets(3)
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "call",
    [
        dict(seed=0),
        dict(seed=1, padding=3),
        dict(seed=2, rows=1),
        dict(seed=3, rows=3, min_new_tokens=8),
        dict(seed=4, eos_token_id=None),
        dict(seed=5, num_return_sequences=2, no_repeat_ngram_size=2),
    ],
)
def test_codes_of_a_talker_are_those_of_its_own_generate(call: dict[str, Any], sampler: str) -> None:
    talker = tiny_talker()
    expected, after = spoken(talker, **call)
    visual_spec.accelerate(talker, sampler)
    codes, left = spoken(talker, **call)
    assert torch.equal(codes, expected)
    assert left == after  # the generator stands where the own loop leaves it
    assert talker.last_trace.target_calls.max() <= expected.shape[1] - 9
    visual_spec.restore(talker)
    assert torch.equal(spoken(talker, **call)[0], expected)


def test_greedy_codes_of_a_talker_and_a_whole_omni() -> None:
    talker = tiny_talker()
    expected, _ = spoken(talker, 0, do_sample=False)
    holder = torch.nn.Module()
    holder.talker = talker
    holder.__class__ = type("Qwen2_5OmniForConditionalGeneration", (torch.nn.Module,), {})
    visual_spec.accelerate(holder)
    assert torch.equal(spoken(talker, 0, do_sample=False)[0], expected)
    assert "same tokens" in visual_spec.summary(holder)


def test_a_talker_hands_codes_on_as_they_are_drawn() -> None:
    talker, plain, fast = tiny_talker(), Heard(), Heard()
    spoken(talker, 1, rows=1, streamer=plain)
    spoken(visual_spec.accelerate(talker), 1, rows=1, streamer=fast)
    assert [codes.flatten().tolist() for codes in fast.parts] == [c.flatten().tolist() for c in plain.parts]
    assert fast.ends == plain.ends == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (dict(guidance_scale=2.0), "a talker has no guidance"),
        (dict(num_beams=2), "num_beams=2 is not supported"),
        (dict(max_new_tokens=0), "must be greater than 0"),
        (dict(voice="ann"), "takes no voice"),
    ],
)
def test_a_talker_refuses_what_it_does_not_know(settings: dict[str, Any], error: str) -> None:
    refuses((ValueError, TypeError), error, spoken, visual_spec.accelerate(tiny_talker()), 0, **settings)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("settings", "codes", "after"), CHATTERBOX)
def test_codes_of_chatterbox_are_those_of_its_public_loop(
    settings: dict[str, Any], codes: list[int], after: float, sampler: str
) -> None:
    model = visual_spec.accelerate(T3(), sampler)
    torch.manual_seed(3)
    assert model.inference(t3_cond=VOICE, text_tokens=TEXT, max_new_tokens=24, **settings).tolist() == [codes]
    assert torch.rand(1).item() == after


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("settings", "codes"), TURBO)
def test_codes_of_chatterbox_turbo_are_those_of_its_public_loop(
    settings: dict[str, Any], codes: list[int], sampler: str
) -> None:
    model = visual_spec.accelerate(T3(turbo=True), sampler)
    torch.manual_seed(3)
    text = torch.tensor([[3, 9, 22, 41, 7, 48, 12]])
    assert model.inference_turbo(VOICE, text, max_gen_len=24, **settings).tolist() == [codes]
    assert torch.rand(1).item() == 0.5762494802474976


def test_a_t3_refuses_texts_that_are_no_pair_and_more_codes_than_it_has_positions_for() -> None:
    model = visual_spec.accelerate(T3())
    with pytest.raises(ValueError, match="1 texts with cfg_weight=0.5; pass one, and with guidance"):
        model.inference(t3_cond=VOICE, text_tokens=TEXT[:1])
    with pytest.raises(ValueError, match="max_new_tokens=85; pass 1 to 84"):
        model.inference(t3_cond=VOICE, text_tokens=TEXT, max_new_tokens=85)
    alone = model.inference(t3_cond=VOICE, text_tokens=TEXT[:1], max_new_tokens=9, cfg_weight=0.0)
    assert alone.shape[0] == 1


@pytest.mark.parametrize("times", (1.0, 2.0))
@pytest.mark.parametrize("last", (4, 0))
@pytest.mark.parametrize("excluded", (True, False))
def test_the_law_of_repetition_aware_sampling_is_that_of_its_two_draws(
    excluded: bool, last: int, times: float
) -> None:
    scores = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.5
    ids = torch.tensor([[6, 1, 1, 3, 5, 1, 0, 2], [6, 4, 4, 4, 4, 0, 2, 2]])  # the first one is a prompt
    stops = torch.tensor([[1, 4, 7], [3, 6, 8]])
    text = Text(ids, torch.ones_like(ids, dtype=torch.bool), ids, stops, None, 7, 1)
    laws = RepetitionAware(0.8, 4, last, times, excluded)(scores, text).exp()
    for row in range(2):
        for column in range(3):
            before = ids[row, 1 : stops[row, column]].tolist()[-last if last else 0 :]
            plain = scores[row, column].softmax(0).tolist()
            first, second = first_and_second(plain, 0.8, 4)
            expected = [0.0] * 7
            for code, share in enumerate(first):
                again = second[code] if excluded else plain
                for other in range(7):
                    drawn_anew = before.count(code) >= times
                    expected[other] += share * (again[other] if drawn_anew else other == code)
            assert torch.allclose(laws[row, column], torch.tensor(expected, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("least", "most"), [(0, 30), (4, 30), (0, 12)])
def test_codes_of_cosyvoice_are_those_of_its_public_loop(least: int, most: int, sampler: str) -> None:
    model = visual_spec.accelerate(Qwen2LM(ras_sampling), sampler)
    assert list(model.inference_wrapper(PROMPT, 25, least, most, "")) == COSYVOICE[:most]


def test_cosyvoice_hands_codes_on_as_they_are_drawn_and_ends_with_its_reader() -> None:
    model, calls = Qwen2LM(ras_sampling), []
    model.llm.model.model.register_forward_hook(lambda *_: calls.append(1))
    visual_spec.accelerate(model, "autoregressive")
    codes = model.inference_wrapper(PROMPT, 25, 0, 30, "")
    assert next(codes) == COSYVOICE[0]
    assert len(calls) < 6
    codes.close()
    assert len(calls) < 10


def test_a_drawn_cosyvoice_ends_at_any_of_its_ends_and_its_law_is_read_from_its_sampling() -> None:
    model = Qwen2LM(functools.partial(ras_sampling, top_p=0.7, tau_r=0.3))
    model.llm_decoder.weight.data *= 0.01
    assert repetition_aware(model) == RepetitionAware(0.7, 25, 10, 3.0, True)
    lengths = set()
    for seed in range(6):
        texts = []
        for sampler in SAMPLERS:
            visual_spec.accelerate(model, sampler)
            torch.manual_seed(seed)
            texts.append(list(model.inference_wrapper(PROMPT, 25, 3, 40, "")))
        assert texts[0] == texts[1] == texts[2]
        assert all(code < 40 for code in texts[0])
        lengths.add(len(texts[0]))
    assert len(lengths) > 1


def test_a_cosyvoice_of_another_law_is_refused_and_one_of_an_engine_goes_its_own_way() -> None:
    def greedy(scores: Tensor, *_: Any) -> int:
        return int(scores.argmax())

    model = Qwen2LM(greedy)
    refuses(TypeError, "draws by 'greedy'", visual_spec.accelerate, model)
    assert "sampler" not in vars(model)
    served = visual_spec.accelerate(Qwen2LM(ras_sampling))
    served.vllm = object()
    refuses(NotImplementedError, "the public loop", next, served.inference_wrapper(PROMPT, 25, 0, 30, ""))


def test_samplers_that_do_not_fit_are_refused() -> None:
    for sampler in ("maskgit", "drafted"):
        with pytest.raises((TypeError, ValueError)):
            visual_spec.accelerate(T3(), sampler)


def test_hooks_are_looked_for_once_a_text_and_not_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Any] = []
    plain = offload._hooked
    monkeypatch.setattr(offload, "_hooked", lambda root: looks.append(root) or plain(root))
    talker = visual_spec.accelerate(tiny_talker(), "autoregressive")
    spoken(talker, 2, rows=1)
    assert int(talker.last_trace.target_calls.max()) > 10
    assert len(looks) == 1
    assert not offload._AT_HAND
    model = visual_spec.accelerate(T3(), "autoregressive")
    looks.clear()
    model.inference(t3_cond=VOICE, text_tokens=TEXT, max_new_tokens=9)
    assert 0 < len(looks) <= 3  # decoder, table and head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_p", [0.02, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_the_processor_of_transformers_keeps(top_p: float, dtype: torch.dtype) -> None:
    """Among equal scores, too, of which it keeps some."""
    warper = TopPLogitsWarper(top_p)
    for seed in range(6):
        scores = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(seed)).to(dtype)
        scores = scores if seed % 2 else (4 * scores).round() / 4
        scores[:, :, seed : 3 * seed] = -torch.inf
        wanted = warper(None, scores.flatten(0, 1)).view_as(scores)  # pyright: ignore[reportArgumentType]
        assert torch.equal(TopP(warper)(scores, None), wanted)  # pyright: ignore[reportArgumentType]
