"""Speed up a language model of speech codes that the user already has, and undo it.

    tts = ChatterboxTTS.from_pretrained("cuda")
    visual_spec.accelerate(tts)
    wave = tts.generate("Good morning.")

These models write one code a frame in loops of their own. The loop is replaced, what is before and after it stays:

* Qwen2.5-Omni of transformers: `generate` of its talker, whose codes are read with the thinker's text beside them.
* Chatterbox: `inference` and `inference_turbo` of its T3, guided pairs and all processors included.
* CosyVoice 2 and 3: `inference_wrapper` of its language model, which hands codes on while they are drawn. Text that
  comes while it speaks (`inference_bistream`), and codes by vLLM, go its own way.

Codes equal those of the model's own loop in float32, greedy or sampled after the same `torch.manual_seed` on a CPU.
CosyVoice draws a code twice where it repeats: there the law is the same, by
`visual_spec.pipelines.accelerate.speech_rules.RepetitionAware`, and codes are those of plain decoding here.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visual_spec.models.core.offload import at_hand, loads_groups
from visual_spec.models.core.transformers_cache import ImagePrompt, Prompt
from visual_spec.models.next_token.speech_language import SpeechLanguageModel
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    check_writes_texts,
    hang,
    is_accelerated,
    plain,
    tell,
    unwrapped,
)
from visual_spec.pipelines.accelerate.arguments import LiveStream, by_name, noise_of, read_request, returned
from visual_spec.pipelines.accelerate.codes import lengths
from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.pipelines.accelerate.images import law_of
from visual_spec.pipelines.accelerate.speech_rules import (
    BySlot,
    Closing,
    Forbidden,
    PenaltyAtFirst,
    RepetitionAware,
    TopP,
)
from visual_spec.pipelines.streaming import stream_of
from visual_spec.samplers.core.history import HistoryRule, NoRepeatNgram, NotBefore, RepetitionPenalty
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.state import WATCHER
from visual_spec.samplers.core.trace import SampleResult
from visual_spec.samplers.registry import RASTER

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    from visual_spec.samplers.core.base import Sampler
    from visual_spec.samplers.core.noise import CounterNoise

_RULES = ("no_repeat_ngram_size", "repetition_penalty", "suppress_tokens")
# What a talker counts its positions by.
_PLACES = (
    "input_text_ids",
    "image_grid_thw",
    "video_grid_thw",
    "use_audio_in_video",
    "audio_feature_lengths",
    "video_second_per_grid",
)


class SpeechCodeAdapter(Adapter):
    """Qwen2.5-Omni, Chatterbox and CosyVoice: their codes by a sampler of next-token models without a drafter."""

    takes = ("Qwen2.5-Omni", "Chatterbox", "CosyVoice 2 and 3")
    calls = (RASTER,)
    fast_sampler = "speculative-jacobi:window=auto"

    def models(self, thing: object) -> list[nn.Module]:
        inner = unwrapped(thing)
        held = (inner, *(getattr(inner, name, None) for name in ("talker", "t3", "llm")))
        frames = (*held, getattr(getattr(inner, "model", None), "llm", None))
        return [one for one in frames if isinstance(one, nn.Module) and _loops(one)][:1]

    def accelerate(self, thing: Thing, sampler: Sampler) -> Thing:
        """Replace the loops of its codes.

        Raises:
            TypeError: a sampler that does not fit, or a CosyVoice whose `sampling` is not `ras_sampling`.
        """
        (model,) = self.models(thing)
        check_writes_texts(
            sampler, self.calls, "of which a model of speech codes takes none; name another sampler"
        )
        loops = _loops(model)
        if write in loops.values():
            repetition_aware(model)  # refuses another law
        hang(
            model,
            sampler=sampler,
            last_trace=None,
            **{
                name: functools.partial(by_name, loop, model)
                if loop is talk
                else functools.partial(loop, model)
                for name, loop in loops.items()
            },
        )
        return thing


def _loops(model: object) -> dict[str, Callable[..., Any]]:
    """The loops of a model that are replaced, by name."""
    names = {kind.__name__ for kind in type(model).__mro__}
    if "Qwen2_5OmniTalkerForConditionalGeneration" in names:
        return dict(generate=talk)
    if "T3" in names and hasattr(model, "speech_head"):
        return dict(inference_turbo=speak_turbo) if getattr(model, "is_gpt", False) else dict(inference=speak)
    if names & {"Qwen2LM", "CosyVoice3LM"} and hasattr(model, "llm_decoder"):
        return dict(inference_wrapper=write)
    return {}


def _drawn(
    model: Any,
    stage: SpeechLanguageModel,
    law: TokenLaw,
    noise: torch.Generator | Sequence[torch.Generator] | CounterNoise | None,
    prompt: Prompt,
    **settings: Any,
) -> SampleResult:
    """What the model's sampler draws; tokens are codes [B, L]."""
    hung, sampler = is_accelerated(model), settings.pop("sampler", None) or model.sampler
    other = Prompt(prompt.ids + len(prompt.ids), prompt.mask, prompt.positions, prompt.start)
    condition = ImagePrompt(prompt, other if law.guided else None)
    with at_hand(stage, leaves=False):
        result = sampler(stage, condition, law=law, generator=noise, batch_size=len(prompt.ids), **settings)
    tell(model, hung, last_trace=result.trace)
    return result


