"""Train the embedded LlamaGen and its caption encoder on tokens of `shapes` or `things`.

Teacher-forced cross entropy over whole pictures. A tenth of the captions is replaced by the learned unconditional
embedding, so that classifier-free guidance works (Ho and Salimans 2022; LlamaGen section 3.2).

Most tokens of a picture follow from their neighbours, so the caption matters in few places, and a model can learn for a
long time without it. So until the last part of a run, half of the pictures have hidden input tokens, and most of those
have all tokens hidden: one visible token of an object shows its colour, and then the model need not look up the word.
In these pictures tokens of objects weigh more than tokens of the background, which are many and soon learned. This
biases only the law of hidden pictures, which is never sampled from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.captions import PICTURES
from visual_spec.data.shapes import TOUCHING
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_blocks import CaptionEmbedding
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.training.loop import Descent, RunOptions, Trainer, muon_and_adamw, option, read_options
from visual_spec.training.tokens import object_tokens, tokenize_dataset, weighted_cross_entropy


@dataclass(frozen=True)
class AutoregressiveTraining:
    """Settings of a run. `bfloat16` computes the matrix products in it: faster on a GPU, and on CPUs with support.

    `data` is one of `PICTURES`. `touching` is, of `shapes`, the share of scenes with one object inside or overlapping
    another, the last kinds that a model learns.
    """

    data: str = "shapes"

    steps: int = 3000
    batch_size: int = 16
    scenes: int = 24000
    touching: float = TOUCHING
    learning_rate: float = 1.2e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    hidden_pictures: float = 0.5
    wholly_hidden: float = 0.6
    object_weight: float = 3.0
    hidden_until: float = 0.6
    train_text_encoder: bool = True
    bfloat16: bool = False
    compile: bool = True
    seed: int = 0


def initialise(model: LlamaGenTransformer) -> None:
    """Start token embeddings and the caption projection at a scale of order one.

    With the official standard deviation of 0.02 the residual stream starts so small that the blocks drown the words: a
    model of this size then learnt no object colour in 2600 steps. From this start it learnt them in 500.
    """
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.3)
    assert isinstance(model.cls_embedding, CaptionEmbedding)
    for layer in (model.cls_embedding.cap_proj.fc1, model.cls_embedding.cap_proj.fc2):
        torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)


def train_autoregressive(
    model: LlamaGenTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: AutoregressiveTraining,
    out: Path,
    *,
    every: int = 200,
) -> dict:
    """Train both networks in place, on their device; save them in `out/transformer` and `out/text_encoder`; return the
    record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    side = model.grid.width
    kinds: Any = {"touching": settings.touching} if settings.data == "shapes" else {}
    words, tokens = tokenize_dataset(
        vq_model,
        encoder,
        settings.scenes,
        settings.seed + 1,
        side=side,
        cache=out,
        data=settings.data,
        **kinds,
    )
    modules = torch.nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    encoder.requires_grad_(settings.train_text_encoder)
    trained = [p for p in modules.parameters() if p.requires_grad]
    optimisers = muon_and_adamw(model.layers, trained, settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    weights = 1.0 + (settings.object_weight - 1.0) * object_tokens(words, tokens)

    def loss_of(
        word_ids: Tensor, token_ids: Tensor, dropped: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            condition: TextCondition = encoder(word_ids)
            logits = model.teacher_forced(token_ids, condition, dropped, hidden)
        return weighted_cross_entropy(logits, token_ids, weight)

    def save() -> None:
        model.save_pretrained(out / "transformer")
        encoder.save_pretrained(out / "text_encoder")

    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model], parts={"modules": modules})
    return run.run(
        loss_of,
        lambda step: _draw_batch(words, tokens, weights, settings, step),
        lambda: {"held_out_loss": round(_held_out_loss(model, encoder, vq_model, settings.data), 4)},
        save,
    )


