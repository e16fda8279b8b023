"""MusicGen (Copet et al. 2023) as a model of columns, around transformers' own class.

A decoder reads the states of a text encoder by cross-attention, and predicts the codes of a residual quantiser in a
delay pattern: step s holds frame s of the first codebook, frame s - 1 of the second one, and so on (section 2.2). In a
stereo model both channels of a codebook share a delay. The entries of a step are drawn independently of each other, so
a step is a column. Entries outside the clip hold the special id, one above the codes.

Without the causal mask, the same modules are MAGNeT (Ziv et al. 2024), which predicts hidden codes of whole clips. Of
a MusicGen Melody, the condition stands in front of the steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from visual_spec.models.columns.musicgen_modules import MusicCondition, MusicgenModules, Padding
from visual_spec.models.columns.patterns import CodebookPattern
from visual_spec.models.columns.stacks import Stacks, streams_of
from visual_spec.models.core.cache import seen_up_to
from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import loads_groups
from visual_spec.models.core.protocol import DecodeState, TokenGrid, check_ids, wide
from visual_spec.models.core.settings import Within, whole
from visual_spec.models.core.transformers_cache import SlotCache
from visual_spec.models.next_token.llamagen import TextCondition

# -- column by column --------------------------------------------------------------------------------------------------


@dataclass
class MusicgenState(DecodeState):
    """One batch during decoding; logits are [R, K, V]. Place 0 of a row is the empty step, place s + 1 is step s of
    the pattern.

    Attributes:
        cache: keys and values: of the steps, written by place, and of the text, computed once.
        states, seen: from `encoder_states`.
        positions: [1 + S, dim], embeddings of the places; S includes the steps of the prompt.
        prefix: the number of states in front of the places (Melody).
        free: bool [S + window, K], the entries that are decoded; the others are forced.
        forced: long [B, S + window, K], codes of the prompt and the special id.
        features: the output of each layer in the last call, as from `MusicgenModules.run`, for drafters; of several
            streams the first one's.
        stacks, held: of a stacked pattern, its tables, and long [B, S + window, K], the tokens by step.
    """

    cache: EncoderDecoderCache
    states: Tensor
    seen: Tensor
    positions: Tensor
    free: Tensor
    forced: Tensor
    features: list[Tensor]
    prefix: int = 0
    stacks: Stacks | None = None
    held: Tensor | None = None

    def narrow(self, width: int) -> None:
        self.features = [layer[:, :width] for layer in self.features]

    def buffers(self) -> list[Tensor]:
        steps = self.cache.self_attention_cache
        assert isinstance(steps, SlotCache)
        layers = [
            layer for layer in self.cache.cross_attention_cache.layers if isinstance(layer, DynamicLayer)
        ]
        words = [tensor for layer in layers for tensor in (layer.keys, layer.values) if tensor is not None]
        tables = [] if self.stacks is None else self.stacks.buffers()
        held = [] if self.held is None else [self.held]
        return [*steps.buffers(), *words, self.seen, self.free, self.forced, *held, *tables]


class MusicgenColumnModel(MusicgenModules):
    """A `ColumnModel` that predicts one step of the pattern after the other.

    Steps count from the first one that a prompt does not give, and the grid is as wide as the remaining steps.

    Args:
        model, padding: see `MusicgenModules`.
        num_frames: T, frames of the clip, a prompt's among them.
        prompt_frames: P, how many of them the condition gives.
        pattern: the layout; None: MusicGen's delay.

    Raises:
        TypeError, ValueError: as in `MusicgenModules`; or the number of frames is below 1, the prompt leaves none to
            decode, the pattern has another number of codebooks, or it is stacked in another way than `Stacks` knows.
    """

    def __init__(
        self,
        model: Any,
        num_frames: int,
        *,
        prompt_frames: int = 0,
        padding: Padding = "masked",
        pattern: CodebookPattern | None = None,
    ) -> None:
        super().__init__(model, padding)
        # Both channels of a stereo codebook are adjacent: left, right, left, right.
        usual = CodebookPattern.delay([k // self.num_channels for k in range(self.num_codebooks)])
        self.pattern = usual if pattern is None else pattern
        if self.pattern.codebooks != self.num_codebooks:
            raise ValueError(
                f"the pattern is for {self.pattern.codebooks} codebooks; pass one for {self.num_codebooks} codebooks."
            )
        self.streams = streams_of(self.pattern)
        frames = self.pattern.frames_by_step(num_frames)  # [K, S]
        if not 0 <= prompt_frames < num_frames:
            raise ValueError(
                f"prompt_frames={prompt_frames} of num_frames={num_frames}; pass 0 to {num_frames - 1}, so that "
                "something is left to decode."
            )
        self.num_frames, self.prompt_frames = num_frames, prompt_frames
        self._free = (frames >= prompt_frames).T.contiguous()  # [S, K]
        self.first_step = int(self._free.any(1).int().argmax())
        self.num_steps = len(self._free)  # S
        self.grid = TokenGrid(1, self.num_steps - self.first_step, codebooks=self.num_codebooks)

    @property
    def valid(self) -> Tensor:
        """The decoded entries of the grid's steps, bool [grid.width, K]; the others are forced."""
        return self._free[self.first_step :]

    def check_condition(self, condition: TextCondition, batch_size: int) -> None:
        """Check as `MusicgenModules.check_condition`, and check the prompt's codes."""
        super().check_condition(condition, batch_size)
        codes = condition.codes if isinstance(condition, MusicCondition) else None
        expected = (batch_size, self.num_codebooks, self.prompt_frames)
        if codes is None:
            if self.prompt_frames:
                raise ValueError(
                    f"no codes given for prompt_frames={self.prompt_frames}; pass a MusicCondition with codes "
                    f"{expected}."
                )
        elif tuple(codes.shape) != expected or codes.is_floating_point():
            raise ValueError(f"codes {codes.dtype} {tuple(codes.shape)} given; pass integers {expected}.")
        else:
            check_ids("codes", codes, self.vocab_size, of=" of the codec that belongs to the model")

    def _stacks(self, window: int = 0) -> Stacks | None:
        """Return the tables of a stacked pattern; None of others."""
        if not self.pattern.stacked:
            return None
        return Stacks(self.pattern, self.num_frames, self.special_id, window).to(self.device)

    def _forced(self, condition: TextCondition, batch_size: int) -> Tensor:
        """Return the values of the entries that are not decoded, long [B, S, K]."""
        codes = torch.full(
            (batch_size, self.num_codebooks, self.num_frames), self.special_id, device=self.device
        )
        if isinstance(condition, MusicCondition) and condition.codes is not None:
            codes[:, :, : self.prompt_frames] = condition.codes.to(self.device)
        return self.pattern.apply(codes, self.special_id).transpose(1, 2)

    @loads_groups
    def prefill(
        self, condition: TextCondition, *, batch_size: int, guided: bool, window: int
    ) -> MusicgenState:
        """Run the empty step and the prompt, and return the state whose `logits [R, K, V]` predict step 0."""
        self.check_condition(condition, batch_size)
        states, seen = self.encoder_states(condition, guided=guided)
        prefix = states.shape[1] if self.prefixed else 0
        cache = EncoderDecoderCache(
            SlotCache(len(self.decoder.layers), prefix + self.streams * (1 + self.num_steps + window)),
            DynamicCache(),
        )
        scratch = (0, 0, 0, window)
        forced = F.pad(self._forced(condition, batch_size), scratch, value=self.special_id)
        columns = forced[:, : self.first_step]  # [B, P', K]
        places = torch.arange(1 + self.first_step, device=self.device)
        positions = self.position_table(prefix + 1 + self.num_steps).to(states)
        state = MusicgenState(
            logits=torch.zeros(0),  # until the forward below
            guided=guided,
            window=window,
            cache=cache,
            states=states,
            seen=seen,
            positions=positions[prefix:],
            free=F.pad(self._free, scratch).to(self.device),
            forced=forced,
            features=[],
            prefix=prefix,
            stacks=self._stacks(window),
        )
        if state.stacks is not None:
            state.held = forced.clone()
            every = torch.arange(self.first_step, device=self.device).expand(batch_size, -1)
            columns = state.stacks.columns(forced, every)
        columns = F.pad(columns, (0, 0, self.streams, 0), value=self.special_id)
        if prefix:
            before = torch.arange(-prefix, 0, device=self.device).expand(len(states), -1)
            self._run_at(state, states + positions[:prefix], before, 0)
        rows = columns.repeat(2, 1, 1) if guided else columns
        features = self._step(state, rows, places.expand(len(rows), -1), 1 + self.first_step)
        state.logits = self._scores(features[:, -self.streams :])[:, 0]
        return state

    @loads_groups
    def __call__(self, state: MusicgenState, tokens: Tensor, steps: Tensor) -> Tensor:
        """Feed columns `tokens [B, W, K]` at `steps [B, W]`; logits `[R, W, K, V]`, position w predicting step
        `steps[b, w] + 1`.

        Entries that are not `valid` are set to their forced values. See `ColumnModel`.
        """
        at = steps + self.first_step  # [B, W]
        rows = torch.arange(len(at), device=at.device)[:, None]
        tokens = torch.where(state.free[at], tokens, state.forced[rows, at])
        if state.stacks is not None:
            assert state.held is not None
            state.held[rows, at] = tokens
            tokens = state.stacks.columns(state.held, at)
        if state.guided:
            tokens, at = tokens.repeat(2, 1, 1), at.repeat(2, 1)
        places = 1 + at
        return self._scores(self._step(state, tokens, places, 1 + self.num_steps + state.window))

    def _step(self, state: MusicgenState, tokens: Tensor, places: Tensor, num_places: int) -> Tensor:
        """The heads' input, [R, W * N, dim], for columns `tokens [R, W * N, K]` of N streams at `places [R, W]`, which
        see at most the first `num_places`. Writes all layers' outputs to `state.features`."""
        at = state.positions[places.clamp_max(self.num_steps)].repeat_interleave(self.streams, 1)
        streams = torch.arange(self.streams, device=places.device)
        positions = (places[..., None] * self.streams + streams).flatten(1)
        outputs = self._run_at(state, self.embed(tokens) + at, positions, num_places * self.streams)
        state.features = [output[:, :: self.streams] for output in outputs]
        return outputs[-1]

    def _run_at(
        self, state: MusicgenState, embeddings: Tensor, positions: Tensor, count: int
    ) -> list[Tensor]:
        """The layers' outputs for embeddings [R, W, dim] at positions [R, W], below 0 in a prefix, which see at most
        the first `count`."""
        at = positions + state.prefix
        cache = state.cache.self_attention_cache
        assert isinstance(cache, SlotCache)
        seen = seen_up_to(at, state.prefix + count, state.fixed)
        if state.stacks is not None:
            own = state.stacks.seen(positions.clamp(min=0), seen.shape[-1] - state.prefix)
            seen[..., state.prefix :] &= own
        cache.at(at, seen.shape[-1])
        return self.run(embeddings, seen, state.states, state.seen, state.cache)

    def _scores(self, features: Tensor) -> Tensor:
        """Logits [R, W, K, V] of the heads' input [R, W * N, dim]: of N = K streams, each codebook's own stream."""
        if self.streams == 1:
            return self.score(features)
        streams = features.unflatten(1, (-1, self.streams))
        return wide(torch.stack([head(streams[:, :, -k]) for k, head in enumerate(self.heads)], 2))

    def codes(self, tokens: Tensor, condition: TextCondition) -> Tensor:
        """Return codes [B, K, T] of decoded columns [B, grid.width, K], starting with the prompt's."""
        sequence = self._forced(condition, len(tokens))
        sequence[:, self.first_step :] = torch.where(
            self.valid.to(self.device), tokens.to(self.device), sequence[:, self.first_step :]
        )
        return self.pattern.revert(sequence.transpose(1, 2))

    def teacher_forced(
        self,
        codes: Tensor,
        condition: TextCondition,
        dropped: Tensor | None = None,
        hidden_steps: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, K, T, V] of every code of whole clips, long [B, K, T], with gradients.

        Args:
            dropped: bool [B], rows without a text.
            hidden_steps: bool [B, S - 1], inputs replaced by zero, so that the model must use the text instead.

        Raises:
            ValueError: the codes have another shape.
        """
        if tuple(codes.shape[1:]) != (self.num_codebooks, self.num_frames):
            raise ValueError(
                f"codes {tuple(codes.shape)} given; pass [B, {self.num_codebooks}, {self.num_frames}]."
            )
        states, seen = self.encoder_states(condition, dropped=dropped)
        sequence = self.pattern.apply(codes, self.special_id).transpose(1, 2)  # [B, S, K]
        features = self.features(sequence, states, seen, hidden_steps)[-1]  # [B, S * N, dim]
        steps = self.pattern.steps_by_frame(self.num_frames).to(features.device)  # [K, T]
        streams = [-k % self.streams for k in range(self.num_codebooks)]
        return wide(
            torch.stack(
                [
                    head(features[:, own * self.streams + stream])
                    for head, own, stream in zip(self.heads, steps, streams, strict=True)
                ],
                1,
            )
        )

    def features(
        self, sequence: Tensor, states: Tensor, seen: Tensor, hidden_steps: Tensor | None = None
    ) -> list[Tensor]:
        """Return the output of each layer on whole clips, as from `run`: [R, S * N, dim] of N streams, position
        s * N + n predicting step s.

        Args:
            sequence: long [R, S, K], the pattern's steps as the model takes them.
            states, seen: from `encoder_states`.
            hidden_steps: as in `teacher_forced`.
        """
        stacks, streams = self._stacks(), self.streams
        if stacks is not None:
            every = torch.arange(self.num_steps, device=sequence.device).expand(len(sequence), -1)
            sequence = stacks.columns(sequence, every)
        # The empty step is fed, and the last step is not: it predicts nothing.
        embeddings = self.embed(F.pad(sequence[:, :-streams], (0, 0, streams, 0), value=self.special_id))
        if hidden_steps is not None:
            hidden = F.pad(hidden_steps, (1, 0)).repeat_interleave(streams, 1)
            embeddings = embeddings.masked_fill(hidden[..., None], 0.0)
        prefix = states.shape[1] if self.prefixed else 0
        table = self.position_table(prefix + self.num_steps).to(embeddings)
        embeddings = embeddings + table[prefix:].repeat_interleave(streams, 0)
        if prefix:
            embeddings = torch.cat([states + table[:prefix], embeddings], 1)
        count = embeddings.shape[1]
        causal = torch.ones(1, count, count, dtype=torch.bool, device=sequence.device).tril()
        if stacks is not None:
            positions = torch.arange(count - prefix, device=sequence.device)
            causal[:, prefix:, prefix:] &= stacks.seen(positions[None], count - prefix)
        outputs = self.run(embeddings, causal, states, seen)
        return [output[:, prefix:] for output in outputs]


# -- any frame at once -------------------------------------------------------------------------------------------------


@dataclass
class MagnetState(MaskedState):
    """One batch during masked decoding.

    Attributes:
        states, seen: from `encoder_states`, for all rows.
        positions: [T, dim], embeddings of the frames.
        held: keys and values of the last call that kept them: of all frames, scratch places, and the text.
        features: [R, T, dim], what that call had before the heads.
    """

    states: Tensor
    seen: Tensor
    positions: Tensor
    held: EncoderDecoderCache | None = None
    features: Tensor | None = None


class MagnetModel(MusicgenModules):
    """MAGNeT's network: every frame sees every other one, and hidden codes are predicted at their own places.

    A `MaskedModel` whose slots are the frames. Codebooks are decoded one after the other (section 3.2). While one is
    decoded, later ones hold the special id, the mask. The first codebook may depend on the whole clip. A residual
    codebook refines what its surroundings determine, so there a frame sees only frames at most `reach` away (section
    3.3).

    Args:
        model: see `MusicgenModules`.
        num_frames: T, frames of the clips to decode. Official models are trained for one length. None: the model only
            scores whole clips, by `logits`.
        reach: frames to either side that later stages see; None: all.
        padding: see `MusicgenModules`. Official checkpoints were trained with "zeros".

    Raises:
        TypeError, ValueError: as in `MusicgenModules`; or the reach is below 0, or the number of frames is below 1.
    """

    def __init__(
        self, model: Any, num_frames: int | None = None, *, reach: int | None = 5, padding: Padding = "masked"
    ) -> None:
        super().__init__(model, padding)
        if self.prefixed:
            raise TypeError(
                f"{type(model).__name__} given, which goes on from a prefix; pass the MusicgenForCausalLM of a MAGNeT."
            )
        if reach is not None:
            whole("reach", reach, Within(0), ", or None to look at all frames")
        self.reach, self.num_frames, self.mask_id = reach, num_frames, self.special_id
        self._grid = None if num_frames is None else TokenGrid(1, num_frames, codebooks=self.num_codebooks)

    @property
    def grid(self) -> TokenGrid:
        """The grid: height 1, width T (frames), codebooks K.

        Raises:
            ValueError: the model was made without a number of frames.
        """
        if self._grid is None:
            raise ValueError("num_frames=None; pass the frames of a clip to MagnetModel to decode one.")
        return self._grid

    def visible(self, stages: Tensor, num_frames: int) -> Tensor:
        """Return which frames each frame sees, bool [B, T, T], at `stages`, long [B]."""
        frames = torch.arange(num_frames, device=stages.device)
        distance = (frames - frames[:, None]).abs()
        near = distance <= (num_frames if self.reach is None else self.reach)
        return near | (stages == 0)[:, None, None]

    def logits(
        self, codes: Tensor, condition: TextCondition, stages: Tensor, dropped: Tensor | None = None
    ) -> Tensor:
        """Return logits [B, T, V] of the codebooks `stages`, long [B].

        Args:
            codes: long [B, K, T], the special id for hidden codes.
            dropped: bool [B], rows without a text.
        """
        batch, _, count = codes.shape
        states, seen = self.encoder_states(condition, dropped=dropped)
        embeddings = self.embed(codes.transpose(1, 2))
        embeddings = embeddings + self.position_table(count).to(embeddings)
        scores = self.score(self.run(embeddings, self.visible(stages, count), states, seen)[-1])
        return scores[torch.arange(batch, device=codes.device), :, stages]

    @loads_groups
    def prepare(self, condition: TextCondition, *, batch_size: int, guided: bool) -> MagnetState:
        """Compute the projection of the text. See `MaskedModel`. Codes are known tokens, and no condition."""
        frames = self.grid.width
        self.check_condition(condition, batch_size)
        if isinstance(condition, MusicCondition) and condition.codes is not None:
            raise ValueError(
                f"the condition gives codes {tuple(condition.codes.shape)}; hand them to the sampler, as "
                "known_tokens=model.known_tokens(codes)."
            )
        states, seen = self.encoder_states(condition, guided=guided)
        return MagnetState(guided, self.device, states, seen, self.position_table(frames).to(states))

    @loads_groups
    def __call__(
        self,
        state: MagnetState,
        tokens: Tensor,
        stage: int,
        *,
        keep: int | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Return logits [R, T, V] of codebook `stage` for `tokens` long [B, T, K]. See `ReusingMaskedModel`."""
        tokens = tokens.repeat(2, 1, 1) if state.guided else tokens
        rows, frames = tokens.shape[:2]
        visible = self.visible(torch.full((1,), stage, device=tokens.device), frames)
        embeddings = self.embed(tokens) + state.positions
        if places is not None:
            if state.held is None:
                raise ValueError("places given, but nothing is held; call the model with keep=n first.")
            places = places.repeat(rows // len(places), 1)  # [R, n]
            at = places.clamp(max=frames - 1)
            embeddings = embeddings.gather(1, at[..., None].expand(-1, -1, embeddings.shape[-1]))
            visible = visible[0][at]  # [R, n, T]
        elif keep is not None:
            places = torch.arange(frames, device=tokens.device).expand(rows, -1)
            held = SlotCache(len(self.decoder.layers), frames + keep)
            state.held = EncoderDecoderCache(held, DynamicCache())
        if places is not None:
            assert state.held is not None and isinstance(state.held.self_attention_cache, SlotCache)
            state.held.self_attention_cache.at(places, frames)
        held = state.held if places is not None else None
        features = self.run(embeddings, visible, state.states, state.seen, held)[-1]
        if keep is not None:
            state.features = features
        return self.scores(state, features, stage)

    @loads_groups
    def scores(self, state: MagnetState, features: Tensor, stage: int) -> Tensor:
        """Return logits [R, W, V] of codebook `stage` for features [R, W, dim]."""
        return wide(self.heads[stage](features))

    def known_tokens(self, codes: Tensor) -> Tensor:
        """The sampler's `known_tokens`, long [B, T, K], of a clip that begins with codes, long [B, K, P].

        Raises:
            ValueError: the number of codebooks differs, no frame is left to decode, or codes exceed the vocabulary.
        """
        frames = self.grid.width
        if codes.ndim != 3 or codes.shape[1] != self.num_codebooks or not codes.shape[2] < frames:
            raise ValueError(
                f"codes {tuple(codes.shape)} given; pass [B, {self.num_codebooks}, P] with P below the clip's "
                f"{frames} frames."
            )
        check_ids("codes", codes, self.vocab_size, of=" of the codec that belongs to the model")
        return F.pad(codes, (0, frames - codes.shape[2]), value=self.mask_id).transpose(1, 2).contiguous()

    def codes(self, tokens: Tensor, condition: TextCondition | None = None) -> Tensor:
        """Return codes [B, K, T] of decoded tokens [B, T, K], as `MusicgenColumnModel.codes`."""
        return tokens.view(*tokens.shape[:2], -1).transpose(1, 2)
