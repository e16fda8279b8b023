"""Train the embedded masked model of pictures on tokens of `shapes`.

The loss is the cross entropy of hidden tokens (Chang et al. 2022, section 3.1). The hidden share of each picture is
drawn as the Halton sampler's authors do: the arccos of a uniform number, so that most pictures hide most tokens. A
tenth of the captions is replaced by none, so that guidance works (Ho and Salimans 2022). Tokenizer and caption encoder
come from the autoregressive model and do not change.

In the first part of a run tokens of objects weigh more than tokens of the background, which are many and soon learned.
Weights change the law that is learned, so later all tokens weigh the same.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.tokenizer import to_pixels
from visual_spec.data.shapes import held_out_prompts
from visual_spec.data.shapes_parser import score
from visual_spec.files.documents import write_json
from visual_spec.models.core.settings import of_settings
from visual_spec.models.masked.maskgit import MaskedImageTransformer
from visual_spec.models.next_token.llamagen_vq import VQModel
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    round_matrices,
)
from visual_spec.training.tokens import object_tokens, tokenize_dataset, weighted_cross_entropy


@dataclass(frozen=True)
class MaskedImageTraining:
    """Settings of a run.

    Attributes:
        object_weight: weight in the loss of tokens of objects, during the share `weighted_until` of the steps.
        bfloat16: compute the matrix products in it: faster on a GPU, and on CPUs that can.
    """

    steps: int = 4000
    batch_size: int = 256
    scenes: int = 100_000
    learning_rate: float = 1.5e-3
    weight_decay: float = 0.02
    caption_dropout: float = 0.1
    object_weight: float = 3.0
    weighted_until: float = 0.4
    bfloat16: bool = False
    compile: bool = False
    seed: int = 0


def new_model(
    vq_model: VQModel, encoder: CaptionEncoder, *, dim: int, num_layers: int, num_heads: int
) -> MaskedImageTransformer:
    """Return a fresh model for a tokenizer's tokens and an encoder's captions.

    Embeddings and the caption projection start at a scale of order one, see `training.ar.initialise`. Token embeddings
    are also the head, and logits that start of order one need smaller rows.
    """
    model = MaskedImageTransformer(
        vocab_size=vq_model.config["codebook_size"],
        dim=dim,
        num_layers=num_layers,
        num_heads=num_heads,
        grid_size=vq_model.tokens_per_side,
        num_classes=None,
        caption_dim=encoder.config["dim"],
        prefix_length=encoder.max_words,
    )
    for layer in (model.caption.cap_proj.fc1, model.caption.cap_proj.fc2):
        torch.nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
    for table in (model.tok_emb, model.pos_emb, model.reg_tokens):
        torch.nn.init.normal_(table.weight, std=dim**-0.5)
    return model


def hidden_tokens(shares: Tensor, noise: Tensor) -> Tensor:
    """Return which tokens are hidden, bool [B, L]: in each row the ones of least noise, at least one.

    Args:
        shares: [B], uniform in [0, 1]. Row b hides the share 2 / pi * arccos(shares[b]).
        noise: [B, L].
    """
    length = noise.shape[1]
    counts = (2 / math.pi * torch.arccos(shares) * length).ceil().clamp(1, length)
    return noise.argsort(1).argsort(1) < counts[:, None]


def train_masked_image(
    model: MaskedImageTransformer,
    encoder: CaptionEncoder,
    vq_model: VQModel,
    settings: MaskedImageTraining,
    out: Path,
    *,
    every: int = 500,
    workers: int = 1,
) -> dict:
    """Train in place, save the weights in `out`, and return the record that is also written to `out/training.json`.

    It runs where the model is. A run that was interrupted goes on from `out/resume.pt` as if it had not been; the
    finished run removes it. The tokens of the scenes are kept in `out`; so many `workers` paint the scenes.

    Raises:
        ValueError: a model of other tokens or captions than the tokenizer and the encoder make.
    """
    _check_fit(model, encoder, vq_model)
    torch.manual_seed(settings.seed)
    device = model.device
    words, tokens = tokenize_dataset(
        vq_model, encoder, settings.scenes, settings.seed + 1, cache=out, workers=workers
    )
    objects = object_tokens(words, tokens).to(device)
    words, tokens = words.to(device), tokens.to(device)
    encoder.eval().requires_grad_(False)
    # The modulations of the layers start at 0, where Muon's steps of fixed size would tear them apart.
    trunk = torch.nn.ModuleList([part for block in model.blocks for part in (block.attn, block.ff)])
    optimisers = muon_and_adamw(trunk, model.parameters(), settings.learning_rate, settings.weight_decay)
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    run = Trainer(model, settings, out, descend, every=every, reads=[vq_model, encoder])

    def loss_of(
        word_ids: Tensor, token_ids: Tensor, dropped: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        seen = token_ids.masked_fill(hidden, model.mask_id)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            logits = model.predictions(seen, encoder(word_ids), dropped)
        return weighted_cross_entropy(logits.float(), token_ids, weight * hidden)

    def batch(step: int) -> tuple[Tensor, ...]:
        chosen, *drawn = _drawn(objects, settings, step)
        return words[chosen], tokens[chosen].long(), *drawn

    def judged() -> dict[str, float]:
        return {"held_out_loss": held_out_loss(model, encoder, vq_model)}

    return run.run(loss_of, batch, judged, lambda: model.save_pretrained(out))


def _drawn(
    objects: Tensor, settings: MaskedImageTraining, step: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step learns from: scenes [B], whether each hides its caption [B], the hidden tokens and weights [B, L].

    Args:
        objects: which tokens of each scene show an object, [N, L], on the device of the model.
    """
    # One seed per step, so that a resumed run sees what it would have seen. Drawn where the model is: copies from the
    # host would make it wait for the GPU.
    device, size = objects.device, settings.batch_size
    dice = torch.Generator(device).manual_seed((settings.seed << 32) + step)
    chosen = torch.randint(len(objects), (size,), generator=dice, device=device)
    dropped = torch.rand(size, generator=dice, device=device) < settings.caption_dropout
    shares = torch.rand(size, generator=dice, device=device)
    noise = torch.rand(size, objects.shape[1], generator=dice, device=device)
    weight = torch.ones_like(noise)
    if step < settings.weighted_until * settings.steps:
        weight += (settings.object_weight - 1.0) * objects[chosen]
    return chosen, dropped, hidden_tokens(shares, noise), weight


