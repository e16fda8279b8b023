"""What runs of speech and music models promise, in float32 and in bfloat16, beside what their own loops draw."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import visual_spec
from tests.helpers import tiny_ace_step as ace
from tests.helpers import tiny_depth as depth
from tests.helpers import tiny_minimax_music as music
from tests.helpers import tiny_speech as latents
from tests.helpers import tiny_speech_codes as codes
from tests.helpers.tiny_depth import (
    Qwen3TTSTalkerForConditionalGeneration,
    tiny_csm,
    tiny_minimax_music,
    tiny_moshi,
)
from tests.helpers.tiny_depth import tiny_talker as tiny_omni3
from tests.helpers.tiny_speech import tiny_pocket, tiny_vibevoice
from tests.helpers.tiny_speech_codes import T3, Qwen2LM, tiny_talker

TYPES = (torch.float32, torch.bfloat16)


def qwen3_tts(talker: Any) -> list[Tensor]:
    hidden = torch.arange(3 * 2 * 40.0).mul(0.37).sin().view(3, 2, 40)
    torch.manual_seed(5)
    settings = dict(do_sample=True, max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True)
    hidden = hidden.to(talker.code_predictor.lm_head[0].weight.dtype)
    return [talker.code_predictor.generate(inputs_embeds=hidden, **settings).sequences]


def omni(talker: Any) -> list[Tensor]:
    kind, numbers = talker.dtype, torch.Generator().manual_seed(5)
    ids = torch.tensor([[35] * 7 + [36, 37]] * 2)
    read = dict(
        thinker_reply_part=torch.randn(2, 6, 24, generator=numbers).to(kind),
        inputs_embeds=torch.randn(2, 9, 24, generator=numbers).to(kind),
    )
    torch.manual_seed(1)
    return [talker.generate(input_ids=ids, input_text_ids=ids - 9, **read, **codes.LAW)]


def chatterbox(model: Any, turbo: bool) -> list[Tensor]:
    torch.manual_seed(3)
    voice = codes.VOICE.to(model.speech_head.weight.dtype)
    if turbo:
        return [model.inference_turbo(voice, torch.tensor([[3, 9, 22, 41, 7, 48, 12]]), max_gen_len=24)]
    return [model.inference(t3_cond=voice, text_tokens=codes.TEXT, max_new_tokens=24)]


def cosyvoice(model: Any) -> list[Tensor]:
    prompt = codes.PROMPT.to(model.llm_decoder.weight.dtype)
    torch.manual_seed(3)
    return [torch.tensor(list(model.inference_wrapper(prompt, 25, 4, 30, "")))]


def ace_step(handler: Any) -> list[Tensor]:
    torch.manual_seed(3)
    return [ace.drawn(handler, 2.0, ace.Processor(20))[:, 6:]]


def ace_handler(dtype: torch.dtype) -> Any:
    handler = ace.LLMHandler()
    handler.llm.to(dtype)
    return handler


def music_pipe(dtype: torch.dtype) -> Any:
    pipe = tiny_minimax_music()
    pipe.language_model.to(dtype)
    pipe.rvq_depth_decoder.to(dtype)
    return pipe


def spoken(model: Any) -> list[Tensor]:
    return [one.flatten() for one in latents.speak(model).latents]


# How a model is made in a type and run; what its public loop drew in float32, where that loop is not here; and what a
# summary claims.
OWN = "the codes of its own generate"
SAME = "same tokens as autoregressive sampling"
LATENTS = "the latents of its own generate"
Made = tuple[Callable[[torch.dtype], Any], Callable[[Any], list[Tensor]], list[int] | None, str]
MODELS: dict[str, Made] = {
    "CSM": (lambda t: tiny_csm(t, codebooks=16), lambda m: depth.drawn(m, "csm", "sampled", 3), None, OWN),
    "Moshi": (tiny_moshi, lambda m: depth.drawn(m, "moshi", "sampled", 3), None, OWN),
    "Qwen3-Omni": (tiny_omni3, lambda m: depth.drawn(m, "talker", "sampled", 3), None, OWN),
    "Qwen3-TTS": (lambda t: Qwen3TTSTalkerForConditionalGeneration().to(t), qwen3_tts, None, OWN),
    "MiniMax-Music": (music_pipe, lambda m: [music.hiddens(m, 0)[0]], None, "the codes of "),
    "Qwen2.5-Omni": (lambda t: tiny_talker().to(t), omni, None, SAME),
    "Chatterbox": (lambda t: T3().to(t), lambda m: chatterbox(m, False), codes.CHATTERBOX[0][1], SAME),
    "Turbo": (lambda t: T3(True).to(t), lambda m: chatterbox(m, True), codes.TURBO[0][1], SAME),
    "CosyVoice": (lambda t: Qwen2LM(codes.ras_sampling).to(t), cosyvoice, codes.COSYVOICE, SAME),
    "ACE-Step": (ace_handler, ace_step, ace.RECORDED[0][4], SAME),
    "VibeVoice": (tiny_vibevoice, spoken, None, LATENTS),
    "PocketTTS": (
        lambda t: tiny_pocket(dtype=t),
        lambda m: [latents.frames(m, 4).audio_latents],
        None,
        LATENTS,
    ),
}


@pytest.mark.parametrize("sampler", (None, "autoregressive"))
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_printed_is_true(name: str, dtype: torch.dtype, sampler: str | None) -> None:
    make, run, recorded, claim = MODELS[name]
    if sampler is not None and claim != SAME:
        pytest.skip("takes no sampler")
    model = make(dtype)
    own = run(model) if recorded is None else [torch.tensor(recorded)]
    visual_spec.accelerate(model, sampler)
    before = visual_spec.summary(model)
    drawn = run(model)
    after = visual_spec.summary(model)
    assert claim in after
    if dtype == torch.bfloat16:  # no equality without its limit; plain decoding counts near-ties
        assert " up to " in before and "bfloat16" in before, before
        assert (" up to " in after and "bfloat16" in after) if sampler is None else " met" in after, after
        return
    assert "near-ties" not in before + after
    for ours, theirs in zip(drawn, own, strict=True):
        if ours.is_floating_point():
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(ours.flatten()[: theirs.numel()], theirs.flatten())
