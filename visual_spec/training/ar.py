"""Train the embedded LlamaGen and its caption encoder on tokens of `shapes`.

Teacher-forced cross entropy over whole pictures. A tenth of the captions is replaced by the learned unconditional
embedding, so that classifier-free guidance works (Ho and Salimans 2022; LlamaGen section 3.2).

Most tokens of a picture follow from their neighbours, so the caption matters in few places, and a model can learn for a
long time without it. So until the last part of a run, half of the pictures have hidden input tokens, and most of those
have all tokens hidden: one visible token of an object shows its colour, and then the model need not look up the word.
In these pictures tokens of objects weigh more than those of the background, which are many and soon learned. This
biases only the law of hidden pictures, which is never sampled from.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data.shapes import (
    BACKGROUND_COLOURS,
    COUNTS,
    OBJECT_COLOURS,
    RELATIONS,
    SHAPES,
    SIZES,
    TEXTURES,
    caption,
    sample_dataset,
)
from visual_spec.models.core.checkpoints import read_content
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.next_token.llamagen import CaptionEmbedding, LlamaGenTransformer, TextCondition
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder, split_words
from visual_spec.training.loop import Checkpoint, Descent, muon_and_adamw, write_json
from visual_spec.training.tokenizer import to_signed


@dataclass(frozen=True)
class AutoregressiveTraining:
    """Settings of a run. `bfloat16` computes the matrix products in it: faster on a GPU, and on CPUs with support."""

    steps: int = 3000
    batch_size: int = 16
    scenes: int = 24000
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


def shapes_vocabulary() -> list[str]:
    """Return every word that a `shapes` caption can hold."""
    words = [
        "a",
        "on",
        "background",
        *COUNTS,
        *OBJECT_COLOURS,
        *BACKGROUND_COLOURS,
        *SHAPES,
        *SIZES,
        *TEXTURES,
    ]
    words += [word for relation in RELATIONS for word in split_words(relation)]
    words += [name + ("es" if name == "cross" else "s") for name in SHAPES]
    return list(dict.fromkeys(words))


@torch.no_grad()
def tokenize_dataset(
    vq_model: VQModel,
    encoder: CaptionEncoder,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    side: int = 16,
    cache: Path | None = None,
    workers: int = 1,
) -> tuple[Tensor, Tensor]:
    """Return word ids `[N, T]` and tokens int16 `[N, side * side]` of fresh scenes.

    `cache`, a folder, stores them if given. For a `side` below the tokenizer's own, pixels are averaged to shrink the
    pictures first. So many `workers` paint the pictures, each in a process of its own if there are several.

    Raises:
        ValueError: `cache` holds the tokens of another tokenizer, or the words of another vocabulary.
    """
    path = cache / f"tokens_{side}_{count}_{seed}_{int(held_out)}.pt" if cache else None
    owner = f"{fingerprint([vq_model])} {list(encoder.config['vocabulary'])} {encoder.max_words}"
    if path and path.exists():
        saved = read_content(path)
        if not isinstance(saved, dict) or saved.get("owner") != owner:
            raise ValueError(
                f"{path} holds tokens of another tokenizer or words of another encoder; pass another --out folder, or "
                "remove it."
            )
        return saved["words"], saved["tokens"]
    words, tokens = [], []
    for captions, pictures in _painted(count, seed, held_out, workers):
        words.append(encoder.word_ids(captions).cpu())
        for part in to_signed(pictures).split(20):
            part = F.adaptive_avg_pool2d(part, side * vq_model.patch_size)
            tokens.append(vq_model.encode_tokens(part.to(vq_model.device)).to(torch.int16).cpu())
    result = torch.cat(words), torch.cat(tokens)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"words": result[0], "tokens": result[1], "owner": owner}, path)
    return result


def _painted(count: int, seed: int, held_out: bool, workers: int) -> Iterator[tuple[list[str], np.ndarray]]:
    """Captions and pictures of scenes, at most 500 at a time."""
    starts = range(0, count, 500)
    settings = (
        [min(500, count - start) for start in starts],
        [seed * 100_003 + start for start in starts],
        [held_out] * len(starts),
    )
    if workers == 1:
        yield from map(_paint, *settings)
        return
    # Spawned, because a process that uses a GPU cannot be forked.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_paint, *settings)


def _paint(count: int, seed: int, held_out: bool) -> tuple[list[str], np.ndarray]:
    scenes, pictures = sample_dataset(count, seed, held_out=held_out)
    return [caption(scene) for scene in scenes], pictures


def initialise(model: LlamaGenTransformer) -> None:
    """Start token embeddings and the caption projection at a scale of order one.

    With the official standard deviation of 0.02 the residual stream starts so small that the blocks drown the words: a
    model of this size then learnt no object colour in 2600 steps. From this start it learnt them in 500.
    """
    torch.nn.init.normal_(model.tok_embeddings.weight, std=0.3)
    assert isinstance(model.cls_embedding, CaptionEmbedding)
    for layer in (model.cls_embedding.cap_proj.fc1, model.cls_embedding.cap_proj.fc2):
        torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)


def object_tokens(words: Tensor, tokens: Tensor) -> Tensor:
    """Return which tokens `[N, L]` belong to objects: those other than the usual background tokens of their slot.

    A caption ends in "<texture> <colour> background", so pictures `[N, T]` with equal last words share a background.
    """
    _, group = words[:, -3:-1].unique(dim=0, return_inverse=True)
    usual = torch.stack([tokens[group == number].mode(0).values for number in range(int(group.max()) + 1)])
    return tokens != usual[group]


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
    device = model.device
    side = model.grid.width
    words, tokens = tokenize_dataset(
        vq_model, encoder, settings.scenes, settings.seed + 1, side=side, cache=out
    )
    modules = torch.nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    encoder.requires_grad_(settings.train_text_encoder)
    trained = [p for p in modules.parameters() if p.requires_grad]
    optimisers = muon_and_adamw(model.layers, trained, settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    checkpoint = Checkpoint(
        out / "resume.pt", every, asdict(settings), reads=[vq_model], modules=modules, descend=descend
    )

    weights = 1.0 + (settings.object_weight - 1.0) * object_tokens(words, tokens)

    def loss_of(
        word_ids: Tensor, token_ids: Tensor, dropped: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=settings.bfloat16):
            condition: TextCondition = encoder(word_ids)
            logits = model.teacher_forced(token_ids, condition, dropped, hidden)
        return (F.cross_entropy(logits.mT, token_ids, reduction="none") * weight).mean() / weight.mean()

    step_loss = torch.compile(loss_of) if settings.compile else loss_of
    for step in range(checkpoint.resume(), settings.steps):
        batch = _draw_batch(words, tokens, weights, settings, step)
        loss = step_loss(*(part.to(device) for part in batch))
        descend(loss, step)
        checkpoint.after(step, settings.steps, loss)
    modules.eval()
    record = {
        "settings": asdict(settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seconds": round(checkpoint.seconds),
        "held_out_loss": round(_held_out_loss(model, encoder, vq_model), 4),
        "loss": checkpoint.curve,
    }
    model.save_pretrained(out / "transformer")
    encoder.save_pretrained(out / "text_encoder")
    write_json(out / "training.json", record)
    checkpoint.remove()
    return record


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
    hide = rng.random((count, 1)) < settings.hidden_pictures * (step < settings.hidden_until * settings.steps)
    rate = rng.uniform(0.3, 1.0, (count, 1))
    rate[rng.random((count, 1)) < settings.wholly_hidden] = 1.0
    hidden = torch.from_numpy(hide & (rng.random((count, tokens.shape[1] - 1)) < rate))
    weight = weights[chosen].where(torch.from_numpy(hide), 1.0)
    return words[chosen], tokens[chosen].long(), dropped, hidden, weight


@torch.no_grad()
def _held_out_loss(model: LlamaGenTransformer, encoder: CaptionEncoder, vq_model: VQModel) -> float:
    """Return the cross entropy in nats a token on 400 held-out pictures."""
    words, tokens = tokenize_dataset(vq_model, encoder, 400, 777, held_out=True, side=model.grid.width)
    losses = []
    for word_ids, token_ids in zip(
        words.to(model.device).split(20), tokens.to(model.device).long().split(20), strict=True
    ):
        logits = model.teacher_forced(token_ids, encoder(word_ids))
        losses.append(F.cross_entropy(logits.mT, token_ids).item())
    return float(np.mean(losses))


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded LlamaGen and caption encoder.

`python -m visual_spec.training.ar --tokenizer FOLDER --out FOLDER`

Afterwards `--out` holds `transformer/`, `text_encoder/` and `training.json`; `scripts/assemble_shapes.py` joins the
parts to a pipeline.
"""