@torch.no_grad()
def held_out_loss(
    model: MaskedImageTransformer, encoder: CaptionEncoder, vq_model: VQModel, count: int = 400
) -> float:
    """Mean cross entropy of hidden tokens of held-out pictures, with shares and slots that are the same every time."""
    words, tokens = tokenize_dataset(vq_model, encoder, count, 777, held_out=True)
    rng = np.random.default_rng(777)
    shares = torch.from_numpy((rng.permutation(count) + 0.5) / count).float()
    hidden = hidden_tokens(shares, torch.from_numpy(rng.random(tuple(tokens.shape))))
    total = 0.0
    for word_ids, token_ids, part in zip(words.split(50), tokens.split(50), hidden.split(50), strict=True):
        conditions = encoder(word_ids.to(model.device))
        seen = token_ids.long().masked_fill(part, model.mask_id).to(model.device)
        logits = model.predictions(seen, conditions).float().cpu()
        total += F.cross_entropy(logits[part], token_ids.long()[part], reduction="sum").item()
    return round(total / int(hidden.sum()), 4)


def _check_fit(model: MaskedImageTransformer, encoder: CaptionEncoder, vq_model: VQModel) -> None:
    sizes = (encoder.max_words, encoder.config["dim"])
    read = (model.config["prefix_length"], model.config["caption_dim"])
    if sizes != read:
        raise ValueError(
            f"the encoder makes {sizes[0]} words of {sizes[1]} numbers, and the model reads {read[0]} of {read[1]}; "
            "make the model for this encoder."
        )
    made = (vq_model.tokens_per_side, vq_model.config["codebook_size"])
    predicted = (model.grid.width, model.vocab_size)
    if made != predicted:
        raise ValueError(
            f"the tokenizer makes {made[0]} x {made[0]} tokens of {made[1]} codes, and the model predicts "
            f"{predicted[0]} x {predicted[0]} of {predicted[1]}; make the model for this tokenizer."
        )


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded masked model: `python scripts/train masked_image --shapes FOLDER --out FOLDER`.

