"""Speed up a language model of transformers that writes codes (of music, speech, pictures), and undo it.

    model = AutoModelForCausalLM.from_pretrained(...)
    visual_spec.accelerate(model, codes=(first, last + 1), end=end)
    ids = model.generate(**tokenizer(prompt, return_tensors="pt"), do_sample=True, max_new_tokens=2000)

`accelerate` hangs `generate` on the object and touches nothing else. It draws codes and the end only. The ids are those
of `generate` with a processor that forbids every other id: greedy ones, and sampled ones after the same
`torch.manual_seed` on a CPU. Only a tie up to rounding can make a difference.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from visual_spec.models.core.offload import loads_groups
from visual_spec.models.core.transformers_cache import ImagePrompt
from visual_spec.models.next_token.code_language import CodeLanguageModel, why_not
from visual_spec.pipelines.accelerate.adapter import (
    Adapter,
    Thing,
    check_writes_texts,
    hang,
    is_accelerated,
    promise,
    tell,
    unwrapped,
)
from visual_spec.pipelines.accelerate.arguments import (
    LiveStream,
    by_name,
    logprobs_asked,
    noise_of,
    read_request,
    returned,
)
from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
from visual_spec.pipelines.accelerate.images import law_of, prompt_of
from visual_spec.samplers.core.history import (
    HistoryRule,
    NoRepeatNgram,
    NotBefore,
    RepetitionPenalty,
    TextFunction,
)
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.registry import RASTER

if TYPE_CHECKING:
    from transformers import GenerationConfig
    from transformers.generation.streamers import BaseStreamer

    from visual_spec.samplers.core.base import Sampler

# Settings of `generate` that are neutral for other models, and rules here.
_RULES = ("no_repeat_ngram_size", "repetition_penalty")
_USUAL_NEW = 20  # tokens that transformers makes where nothing is said


class CodeAdapter(Adapter):
    """Causal language models of transformers that write codes by a head over their vocabulary.

    `generate` then draws codes. A model gets `sampler` and, after a text, `last_trace`. A model that cannot be read is
    left as it is, and a warning says why.
    """

    takes = ("causal language models with codes=(first, last + 1)",)
    calls = (RASTER,)
    fast_sampler = "speculative-jacobi:window=auto"
    options = ("codes", "end", "drafter")

    def models(self, thing: object) -> list[Any]:
        model = unwrapped(thing)
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or getattr(config, "is_encoder_decoder", True):
            return []
        names = {kind.__name__ for kind in type(model).__mro__}
        writes = type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        return [model] if writes and {"PreTrainedModel", "GenerationMixin"} <= names else []

    def accelerate(
        self,
        thing: Thing,
        sampler: Sampler,
        *,
        codes: object = None,
        end: int | None = None,
        drafter: object = None,
    ) -> Thing:
        """Write codes with a sampler of next-token models.

        Args:
            codes: (first, last + 1), the ids of the codes, or a list of such ranges.
            end: the id that ends a text; None: every text has `max_new_tokens` codes.
            drafter: what a sampler drafts with that asks for one, a `BlockDrafter` for `BlockDraftSampler`.

        Raises:
            TypeError: no codes, or a sampler that does not fit.
            ValueError: ids that the model does not have, or a sampler that lacks its drafter.
        """
        (model,) = self.models(thing)
        _check_codes(model, codes)
        fitting = "a BlockDrafter trained for it (python -m visual_spec.training.block_drafter)"
        check_writes_texts(sampler, self.calls, fitting, drafter)
        if drafter is not None and not getattr(sampler, "needs_drafter", False):
            raise TypeError(
                f"{type(sampler).__name__} takes no drafter; pass BlockDraftSampler() for a BlockDrafter."
            )
        CodeLanguageModel(model, codes, end, new_tokens=1)  # refuses ids, and attention that takes no mask
        reason = why_not(model)
        if reason is not None:
            warnings.warn(f"{type(model).__name__} is left as it is: {reason}.", stacklevel=3)
            return thing
        generate = functools.partial(by_name, generate_codes, model)
        hang(
            model, sampler=sampler, codes=codes, end=end, drafter=drafter, last_trace=None, generate=generate
        )
        return thing

    def expects(self, model: Any) -> str:
        return f"{promise(model.sampler, model=model)}, codes {model.codes} alone"


def _check_codes(model: object, codes: object) -> None:
    if codes is None:
        raise TypeError(
            f"cannot decode a {type(model).__name__} without the ids of its codes; pass codes=(first, last + 1), and "
            "end=, the id that ends a text."
        )


@loads_groups
def generate_codes(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    codes: object = None,
    end: int | None = None,
    negative_prompt_ids: Tensor | None = None,
    negative_prompt_attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Any] | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
    callback: Callable[[int, Tensor], None] | None = None,
    streamer: BaseStreamer | None = None,
    sampler: Sampler | None = None,
    drafter: object = None,
    output_logprobs: bool = False,
    **settings: Any,
) -> Any:
    """Write codes with a causal language model.

    Args:
        input_ids, attention_mask: [B, T], left-padded. No mask: nothing is padding.
        codes, end: as in `accelerate`, whose values they replace.
        negative_prompt_ids, negative_prompt_attention_mask: [B, T'], the second prompts of guidance, of any length,
            left-padded; left out, the last token of each prompt.
        generation_config: in place of `model.generation_config`.
        logits_processor: of transformers, each a function of the text before a slot and of the slot's scores
            (`visual_spec.samplers.core.history.TextFunction`).
        generator: one `torch.Generator` for the batch, or a list of one a text. None: PyTorch's default one, used as
            `torch.multinomial` uses it, so that for the seed sampled ids equal those that `generate` returns
            (`visual_spec.pipelines.accelerate.drawn_noise`), if the sampler is one that keeps tokens.
        callback: called after every target call, as (index, committed tokens [B]).
        streamer: of transformers; gets the prompt and then the tokens, as they are committed.
        sampler, drafter: in place of `model.sampler` and its drafter, for this call; then the model need not be
            accelerated.
        output_logprobs: keep the log-probability of each drawn token: `model.last_trace.logprobs` under the law that it
            was drawn from, `model_logprobs` under the model without guidance, both over the codes and the end. With
            return_dict_in_generate the output has them, too, [B, N], nan after an end.
        settings: of `generate`: do_sample, temperature, top_k, top_p, guidance_scale, repetition_penalty,
            no_repeat_ngram_size, max_new_tokens or max_length, min_new_tokens or min_length, eos_token_id (the end),
            pad_token_id, num_return_sequences, return_dict_in_generate. What `generate` takes beside these has to be
            neutral (`arguments.NEUTRAL`).

    Returns:
        The ids that `generate` returns, long [B, T + N]: prompts, then texts, with padding after their ends. With
        return_dict_in_generate they are the `sequences` of a `GenerateDecoderOnlyOutput`.

    Raises:
        TypeError: no prompt, no ids of codes, or an input that is not known.
        ValueError: a setting out of range, or one that no sampler here knows.
        FloatingPointError: logits that define no law; names the slot.
    """
    if input_ids is None:
        raise TypeError("input_ids is missing; pass what the tokenizer makes, long [B, T].")
    own, hung = vars(model), is_accelerated(model)
    codes, end = (own.get("codes"), own.get("end")) if codes is None else (codes, end)
    _check_codes(model, codes)
    request = read_request(
        model,
        generation_config,
        settings,
        "a language model of codes",
        ("negative_prompt_ids", "negative_prompt_attention_mask"),
        reads=_RULES,
    )
    config = request.config
    asked_end = request.asked.get("eos_token_id")
    if asked_end is not None and asked_end not in (end, [end]):
        raise ValueError(f"eos_token_id={asked_end}, but end={end}; pass the end in visual_spec.accelerate.")
    most, least = lengths(config, input_ids.shape[1])
    law = law_of(config, 1.0)
    processors = tuple(logits_processor or ())
    penalty = getattr(config, "repetition_penalty", None)
    penalty = 1.0 if penalty is None else penalty
    stage = CodeLanguageModel(
        model, codes, end, new_tokens=most, normalised=law.guided and bool(penalty != 1 or processors)
    )
    law = _with_rules(law, config, stage, penalty, least, processors)
    count = config.num_return_sequences or 1
    prompt = prompt_of(input_ids, attention_mask)
    negative = None
    if law.guided:
        if negative_prompt_ids is None:
            negative_prompt_ids = input_ids[:, -1:]
        negative = prompt_of(negative_prompt_ids, negative_prompt_attention_mask)
        # As in `generate`, whose guidance counts padding among the positions of these.
        length = negative_prompt_ids.shape[1]
        negative.positions = torch.arange(length, device=input_ids.device).expand(len(input_ids), -1)
        negative.start = torch.full((len(input_ids),), length, device=input_ids.device)
        # `generate` takes logits of the model's own type from float32, and draws in the wider of both.
        stage.plain_draws = (
            *stage.plain_draws[:2],
            torch.promote_types(torch.float32, stage.head.weight.dtype),
        )
    condition = ImagePrompt(prompt, negative).repeat(count)
    given, pad = input_ids.repeat_interleave(count, 0), config.pad_token_id
    live, chosen = LiveStream(streamer, given), model.sampler if sampler is None else sampler
    noise = noise_of(stage, chosen, law, generator, given)
    parts: dict[str, Any] = dict(generator=noise, batch_size=len(given), callback=callback)
    parts |= logprobs_asked(chosen, output_logprobs)
    if getattr(chosen, "needs_drafter", False):
        parts["drafter"] = own.get("drafter") if drafter is None else drafter
    with live.watching(lambda tokens, ready: stage.texts(tokens[:, :ready], pad)):
        result = chosen(stage, condition, law=law, **parts)
    tell(model, hung, last_trace=result.trace)
    texts = stage.texts(result.tokens, pad).to(given.device)
    if isinstance(noise, DrawnNoise):
        noise.rewind(texts.shape[1])
    live.end(texts)
    return returned(torch.cat([given, texts], 1), config, result.trace, drawn=texts.shape[1])


def _with_rules(
    law: TokenLaw,
    config: GenerationConfig,
    stage: CodeLanguageModel,
    penalty: float,
    least: int,
    processors: Sequence[Any],
) -> TokenLaw:
    """The law with the rules of a generation config, in the order of transformers, and the end."""
    rules: list[HistoryRule] = []
    if penalty != 1:
        rules.append(RepetitionPenalty(penalty))
    size = getattr(config, "no_repeat_ngram_size", None) or 0
    if size:
        rules.append(NoRepeatNgram(size))
    if least and stage.end is not None:
        rules.append(NotBefore(stage.end, least))
    rules += map(TextFunction, processors)
    numbers = {name: getattr(law, name) for name in ("guidance_scale", "temperature", "top_k", "top_p")}
    return TokenLaw(**numbers, history=tuple(rules), end=stage.end)


def lengths(config: GenerationConfig, given: int) -> tuple[int, int]:
    """The most and the least tokens of a text after a prompt of `given`, as transformers reads them."""

    def setting(new: str, whole: str, default: int) -> int:
        if getattr(config, new) is not None:
            return getattr(config, new)
        return getattr(config, whole) - given if getattr(config, whole) else default  # 0 says nothing

    most = setting("max_new_tokens", "max_length", _USUAL_NEW)
    least = max(0, setting("min_new_tokens", "min_length", 0))
    if most < 1 or least > most:
        raise ValueError(
            f"at most {most} and at least {least} new tokens after a prompt of {given}; pass max_new_tokens of at "
            "least 1, and not fewer than min_new_tokens."
        )
    return most, least
