"""Multi-scale local speculative decoding: a picture is drafted from a small one, then corrected where it is wrong.

MuLo-SD (Peruzzo et al., "Multi-scale local speculative decoding for image generation", 2026). A low-resolution model
draws a small picture, an up-sampler turns it into a law for every token of the large one, and the target scores all
drafts in one call. A refused draft is replaced, and only its spatial neighbourhood is verified again. The published
method never returns to the rest of the raster: this makes it fast, and not exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel, TokenGrid
from visual_spec.models.core.settings import COUNT, Within, register_to_config
from visual_spec.samplers.core.acceptance import exact_acceptance, residual
from visual_spec.samplers.core.base import Sampler
from visual_spec.samplers.core.checks import CheckedLaw, check_guided, check_returned
from visual_spec.samplers.core.drafters import draft_law
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, CounterNoise
from visual_spec.samplers.core.relaxed import neighbour_table
from visual_spec.samplers.core.state import Run, State
from visual_spec.samplers.core.trace import LOSSLESS, LOSSY, DivergenceMeter


def pooled(law: Tensor, drafts: Tensor, neighbours: Tensor) -> Tensor:
    """Return the mass that a law gives to a draft and its nearest codes: [B, N].

    Args:
        law: [B, N, V] log-probabilities.
        drafts: long [B, N].
        neighbours: long [V, P], each code's nearest codes, itself first.
    """
    return law.gather(-1, neighbours[drafts]).exp().sum(-1)


def later_neighbours(grid: TokenGrid, radius: int | None) -> Tensor:
    """Bool [L, L]: [i, j] is true if slot j > i lies within `radius` rows and columns of slot i (None: anywhere).

    Earlier slots were verified without knowledge of slot i, so there is no reason to verify them again.
    """
    slots = torch.arange(grid.num_tokens)
    later = slots > slots[:, None]
    if radius is None:
        return later
    row, column = slots // grid.width, slots % grid.width
    near = (row - row[:, None]).abs() <= radius
    return later & near & ((column - column[:, None]).abs() <= radius)


@dataclass
class LocalSpeculationState(State):
    """A batch between two calls. `tokens` is long [B, L], the whole drafted picture.

    Attributes:
        label: [B, L, V] log-probabilities, the law that each token was drawn from.
        open: bool [B, L], the slots that the next call tests.
    """

    label: Tensor
    open: Tensor


class MultiscaleSampler(Sampler[NextTokenModel, LocalSpeculationState]):
    """Draft every token from a low-resolution picture; verify all in one call, then again around refused slots.

    Args:
        pool: number of nearest codes over which target and draft probabilities are pooled before the comparison; 1 is
            the exact ratio. Values above 1 need a codebook.
        radius: how many rows and columns around a refused slot are verified again, at least 1. None: all later slots;
            with pool 1 and unlimited rounds this makes the method lossless (it is maximally coupled Jacobi decoding
            with the whole picture as its window).
        max_rounds: most verification calls; slots still open then keep their last draw. None: until nothing is refused.

    A call takes `drafter`. It has `transformer`, a `NextTokenModel` over a smaller grid with the same condition, and
    `upsampler`, which maps its tokens [B, l] to logits [B, L, V] of the target's slots. If `pool` is above 1, a call
    also takes `codebook`, [V, D].

    The divergence in the trace is the mass that pooling moves at the tested slots, a mean over them. It does not count
    the effect on a slot whose earlier tokens changed outside `radius` or after `max_rounds`.
    """

    takes = ("drafter", "codebook")
    needs_drafter = True

    @register_to_config
    def __init__(
        self,
        pool: Annotated[int, COUNT] = 8,
        radius: Annotated[int | None, Within(1, none="no limit")] = 2,
        max_rounds: Annotated[int | None, Within(1, none="no limit")] = 8,
    ) -> None:
        pass

    @property
    def keeps(self) -> str:
        """Lossless without pooling, if every slot after a refusal is verified again."""
        config = self.config
        return LOSSLESS if (config.pool, config.radius, config.max_rounds) == (1, None, None) else LOSSY

    @property
    def needs_codebook(self) -> bool:
        """Whether the pool needs nearest codes."""
        return self.config["pool"] > 1

    def check(self, model: NextTokenModel, law: TokenLaw, batch_size: int, parts: dict[str, Any]) -> None:
        super().check(model, law, batch_size, parts)
        drafter, codebook = parts.get("drafter"), parts.get("codebook")
        name = type(self).__name__
        if drafter is None or not hasattr(drafter, "upsampler"):
            raise ValueError(
                f"{name} needs a drafter with a low-resolution transformer and an up-sampler, got "
                f"{type(drafter).__name__}; pass a MultiscaleDrafter as `drafter`."
            )
        given = (drafter.transformer.vocab_size, drafter.upsampler.num_tokens)
        wanted = (model.vocab_size, model.grid.num_tokens)
        if given != wanted:
            raise ValueError(
                f"the drafter guesses {given[1]} tokens out of {given[0]}, but the target has {wanted[1]} out of "
                f"{wanted[0]}; pass a drafter that was trained for this model."
            )
        if self.needs_codebook and (codebook is None or len(codebook) != model.vocab_size):
            codes = "none" if codebook is None else f"one of {len(codebook)} codes"
            raise ValueError(
                f"pool={self.config['pool']} needs the codebook of the {model.vocab_size} tokens, got {codes}; pass "
                "`codebook` [V, D], or pool=1."
            )

    def plan(self, run: Run) -> None:
        run.window = max(1, run.num_tokens - 1)

    def prepare(self, run: Run) -> LocalSpeculationState:
        """Draft the whole picture from a small one."""
        num_tokens, law = run.num_tokens, run.law.law
        slots = torch.arange(num_tokens, device=run.device).expand(run.batch_size, -1)  # [B, L]
        small = _draw_small_picture(
            run.drafter.transformer, run.condition, run.batch_size, law, run.noise, run.device
        )
        # The up-sampler takes no guidance: the small picture is already guided.
        enlarged = run.drafter.upsampler(small)
        sizes = num_tokens, run.model.vocab_size
        check_returned(enlarged, run.batch_size, False, *sizes, who="the up-sampler")
        label = CheckedLaw(TokenLaw(allowed=law.allowed), num_tokens)(enlarged, slots, False)
        tokens = run.noise.categorical(label, slots, DRAFT)  # [B, L]
        run.lap("draft")
        run.tables["near"] = later_neighbours(run.model.grid, self.config.radius).to(
            run.device, torch.float32
        )
        if self.config.pool > 1:
            others = neighbour_table(run.parts["codebook"], self.config.pool - 1, run.device).long()
            itself = torch.arange(len(others), device=run.device)[:, None]
            run.tables["neighbours"] = torch.cat([itself, others], 1)  # [V, P], itself first
        return LocalSpeculationState.blank(
            run,
            tokens,
            target_calls=torch.ones_like(tokens[:, 0]),
            meter=None if self.keeps != LOSSY else DivergenceMeter(run.batch_size, run.device),
            label=label,
            open=torch.ones_like(tokens, dtype=torch.bool),
        )

    def step(self, run: Run, state: LocalSpeculationState) -> None:
        """Score the picture, test the open slots, replace refused drafts, and open the slots around them."""
        slots = torch.arange(run.num_tokens, device=run.device).expand_as(state.tokens)
        logits = state.cache.logits[:, None]  # [R, 1, V]
        if run.num_tokens > 1:
            later = run.model(state.cache, state.tokens[:, :-1], slots[:, :-1])
            vocab_size = run.model.vocab_size
            for part, width in ((logits, 1), (later, run.num_tokens - 1)):
                check_returned(part, len(slots), run.guided, width, vocab_size)
            logits = torch.cat([logits, later], 1)  # [R, L, V]
        run.lap("model")
        state.round += 1
        target = run.law(logits, slots, run.guided)  # [B, L, V]
        probability = exact = exact_acceptance(target, state.label, state.tokens)  # [B, L]
        if self.config.pool > 1:
            masses = [pooled(law, state.tokens, run.tables["neighbours"]) for law in (target, state.label)]
            probability = (masses[0] / masses[1]).clamp(max=1)
        if state.meter is not None:
            state.meter.add(probability, exact, state.open)
        refused = state.open & ~run.noise.bernoulli(probability, slots, ACCEPT, state.round)
        left = residual(target, state.label)
        replacement = run.noise.categorical(left, slots, RESIDUAL, state.round)
        state.tokens = torch.where(refused, replacement, state.tokens)
        # Kept or replaced, a tested token is a draw from the target law given the present earlier tokens.
        state.label = torch.where(state.open[..., None], target, state.label)
        state.target_calls += state.open.any(1)
        state.commit_call.masked_fill_(state.open, state.round)
        state.open = (refused.float()[:, None] @ run.tables["near"]).squeeze(1) > 0
        if state.round == self.config.max_rounds:
            state.open = torch.zeros_like(state.open)
        run.lap("verify")

    def progress(self, run: Run, state: LocalSpeculationState) -> Tensor:
        return (~state.open).sum(1)

    def committed(self, run: Run, state: LocalSpeculationState) -> Tensor:
        return ~state.open

    def measure(
        self, run: Run, state: LocalSpeculationState, tokens: Tensor
    ) -> tuple[float | None, Tensor | None]:
        return (None if state.meter is None else state.meter.mean()), None


def _draw_small_picture(
    model: NextTokenModel,
    condition: object,
    batch_size: int,
    law: TokenLaw,
    noise: CounterNoise,
    device: torch.device,
) -> Tensor:
    """Draw the low-resolution tokens [B, l], token by token, with their own noise (round 1 of the draft stream)."""
    num_tokens = model.grid.num_tokens
    state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
    check_guided(state, law.guided)
    checked = CheckedLaw(law, num_tokens, vocab_size=model.vocab_size)
    tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long, device=device)
    logits = state.logits[:, None]
    for slot in range(num_tokens):
        slots = torch.full((batch_size, 1), slot, device=device)
        if slot:
            logits = model(state, tokens[:, slot - 1 : slot], slots - 1)
        tokens[:, slot] = noise.categorical(draft_law(checked, logits, slots, law.guided), slots, DRAFT, 1)[
            :, 0
        ]
    return tokens
