"""Train the causal layer of a masked model of pictures, on tokens of `shapes`.

The masked model, which does not change, reads a picture of which only the first tokens of an order are known; the
layer learns the tokens after them, each given all before it (cross entropy; self-speculative masked diffusion,
2510.03929). Half of the pictures take the order of the Halton sequence, half a random one. A tenth goes without
captions, so that guidance works. Matrices are stored in 8 bits.

The tokens of a group tell most about each other where little is known: `shapes_masked`, told 31 more tokens, gains 0.7
nats on the next one where it knew none (random order), 0.1 where it knew 32, and nothing where it knew 96. So most
pictures of a batch are learned from their beginning. The model's features of a blank picture depend on the caption
only, and are computed once. In the other pictures `L * u^3` tokens are known, for a uniform u.

Its figure of merit is the loss of held-out tokens, beside the masked model's, to which the tokens of a group are
independent. The mean overlap of both laws, the sum over the codes of the smaller probability, is the chance that a
draft of the masked model is kept.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.loading import load_pipeline
from visual_spec.prototype.self_speculative.causal_layer import CausalLayer
from visual_spec.samplers.core.masking import halton_order
from visual_spec.training.loop import Descent, OutOptions, Trainer, option, read_options, round_matrices
from visual_spec.training.tokens import tokenize_dataset


@dataclass(frozen=True)
class CausalLayerTraining:
    """Settings of a run.

    Attributes:
        batch_size: pictures of a step that are learned from their beginning.
        begun: pictures of a step of which some tokens are known.
        places: tokens after the known ones that are learned, the widest group the layer is made for.
        bfloat16: compute the features in it: faster on a GPU, and on CPUs that can.
    """

    steps: int = 3000
    batch_size: int = 24
    begun: int = 6
    scenes: int = 5000
    places: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    caption_dropout: float = 0.1
    bfloat16: bool = False
    seed: int = 0


@dataclass
class Groups:
    """Hidden tokens of pictures, in the order in which they are decoded.

    Attributes:
        features: [B, G, C], of the masked model at their slots.
        tokens, slots: long [B, G].
        there: bool [B, G], false after the last slot of a picture.
        state: the masked model's own.
    """

    features: Tensor
    tokens: Tensor
    slots: Tensor
    there: Tensor
    state: Any


@dataclass
class Beginnings:
    """What a masked model makes of blank pictures, by caption; the last one has none.

    Attributes:
        features: bfloat16 [N + 1, L, C].
        modulation: [N + 1, 2, C], of the head.
        state: some state of the model.
    """

    features: Tensor
    modulation: Tensor
    state: Any

    @classmethod
    @torch.no_grad()
    def of(cls, model: MaskedImageTransformer, encoder: CaptionEncoder, words: Tensor) -> Beginnings:
        """Read captions, words long [N, T], 32 at a time."""
        features, modulation, state = [], [], None
        for part in [*words.split(32), None]:
            conditions, count = (None, 1) if part is None else (encoder(part), len(part))
            state = model.prepare(conditions, batch_size=count, guided=False)
            blank = torch.full((count, model.grid.num_tokens, 1), model.mask_id, device=words.device)
            model(state, blank, 0, keep=0)
            assert state.features is not None
            features.append(state.features.bfloat16())
            modulation.append(state.head_modulation.float())
        return cls(torch.cat(features), torch.cat(modulation), state)

    def groups(self, chosen: Tensor, tokens: Tensor, order: Tensor, places: int) -> Groups:
        """The first `places` tokens of pictures with the captions `chosen`, long [B]; N is no caption."""
        slots = order[:, :places]
        features = self.features[chosen[:, None], slots].float()
        state = copy(self.state)
        state.head_modulation = self.modulation[chosen]
        there = torch.ones_like(slots, dtype=torch.bool)
        return Groups(features, tokens.gather(1, slots), slots, there, state)


def new_layer(model: MaskedImageTransformer, dim: int | None = None, num_heads: int = 8) -> CausalLayer:
    """A fresh layer for a model."""
    return CausalLayer(model.feature_dim, model.vocab_size, model.grid.width, dim, num_heads)


@torch.no_grad()
def groups_of(
    model: MaskedImageTransformer, condition: Any, tokens: Tensor, order: Tensor, known: Tensor, places: int
) -> Groups:
    """Return what the layer learns from pictures of which the model sees the first tokens of an order.

    Args:
        condition: of the model, or None.
        tokens, order: long [B, L], by slot and by place.
        known: long [B], the tokens that the model sees.
        places: G, of the group.
    """
    batch, length = tokens.shape
    state = model.prepare(condition, batch_size=batch, guided=False)
    rank = order.argsort(1)  # [B, L], the place of each slot
    seen = tokens.masked_fill(rank >= known[:, None], model.mask_id)
    model(state, seen[..., None], 0, keep=0)
    following = known[:, None] + torch.arange(places, device=tokens.device)  # [B, G]
    there = following < length
    slots = order.gather(1, following.clamp(max=length - 1))
    assert state.features is not None
    features = state.features.float()
    features = features.gather(1, slots[..., None].expand(-1, -1, features.shape[-1]))
    return Groups(features, tokens.gather(1, slots), slots, there, state)


def chain_logits(layer: CausalLayer, model: MaskedImageTransformer, groups: Groups) -> Tensor:
    """Logits `[B, G, V]` of the tokens of groups, each given those before it, with gradients."""
    return model.scores(groups.state, layer(groups.features, groups.tokens, groups.slots))


def loss_of(logits: Tensor, groups: Groups) -> Tensor:
    """The mean cross entropy of the tokens of groups, in nats."""
    return F.cross_entropy(logits[groups.there].float(), groups.tokens[groups.there])


def some_orders(count: int, side: int, dice: torch.Generator) -> Tensor:
    """Orders of the slots, long [count, L]: the Halton sequence for the first half, then random orders."""
    length = side**2
    drawn = torch.rand(count, length, generator=dice).argsort(1)
    drawn[: count // 2] = halton_order(1, side, side)
    return drawn


def train_causal_layer(
    layer: CausalLayer,
    model: MaskedImageTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: CausalLayerTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    A run that was interrupted goes on from `out/resume.pt` as if it had not been; the finished run removes it. The
    tokens of the scenes are kept in `out`.

    Raises:
        ValueError: a layer for another model.
    """
    layer.check_fits(model)
    words, tokens = tokenize_dataset(vq_model, encoder, settings.scenes, settings.seed + 1, cache=out)
    rate, size = settings.learning_rate, settings.batch_size
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
        beginnings = Beginnings.of(model, encoder, words)
    optimiser = torch.optim.AdamW(layer.parameters(), lr=rate, weight_decay=settings.weight_decay)
    descend = Descent([optimiser], settings.steps, rate, warmup=min(50, settings.steps))
    reads = [model, encoder, vq_model]

    def batch(step: int) -> tuple[Any, ...]:
        dice = torch.Generator().manual_seed((settings.seed << 32) + step)
        chosen = torch.randint(len(tokens), (size,), generator=dice)
        lengths = chosen.where(torch.rand(size, generator=dice) >= settings.caption_dropout, len(tokens))
        order = some_orders(size, model.grid.width, dice)
        blank = beginnings.groups(lengths, tokens[chosen].long(), order, settings.places)
        return blank, _begun(model, encoder, words, tokens, settings, dice) if settings.begun else None

    def loss(blank: Groups, begun: Groups | None) -> Tensor:
        early = loss_of(chain_logits(layer, model, blank), blank)
        if begun is None:
            return early
        late = loss_of(chain_logits(layer, model, begun), begun)
        return (size * early + settings.begun * late) / (size + settings.begun)

    def judged() -> dict[str, Any]:
        round_matrices(layer, out)
        places = min(settings.places, 32)
        return {"held_out": held_out(layer, model, encoder, vq_model, places=places)}

    run = Trainer(layer, settings, out, descend, every=every, reads=reads, parts={"layer": layer})
    return run.run(loss, batch, judged)


