"""Decoding by students: the noise of all slots to their tokens, in one call or two (Liu et al. 2024, arXiv 2412.17153).

Distilled Decoding 1. The first call maps the noise of a picture to all its tokens. A second call keeps the tokens of
the first slots, and draws the others anew from the same noise. In between, the teacher may draw the last of the kept
slots again, one token a call, or one scale a call if it is a VAR. That costs calls and brings the picture nearer to the
teacher's.

A student has a law of its own, which is not its teacher's. Nothing here measures how far apart they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.settings import Within, register_to_config
from visual_spec.prototype.students.base import DistilledAnswer, DistilledModel, DistilledState
from visual_spec.samplers.continuous.base import check_tokens
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import (
    check_allowed,
    check_guided,
    check_prefill,
    check_request,
    check_returned,
)
from visual_spec.samplers.core.law import TokenLaw, non_finite
from visual_spec.samplers.core.noise import CHAIN, TOKEN
from visual_spec.samplers.core.state import Run, State, draw_tokens
from visual_spec.samplers.core.trace import LOSSY, SampleResult
from visual_spec.samplers.scales.stages import law_at_scale


@dataclass
class StudentCache:
    """What the calls of one decode read.

    Attributes:
        student: from the student's prefill.
        guided: whether the teacher runs unconditional rows too.
        teacher: its state, once it was called.
        canvas: [B, D, h, w], what a teacher of scales reads: the maps so far.
    """

    student: DistilledState
    guided: bool
    teacher: Any = None
    canvas: Any = None

    @property
    def device(self) -> torch.device:
        """The device of the decode."""
        return self.student.prefix.device


@dataclass
class StudentState(State):
    """A `State` whose `cache` is a `StudentCache`. `tokens` are [B, L, D], of the last calls; `lengths`, the slots that
    no later call changes; `round`, calls of `step` so far; `target_calls`, of the student and the teacher.

    Attributes:
        noise: [B, L, D].
        ids: long [B, r], of the slots that a second call keeps, as far as they hold codes, else 0.
    """

    noise: Tensor
    ids: Tensor


class DistilledSampler(Sampler[DistilledModel, StudentState]):
    """Draws all slots at once, each from its own noise.

    Args:
        steps: calls of the student, 1 or 2. With 2 the second one keeps the slots below `model.restart`.
        teacher_from: the slot from which the teacher draws again what the second call keeps, one token or scale a call;
            0: all of it, and there is no first call. None: the teacher draws nothing. Needs two steps.

    A call takes the `codebook`, [V, D], the code of every token as the decoder sees it, and the `teacher`, a
    `NextTokenModel` over the same tokens, or a `ScaleModel` and its `tokenizer`. The `law` is the teacher's; its
    guidance grows with the scales, as in `ScaleWiseSampler`. A student without a teacher takes none but
    `TokenLaw()`, for guidance is in its weights. It returns tokens float [B, L, D]. Noise belongs to a sample and a
    slot, so a picture depends on no batch; it is the same for one step and for two.
    """

    takes = ("codebook", "teacher", "tokenizer")
    law_names = ("steps", "teacher_from")
    keeps = LOSSY
    counts_prefill = False
    records_steps = False

    @register_to_config
    def __init__(
        self,
        steps: Annotated[int, Within(1, 2)] = 1,
        teacher_from: Annotated[int | None, Within(0, none="no teacher")] = None,
    ) -> None:
        if teacher_from is not None and steps == 1:
            raise ValueError(
                f"teacher_from={teacher_from} with steps=1; the teacher draws what a second call keeps: pass steps=2."
            )

    @property
    def needs_codebook(self) -> bool:
        return True

    def check(self, model: DistilledModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        wanted, codebook = (model.vocab_size, model.token_dim), parts.get("codebook")
        if codebook is None or tuple(codebook.shape) != wanted:
            given = "none" if codebook is None else f"one of shape {tuple(codebook.shape)}"
            raise ValueError(f"codebook: {given} given; pass the codebook of the student's tokens, {wanted}.")
        if self.config.teacher_from is None:
            if law != TokenLaw():
                raise ValueError(
                    f"{law} given, but this sampler draws with the student alone, whose law is in its weights; pass "
                    "TokenLaw(), or let the teacher draw some slots (steps=2, teacher_from=slot)."
                )
        else:
            self._check_teacher(model, law, parts)

    def _check_teacher(self, model: DistilledModel, law: TokenLaw, parts: dict[str, Any]) -> None:
        start, last = self.config.teacher_from, min(model.restart - 1, model.first_continuous)
        teacher = parts.get("teacher")
        if teacher is None:
            raise ValueError(
                f"teacher_from={start}, but no teacher given; pass the model that the student learned from."
            )
        if not (hasattr(teacher, "vocab_size") and (hasattr(teacher, "scales") or hasattr(teacher, "grid"))):
            raise TypeError(
                f"the teacher is a {type(teacher).__name__}, which predicts no tokens; pass the model that the student "
                "learned from."
            )
        own, other = (getattr(each, "scales", None) or each.grid for each in (model, teacher))
        if (other, teacher.vocab_size) != (own, model.vocab_size):
            raise ValueError(
                f"the teacher draws {other} out of {teacher.vocab_size} tokens, and the student {own} out of "
                f"{model.vocab_size}; pass the model that the student learned from."
            )
        if hasattr(model, "scales"):
            check_allowed(law, model.vocab_size)
            if parts.get("tokenizer") is None:
                raise ValueError("no tokenizer given; pass the one of the teacher, which reads maps of it.")
        else:
            check_request(teacher, law)
        if start not in model.starts or start > last:
            allowed = [slot for slot in model.starts if slot <= last]
            whole = allowed == [*range(last + 1)]
            raise ValueError(
                f"teacher_from={start}; the second call keeps slots 0 to {model.restart - 1}, and the teacher reads "
                f"codes: pass {f'0 to {last}' if whole else 'one of ' + ', '.join(map(str, allowed))}."
            )

    def prefill(self, run: Run) -> StudentCache:
        return StudentCache(run.model.prefill(run.condition, batch_size=run.batch_size), run.guided)

    def calls_of(self, model: DistilledModel) -> list[tuple[str, int]]:
        """Who makes each call, and the first slot that it draws."""
        start, restart = self.config.teacher_from, model.restart
        first = [] if start == 0 else [("student", 0)]
        by_teacher = [] if start is None else [("teacher", s) for s in model.starts if start <= s < restart]
        return first + by_teacher + [("student", restart)] * (self.config.steps - 1)

    def planned_calls(self, model: DistilledModel, parts: dict[str, Any]) -> int:
        return len(self.calls_of(model))

    def prepare(self, run: Run) -> StudentState:
        model, size, device = run.model, run.batch_size, run.device
        slots = torch.arange(model.grid.num_tokens, device=device).expand(size, -1)
        dtype = torch.promote_types(run.cache.student.prefix.dtype, torch.float32)
        noise = run.noise.normal(slots, model.token_dim, CHAIN, dtype=dtype)
        return StudentState.blank(run, noise.clone(), noise=noise, ids=slots.new_zeros(size, model.restart))

    def step(self, run: Run, state: StudentState) -> None:
        calls = self.calls_of(run.model)
        who, slot = calls[state.round]
        if who == "student":
            self._student(run, state, slot)
        elif hasattr(run.model, "scales"):
            self._teach_scale(run, state, slot)
        else:
            self._teach_slot(run, state, slot)
        # The next call of the student draws all after the slots that it keeps.
        later = calls[state.round + 1 :]
        state.lengths.fill_(later[0][1] if later else run.num_tokens)
        state.round += 1

    def _student(self, run: Run, state: StudentState, known: int) -> None:
        vectors = torch.cat([state.tokens[:, :known], state.noise[:, known:]], 1)
        answer = run.model(state.cache.student, vectors, known)
        run.lap("model")
        self._check_answer(run.model, answer, len(vectors), known)
        slots = torch.arange(known, known + answer.logits.shape[1], device=run.device)
        run.law.remember(non_finite(answer.logits), slots.expand(len(vectors), -1))
        ids = answer.logits.argmax(-1)
        codes = run.parts["codebook"].to(vectors)[ids]
        state.tokens = torch.cat([vectors[:, :known], codes, answer.vectors.to(vectors)], 1)
        if known == 0:
            kept = ids[:, : state.ids.shape[1]]
            state.ids[:, : kept.shape[1]] = kept
        state.target_calls += 1
        state.commit_call[:, known:].fill_(state.round)

    @staticmethod
    def _check_answer(model: DistilledModel, answer: DistilledAnswer, batch_size: int, known: int) -> None:
        """Refuse an answer that does not hold codes and vectors of all slots from `known` on."""
        codes = max(model.first_continuous - known, 0)
        vectors = model.grid.num_tokens - known - codes
        for what, returned, *sizes in (
            ("logits", answer.logits, codes, model.vocab_size),
            ("vectors", answer.vectors, vectors, model.token_dim),
        ):
            check_returned(returned, batch_size, False, *sizes, who=f"the student's {what}:")

    def _teach_slot(self, run: Run, state: StudentState, slot: int) -> None:
        """Draw one slot with the teacher, given the tokens before it."""
        teacher, cache = run.parts["teacher"], state.cache.teacher
        before = torch.arange(slot, device=run.device).expand(len(state.ids), -1)
        if cache is None:
            cache = teacher.prefill(
                run.condition, batch_size=run.batch_size, guided=run.guided, window=max(slot, 1)
            )
            check_prefill(cache, run.batch_size, run.guided, teacher.vocab_size, "the teacher")
            state.cache.teacher, logits = cache, cache.logits[:, None]
            state.target_calls += 1
            if slot:
                logits = teacher(cache, state.ids[:, :slot], before)
                check_returned(logits, before.shape[0], run.guided, slot, teacher.vocab_size)
                logits = logits[:, -1:]
                state.target_calls += 1
        else:
            logits = teacher(cache, state.ids[:, slot - 1 : slot], before[:, -1:])
            state.target_calls += 1
        run.lap("model")
        at = torch.full_like(state.lengths[:, None], slot)
        drawn = draw_tokens(run.law, run.noise, logits, at, run.guided)  # [B, 1]
        self._commit(run, state, slice(slot, slot + 1), drawn)

    def _teach_scale(self, run: Run, state: StudentState, slot: int) -> None:
        """Draw one scale with the teacher, given the scales before it, as `ScaleWiseSampler` draws it."""
        teacher, tokenizer, cache = run.parts["teacher"], run.parts["tokenizer"], state.cache
        starts = run.model.starts
        scale, stop = starts.index(slot), starts.index(run.model.restart)
        if cache.teacher is None:
            cache.canvas = tokenizer.begin(run.batch_size, run.device, state.tokens.dtype)
            maps = []
            for number, (first, end) in enumerate(pairwise(starts[: scale + 1])):
                cache.canvas = tokenizer.accumulate(cache.canvas, number, state.ids[:, first:end])
                maps.append(tokenizer.next_map(cache.canvas, number + 1))
            cache.teacher = teacher.prefill(
                run.condition, batch_size=run.batch_size, guided=run.guided, maps=maps, stop=stop
            )
            logits = check_guided(cache.teacher, run.guided).logits
        else:
            logits = teacher(cache.teacher, tokenizer.next_map(cache.canvas, scale), scale)
        state.target_calls += 1
        run.lap("model")
        end = starts[scale + 1]
        slots = torch.arange(slot, end, device=run.device).expand(run.batch_size, -1)
        check_returned(logits, len(slots), run.guided, end - slot, teacher.vocab_size)
        law = run.law.law = law_at_scale(run.law_given, scale / (len(starts) - 1))
        log_probs = run.law(logits if law.guided else logits[: len(slots)], slots, law.guided)
        drawn = run.noise.categorical(log_probs, slots, TOKEN)  # [B, n * n]
        cache.canvas = tokenizer.accumulate(cache.canvas, scale, drawn)
        self._commit(run, state, slice(slot, end), drawn)

    def _commit(self, run: Run, state: StudentState, slots: slice, drawn: Tensor) -> None:
        state.ids[:, slots] = drawn
        state.tokens[:, slots] = run.parts["codebook"].to(state.tokens)[drawn]
        state.commit_call[:, slots].fill_(state.round)
        run.lap("verify")

    def result(self, run: Run, state: StudentState, tokens: Tensor, trace: dict[str, Any]) -> SampleResult:
        """Tokens float [B, L, D]."""
        check_tokens(tokens)
        return super().result(run, state, tokens, trace)
