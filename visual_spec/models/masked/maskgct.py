"""MaskGCT's two networks: phones to semantic codes of speech, and those to acoustic codes (Wang et al., ICLR 2025).

One class each serves any size of the official layout; parameter names are the official keys. Both are Llamas whose
layers see the whole sequence, and whose norms are scaled by the share of the steps that is left (section 3.2). A
sequence begins with what leads in: the phones of the prompt and of the text, and the prompt's semantic codes; or the
prompt's acoustic codes. The codes to decode follow.

`SemanticDecoder` and `AcousticDecoder` are `MaskedModel`s over these networks. Samples of a batch may differ in the
length of each part. Every sample is padded for itself, its positions count only what is there, and its own deviation
rescales its guidance. So a sample does not depend on the batch that it is in, as it does in the published code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from visual_spec.models.core.masked_protocol import MaskedState
from visual_spec.models.core.offload import loads_weights
from visual_spec.models.core.protocol import TokenGrid, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config, whole

_EPSILON = 1e-6  # of every norm
_BASE = 10000.0  # of the rotary positions


# -- the network -------------------------------------------------------------------------------------------------------


class TimedNorm(nn.Module):
    """A norm by the mean square, whose gain depends on the time."""

    def __init__(self, dim: int):
        super().__init__()
        self.to_weight = nn.Linear(dim, dim)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """Normalise `x [R, S, dim]` at an embedded `time [dim]`."""
        values = wide(x)
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + _EPSILON)
        return (self.to_weight(time) * values).to(x.dtype)


class TimedLayer(nn.Module):
    """A layer of `TimedLlama`: a Llama's, under norms that read the time."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        config = LlamaConfig(hidden_size=dim, intermediate_size=4 * dim, num_attention_heads=heads)
        config._attn_implementation = "sdpa"
        self.self_attn, self.mlp = LlamaAttention(config, 0), LlamaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = TimedNorm(dim), TimedNorm(dim)

    def forward(self, x: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """`x [R, S, dim]`; cosines and sines [R, S, D]; bool `seen [R, 1, 1, S]`."""
        x = x + self.self_attn(self.input_layernorm(x, time), rotary, seen)[0]
        return x + self.mlp(self.post_attention_layernorm(x, time))


class TimedLlama(nn.Module):
    """The layers of both networks."""

    def __init__(self, dim: int, layers: int, heads: int):
        super().__init__()
        if dim % (2 * heads):
            raise ValueError(
                f"hidden_size={dim} and num_heads={heads} given; pass a multiple of twice the heads."
            )
        self.layers = nn.ModuleList(TimedLayer(dim, heads) for _ in range(layers))
        self.norm = TimedNorm(dim)
        self.diff_step_mlp, self.cond_mlp = _two_layers(dim), _two_layers(dim)

    def forward(self, x: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor], seen: Tensor) -> Tensor:
        """Features [R, S, dim] of `x [R, S, dim]` at a `time []` from 1, the first step, to 0."""
        half = x.shape[-1] // 2
        rates = torch.arange(half, device=x.device, dtype=time.dtype) * -(math.log(10000.0) / (half - 1))
        angles = time * rates.exp()
        embedded = self.diff_step_mlp(torch.cat([angles.sin(), angles.cos()]).to(x.dtype))
        for layer in self.layers:
            x = layer(x, embedded, rotary, seen)
        return self.norm(x, embedded)


def _two_layers(dim: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))


