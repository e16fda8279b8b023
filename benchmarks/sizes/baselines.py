"""What users run today in place of our samplers: transformers' `generate`, and the loops of the official programs.

A baseline draws a few tokens after a prompt and part of a picture, so that calls cost what they cost in the middle of
a picture. The time runs from the start of the second token's forward to the start of the last one's, which covers all
that a token costs and nothing else. The loops are rewritten here with transformers' modules; what each takes from its
program is in its docstring. They are measured where the law is guided, as the programs draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.sizes.models import OfficialModel
from visual_spec.models.core.transformers_cache import CACHE, ImagePrompt
from visual_spec.samplers.core.law import TokenLaw

# Draws `count` tokens: (model, condition, picture so far [B, N] with row ends, law, count) -> None.
Draw = Callable[[OfficialModel, ImagePrompt, Tensor, TokenLaw, int], Any]


@dataclass(frozen=True)
class Baseline:
    """A way to decode that is not ours.

    Attributes:
        name: of the row.
        draw: draws tokens.
        forwards: of the decoder, for every token.
        largest_batch: that the program draws; None: any.
    """

    name: str
    draw: Draw
    forwards: int
    largest_batch: int | None = None


def baselines_of(official: OfficialModel) -> list[Baseline]:
    """The baselines of a model: none for those that only have official code like our own plain sampler."""
    return _BASELINES.get(getattr(official.model, "family", ""), [])


@torch.no_grad()
def time_baseline(
    baseline: Baseline, official: OfficialModel, law: TokenLaw, *, batch_size: int, slots: int
) -> tuple[float, int, float]:
    """Seconds of calls in the middle of a picture, how many those were, and seconds from the start to the first token.

    Args:
        slots: tokens to draw, at least 3; a token is a call.
    """
    condition = official.condition(batch_size)
    model, device = official.model, official.model.device
    picture = model.sequence(torch.zeros(batch_size, model.grid.num_tokens, dtype=torch.long, device=device))
    begun = picture[:, : max(0, (picture.shape[1] - slots) // 2)]
    count = min(slots, picture.shape[1])
    first = Marks(model.decoder, baseline.forwards)
    with first:
        baseline.draw(official, condition, picture[:, :0], law, 2)
    middle = Marks(model.decoder, baseline.forwards)
    with middle:
        baseline.draw(official, condition, begun, law, count)
    assert middle.tokens == count, f"{baseline.name} drew {middle.tokens} tokens, not {count}"
    return middle.between(1, count - 1), count - 2, first.between(None, 1)


class Marks:
    """The moments at which the decoder begins to work on each token, by CUDA events or the clock.

    Args:
        decoder: its forwards are counted.
        forwards: of the decoder, for every token.
    """

    def __init__(self, decoder: Any, forwards: int) -> None:
        self.decoder, self.forwards = decoder, forwards
        self.device = next(decoder.parameters()).device
        self.calls, self.moments = 0, []

    def __enter__(self) -> Marks:
        self.handle = self.decoder.register_forward_pre_hook(self._note)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.start = self._now()
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def tokens(self) -> int:
        """Return how many were drawn."""
        return len(self.moments)

    def between(self, first: int | None, last: int) -> float:
        """Seconds from the forward of one token to the forward of another, by index; None: from the start."""
        begin, end = self.start if first is None else self.moments[first], self.moments[last]
        return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000

    def _note(self, *_: Any) -> None:
        if self.calls % self.forwards == 0:
            self.moments.append(self._now())
        self.calls += 1

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


# -- Janus -----------------------------------------------------------------------------------------------------------


def generate_janus(
    official: OfficialModel, condition: ImagePrompt, begun: Tensor, law: TokenLaw, count: int
) -> Tensor:
    """transformers' own loop, `generate(generation_mode="image")`: both prompts in one forward, its static cache.

    It takes a prompt of text only, so text ids stand for the picture so far: they cost the same. Its cache has room
    for the whole picture.
    """
    model: Any = official.module
    ids = condition.prompt.ids.to(begun.device)
    ids = torch.cat([ids[:, :-1], ids[:, 1:2].expand(-1, begun.shape[1]), ids[:, -1:]], 1)
    vision = model.model.vision_model.config
    whole, vision.num_image_tokens = vision.num_image_tokens, count
    try:
        return model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_mode="image",
            max_length=official.prefix + official.length,
            guidance_scale=law.guidance_scale,
            **_sampling(law),
        )
    finally:
        vision.num_image_tokens = whole


def draw_as_janus(
    official: OfficialModel, condition: ImagePrompt, begun: Tensor, law: TokenLaw, count: int
) -> Tensor:
    """The loop of deepseek-ai/Janus, generation_inference.py: both prompts of a sample are neighbouring rows of one
    forward, keys and values are joined anew for every token, and the token is drawn from the whole softmax.
    """
    model: Any = official.module
    assert condition.unconditional is not None
    ids = torch.stack([condition.prompt.ids, condition.unconditional.ids], 1).flatten(0, 1).to(begun.device)
    inputs = model.get_input_embeddings()(ids)
    if begun.shape[1]:
        seen = model.prepare_embeddings_for_image_generation(begun.repeat_interleave(2, 0))
        inputs = torch.cat([inputs, seen], 1)
    cache, drawn = None, []
    for _ in range(count):
        out = model.model.language_model(inputs_embeds=inputs, use_cache=True, **{CACHE: cache})
        cache = out[CACHE]
        scores = model.model.generation_head(out.last_hidden_state[:, -1])  # [2B, V]
        scores = scores[1::2] + law.guidance_scale * (scores[0::2] - scores[1::2])
        drawn.append(torch.multinomial(torch.softmax(scores / (law.temperature or 1.0), -1), 1))
        inputs = model.prepare_embeddings_for_image_generation(drawn[-1].repeat_interleave(2, 0))
    return torch.cat(drawn, 1)


# -- Lumina-mGPT -----------------------------------------------------------------------------------------------------


def draw_as_lumina(
    official: OfficialModel, condition: ImagePrompt, begun: Tensor, law: TokenLaw, count: int
) -> Tensor:
    """What Alpha-VLLM/Lumina-mGPT, inference_solver.py makes `generate` do, one picture at a time: a forward for either
    prompt, keys and values joined anew for every token, the head of all ids, other ids forbidden, top-k.
    """
    model: Any = official.module
    assert condition.unconditional is not None
    inputs = [
        torch.cat([prompt.ids.to(begun.device), begun], 1)
        for prompt in (condition.prompt, condition.unconditional)
    ]
    allowed = official.model.ids(torch.arange(official.model.vocab_size, device=begun.device))
    forbidden = torch.ones(official.text_vocab, dtype=torch.bool, device=begun.device)
    forbidden[allowed] = False
    caches, drawn = [None, None], []
    for _ in range(count):
        scores = []
        for row, ids in enumerate(inputs):
            out = model.model(input_ids=ids, use_cache=True, **{CACHE: caches[row]})
            caches[row] = out[CACHE]
            scores.append(model.lm_head(out.last_hidden_state[:, -1]).float())  # [B, V]
        guided = scores[1] + law.guidance_scale * (scores[0] - scores[1])
        guided = guided.masked_fill(forbidden, -torch.inf) / (law.temperature or 1.0)
        if law.top_k:
            least = guided.topk(min(law.top_k, guided.shape[-1])).values[:, -1:]
            guided = guided.masked_fill(guided < least, -torch.inf)
        drawn.append(torch.multinomial(torch.softmax(guided, -1), 1))
        inputs = [drawn[-1], drawn[-1]]
    return torch.cat(drawn, 1)


# -- Emu3 ------------------------------------------------------------------------------------------------------------


def generate_emu3(
    official: OfficialModel, condition: ImagePrompt, begun: Tensor, law: TokenLaw, count: int
) -> Tensor:
    """transformers' `generate` as its documentation of Emu3 and baaivision/Emu3, image_generation.py call it: a forward
    for either prompt, its default cache, and a function that says which ids may follow.
    """
    model: Any = official.module
    assert condition.unconditional is not None
    prompts = [
        torch.cat([prompt.ids.to(begun.device), begun], 1)
        for prompt in (condition.prompt, condition.unconditional)
    ]
    start, width = int(condition.prompt.ids[0, -1]), official.model.grid.width
    image_ids, row_end = model.model.vocabulary_mapping.image_tokens, [official.model.row_end]

    def allowed(_: int, ids: Tensor) -> list[int]:
        offset = len(ids) - int((ids == start).nonzero()[0])
        return row_end if offset % (width + 1) == 0 else image_ids

    return model.generate(
        input_ids=prompts[0],
        attention_mask=torch.ones_like(prompts[0]),
        negative_prompt_ids=prompts[1],
        negative_prompt_attention_mask=torch.ones_like(prompts[1]),
        guidance_scale=law.guidance_scale,
        prefix_allowed_tokens_fn=allowed,
        max_new_tokens=count,
        min_new_tokens=count,
        **_sampling(law),
    )


def _sampling(law: TokenLaw) -> dict[str, Any]:
    if law.temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}


_BASELINES = {
    "Janus": [
        Baseline("transformers generate", generate_janus, 1),
        Baseline("official loop", draw_as_janus, 1),
    ],
    "Chameleon": [Baseline("official loop", draw_as_lumina, 2, largest_batch=1)],
    "Emu3": [Baseline("transformers generate", generate_emu3, 2)],
}