Tokenizer and caption encoder come from `shapes` and do not change. Afterwards `--out` holds the weights and
`training.json`, with the loss curve, the held-out loss, and the accuracy of pictures of held-out prompts under several
samplers and guidance scales. An interrupted run resumes.
"""

SAMPLERS: dict[str, dict[str, Any]] = {
    "confidence": {},
    "confidence, noise 1": {"choice_temperature": 1.0},
    "confidence, noise 4.5": {"choice_temperature": 4.5},
    "halton": {"schedule": "arccos", "score": "halton"},
}


@torch.no_grad()
def judge(parts: tuple, prompts: list[str], sampler: MaskedSampler, guidance: float) -> dict[str, Any]:
    """Accuracy of one picture for each prompt; `parts` are the model, the caption encoder and the tokenizer."""
    (model, encoder, vq_model), hits = parts, []
    for start in range(0, len(prompts), 50):
        some, seed = prompts[start : start + 50], torch.Generator().manual_seed(1000 + start)
        law = TokenLaw(guidance_scale=guidance)
        drawn = sampler(model, encoder(some), batch_size=len(some), law=law, generator=seed)
        pictures = to_pixels(vq_model.decode_tokens(drawn.tokens).cpu())
        hits += [score(prompt, picture) for prompt, picture in zip(some, pictures, strict=True)]
    whole = sum(all(hit.values()) for hit in hits) / len(hits)
    attributes = sum(sum(hit.values()) / len(hit) for hit in hits) / len(hits)
    return {"all_correct": round(whole, 4), "mean_attribute": round(attributes, 4), "pictures": len(hits)}


@dataclass(kw_only=True)
class Options(RunOptions):
    shapes: Path = option("folder with vq_model/ and text_encoder/")
    start_from: Path | None = option("folder of an earlier run to go on with, at a new rate", None)
    dim: int = 192
    num_layers: int = 8
    num_heads: int = 6
    workers: int = option("processes that paint the scenes", 1)
    eight_bits: bool = option("store matrices in 8 bits, and judge them", False)
    judged_prompts: int = option("held-out prompts; 0: none", 200)
    judged_steps: int = option("calls of a picture", 16)
    guidance_scale: list[float] = field(default_factory=lambda: [1.0, 1.5, 2.0, 3.0])


def main() -> None:
    options, settings = read_options(HELP, Options, MaskedImageTraining)
    torch.manual_seed(settings.seed)
    vq_model: Any = VQModel.from_pretrained(options.shapes / "vq_model", torch_dtype=torch.float32)
    encoder: Any = CaptionEncoder.from_pretrained(options.shapes / "text_encoder", torch_dtype=torch.float32)
    vq_model, encoder = vq_model.eval().to(options.device), encoder.eval().to(options.device)
    if options.start_from is None:
        size = {name: getattr(options, name) for name in ("dim", "num_layers", "num_heads")}
        model: Any = new_model(vq_model, encoder, **size)
    else:
        model = MaskedImageTransformer.from_pretrained(options.start_from, torch_dtype=torch.float32)
    model = model.to(options.device)
    record = train_masked_image(model, encoder, vq_model, settings, options.out, workers=options.workers)
    if options.start_from is not None:
        earlier = json.loads((options.start_from / "training.json").read_text())
        record["started_from"] = {key: value for key, value in earlier.items() if key != "loss"}
    if options.eight_bits:
        round_matrices(model, options.out)
    prompts, accuracy = held_out_prompts(options.judged_prompts), {}
    for name, parts in SAMPLERS.items() if prompts else ():
        sampler = of_settings(MaskedSampler, steps=options.judged_steps, **parts)
        for guidance in options.guidance_scale:
            shares = judge((model, encoder, vq_model), prompts, sampler, guidance)
            accuracy[f"{name}, {options.judged_steps} steps, guidance {guidance:g}"] = shares
            print(name, guidance, shares, flush=True)
    write_json(options.out / "training.json", record | {"prompt_accuracy": accuracy})
    print(f"{record['parameters'] / 1e6:.2f} M parameters, held-out loss {record['held_out_loss']}")