def _prompt(embeds: Tensor, rows: int, mask: Tensor | None = None, **where: Tensor | None) -> Prompt:
    shape = rows, embeds.shape[1]
    mask = torch.ones(shape, device=embeds.device) if mask is None else mask
    ids = torch.arange(rows, device=embeds.device)[:, None].expand(shape)
    return Prompt(ids, mask.bool(), **where)


@loads_groups
@torch.no_grad()
def talk(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    inputs_embeds: Tensor | None = None,
    thinker_reply_part: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    generator: torch.Generator | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    streamer: BaseStreamer | None = None,
    sampler: Sampler | None = None,
    **settings: Any,
) -> Any:
    """Draw the codes of Qwen2.5-Omni's talker; see `Qwen2_5OmniTalkerForConditionalGeneration.generate`.

    Args:
        input_ids: long [B, T], codes that stand for the prompt.
        inputs_embeds: [B, T, C].
        thinker_reply_part: [B, N, C], what is read beside each code; the last one goes on.
        generator, callback, streamer, sampler, settings: as in `visual_spec.pipelines.accelerate.codes.generate_codes`;
            among the settings also what positions are counted by.

    Returns:
        long [B, T + M]: input_ids, then codes up to the longest row's end.

    Raises:
        TypeError: an input is missing, or not known.
        ValueError: a setting out of range, or one that no sampler here knows.
    """
    if input_ids is None or inputs_embeds is None or thinker_reply_part is None:
        raise TypeError("a talker reads input_ids, inputs_embeds and thinker_reply_part; pass all three.")
    laws = {name: value for name, value in settings.items() if name not in _PLACES}
    inputs = ("inputs_embeds", "thinker_reply_part", *_PLACES)
    config = read_request(model, generation_config, laws, "a talker", inputs, reads=_RULES).config
    count = config.num_return_sequences or 1
    given = input_ids.repeat_interleave(count, 0)
    most, least = lengths(config, given.shape[1])
    read = _first_call(
        model,
        input_ids=input_ids,
        attention_mask=attention_mask,
        inputs_embeds=inputs_embeds.clone(),  # it adds the opening in place
        thinker_reply_part=thinker_reply_part,
        generation_config=generation_config,
        **settings,
    )
    positions, start = read.get("position_ids"), None
    if positions is not None:
        positions, start = positions[-3:].long(), read["inputs_embeds"].shape[1] + model.rope_deltas.flatten()
    prompt = _prompt(
        read["inputs_embeds"], len(given), read.get("attention_mask"), positions=positions, start=start
    )
    stage = SpeechLanguageModel(
        model.model,
        model.get_input_embeddings(),
        model.codec_head,
        read["inputs_embeds"],
        given,
        new_tokens=most,
        beside=thinker_reply_part.repeat_interleave(count, 0),
        project=model.thinker_to_talker_proj,
    )
    ends = config.eos_token_id
    ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
    law = law_of(config, 1.0)
    if law.guided:
        raise ValueError(f"guidance_scale={law.guidance_scale}; a talker has no guidance, leave it at 1.")
    law = TokenLaw(
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        history=_rules(config, ends, least),
        end=ends[0] if ends else None,
    )
    noise = noise_of(stage, model.sampler if sampler is None else sampler, law, generator, given)
    live = LiveStream(streamer, given)
    pad = ends[0] if config.pad_token_id is None and ends else config.pad_token_id
    with live.watching(lambda tokens, ready: _texts(tokens[:, :ready], ends, pad)):
        result = _drawn(model, stage, law, noise, prompt, sampler=sampler, callback=callback)
    texts = _texts(result.tokens, ends, pad).to(given.device)
    if isinstance(noise, DrawnNoise):
        noise.rewind(texts.shape[1])
    live.end(texts)
    return returned(torch.cat([given, texts], 1), config, result.trace, drawn=texts.shape[1])