def _parser() -> argparse.ArgumentParser:
    defaults = AutoregressiveTraining()
    parser = argparse.ArgumentParser(description=HELP)
    parser.add_argument(
        "--tokenizer",
        type=Path,
        required=True,
        help="folder that python -m visual_spec.training.tokenizer wrote",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument(
        "--hidden-pictures",
        type=float,
        default=defaults.hidden_pictures,
        help="share of pictures with hidden input tokens; 0 to go on from weights that hear the caption",
    )
    parser.add_argument(
        "--grid-size", type=int, default=16, help="tokens per side; 8 for the low-resolution drafter"
    )
    parser.add_argument(
        "--text-encoder", type=Path, help="a trained text encoder to keep as it is; default: train one"
    )
    parser.add_argument(
        "--start-from", type=Path, help="folder with transformer/ and text_encoder/ to start from"
    )
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    torch.manual_seed(arguments.seed)
    vq_model = VQModel.from_pretrained(arguments.tokenizer).eval().to(arguments.device)
    if arguments.text_encoder is None:
        encoder = CaptionEncoder(shapes_vocabulary(), dim=128, num_layers=0, num_heads=4, max_words=20)
    else:
        encoder = CaptionEncoder.from_pretrained(arguments.text_encoder)
    model = LlamaGenTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=arguments.dim,
        num_layers=arguments.num_layers,
        num_heads=arguments.num_heads,
        grid_size=arguments.grid_size,
        prefix_length=encoder.max_words,
        num_classes=None,
        caption_dim=encoder.config["dim"],
        zero_prefix_keys=False,
    )
    initialise(model)
    if arguments.start_from is not None:
        encoder.load_state_dict(
            CaptionEncoder.from_pretrained(arguments.start_from / "text_encoder").state_dict()
        )
        model.load_state_dict(
            LlamaGenTransformer.from_pretrained(arguments.start_from / "transformer").state_dict()
        )
    settings = AutoregressiveTraining(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        scenes=arguments.scenes,
        learning_rate=arguments.learning_rate,
        hidden_pictures=arguments.hidden_pictures,
        train_text_encoder=arguments.text_encoder is None,
        bfloat16=arguments.bfloat16,
        compile=not arguments.no_compile,
        seed=arguments.seed,
    )
    model.to(arguments.device)
    encoder.to(arguments.device)
    record = train_autoregressive(model, encoder, vq_model, settings, arguments.out)
    print(
        f"{record['parameters'] / 1e6:.2f} M parameters, held-out loss {record['held_out_loss']}, {record['seconds']} s"
    )


if __name__ == "__main__":
    main()
