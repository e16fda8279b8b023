"""Drafters that propose a whole block in one forward, in the layout of DFlash and DSpark.

DFlash (Chen et al., arXiv 2602.06036): a few layers whose queries are the positions of a block, the newest token and
then masks. Their keys and values are of the block, all of it, and of the target's hidden states of chosen layers at the
tokens before it. DSpark (arXiv 2607.05147) adds a bias by the token before, so a block is drawn from left to right.
Folders are those of `speculators` (vllm-project), which vLLM reads; see `folders`.

A *corrector* (`corrects`) is the same network with more to read, for Jacobi decoding: in place of masks the drafts that
stand in the window now, and of each position the hidden state that the last call left there, after another token
perhaps. It predicts the next iterate: what the head reads there is the old state plus a change. Such a file has no use
in an engine that drafts behind the newest token only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visual_spec.models.core.cache import StaticCache, on_host
from visual_spec.models.core.offload import decodes
from visual_spec.models.core.protocol import DecodeState, wide
from visual_spec.models.core.saved import SavedModel
from visual_spec.models.core.settings import Count, register_to_config
from visual_spec.prototype.block_drafts.folders import read_folder, write_folder

DFLASH, DSPARK = "dflash", "dspark"


@dataclass
class BlockDrafterState(DecodeState):
    """The drafter's state of one decode. It has a row a sample, of a plain block of a guided target two.

    Attributes:
        target: whose hidden states, head and, perhaps, embedding are read.
        cache: keys and values of what stands before the block: the prompt's T places, then by slot.
        turns: cosines and sines [positions, D].
        prompt: bool [R, T], the places of the prompt that count.
        start: long [R], the position of slot 0.
        guidance: scale by which the branches of the target are mixed.
        ids: long [V], the drafter's ids of the target's tokens, -1 where it has none; None: they are the same.
        stale: [B, L + window, F], by slot: what the head read there in the last call, of all branches; of a corrector.
    """

    target: Any
    cache: StaticCache
    turns: tuple[Tensor, Tensor]
    prompt: Tensor
    start: Tensor
    guidance: float
    ids: Tensor | None
    stale: Tensor | None = None

    def select(self, samples: Tensor) -> None:
        rows = self.rows(samples)
        self.cache.select(rows)
        self.logits, self.prompt, self.start = self.logits[rows], self.prompt[rows], self.start[rows]
        self.stale = None if self.stale is None else self.stale[samples]


class BlockLayer(nn.Module):
    """A layer of Qwen3: queries of the block, keys and values of what stands before it and of the block."""

    def __init__(self, layer: Mapping[str, Any]) -> None:
        super().__init__()
        dim, eps, bias = layer["hidden_size"], layer["rms_norm_eps"], layer["attention_bias"]
        heads, inner = layer["num_attention_heads"], layer["intermediate_size"]
        self.head_dim = size = layer["head_dim"]
        self.groups = groups = layer["num_key_value_heads"]
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(dim, heads * size, bias),
                "k_proj": nn.Linear(dim, groups * size, bias),
                "v_proj": nn.Linear(dim, groups * size, bias),
                "o_proj": nn.Linear(heads * size, dim, bias),
                "q_norm": nn.RMSNorm(size, eps),
                "k_norm": nn.RMSNorm(size, eps),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(dim, inner, False),
                "up_proj": nn.Linear(dim, inner, False),
                "down_proj": nn.Linear(inner, dim, False),
            }
        )

    def keys(self, hidden: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, N, H, D] of hidden [B, N, dim] at positions turned by [B, N, D]."""
        parts = self.self_attn
        keys = parts["k_norm"](parts["k_proj"](hidden).unflatten(-1, (-1, self.head_dim)))
        return _turned(keys, turns), parts["v_proj"](hidden).unflatten(-1, (-1, self.head_dim))

    def forward(
        self, hidden: Tensor, turns: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Return hidden [B, N, dim]; `before`: keys and values [B, H, S, D]; `seen`: bool [B, 1, N, S + N]."""
        parts, normed = self.self_attn, self.input_layernorm(hidden)
        queries = parts["q_norm"](parts["q_proj"](normed).unflatten(-1, (-1, self.head_dim)))
        held = (
            torch.cat([old, new.transpose(1, 2)], 2)
            for old, new in zip(before, self.keys(normed, turns), strict=True)
        )
        mixed = F.scaled_dot_product_attention(
            _turned(queries, turns).transpose(1, 2), *held, attn_mask=seen, enable_gqa=True
        )
        hidden = hidden + parts["o_proj"](mixed.transpose(1, 2).flatten(2))
        normed, parts = self.post_attention_layernorm(hidden), self.mlp
        return hidden + parts["down_proj"](F.silu(parts["gate_proj"](normed)) * parts["up_proj"](normed))


def _turned(vectors: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate vectors [B, N, H, D], halves against each other, by cosines and sines [B, N, D]."""
    cosine, sine = (part.unsqueeze(2) for part in turns)
    first, second = vectors.chunk(2, -1)
    return vectors * cosine + torch.cat([-second, first], -1) * sine


class Corrector(nn.Module):
    """What a corrector has beside the layout: how it reads drafts and old states, and what it changes.

    Args:
        dim: of the drafter.
        features: F, numbers that the target's head reads of a slot, of both branches where the target is guided.
    """

    def __init__(self, dim: int, features: int, branches: int) -> None:
        super().__init__()
        self.branches, self.features = branches, features * branches
        self.read = nn.Linear(3 * dim + self.features, dim, bias=False)
        self.age = nn.Embedding(3, dim)  # never scored; scored after another token; scored after this token
        self.change = nn.Linear(dim, features, bias=False)


class BlockDrafter(SavedModel):
    """A drafter of a block for any next-token model that keeps what its head reads, `state.features`.

    Its arguments are the settings of a folder of `speculators`.

    Args:
        transformer_layer_config: of a Qwen3 model, by name: its `num_hidden_layers` are the drafter's, its
            `vocab_size` the ids that it embeds.
        speculators_model_type: "dflash" or "dspark".
        draft_vocab_size: ids that it drafts.
        block_size: positions of a block, the newest token's among them.
        aux_hidden_state_layer_ids: of the target; i is what layer i reads, and the number of layers what the head
            reads. A corrector reads that alone: None.
        mask_token_id: embedded where a token is to be drafted.
        target_hidden_size: of the target; None: as the drafter's.
        sample_from_anchor: whether the newest token's position predicts the first slot (DSpark), or each mask its own
            slot (DFlash).
        markov_rank: of DSpark's bias; 0: none.
        markov_head_type: "vanilla" or "gated".
        own_embeddings, own_head: whether the folder has its own, in place of the target's.
        speculators_config: for engines; not read here.
        corrects: branches of the target whose states a corrector reads: 2 under guidance, else 1; 0: no corrector.
    """

    @register_to_config
    def __init__(
        self,
        transformer_layer_config: dict[str, Any],
        speculators_model_type: str = DFLASH,
        draft_vocab_size: Count = 1024,
        block_size: Count = 16,
        aux_hidden_state_layer_ids: Sequence[int] | None = None,
        mask_token_id: int = 0,
        target_hidden_size: int | None = None,
        sample_from_anchor: bool = False,
        markov_rank: int = 0,
        markov_head_type: str = "vanilla",
        own_embeddings: bool = True,
        own_head: bool = False,
        speculators_config: dict[str, Any] | None = None,
        corrects: int = 0,
    ) -> None:
        super().__init__()
        layer = layer_settings(transformer_layer_config)
        dim, eps, size = layer["hidden_size"], layer["rms_norm_eps"], layer["vocab_size"]
        self.features = target_hidden_size or dim
        self.theta = layer["rope_theta"]
        count = corrects or len(aux_hidden_state_layer_ids or (0,))
        self.fc = nn.Linear(count * self.features, dim, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(dim, eps), nn.RMSNorm(dim, eps)
        self.layers = nn.ModuleList(BlockLayer(layer) for _ in range(layer["num_hidden_layers"]))
        self.embed_tokens = nn.Embedding(size, dim) if own_embeddings else None
        self.lm_head = nn.Linear(dim, draft_vocab_size, bias=False) if own_head else None
        fewer = own_head and draft_vocab_size != size
        self.d2t: Tensor | None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.long) if fewer else None)
        self.markov_head = None
        if markov_rank:
            parts = {
                "markov_w1": nn.Embedding(size, markov_rank),
                "markov_w2": nn.Linear(markov_rank, draft_vocab_size, bias=False),
            }
            if markov_head_type == "gated":
                parts["gate_proj"] = nn.Linear(dim + markov_rank, markov_rank)
            self.markov_head = nn.ModuleDict(parts)
        self.corrector = Corrector(dim, self.features, corrects) if corrects else None
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(
                    parameter, std=0.02 if name == "embed_tokens.weight" else parameter.shape[1] ** -0.5
                )
        if self.corrector is not None:
            nn.init.zeros_(self.corrector.change.weight)

    @classmethod
    def for_target(
        cls,
        target: Any,
        state: Any,
        *,
        layers: int = 1,
        corrects: bool = True,
        block_size: int = 16,
        **layer: Any,
    ) -> BlockDrafter:
        """Return a fresh drafter for a target.

        Args:
            state: of the target's prefill, as the user decodes: with guidance or without.
            layers: of the drafter.
            corrects: make a corrector, which only the samplers here can use.
            layer: other settings of `transformer_layer_config`, by name.
        """
        width, size = state.features.shape[-1], target.vocab_size
        heads = next(heads for heads in (width // 64, 4, 2, 1) if heads and width % (2 * heads) == 0)
        table = getattr(target, "table", None)
        layer = {
            "model_type": "qwen3",
            "vocab_size": size + 1,  # and the mask
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "intermediate_size": 2 * width,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "attention_bias": False,
            "max_position_embeddings": target.grid.num_tokens + block_size,
            **layer,
        }
        if corrects:
            settings: dict[str, Any] = dict(mask_token_id=size, corrects=2 if state.guided else 1)
        elif table is None:
            settings = dict(mask_token_id=size, aux_hidden_state_layer_ids=[_depth(target)])
        else:  # as engines read it: the text's ids, and the rows of its head that draft codes
            ids, depth = target.ids(torch.arange(size)), _depth(target)
            layer["vocab_size"] = len(table.weight)
            unused = torch.ones(len(table.weight), dtype=torch.bool).index_fill(0, ids, False).nonzero()
            settings = dict(
                mask_token_id=int(unused[0]) if len(unused) else 0,
                aux_hidden_state_layer_ids=sorted({1, depth // 2, depth - 1} - {0}),
                own_embeddings=False,
                own_head=True,
            )
        made = cls(layer, draft_vocab_size=size, block_size=block_size, **settings)
        if made.lm_head is not None:
            with torch.no_grad():
                made.lm_head.weight.copy_(target.head.weight[ids])
                if made.d2t is not None:
                    made.d2t.copy_(ids - torch.arange(size))
        return made

    @staticmethod
    def wrote(settings: Mapping[str, Any]) -> bool:
        """Return whether a config.json without a class is of a folder of `speculators`."""
        return "speculators_model_type" in settings

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Read a folder of `speculators`, see `folders.read_folder`."""
        return read_folder(cls, pretrained_model_name_or_path, kwargs)

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Write a folder of `speculators`."""
        write_folder(self, save_directory)

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose hidden states the target must hand out beside what its head reads."""
        return () if self.corrector is not None else tuple(self.config["aux_hidden_state_layer_ids"] or ())

    @property
    def most(self) -> int:
        """The most slots that a block drafts."""
        anchored = self.corrector is not None or self.config["sample_from_anchor"]
        return self.config["block_size"] - (not anchored)

    # -- decoding ------------------------------------------------------------------------------------------------------

    @decodes
    def follow(self, model: Any, state: Any, *, window: int, guidance: float) -> BlockDrafterState:
        """Return the drafter's state beside a target that has just been prefilled.

        Args:
            model, state: the target and its state, or those around them that read a text (`reading_text`).
            window: the most positions of a target call.
            guidance: scale of the target's law.

        Raises:
            ValueError: the drafter was made for another target.
        """
        target, own = getattr(model, "wrapped", model), getattr(state, "inner", state)
        reads = _read_of(own, self.taps)  # [R, T or 1, ...]
        rows = len(reads) // (1 + own.guided)
        self.check_target(target, own)
        tapped = getattr(own, "tapped", None) is not None
        prompt, start = reads.new_zeros(rows, 0, dtype=torch.bool), torch.zeros(rows, dtype=torch.long)
        if self.corrector is None:
            rows = len(reads)
            prompt, start = reads.new_zeros(rows, 0, dtype=torch.bool), start.repeat(len(reads) // len(start))
            if tapped:
                prompt, start = own.prompt_mask, own.start
        length, slots = prompt.shape[1], target.grid.num_tokens + window
        layer: Any = self.layers[0]
        shape = (len(self.layers), rows, layer.groups, length + slots, layer.head_dim)
        made = BlockDrafterState(
            logits=reads.new_zeros(rows, 1),
            guided=own.guided and self.corrector is None,
            window=window,
            target=target,
            cache=StaticCache.allocate(reads, shape),
            turns=self.turns(length + slots + self.config["block_size"], reads),
            prompt=prompt,
            start=start.to(reads.device),
            guidance=guidance,
            ids=self._ids(target),
        )
        if self.corrector is not None:
            made.stale = reads.new_zeros(rows, slots, self.corrector.features)
        elif tapped:
            places = torch.arange(length, device=reads.device).expand(rows, -1)
            self._remember(made, reads, places, (prompt.cumsum(1) - 1).clamp(min=0))
        return made

    @decodes
    def observe(self, state: BlockDrafterState, target: Any, slots: Tensor) -> None:
        """Read what the target's state holds of its last call, of the tokens fed at slots [B, W]."""
        own = getattr(target, "inner", target)
        reads = _read_of(own, self.taps)  # [R, W, ...]
        if state.stale is not None:
            reads = torch.cat(reads.chunk(1 + own.guided), -1)  # [B, W, branches * F]
            state.stale.scatter_(1, slots[..., None].expand_as(reads), reads)
        elif own.guided:
            slots = slots.repeat(2, 1)
        length = state.prompt.shape[1]
        self._remember(state, reads, length + slots, state.start[:, None] + slots)

    @decodes
    def draft(
        self,
        state: BlockDrafterState,
        tokens: Tensor,
        fed: Tensor,
        slots: Tensor,
        draw: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return drafts long [B, N] of the slots after the newest token.

        Args:
            tokens: long [B, 1 + N], the newest token, then the drafts that stand at these slots.
            fed: long [B, N], what the last call was fed at the newest token's slot and after it, -1 where nothing.
            slots: long [B, 1 + N]; N at most `most`.
            draw: takes logits [R, M, V] and the slots [B, M] that they are of, and returns tokens [B, M].
        """
        old = None if state.stale is None else _at(state.stale, slots[:, :-1])
        hidden = self.hidden(state, tokens, fed, slots[:, :-1], old)
        logits = self.logits(state, hidden)
        if self.markov_head is None:
            return draw(logits, slots[:, 1:])
        drawn = [tokens[:, :1]]
        for place in range(logits.shape[1]):
            before = drawn[-1].repeat(len(logits) // len(tokens), 1)
            biased = logits[:, place, None] + self._placed(
                state, self.bias(self._outside(state, before), hidden[:, place, None])
            )
            drawn.append(draw(biased, slots[:, place + 1, None]))
        return torch.cat(drawn[1:], 1)

    def hidden(
        self, state: BlockDrafterState, tokens: Tensor, fed: Tensor, slots: Tensor, old: Tensor | None
    ) -> Tensor:
        """Return what the drafter's head reads, [R, N, dim], of the slots after slots [B, N]. Gradients flow.

        Args:
            tokens, fed: as of `draft`.
            old: [B, N, F], what the head read at the slots in the last call; of a corrector.
        """
        corrector, count = self.corrector, slots.shape[1]
        if corrector is not None:
            assert self.embed_tokens is not None
            known = fed >= 0
            asked = torch.stack(
                [tokens[:, :-1], tokens[:, 1:], fed.where(known, self.config["mask_token_id"])], 2
            )
            assert old is not None
            old = old * known[..., None]
            hidden = corrector.read(torch.cat([self.embed_tokens(asked).flatten(2), old], -1))
            hidden = hidden + corrector.age(known.long() + (known & (fed == tokens[:, :-1])))
        else:
            masks = count - self.config["sample_from_anchor"]
            tokens = F.pad(tokens[:, :1], (0, masks), value=self.config["mask_token_id"])
            slots = slots[:, :1] + torch.arange(1 + masks, device=slots.device)
            if state.guided:
                tokens, slots = tokens.repeat(2, 1), slots.repeat(2, 1)
            hidden = self._embedded(state, tokens)
        length = state.prompt.shape[1]
        places, first = torch.arange(state.cache.num_slots, device=slots.device), length + slots[:, :1]
        if on_host(slots):
            places = places[: int(first.max())]
        before = places < first  # [R, S]
        before[:, :length] &= state.prompt
        seen = F.pad(
            before[:, None, None].expand(-1, 1, hidden.shape[1], -1), (0, hidden.shape[1]), value=True
        )
        turns = self._at_positions(state, state.start[:, None] + slots)
        for index, layer in enumerate(self.layers):
            held = tuple(part[:, :, : len(places)] for part in state.cache.layer(index))
            hidden = layer(hidden, turns, held, seen)
        if corrector is None:
            return self.norm(hidden)[:, hidden.shape[1] - count :]
        assert old is not None
        first, *rest = old.chunk(corrector.branches, -1)
        base = rest[0] + state.guidance * (first - rest[0]) if rest else first
        return base + corrector.change(self.norm(hidden))

    def logits(self, state: BlockDrafterState, hidden: Tensor) -> Tensor:
        """Return logits [R, N, V] of the target's tokens, without DSpark's bias."""
        if self.lm_head is not None:
            return wide(self._placed(state, self.lm_head(hidden)))
        score = getattr(state.target, "score", None) or state.target.output
        return wide(score(hidden))

    def bias(self, before: Tensor, hidden: Tensor) -> Tensor:
        """Return DSpark's bias [R, N, draft_vocab_size] after ids long [R, N], for hidden [R, N, dim]."""
        assert self.markov_head is not None
        parts = self.markov_head
        vector = parts["markov_w1"](before)
        if "gate_proj" in parts:
            vector = torch.sigmoid(parts["gate_proj"](torch.cat([hidden, vector], -1))) * vector
        return parts["markov_w2"](vector)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _remember(self, state: BlockDrafterState, reads: Tensor, places: Tensor, positions: Tensor) -> None:
        """Write the keys of hidden states [R, W, layers * F], whose tokens stand at `positions`, at `places` [R, W]."""
        state.cache.at(places, state.cache.num_slots)
        for index, (keys, values) in enumerate(self.keys(state, reads, positions)):
            state.cache.update(index, keys, values)

    def keys(self, state: BlockDrafterState, reads: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [R, W, H, D] of each layer, of hidden states [R, W, layers * F]. Gradients flow."""
        hidden, turns = self.hidden_norm(self.fc(reads)), self._at_positions(state, positions)
        layers: Any = self.layers
        return [layer.keys(hidden, turns) for layer in layers]

    def turns(self, count: int, like: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[0]
        size = layer.head_dim
        speeds = self.theta ** -(torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
        angles = torch.outer(torch.arange(count, device=like.device), speeds).repeat(1, 2)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)

    def _at_positions(self, state: BlockDrafterState, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosines, sines = state.turns
        positions = positions.clamp(max=len(cosines) - 1)
        return cosines[positions], sines[positions]

    def _embedded(self, state: BlockDrafterState, tokens: Tensor) -> Tensor:
        """Embed tokens of the target, and the mask, long [R, N]."""
        mask = tokens == self.config["mask_token_id"]
        mask[:, 0] = False
        ids = self._outside(state, tokens.masked_fill(mask, 0)).masked_fill(
            mask, self.config["mask_token_id"]
        )
        table = state.target.table if self.embed_tokens is None else self.embed_tokens
        return table(ids)

    def _outside(self, state: BlockDrafterState, tokens: Tensor) -> Tensor:
        """Ids that are embedded, of the target's tokens: the text's, where the target is the decoder of a text."""
        ids_of = getattr(state.target, "ids", None)
        return tokens if ids_of is None or self.corrector is not None else ids_of(tokens)

    def _placed(self, state: BlockDrafterState, logits: Tensor) -> Tensor:
        """Logits [R, N, V] of the target's tokens, from those of the drafter's ids."""
        if state.ids is None:
            return logits
        return logits[..., state.ids.clamp(min=0)].masked_fill(state.ids < 0, -torch.inf)

    def _ids(self, target: Any) -> Tensor | None:
        """The drafter's ids of the target's tokens, see `BlockDrafterState.ids`."""
        if self.lm_head is None or not hasattr(target, "ids"):
            return None
        wanted = target.ids(torch.arange(target.vocab_size, device=self.device))
        size = self.config["draft_vocab_size"]
        own = torch.arange(size, device=self.device)
        own = own if self.d2t is None else own + self.d2t
        same = own[:, None] == wanted  # [drafted, V]
        ids = torch.where(same.any(0), same.long().argmax(0), -1)
        return None if torch.equal(ids, torch.arange(size, device=ids.device)) else ids

    def check_target(self, target: Any, state: Any) -> None:
        """Refuse a target that this drafter was not made for, by ValueError."""
        width, branches, dtype = state.features.shape[-1], 1 + state.guided, state.features.dtype
        if dtype != self.dtype:
            raise ValueError(
                f"this drafter is in {self.dtype}, and the model in {dtype}; pass drafter.to({dtype})."
            )
        if width != self.features:
            raise ValueError(
                f"this drafter reads hidden states of {self.features} numbers, and the model has {width}; pass the one "
                "that was trained for this model (python -m visual_spec.training.block_drafter)."
            )
        if self.corrector is not None and self.corrector.branches != branches:
            raise ValueError(
                f"this corrector reads {self.corrector.branches} branches, and this decode has {branches}; decode with "
                "guidance as it was trained, or train one for this law."
            )
        if self.lm_head is None and self.config["draft_vocab_size"] not in (
            target.vocab_size,
            getattr(target, "num_ids", 0),
        ):
            raise ValueError(
                f"this drafter drafts {self.config['draft_vocab_size']} tokens, and the model has {target.vocab_size}."
            )
        if self.taps not in ((), (_depth(target),)) and getattr(state, "tapped", None) is None:
            raise ValueError(
                f"this drafter reads layers {list(self.taps)}, which a {type(target).__name__} does not hand out; "
                "train a corrector for it."
            )


def _read_of(state: Any, taps: tuple[int, ...]) -> Tensor:
    """What the drafter reads of a target's state, [R, W, ...]."""
    return state.tapped if taps and getattr(state, "tapped", None) is not None else state.features


def _depth(target: Any) -> int:
    """The number of the target's layers."""
    return len(target.layers) if hasattr(target, "layers") else target.decoder.config.num_hidden_layers


def _at(values: Tensor, slots: Tensor) -> Tensor:
    """Return values [B, S, F] at slots [B, N]."""
    return values.gather(1, slots[..., None].expand(-1, -1, values.shape[-1]))


def layer_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the layers, with Qwen3's where nothing is said.

    Raises:
        ValueError: layers of another kind: sliding attention, scaled rotary embeddings, another activation.
    """
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    layer = {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 128,
        **given,
    }
    kinds = set(given.get("layer_types") or ()) - {"full_attention"}
    kind = rope.get("rope_type", rope.get("type", "default"))
    act = given.get("hidden_act", "silu")
    if kinds or kind != "default" or act != "silu":
        raise ValueError(
            f"transformer_layer_config has layer_types={sorted(kinds)}, rope_type={kind!r}, hidden_act={act!r}; blocks "
            "are drafted by layers of full attention with plain rotary embeddings and 'silu'."
        )
    return layer