class _Read(Exception):
    """The first call of a decoder was seen."""


def _first_call(model: Any, **inputs: object) -> dict[str, Any]:
    """What the talker's own `generate` hands to its decoder at first: how prompts are opened, and when positions are
    counted by their mask, differs between versions of transformers."""
    seen: dict[str, Any] = {}

    def stop(_: object, args: object, given: dict[str, object]) -> None:
        seen.update(given)
        raise _Read

    handle = model.model.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        type(model).generate(model, **inputs)
    except _Read:
        return seen
    finally:
        handle.remove()
    raise AssertionError("the talker's generate did not call its decoder")


def _rules(config: GenerationConfig, ends: list[int], least: int) -> tuple[HistoryRule, ...]:
    """The rules of a generation config, in the order of transformers."""
    rules: list[HistoryRule] = []
    if (penalty := config.repetition_penalty or 1.0) != 1:
        rules.append(RepetitionPenalty(penalty))
    if config.no_repeat_ngram_size:
        rules.append(NoRepeatNgram(config.no_repeat_ngram_size))
    if least:
        rules += [NotBefore(end, least) for end in ends]
    if config.suppress_tokens:
        rules.append(Forbidden(tuple(config.suppress_tokens)))
    if len(ends) > 1:
        rules.append(Closing(tuple(ends), ends[0]))
    return tuple(rules)


def _texts(tokens: Tensor, ends: list[int], pad: int | None) -> Tensor:
    """Codes [B, M] of tokens [B, L]: up to the longest row's end, with `pad` after the others' ends."""
    if not ends:
        return tokens
    closes = torch.isin(tokens, torch.tensor(ends, device=tokens.device)).long()
    after = closes.cumsum(1) - closes > 0
    return tokens.masked_fill(after, ends[0] if pad is None else pad)[:, : int((~after).sum(1).max())]