@torch.no_grad()
def _begun(
    model: MaskedImageTransformer,
    encoder: CaptionEncoder,
    words: Tensor,
    tokens: Tensor,
    settings: CausalLayerTraining,
    dice: torch.Generator,
) -> Groups:
    """Groups of pictures of which some tokens are known."""
    chosen = torch.randint(len(tokens), (settings.begun,), generator=dice)
    known = (model.grid.num_tokens * torch.rand(settings.begun, generator=dice) ** 3).long()
    order = some_orders(settings.begun, model.grid.width, dice)
    dropped = torch.rand((), generator=dice).item() < settings.caption_dropout
    with torch.autocast("cpu", torch.bfloat16, enabled=settings.bfloat16):
        conditions = None if dropped else encoder(words[chosen])
        return groups_of(model, conditions, tokens[chosen].long(), order, known, settings.places)


@torch.no_grad()
def held_out(
    layer: CausalLayer,
    model: MaskedImageTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    *,
    places: int,
    count: int = 64,
) -> dict[str, dict[str, float]]:
    """By order and number of known tokens, for groups of held-out pictures: nats a token of both laws, and their mean
    overlap.
    """
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True)
    orders = some_orders(2 * count, model.grid.width, torch.Generator().manual_seed(777)).split(count)
    figures = {}
    for name, order in zip(("halton", "random"), orders, strict=True):
        for known in (0, *(model.grid.num_tokens // share for share in (32, 8, 2))):
            sums = torch.zeros(4, dtype=torch.float64)
            for part in torch.arange(count).split(16):
                conditions = encoder(words[part])
                held = torch.full_like(part, known)
                groups = groups_of(model, conditions, tokens[part].long(), order[part], held, places)
                drafts = model.scores(groups.state, groups.features)
                laws = chain_logits(layer, model, groups)
                here = int(groups.there.sum())
                shared = torch.minimum(drafts.softmax(-1), laws.softmax(-1)).sum(-1)[groups.there].sum()
                nats = [loss_of(logits, groups).item() * here for logits in (drafts, laws)]
                sums += torch.tensor([*nats, shared.item(), here])
            means = [round(value, 4) for value in (sums[:3] / sums[3]).tolist()]
            names = ("independent_nats", "chain_nats", "overlap")
            figures[f"{name}, {known} known"] = dict(zip(names, means, strict=True))
    return figures


HELP = "Train the causal layer of a masked model: python scripts/train causal_layer --out FOLDER"


@dataclass(kw_only=True)
class Options(OutOptions):
    model: str = option("embedded name or folder of a masked pipeline", "shapes_masked")
    start_from: Path | None = option("folder of an earlier run to go on with, at a new rate", None)
    dim: int | None = option("width (default: the model's)", None)
    num_heads: int = 8


def main() -> None:
    options, settings = read_options(HELP, Options, CausalLayerTraining)
    pipe: Any = load_pipeline(options.model)
    for part in (pipe.transformer, pipe.text_encoder, pipe.vq_model):
        part.eval().requires_grad_(False)
    torch.manual_seed(settings.seed)
    if options.start_from is None:
        layer = new_layer(pipe.transformer, options.dim, options.num_heads)
    else:  # 32 bits: what is stored in fewer is computed with in these
        layer = CausalLayer.from_pretrained(options.start_from, torch_dtype=torch.float32)
    parts = pipe.transformer, pipe.text_encoder, pipe.vq_model
    figures = train_causal_layer(layer, *parts, settings, options.out)
    print(f"{figures['parameters'] / 1e6:.2f} M parameters, held out {figures['held_out']}")
