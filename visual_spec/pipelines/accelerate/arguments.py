"""What `generate` of transformers takes, read once for every model that `accelerate` routes.

An argument passes if it changes nothing: None, what transformers takes for it where nothing is said, or what the
samplers here do anyway. Of the others the settings of a `TokenLaw` and the lengths mean here what they mean there, a
streamer gets the tokens as they are committed, and the rest is refused by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from visual_spec.samplers.core.checks import check_logprobs
from visual_spec.samplers.core.state import WATCHER
from visual_spec.samplers.core.trace import IDENTICAL, promised

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig

    from visual_spec.models.next_token.cached_decoder import CachedDecoder
    from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise
    from visual_spec.samplers.core.base import Sampler
    from visual_spec.samplers.core.law import TokenLaw
    from visual_spec.samplers.core.trace import DecodeTrace, SampleResult

# Arguments and settings of `generate` that change the law in ways a `TokenLaw` does not know, or how it is computed, by
# the values beside None that do nothing.
_BY_NEUTRAL_VALUE: tuple[tuple[tuple[object, ...], str], ...] = (
    (
        (),
        "assistant_model custom_generate dola_layers exponential_decay_length_penalty forced_bos_token_id "
        "forced_eos_token_id max_time prefix_allowed_tokens_fn prompt_lookup_num_tokens top_h "
        "watermarking_config",
    ),
    (
        ([],),
        "bad_words_ids begin_suppress_tokens constraints force_words_ids logits_processor stop_strings "
        "stopping_criteria suppress_tokens",
    ),
    (("static", "dynamic", "hybrid", "sliding_window"), "cache_implementation"),  # ours is static
    ((0.0,), "diversity_penalty epsilon_cutoff eta_cutoff min_p penalty_alpha"),
    (
        (False,),
        "early_stopping output_attentions output_hidden_states output_logits output_scores "
        "remove_invalid_values synced_gpus token_healing use_mtp",
    ),
    ((0,), "encoder_no_repeat_ngram_size no_repeat_ngram_size"),
    ((1.0,), "encoder_repetition_penalty length_penalty repetition_penalty typical_p"),
    ((1,), "num_beam_groups num_beams"),
    (({},), "sequence_bias"),
    ((True, False), "use_cache"),  # a cache of our own, and the same tokens without
)
NEUTRAL = {name: values for values, names in _BY_NEUTRAL_VALUE for name in names.split()}
UNREAD = (
    "tokenizer",
    "assistant_tokenizer",
    "trust_remote_code",
)  # any value: they belong to arguments above
SUPPORTED = ("do_sample", "temperature", "top_k", "top_p", "guidance_scale", "num_return_sequences")

# Where transformers leaves a step out for None, and a config that says nothing means something else.
_NONE_MEANS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}


@dataclass
class Request:
    """A call of `generate`, read.

    Attributes:
        config: the generation config of the model, under the one that was passed, under the call's settings.
        asked: what the call itself says, by name.
    """

    config: GenerationConfig
    asked: dict[str, Any]


def read_request(
    model: Any,
    generation_config: GenerationConfig | None,
    arguments: Mapping[str, Any],
    family: str,
    inputs: Collection[str],
    reads: Collection[str] = (),
) -> Request:
    """Read the settings of a call of `generate`, and refuse those that no sampler here knows.

    Args:
        model: of transformers; its own generation config fills in what the others leave open, as in `generate`.
        generation_config: in front of it, or None.
        arguments: of the call, beside the model's inputs.
        family, inputs: name of the model and its inputs, for errors.
        reads: settings of `NEUTRAL` that this model takes at any value.

    Raises:
        TypeError: an argument that `generate` does not take either, and that is not None.
        ValueError: one that it takes, at a value that changes what a sampler here would draw.
    """
    asked = {name: _NONE_MEANS.get(name) if value is None else value for name, value in arguments.items()}
    config = copy.deepcopy(model.generation_config)
    if generation_config is not None:
        own = generation_config.to_dict()
        config.update(**{name: value for name, value in own.items() if value is not None and name[0] != "_"})
    left = config.update(**asked)
    values = {name: getattr(config, name, None) for name in NEUTRAL if name not in reads}
    _refuse(values | left, family, inputs, reads)
    return Request(config, asked)


def _refuse(
    values: Mapping[str, object], family: str, inputs: Collection[str], reads: Collection[str]
) -> None:
    for name, value in values.items():
        if value is None or name in UNREAD:
            continue
        if name not in NEUTRAL:
            raise TypeError(
                f"{family} takes no {name}; beside input_ids and attention_mask it takes "
                f"{', '.join(sorted(inputs)) or 'no inputs'}, and settings of generate."
            )
        check_neutral(
            name, value, NEUTRAL[name], f"Supported are {', '.join((*SUPPORTED, *reads))} and streamer."
        )


def check_neutral(name: str, value: object, neutral: Collection[object], advice: str) -> None:
    """Refuse an argument that is neither None nor one of the values that do nothing.

    Raises:
        ValueError: names the argument, its value and those that pass.
    """
    if value is None or any(isinstance(value, type(plain)) and value == plain for plain in neutral):
        return
    if isinstance(value, (int, float)) and any(value == plain for plain in neutral):
        return
    allowed = " or ".join(repr(plain) for plain in neutral) or "None"
    text = repr(value)
    raise ValueError(
        f"{name}={text if len(text) < 80 else type(value).__name__} is not supported; leave it at {allowed}. {advice}"
    )


def bound_arguments(model: Any, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of a call of `generate` by name, positional ones by the names that this model's method gives them.

    What the model calls `inputs` is its `input_ids`.

    Raises:
        TypeError: more positional arguments than it takes, or one given twice.
    """
    signature = inspect.signature(type(model).generate)
    bound = dict(list(signature.bind(model, *args, **kwargs).arguments.items())[1:])  # without the model
    named = bound.pop("kwargs", {})
    prompt = bound.pop("inputs", None)
    if prompt is not None:
        if named.get("input_ids") is not None:
            raise TypeError("both of inputs and input_ids given; pass one of them.")
        named["input_ids"] = prompt
    return bound | named