@torch.no_grad()
def speak(
    model: Any,
    *,
    t3_cond: object,
    text_tokens: Tensor,
    initial_speech_tokens: Tensor | None = None,
    prepend_prompt_speech_tokens: Tensor | None = None,
    num_return_sequences: int = 1,
    max_new_tokens: int | None = None,
    stop_on_eos: bool = True,
    do_sample: bool = True,
    temperature: float = 0.8,
    top_p: float = 0.95,
    min_p: float = 0.05,
    length_penalty: float = 1.0,
    repetition_penalty: float = 1.2,
    cfg_weight: float = 0.5,
    **decoding: Any,
) -> Tensor:
    """Draw the codes of Chatterbox's T3; see its `inference`.

    As there, `num_return_sequences`, `stop_on_eos`, `do_sample` and `length_penalty` do nothing.

    Args:
        text_tokens: long [2, T] with guidance (`cfg_weight` above 0), the text twice; else [1, T].
        max_new_tokens: None: as many as the model has positions for.
        decoding: generator, callback, sampler, as in `talk`.

    Returns:
        long [1, M], with the end.

    Raises:
        ValueError: texts that are no pair, or more codes than the model has positions for.
    """
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopPLogitsWarper

    assert prepend_prompt_speech_tokens is None, "not implemented by T3"
    hp, guided = model.hp, cfg_weight > 0
    text_tokens = torch.atleast_2d(text_tokens).to(model.device, torch.long)
    if len(text_tokens) != 1 + guided:
        raise ValueError(
            f"{len(text_tokens)} texts with cfg_weight={cfg_weight}; pass one, and with guidance the same one twice."
        )
    beside = model.speech_pos_emb.emb.weight[None, 1:]
    most = beside.shape[1] + 1 if max_new_tokens is None else max_new_tokens
    if not 1 <= most <= beside.shape[1] + 1:
        raise ValueError(
            f"max_new_tokens={most}; pass 1 to {beside.shape[1] + 1}, the positions that the model knows."
        )
    if initial_speech_tokens is None:
        initial_speech_tokens = torch.full_like(text_tokens[:, :1], hp.start_speech_token)
    embeds, _ = model.prepare_input_embeds(
        t3_cond=t3_cond, text_tokens=text_tokens, speech_tokens=initial_speech_tokens, cfg_weight=cfg_weight
    )
    opening = torch.full_like(text_tokens[:, :1], hp.start_speech_token)
    opened = model.speech_emb(opening) + model.speech_pos_emb.get_fixed_embedding(0)
    warpers = (
        *((TemperatureLogitsWarper(float(temperature)),) if temperature != 1 else ()),
        MinPLogitsWarper(min_p=min_p),
    )
    law = TokenLaw(
        guidance_scale=1 + cfg_weight,
        history=(
            RepetitionPenalty(float(repetition_penalty)),
            BySlot(warpers),
            TopP(TopPLogitsWarper(top_p)),
        ),
        end=hp.stop_speech_token,
    )
    prompt = torch.cat([embeds, opened], 1)
    return _spoken(model, prompt, opening[:1], law, most, beside, **decoding)


@torch.no_grad()
def speak_turbo(
    model: Any,
    t3_cond: object,
    text_tokens: Tensor,
    temperature: float = 0.8,
    top_k: int = 1000,
    top_p: float = 0.95,
    repetition_penalty: float = 1.2,
    max_gen_len: int = 1000,
    **decoding: Any,
) -> Tensor:
    """Draw the codes of Chatterbox Turbo's T3; see its `inference_turbo`, whose penalty comes after the filters.

    Returns:
        long [1, M], without the end.
    """
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    text_tokens = torch.atleast_2d(text_tokens)
    if len(text_tokens) != 1:
        raise ValueError(f"{len(text_tokens)} texts; pass one.")
    hp = model.hp
    opening = torch.full_like(text_tokens[:, :1], hp.start_speech_token)
    prompt, _ = model.prepare_input_embeds(
        t3_cond=t3_cond, text_tokens=text_tokens, speech_tokens=opening, cfg_weight=0.0
    )
    warpers = (
        *((TemperatureLogitsWarper(temperature),) if temperature > 0 and temperature != 1 else ()),
        *((TopKLogitsWarper(top_k),) if top_k > 0 else ()),
    )
    nucleus = (TopP(TopPLogitsWarper(top_p)),) if top_p < 1 else ()
    penalties = (
        PenaltyAtFirst(hp.start_speech_token, repetition_penalty),
        RepetitionPenalty(repetition_penalty),
    )
    law = TokenLaw(
        history=(BySlot(warpers), *nucleus, *(penalties if repetition_penalty != 1 else ())),
        end=hp.stop_speech_token,
    )
    codes = _spoken(model, prompt, opening[:, :0], law, max_gen_len + 1, None, **decoding)
    return codes[:, :-1] if codes[0, -1] == hp.stop_speech_token else codes


