"""Multi-scale local speculative decoding: a picture is guessed from a small one, then corrected where it is wrong.

MuLo-SD (Peruzzo et al., "Multi-scale local speculative decoding for image generation", 2026). A low-resolution model
draws a small picture, an up-sampler turns it into a law for every token of the large one, and the target scores all
drafts in one call. A refused draft is replaced, and only its spatial neighbourhood is looked at again: the published
method never returns to the rest of the raster, which is where it gains and where it gives up exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch import Tensor

from visual_spec.models.core.protocol import NextTokenModel, TokenGrid
from visual_spec.samplers.autoregressive import Callback
from visual_spec.samplers.core.acceptance import residual
from visual_spec.samplers.core.checks import CheckedLaw, check_request
from visual_spec.samplers.core.configuration import register_to_config
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.noise import ACCEPT, DRAFT, RESIDUAL, CounterNoise, draw_keys
from visual_spec.samplers.core.relaxed import neighbour_table
from visual_spec.samplers.core.trace import DecodeTrace, SampleResult, Stopwatch


def pooled(law: Tensor, drafts: Tensor, neighbours: Tensor) -> Tensor:
    """Mass that a law gives a draft and its nearest codes: [B, N].

    Args:
        law: [B, N, V] log-probabilities.
        drafts: long [B, N].
        neighbours: long [V, P], each code's nearest codes, itself first.
    """
    return law.gather(-1, neighbours[drafts]).exp().sum(-1)


def later_neighbours(grid: TokenGrid, radius: int | None) -> Tensor:
    """Bool [L, L]: [i, j] is true where slot j > i lies within `radius` rows and columns of slot i (None: anywhere).

    Earlier slots were verified without knowing slot i, so they have no reason to be looked at again.
    """
    slots = torch.arange(grid.num_tokens)
    later = slots > slots[:, None]
    if radius is None:
        return later
    row, column = slots // grid.width, slots % grid.width
    near = (row - row[:, None]).abs() <= radius
    return later & near & ((column - column[:, None]).abs() <= radius)


class MultiscaleSampler(SchedulerMixin, ConfigMixin):
    """Draft every token from a low-resolution picture; verify all in one call, then again around what was refused.

    Args:
        pool: size of the set of nearest codes over which target and draft probabilities are pooled before they are
            compared; 1 is the exact ratio. A pool needs a codebook.
        radius: how many rows and columns around a refused slot are verified again, at least 1; None is every later
            slot, which with pool 1 and unlimited rounds makes the method lossless (it is maximally coupled Jacobi
            decoding with the whole picture as its window).
        max_rounds: verification calls at most; what is then still open stays as it was drawn last. None: until
            nothing is refused.

    The divergence in the trace is what pooling moves at the slots that are tested, a mean over them. What it does to a
    slot that a text behind `radius` or `max_rounds` has changed is not counted.

    Raises:
        ValueError: a value out of range.
    """

    config_name = "sampler_config.json"
    needs_drafter = True
    identical = False

    @register_to_config
    def __init__(self, pool: int = 8, radius: int | None = 2, max_rounds: int | None = 8) -> None:
        for name, value, optional in (
            ("pool", pool, False),
            ("radius", radius, True),
            ("max_rounds", max_rounds, True),
        ):
            good = (value is None and optional) or (
                isinstance(value, int) and not isinstance(value, bool) and value >= 1
            )
            if not good:
                none = ", or None for no limit" if optional else ""
                raise ValueError(f"{name}={value!r}; pass an integer of at least 1{none}.")

    @property
    def lossless(self) -> bool:
        """Whether the output law is the model's: no pooling, and everything behind a refusal is verified again."""
        return (
            self.config["pool"] == 1 and self.config["radius"] is None and self.config["max_rounds"] is None
        )

    @property
    def needs_codebook(self) -> bool:
        """Whether nearest codes are asked for."""
        return self.config["pool"] > 1

    @torch.no_grad()
    def __call__(
        self,
        model: NextTokenModel,
        condition: Any,
        *,
        law: TokenLaw,
        drafter: Any = None,
        codebook: Tensor | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        batch_size: int = 1,
        callback: Callback | None = None,
    ) -> SampleResult:
        """Decode a batch. Other arguments and errors are those of `AutoregressiveSampler.__call__`.

        Args:
            drafter: has `transformer`, a `NextTokenModel` over a smaller grid that takes the same condition, and
                `upsampler`, which maps its tokens [B, l] to logits [B, L, V] of the target's slots.
            codebook: [V, D], one vector a token id; needed where `pool` is above 1.

        Raises:
            ValueError: no drafter, one of another grid or vocabulary, or a codebook that does not fit.
        """
        check_request(model, law, batch_size)
        num_tokens = model.grid.num_tokens
        self._check(model, drafter, codebook)
        keys = draw_keys(generator, batch_size)
        watch = Stopwatch()
        state = model.prefill(
            condition, batch_size=batch_size, guided=law.guided, window=max(1, num_tokens - 1)
        )
        device = state.logits.device
        first = state.logits[:, None]  # [R, 1, V]
        watch.lap("prefill", device)
        noise = CounterNoise(keys, device)
        checked = CheckedLaw(law, num_tokens, deferred=device.type == "cuda")
        slots = torch.arange(num_tokens, device=device).expand(batch_size, -1)  # [B, L]

        small = _draw_small_picture(drafter.transformer, condition, batch_size, law, noise, device)
        # The up-sampler knows no guidance: the small picture was guided already.
        label = CheckedLaw(TokenLaw(allowed=law.allowed), num_tokens)(drafter.upsampler(small), slots, False)
        tokens = noise.categorical(label, slots, DRAFT)  # [B, L]
        watch.lap("draft", device)

        near = later_neighbours(model.grid, self.config["radius"]).to(device)
        neighbours = None
        if codebook is not None and self.config["pool"] > 1:
            others = neighbour_table(codebook, self.config["pool"] - 1, device).long()
            neighbours = torch.cat([torch.arange(len(others), device=device)[:, None], others], 1)  # [V, P]
        open_slots = torch.ones_like(tokens, dtype=torch.bool)
        target_calls = slots.new_ones(batch_size)
        commit_call = torch.zeros_like(tokens)
        moved = label.new_zeros(batch_size)
        tested = label.new_zeros(batch_size)
        round = 0
        while round != self.config["max_rounds"]:
            round += 1
            logits = first
            if num_tokens > 1:
                logits = torch.cat([first, model(state, tokens[:, :-1], slots[:, :-1])], 1)  # [R, L, V]
            watch.lap("model", device)
            target = checked(logits, slots, law.guided)  # [B, L, V]
            at = tokens[..., None]
            exact = (target.gather(-1, at) - label.gather(-1, at)).exp().squeeze(-1)  # [B, L]
            probability = exact
            if neighbours is not None:
                probability = pooled(target, tokens, neighbours) / pooled(label, tokens, neighbours)
            probability = probability.clamp(max=1)
            moved += ((probability - exact).clamp(min=0) * open_slots).sum(1)
            tested += open_slots.sum(1)
            refused = open_slots & ~noise.bernoulli(probability, slots, ACCEPT, round)
            replacement = noise.categorical(residual(target, label), slots, RESIDUAL, round)
            tokens = torch.where(refused, replacement, tokens)
            # Kept or replaced, a token that was tested is a draw from the target law under this text.
            label = torch.where(open_slots[..., None], target, label)
            target_calls += open_slots.any(1)
            commit_call.masked_fill_(open_slots, round)
            open_slots = (refused.to(near.dtype)[:, None].float() @ near.float()).squeeze(1) > 0
            watch.lap("verify", device)
            if callback is not None:
                callback(round, (~open_slots).sum(1))
            if not open_slots.any():
                break
        checked.finish()
        seconds, phase_seconds = watch.read()
        trace = DecodeTrace(
            sampler=type(self).__name__,
            lossless=self.lossless,
            identical=False,
            target_calls=target_calls.cpu(),
            commit_call=commit_call.cpu(),
            seconds=seconds,
            phase_seconds=phase_seconds,
            peak_memory=watch.peak_memory(device),
            divergence=None if self.lossless else float((moved / tested).mean()),
        )
        return SampleResult(tokens, trace)

    def _check(self, model: NextTokenModel, drafter: Any, codebook: Tensor | None) -> None:
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
            found = "none" if codebook is None else f"one of {len(codebook)} codes"
            raise ValueError(
                f"pool={self.config['pool']} needs the codebook of the {model.vocab_size} tokens, got {found}; pass "
                "`codebook` [V, D], or pool=1."
            )


def _draw_small_picture(
    model: NextTokenModel,
    condition: Any,
    batch_size: int,
    law: TokenLaw,
    noise: CounterNoise,
    device: torch.device,
) -> Tensor:
    """The low-resolution tokens [B, l], token by token, with noise of their own (round 1 of the draft stream)."""
    num_tokens = model.grid.num_tokens
    state = model.prefill(condition, batch_size=batch_size, guided=law.guided, window=1)
    checked = CheckedLaw(law, num_tokens)
    tokens = torch.zeros(batch_size, num_tokens, dtype=torch.long, device=device)
    logits = state.logits[:, None]
    for slot in range(num_tokens):
        slots = torch.full((batch_size, 1), slot, device=device)
        if slot:
            logits = model(state, tokens[:, slot - 1 : slot], slots - 1)
        tokens[:, slot] = noise.categorical(checked(logits, slots, law.guided), slots, DRAFT, 1)[:, 0]
    return tokens