def by_name(function: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with a model and the arguments of a call of its `generate`, see `bound_arguments`."""
    return function(model, **bound_arguments(model, args, kwargs))


def noise_of(
    stage: CachedDecoder,
    sampler: Sampler,
    law: TokenLaw,
    generator: torch.Generator | Sequence[torch.Generator] | None,
    ids: Tensor,
) -> torch.Generator | Sequence[torch.Generator] | DrawnNoise | None:
    """The noise of a decode by a `CachedDecoder`: the generators that were passed. Where there are none, what
    `torch.multinomial` takes from PyTorch's default generator, if the model's own `generate` draws so, on a CPU, and
    the sampler keeps tokens.

    Args:
        ids: long [B, T], the prompts.
    """
    # On a GPU such noise would keep calls from being recorded, and the host would wait in every one.
    plain = (
        generator is None
        and ids.device.type == "cpu"
        and promised(sampler) == IDENTICAL
        and law.temperature > 0
    )
    if stage.plain_draws is None or not plain:
        return generator
    # No picture of another model needs it.
    from visual_spec.pipelines.accelerate.drawn_noise import DrawnNoise

    num_ids, own, dtype = stage.plain_draws
    return DrawnNoise(
        len(ids),
        stage.grid.num_tokens,
        num_ids,
        own,
        None,
        ids.device,
        dtype,
        num_rows=2 * len(ids) if law.guided and stage.draws_pairs else None,
        row_length=None if stage.row_end is None else stage.grid.width,
    )


def logprobs_asked(sampler: object, asked: bool) -> dict[str, bool]:
    """What a call of a sampler takes for `output_logprobs`; refused of one that does not keep them (ValueError)."""
    if not asked:
        return {}
    check_logprobs(sampler)
    return {"output_logprobs": True}


def returned(
    sequences: Tensor,
    config: GenerationConfig,
    trace: DecodeTrace,
    kind: str = "GenerateDecoderOnlyOutput",
    drawn: int | None = None,
) -> Any:
    """What `generate` returns: the sequences, or an output of transformers with them if the config asks for one.

    The output also has `logprobs` and `model_logprobs` of the trace, if asked for, of the first `drawn` tokens.
    """
    if not config.return_dict_in_generate:
        return sequences
    from transformers.generation import utils

    output = getattr(utils, kind)(sequences=sequences)
    for name in ("logprobs", "model_logprobs"):
        if (values := getattr(trace, name)) is not None:
            output[name] = values[:, :drawn]
    return output


class LiveStream:
    """Hand tokens to a streamer while they are drawn, as `generate` does: the prompt, then one token of every row.

    A call of a sampler commits several tokens, of each sample another number: a token is handed on once every row has
    it and all before it.

    Args:
        streamer: of transformers, or None.
        prompt: long [R, T], with T = 0 for none.
        most: tokens to hand on at most; None: all.
    """

    def __init__(self, streamer: Any, prompt: Tensor, most: int | None = None) -> None:
        self.streamer, self.prompt, self.most = streamer, prompt, most
        self.sent: int | None = None  # tokens so far; None: not even the prompt

    @contextmanager
    def watching(self, ids_of: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
        """Within this context, hand on what samplers commit.

        Args:
            ids_of: from the sampler's tokens [B, L, ...], and how many slots all rows have, to what is known after the
                prompt, long [R, N].
        """

        def watch(result_so_far: Callable[[], SampleResult]) -> None:
            result = result_so_far()
            ready = int((result.trace.commit_call >= 0).all(0).cumprod(0).sum())
            self.put(ids_of(result.tokens, ready))

        before = WATCHER.set(WATCHER.get() if self.streamer is None else watch)
        try:
            yield
        finally:
            WATCHER.reset(before)

    def put(self, ids: Tensor) -> None:
        """Hand on what is new of the tokens so far, long [R, N]."""
        if self.sent is None:
            self.streamer.put(self.prompt.cpu())
            self.sent = 0
        for column in ids[:, self.sent : self.most].cpu().unbind(1):
            self.streamer.put(column)
            self.sent += 1

    def end(self, ids: Tensor) -> None:
        """Hand on the rest of all tokens, long [R, N], and the end."""
        if self.streamer is not None:
            self.put(ids)
            self.streamer.end()