def _spoken(
    model: Any, prompt: Tensor, text: Tensor, law: TokenLaw, most: int, beside: Tensor | None, **decoding: Any
) -> Tensor:
    """The codes of a T3, long [1, M], up to the end."""
    stage = SpeechLanguageModel(
        model.tfmr, model.speech_emb, model.speech_head, prompt, text, new_tokens=most, beside=beside
    )
    sampler = decoding.get("sampler") or model.sampler
    noise = noise_of(stage, sampler, law, decoding.pop("generator", None), prompt[:1, :, 0])
    tokens = _drawn(model, stage, law, noise, _prompt(prompt, 1), **decoding).tokens
    assert law.end is not None
    codes = _texts(tokens, [law.end], None)
    if isinstance(noise, DrawnNoise):
        noise.rewind(codes.shape[1])
    return codes


@torch.no_grad()
def write(
    model: Any, lm_input: Tensor, sampling: int, min_len: int, max_len: int, uuid: str, **decoding: Any
) -> Iterator[int]:
    """Draw the codes of CosyVoice 2 or 3 and hand them on; see its `inference_wrapper`.

    Args:
        lm_input: [1, T, C].
        sampling: not read, as there.
        min_len, max_len: codes; before `min_len` of them the speech does not end.
        decoding: generator, callback, sampler, as in `talk`.

    Yields:
        codes, without the end.
    """
    if hasattr(model, "vllm"):
        yield from plain(model, "inference_wrapper")(lm_input, sampling, min_len, max_len, uuid)
        return
    if max_len < 1:
        return
    ends = list(model.stop_token_ids)
    stage = SpeechLanguageModel(
        model.llm.model.model,
        model.speech_embedding,
        model.llm_decoder,
        lm_input,
        torch.zeros(1, 0, dtype=torch.long, device=lm_input.device),
        new_tokens=max_len,
    )
    rules: list[HistoryRule] = []
    if min_len > 0:  # other codes that end may come before, as in its own loop
        rules.append(NotBefore(model.speech_token_size, min_len))
    law = TokenLaw(history=(*rules, repetition_aware(model), Closing(tuple(ends), ends[0])), end=ends[0])
    generator = decoding.pop("generator", None)

    def draw(hear: Callable[[Callable[[], list[int]]], object]) -> list[int]:
        def watch(result_so_far: Callable[[], SampleResult]) -> object:
            result = result_so_far()
            ready = int((result.trace.commit_call[0] >= 0).cumprod(0).sum())
            return hear(lambda: result.tokens[0, :ready].tolist())

        before = WATCHER.set(watch)
        try:
            drawn = _drawn(model, stage, law, generator, _prompt(lm_input, 1), **decoding)
            return drawn.tokens[0].tolist()
        finally:
            WATCHER.reset(before)

    sent = 0
    for codes in stream_of(draw, lambda codes: codes):
        for code in codes[sent:]:
            if code in ends:
                return
            yield code
        sent = max(sent, len(codes))


def repetition_aware(model: Any) -> RepetitionAware:
    """The law of a CosyVoice's `sampling`.

    Raises:
        TypeError: that is not `ras_sampling`.
    """
    function, given = model.sampling, {}
    while isinstance(function, functools.partial):
        function, given = function.func, function.keywords | given
    if getattr(function, "__name__", "") != "ras_sampling":
        raise TypeError(
            f"this CosyVoice draws by {getattr(function, '__name__', function)!r}; the law of ras_sampling alone is "
            "known here."
        )
    defaults = inspect.signature(function).parameters
    values = {
        name: given.get(name, defaults[name].default) for name in ("top_p", "top_k", "win_size", "tau_r")
    }
    # Releases differ in the second draw: from all codes, or from all but the one that repeats.
    with torch.random.fork_rng(devices=[]):
        certain = torch.tensor([0.0, -80.0])
        excluded = function(certain, [0], 25, top_p=0.5, top_k=1, win_size=1, tau_r=0.1) != 0
    return RepetitionAware(
        values["top_p"], values["top_k"], values["win_size"], values["win_size"] * values["tau_r"], excluded
    )