def hidden_inputs(
    rng: np.random.Generator, share: float, wholly: float, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return which of some samples have hidden inputs, bool `[B, 1]`, and which inputs those are, bool `[B, L - 1]`.

    Args:
        share: of the samples that have any; each hides 0.3 to 1 of its inputs.
        wholly: share of those that hide all.
    """
    hide = rng.random((shape[0], 1)) < share
    rate = rng.uniform(0.3, 1.0, (shape[0], 1))
    rate[rng.random((shape[0], 1)) < wholly] = 1.0
    return torch.from_numpy(hide), torch.from_numpy(hide & (rng.random(shape) < rate))


def _draw_batch(
    words: Tensor, tokens: Tensor, weights: Tensor, settings: AutoregressiveTraining, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return words, tokens `[B, L]`, dropped captions, hidden inputs and weights of a step, the same for the same seed.

    Args:
        words, tokens: of the whole dataset.
        weights: `[N, L]`, of the tokens of pictures with hidden inputs.
    """
    rng, count = np.random.default_rng((settings.seed, step)), settings.batch_size
    chosen = torch.from_numpy(rng.integers(len(tokens), size=count))
    dropped = torch.from_numpy(rng.random(count) < settings.caption_dropout)
    share = settings.hidden_pictures * (step < settings.hidden_until * settings.steps)
    hide, hidden = hidden_inputs(rng, share, settings.wholly_hidden, (count, tokens.shape[1] - 1))
    weight = weights[chosen].where(hide, 1.0)
    return words[chosen], tokens[chosen].long(), dropped, hidden, weight


@torch.no_grad()
def _held_out_loss(
    model: LlamaGenTransformer, encoder: CaptionEncoder, vq_model: VQModel, data: str = "shapes"
) -> float:
    """Return the cross entropy in nats a token on 400 held-out pictures."""
    side = model.grid.width
    words, tokens = tokenize_dataset(vq_model, encoder, 400, 777, held_out=True, side=side, data=data)
    losses = []
    for word_ids, token_ids in zip(
        words.to(model.device).split(20), tokens.to(model.device).long().split(20), strict=True
    ):
        logits = model.teacher_forced(token_ids, encoder(word_ids))
        losses.append(F.cross_entropy(logits.mT, token_ids).item())
    return float(np.mean(losses))


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded LlamaGen and caption encoder.

`python scripts/train ar --tokenizer FOLDER --out FOLDER`

Afterwards `--out` holds `transformer/`, `text_encoder/` and `training.json`; `scripts/assemble.py shapes` joins the
parts to a pipeline.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    tokenizer: Path = option("folder that python scripts/train tokenizer wrote")
    grid_size: int = option("tokens per side; 8 for the low-resolution drafter", 16)
    text_encoder: Path | None = option("a trained text encoder to keep as it is; without: train one", None)
    start_from: Path | None = option("folder with transformer/ and text_encoder/ to start from", None)
    blocks_from: Path | None = option("folder of a transformer of these sizes to take the blocks of", None)
    dim: int = 192
    num_layers: int = 6
    num_heads: int = 4


def main() -> None:
    options, settings = read_options(HELP, Options, AutoregressiveTraining)
    settings = replace(settings, train_text_encoder=options.text_encoder is None)
    torch.manual_seed(settings.seed)
    vq_model = VQModel.from_pretrained(options.tokenizer).eval().to(options.device)
    if options.text_encoder is None:
        encoder = CaptionEncoder(
            PICTURES[settings.data].vocabulary(), dim=128, num_layers=0, num_heads=4, max_words=20
        )
    else:
        encoder = CaptionEncoder.from_pretrained(options.text_encoder)
    model = LlamaGenTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=options.dim,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        grid_size=options.grid_size,
        prefix_length=encoder.max_words,
        num_classes=None,
        caption_dim=encoder.config["dim"],
        zero_prefix_keys=False,
    )
    initialise(model)
    if options.start_from is not None:
        for part, name in ((encoder, "text_encoder"), (model, "transformer")):
            part.load_state_dict(type(part).from_pretrained(options.start_from / name).state_dict())
    if options.blocks_from is not None:
        model.layers.load_state_dict(
            LlamaGenTransformer.from_pretrained(options.blocks_from).layers.state_dict()
        )
    model.to(options.device)
    encoder.to(options.device)
    record = train_autoregressive(model, encoder, vq_model, settings, options.out)
    print({name: record[name] for name in ("parameters", "held_out_loss", "seconds")})