def rotary_of(seen: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [R, S, width] of the positions among what bool `seen [R, S]` shows."""
    wide = torch.promote_types(dtype, torch.float32)
    place = (seen.cumsum(1) - 1).clamp(min=0).to(wide)  # [R, S]
    rates = _BASE ** (-torch.arange(0, width, 2, device=seen.device, dtype=wide) / width)
    angles = place[..., None] * torch.cat([rates, rates])
    return angles.cos().to(dtype), angles.sin().to(dtype)


class SemanticNetwork(SavedModel):
    """Scores semantic codes from phones. The defaults are the official ones.

    Args:
        vocab_size: number of semantic codes.
        phones: number of phones; the last one is padding.

    Raises:
        ValueError: a width that is no multiple of twice the heads.
    """

    _no_split_modules = ["TimedLayer"]

    @register_to_config
    def __init__(
        self,
        vocab_size: Count = 8192,
        hidden_size: int = 1536,
        num_layers: int = 16,
        num_heads: Count = 16,
        phones: int = 1024,
    ):
        super().__init__()
        self.mask_emb = nn.Embedding(1, hidden_size)
        self.to_logit = nn.Linear(hidden_size, vocab_size)
        self.cond_emb = nn.Embedding(vocab_size, hidden_size)
        self.phone_emb = nn.Embedding(phones, hidden_size)
        self.diff_estimator = TimedLlama(hidden_size, num_layers, num_heads)

    @loads_weights
    def embed_phones(self, phones: Tensor) -> Tensor:
        """Return what leads in for phones: long [S] to [S, dim]."""
        return self.diff_estimator.cond_mlp(self.phone_emb(phones))

    @loads_weights
    def embed_codes(self, codes: Tensor) -> Tensor:
        """Return [..., dim] of codes, long [...]; `vocab_size` stands for a hidden one."""
        hidden = codes == self.config["vocab_size"]
        known = self.cond_emb(codes.masked_fill(hidden, 0))
        return torch.where(hidden[..., None], self.mask_emb.weight[0], known)

    @loads_weights
    def forward(self, codes: Tensor, state: SpeechState) -> Tensor:
        """Return logits [B, L, V], of guided features, of codes long [B, L]."""
        x = torch.cat([state.lead[0], self.embed_codes(codes)], 1)
        return wide(self.to_logit(_guided(self.diff_estimator, x, state)))


class AcousticNetwork(SavedModel):
    """Scores acoustic codes, one codebook after the other, from semantic ones. The defaults are the official ones.

    Args:
        codebooks: number of codebooks; MaskGCT decodes the first by a network that knows no other.
        vocab_size: codes of each.
        semantic_codes: number of semantic codes.

    Raises:
        ValueError: a width that is no multiple of twice the heads.
    """

    _no_split_modules = ["TimedLayer"]

    @register_to_config
    def __init__(
        self,
        codebooks: Count = 12,
        vocab_size: Count = 1024,
        semantic_codes: int = 8192,
        hidden_size: int = 1024,
        num_layers: int = 16,
        num_heads: Count = 16,
    ):
        super().__init__()
        self.layer_emb, self.mask_emb = nn.Embedding(codebooks, hidden_size), nn.Embedding(1, hidden_size)
        self.token_emb = nn.ModuleList(nn.Embedding(vocab_size, hidden_size) for _ in range(codebooks))
        self.to_logits = nn.ModuleList(nn.Linear(hidden_size, vocab_size) for _ in range(codebooks))
        self.cond_emb = nn.Embedding(semantic_codes, hidden_size)
        self.diff_estimator = TimedLlama(hidden_size, num_layers, num_heads)

    @loads_weights
    def embed_codes(self, codes: Tensor) -> Tensor:
        """Return the sum of the embeddings, [..., dim], of codes long [..., K]; `vocab_size` stands for a hidden one.

        Codebooks beyond the network's own are not read.
        """
        total = torch.zeros_like(self.mask_emb.weight[0])
        for book, table in enumerate(self.token_emb):
            hidden = codes[..., book] == self.config["vocab_size"]
            known = table(codes[..., book].masked_fill(hidden, 0))
            total = total + torch.where(hidden[..., None], self.mask_emb.weight[0], known)
        return total

    @loads_weights
    def forward(self, codes: Tensor, state: SpeechState, lead: Tensor, stage: int) -> Tensor:
        """Return logits [B, L, V], of guided features, of codebook `stage` of codes long [B, L, K].

        Args:
            lead: [B, S - L, dim], what leads in.
        """
        assert state.semantic is not None
        conditions = self.cond_emb(state.semantic) + self.layer_emb.weight[stage]  # [B, S, dim]
        x = torch.cat([lead, self.embed_codes(codes)], 1) + self.diff_estimator.cond_mlp(conditions)
        return wide(self.to_logits[stage](_guided(self.diff_estimator, x, state)))


# -- decoding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SemanticCondition:
    """What semantic codes are decoded from; one entry a sample.

    Attributes:
        phones: long [P], of the prompt's text and the text to speak.
        prompts: long [Q], the prompt's semantic codes.
        lengths: codes to decode, at least 1.
        guidance_scale: `s` of `unconditional + s * (conditional - unconditional)`, of the features before the head; 1
            or below: none. The published code names s - 1.
        guidance_rescale: how much of the guided features is brought back to the deviation of the conditional ones, 0
            to 1.
    """

    phones: Sequence[Tensor]
    prompts: Sequence[Tensor]
    lengths: Sequence[int]
    guidance_scale: float = 3.5
    guidance_rescale: float = 0.75


@dataclass(frozen=True)
class AcousticCondition:
    """What acoustic codes are decoded from; one entry a sample.

    Attributes:
        semantic: long [Q + L], the semantic codes of the prompt and what follows.
        prompts: long [Q, K], the prompt's acoustic codes; the L frames after it are decoded.
        guidance_scale, guidance_rescale: see `SemanticCondition`.
    """

    semantic: Sequence[Tensor]
    prompts: Sequence[Tensor]
    guidance_scale: float = 3.5
    guidance_rescale: float = 0.75

    @property
    def lengths(self) -> list[int]:
        """Frames to decode."""
        return [len(codes) - len(prompt) for codes, prompt in zip(self.semantic, self.prompts, strict=True)]


@dataclass
class SpeechState(MaskedState):
    """One batch during decoding. R = 2B with guidance: the last B rows see neither phones nor prompt; else B.

    Attributes:
        lead: [B, S - L, dim], what leads in, by the network of the stage.
        seen: bool [R, 1, 1, S].
        rotary: cosines and sines [R, S, D].
        there: bool [B, L], codes that a sample has.
        scale, rescale: of the guidance.
        time: [], from 1 at the first step to 0.
        semantic: long [B, S], of acoustic decoding.
    """

    lead: list[Tensor]
    seen: Tensor
    rotary: tuple[Tensor, Tensor]
    there: Tensor
    scale: float
    rescale: float
    time: Tensor
    semantic: Tensor | None = None


class _SpeechDecoder(nn.Module):
    """What both decoders share: the grid of the longest sample, the time, and the layout of a batch."""

    mask_id: int
    vocab_size: int

    def __init__(self, num_frames: int, codebooks: int, vocab_size: int):
        super().__init__()
        self.grid = TokenGrid(1, whole("num_frames", num_frames), codebooks=codebooks)
        self.vocab_size = self.mask_id = vocab_size

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return next(self.parameters()).device

    def known_tokens(self, lengths: Sequence[int], device: torch.device | None = None) -> Tensor:
        """Return the sampler's `known_tokens`, long [B, L, K]: what lies after the end of a sample is not decoded."""
        ends = torch.tensor(lengths, device=device)[:, None]
        there = torch.arange(self.grid.width, device=device) < ends  # [B, L]
        return torch.where(there, self.mask_id, 0)[..., None].repeat(1, 1, self.grid.codebooks)

    def set_time(self, state: SpeechState, past: float) -> None:
        """See `TimedMaskedModel`."""
        state.time.fill_(1 - past)

    def _check(self, condition: SemanticCondition | AcousticCondition, batch_size: int, guided: bool) -> None:
        lengths = list(condition.lengths)
        if guided:
            raise ValueError(
                "a guided law given, but MaskGCT guides its features itself; pass guidance_scale=1 in the law, and "
                "guidance_scale in the condition."
            )
        if len(lengths) != batch_size or len(condition.prompts) != batch_size:
            raise ValueError(
                f"{len(condition.prompts)} prompts and {len(lengths)} lengths given for {batch_size} samples; pass one "
                "of each a sample."
            )
        if min(lengths) < 1 or max(lengths) != self.grid.width:
            raise ValueError(
                f"samples of {lengths} codes given; each has at least 1, and the longest {self.grid.width}."
            )
        if not (condition.guidance_scale >= 0 and math.isfinite(condition.guidance_scale)):
            raise ValueError(
                f"guidance_scale={condition.guidance_scale}; pass a finite number of at least 0."
            )
        if not 0 <= condition.guidance_rescale <= 1:
            raise ValueError(f"guidance_rescale={condition.guidance_rescale}; pass a number from 0 to 1.")

    def _state(
        self,
        condition: SemanticCondition | AcousticCondition,
        leads: list[list[Tensor]],
        width: int,
        semantic: Tensor | None = None,
    ) -> SpeechState:
        """Lay out a batch: of each network what leads in, [P, dim] of each sample; `width` of an attention head."""
        lead = [pad_sequence(own, batch_first=True) for own in leads]
        device, dtype = lead[0].device, lead[0].dtype
        starts = torch.tensor([len(one) for one in leads[0]], device=device)[:, None]
        ends = torch.tensor(list(condition.lengths), device=device)[:, None]
        before = torch.arange(lead[0].shape[1], device=device) < starts
        there = torch.arange(self.grid.width, device=device) < ends
        seen = torch.cat([before, there], 1)
        if condition.guidance_scale > 1:
            seen = torch.cat([seen, torch.cat([torch.zeros_like(before), there], 1)])
        return SpeechState(
            guided=False,
            device=device,
            lead=lead,
            seen=seen[:, None, None],
            rotary=rotary_of(seen, width, dtype),
            there=there,
            scale=condition.guidance_scale,
            rescale=condition.guidance_rescale,
            time=torch.ones((), device=device, dtype=torch.promote_types(dtype, torch.float32)),
            semantic=semantic,
        )


class SemanticDecoder(_SpeechDecoder):
    """A `TimedMaskedModel` of semantic codes.

    Args:
        network: scores the codes.
        num_frames: codes of the longest sample.

    Raises:
        ValueError: a number of codes below 1.
    """

    def __init__(self, network: SemanticNetwork, num_frames: int):
        super().__init__(num_frames, 1, network.config["vocab_size"])
        self.network = network

    @torch.no_grad()
    def prepare(self, condition: SemanticCondition, *, batch_size: int, guided: bool) -> SpeechState:
        """Embed phones and prompts. See `MaskedModel`. Features are guided here, so no law may be."""
        self._check(condition, batch_size, guided)
        network, device = self.network, self.network.device
        phones = network.config["phones"] - 1  # the last one is padding
        if len(condition.phones) != batch_size or any(len(one) < 1 for one in condition.phones):
            raise ValueError(
                f"phones of {[len(one) for one in condition.phones]} given for {batch_size} samples; pass at least one "
                "phone for each."
            )
        check_codes("phones", condition.phones, phones)
        check_codes("prompts", condition.prompts, self.vocab_size)
        leads = [
            torch.cat([network.embed_phones(own.to(device)), network.embed_codes(codes.to(device))])
            for own, codes in zip(condition.phones, condition.prompts, strict=True)
        ]
        return self._state(condition, [leads], _head_width(network))

    @torch.no_grad()
    def forward(self, state: SpeechState, tokens: Tensor, stage: int = 0) -> Tensor:
        """Return logits [B, L, V] of `tokens`, long [B, L, 1]."""
        return self.network(tokens[..., 0], state)


class AcousticDecoder(_SpeechDecoder):
    """A `TimedMaskedModel` of acoustic codes: the first codebook by a network of its own, the others by another.

    Args:
        first, rest: the networks.
        num_frames: frames of the longest sample.

    Raises:
        ValueError: networks of other codes, or a number of frames below 1.
    """

    def __init__(self, first: AcousticNetwork, rest: AcousticNetwork, num_frames: int):
        check_networks(first, rest)
        super().__init__(num_frames, rest.config["codebooks"], rest.config["vocab_size"])
        self.first, self.rest = first, rest

    @torch.no_grad()
    def prepare(self, condition: AcousticCondition, *, batch_size: int, guided: bool) -> SpeechState:
        """Embed prompts. See `MaskedModel`. Features are guided here, so no law may be."""
        self._check(condition, batch_size, guided)
        books = self.grid.codebooks
        if any(prompt.ndim != 2 or prompt.shape[1] != books for prompt in condition.prompts):
            raise ValueError(
                f"prompts of shapes {[tuple(one.shape) for one in condition.prompts]} given; pass [Q, {books}] each."
            )
        check_codes("prompts", condition.prompts, self.vocab_size)
        check_codes("semantic", condition.semantic, self.rest.config["semantic_codes"])
        if _head_width(self.first) != _head_width(self.rest):
            raise ValueError("the two networks have heads of other widths; load both of one model.")
        device = self.rest.device
        prompts = [prompt.to(device) for prompt in condition.prompts]
        leads = [[network.embed_codes(prompt) for prompt in prompts] for network in (self.first, self.rest)]
        start = max(map(len, prompts))
        # The codes of each part, where the part stands.
        semantic = torch.zeros(batch_size, start + self.grid.width, dtype=torch.long, device=device)
        for row, (codes, prompt) in enumerate(zip(condition.semantic, prompts, strict=True)):
            semantic[row, : len(prompt)] = codes[: len(prompt)]
            semantic[row, start : start + len(codes) - len(prompt)] = codes[len(prompt) :]
        return self._state(condition, leads, _head_width(self.rest), semantic)

    @torch.no_grad()
    def forward(self, state: SpeechState, tokens: Tensor, stage: int) -> Tensor:
        """Return logits [B, L, V] of codebook `stage` of `tokens`, long [B, L, K]."""
        if stage == 0:
            return self.first(tokens, state, state.lead[0], 0)
        return self.rest(tokens, state, state.lead[1], stage)


def check_networks(first: AcousticNetwork, rest: AcousticNetwork) -> None:
    """Refuse two acoustic networks that are not of one model, by ValueError."""
    for name in ("vocab_size", "semantic_codes"):
        if first.config[name] != rest.config[name]:
            raise ValueError(
                f"the network of the first codebook has {name}={first.config[name]}, and the network of the rest "
                f"{rest.config[name]}; load both of one model."
            )


def _head_width(network: SemanticNetwork | AcousticNetwork) -> int:
    return network.config["hidden_size"] // network.config["num_heads"]


def check_codes(name: str, codes: Sequence[Tensor], count: int) -> None:
    """Refuse codes that are not of 0 to count - 1, by ValueError."""
    for one in codes:
        if one.dtype != torch.long or (one.numel() and not 0 <= int(one.min()) <= int(one.max()) < count):
            raise ValueError(
                f"{name} {one.dtype} with {one.tolist()[:8]} ... given; pass int64, 0 to {count - 1}."
            )


def _guided(layers: TimedLlama, x: Tensor, state: SpeechState) -> Tensor:
    """Features [B, L, dim] of the codes to decode, guided; see `SemanticCondition`."""
    rows, length = len(state.seen), state.there.shape[1]
    features = layers(x.repeat(rows // len(x), 1, 1), state.time, state.rotary, state.seen)[:, -length:]
    if rows == len(x):
        return features
    wanted, free = features.chunk(2)
    led = free + state.scale * (wanted - free)
    share = _deviation(wanted, state.there) / _deviation(led, state.there)
    return led * (state.rescale * share + 1 - state.rescale).to(led.dtype)


def _deviation(features: Tensor, there: Tensor) -> Tensor:
    """Return the standard deviation, [B, 1, 1], of all numbers of a sample that are there."""
    numbers = wide(features)
    kept = there[..., None]
    count = there.sum(1)[:, None, None] * features.shape[-1]
    mean = torch.where(kept, numbers, 0).sum((1, 2), keepdim=True) / count
    return (torch.where(kept, (numbers - mean).square(), 0).sum((1, 2), keepdim=True) / (count - 1)).sqrt()
