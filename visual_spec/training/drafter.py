"""Train an `EagleDrafter` for a trained target, on pictures that the target generates itself.

The aim is that the drafter's law covers much of the target's law. So the loss is the cross entropy between the two,
under the guidance with which the picture was drawn; a term on the features stabilises it (EAGLE, section 3.3). The
drafter is unrolled over several steps on its own features, as in decoding (EAGLE-3, HASS; see `EagleDrafter.unrolled`).
The target is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from visual_spec.data import shapes
from visual_spec.data.captions import captions_of
from visual_spec.files.documents import write_json
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.settings import LARGEST, Count, Within, read_fields
from visual_spec.models.drafters.eagle import EagleDrafter, logits_of
from visual_spec.models.next_token.llamagen import LlamaGenTransformer, TextCondition
from visual_spec.pipelines.image import ImagePipeline
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.drafted import DraftedSampler
from visual_spec.samplers.raster.tree import TreeSampler
from visual_spec.training.loop import Descent, RunOptions, Trainer, option, read_options, run_trainer

Draw = Callable[[list[str], float, int], Tensor]
Encode = Callable[[list[str]], TextCondition]

_HELD_OUT_SEED = 777


@dataclass(frozen=True)
class DrafterTraining:
    """Settings of a run. Shard k of the training pictures is drawn with guidance `guidance_scales[k]`, cyclically, and
    all with `temperature`: the law with which the drafter is to decode.
    """

    pictures: Count = 768
    held_out_pictures: Count = 64
    shard_size: Count = 64
    guidance_scales: list[float] = field(default_factory=lambda: [3.0, 1.0, 3.0, 5.0])
    temperature: Annotated[float, Within(above=0, most=LARGEST)] = 1.0
    steps: Count = 1200
    batch_size: Count = 4
    unroll: Count = 3
    unroll_decay: float = 0.8
    feature_weight: float = 0.5
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        read_fields(self)
        if not self.guidance_scales:
            raise ValueError("guidance_scales is empty; pass at least one scale.")


@dataclass
class DrawnPictures:
    """Pictures that the target drew, with the data that training needs.

    Attributes:
        tokens: long [N, L].
        features: float16 [2, N, L, dim], the target's features of every slot, conditional and unconditional.
        guidance: [N], the guidance scale of each picture.
    """

    tokens: Tensor
    features: Tensor
    guidance: Tensor


@torch.no_grad()
def target_features(target: LlamaGenTransformer, condition: TextCondition, tokens: Tensor) -> Tensor:
    """The input of the target's head for every slot of tokens [B, L]: [2, B, L, dim], unconditional rows last."""
    batch_size, length = tokens.shape
    state = target.prefill(condition, batch_size=batch_size, guided=True, window=max(1, length - 1))
    features = [state.features]
    if length > 1:
        target(state, tokens[:, :-1], torch.arange(length - 1, device=tokens.device).expand(batch_size, -1))
        features.append(state.features)
    return torch.cat(features, 1).unflatten(0, (2, batch_size))


def draw_pictures(
    target: LlamaGenTransformer,
    draw: Draw,
    encode: Encode,
    prompts: list[list[str]],
    guidance: list[float],
    folder: Path,
    seed: int,
    temperature: float = 1.0,
) -> DrawnPictures:
    """Draw one shard of pictures for each list of prompts, or read it from `folder` if it was drawn before.

    Raises:
        ValueError: the folder holds shards of another target, other prompts or another law, or a damaged one.
    """
    tokens, features, scales = [], [], []
    owner = fingerprint([target])
    for shard, (texts, scale) in enumerate(zip(prompts, guidance, strict=True)):
        path = folder / f"{shard:05d}.pt"
        if not path.exists():
            drawn = draw(texts, scale, seed + shard)
            law = {"guidance": scale, "temperature": temperature}
            write_content(path, {"tokens": drawn.cpu(), "prompts": texts, "owner": owner, **law})
        saved = read_written(path)
        law = saved["guidance"], saved.get("temperature", 1.0)
        if (saved["prompts"], law, saved.get("owner")) != (texts, (scale, temperature), owner):
            raise ValueError(
                f"{path} holds pictures of another target, or of other prompts, guidance or temperature; pass "
                "another --out folder, or remove it."
            )
        tokens.append(saved["tokens"])
        scales.append(torch.full((len(texts),), float(scale)))
        for part, words in zip(saved["tokens"].split(16), _chunks(texts, 16), strict=True):
            features.append(target_features(target, encode(words), part.to(target.device)).half().cpu())
    return DrawnPictures(torch.cat(tokens), torch.cat(features, 1), torch.cat(scales))


def _batch(
    pictures: DrawnPictures, chosen: Tensor, target: LlamaGenTransformer
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, features and guidance of the chosen pictures, on the target's device."""
    features = pictures.features[:, chosen].to(target.device, target.dtype)
    return pictures.tokens[chosen].to(target.device), features, pictures.guidance[chosen].to(target.device)


def _chunks(items: list[str], size: int) -> list[list[str]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def guided_logits(target: LlamaGenTransformer, features: Tensor, guidance: Tensor) -> Tensor:
    """Return logits [B, N, V] of both branches' features [2, B, N, dim] under each picture's guidance [B]."""
    conditional, unconditional = logits_of(target, features)
    scale = guidance[:, None, None].clamp(min=1)  # 1 or below is no guidance
    return unconditional + scale * (conditional - unconditional)


def drafter_loss(
    drafter: EagleDrafter,
    target: LlamaGenTransformer,
    tokens: Tensor,
    features: Tensor,
    guidance: Tensor,
    settings: DrafterTraining,
) -> Tensor:
    """Return the cross entropy to the target's guided law plus smooth L1 to its features, over the unrolled steps.

    Args:
        tokens: long [B, L].
        features: [2, B, L, dim], the target's.
        guidance: [B].
    """
    wanted = features[:, :, 1:]  # [2, B, L - 1, dim], of the slots that are predicted
    law = (guided_logits(target, wanted, guidance) / settings.temperature).softmax(-1)
    loss, total = torch.zeros((), device=law.device), 0.0
    for step, predicted in enumerate(unroll(drafter, target, tokens, features, settings.unroll)):
        # The first slots cannot be so far from the target's last feature.
        reached = predicted[:, :, step:]
        log_probs = (guided_logits(target, reached, guidance) / settings.temperature).log_softmax(-1)
        cross_entropy = -(law[:, step:] * log_probs).sum(-1).mean()
        distance = F.smooth_l1_loss(reached, wanted[:, :, step:])
        weight = settings.unroll_decay**step
        loss = loss + weight * (cross_entropy + settings.feature_weight * distance)
        total += weight
    return loss / total


def unroll(
    drafter: EagleDrafter, target: LlamaGenTransformer, tokens: Tensor, features: Tensor, steps: int
) -> list[Tensor]:
    """Run `EagleDrafter.unrolled` on both branches of whole pictures: [2, B, L - 1, dim] for each step."""
    fed = tokens[:, :-1].repeat(2, 1)
    rows = drafter.unrolled(target, fed, features[:, :, :-1].flatten(0, 1), steps)
    return [row.unflatten(0, (2, len(tokens))) for row in rows]


@torch.no_grad()
def acceptance_rates(
    drafter: EagleDrafter,
    target: LlamaGenTransformer,
    pictures: DrawnPictures,
    depth: int,
    temperature: float = 1.0,
) -> list[float]:
    """The probability that an exact sampler keeps the draft of depth 1, 2, ..., given that it keeps earlier ones.

    This is the mean overlap of the two laws, the sum over tokens of min(target, draft), on pictures of the target.
    """
    total, slots = [0.0] * depth, [0] * depth
    for chosen in torch.arange(len(pictures.tokens)).split(16):
        tokens, features, guidance = _batch(pictures, chosen, target)
        law = (guided_logits(target, features[:, :, 1:], guidance) / temperature).softmax(-1)
        for step, predicted in enumerate(unroll(drafter, target, tokens, features, depth)):
            draft = (guided_logits(target, predicted[:, :, step:], guidance) / temperature).softmax(-1)
            overlap = torch.minimum(law[:, step:], draft).sum(-1)
            total[step] += float(overlap.sum())
            slots[step] += overlap.numel()
    return [round(mass / count, 4) for mass, count in zip(total, slots, strict=True)]


def train_drafter(
    drafter: EagleDrafter,
    target: LlamaGenTransformer,
    draw: Draw,
    encode: Encode,
    settings: DrafterTraining,
    out: Path,
    *,
    captions: ModuleType = shapes,
    every: int = 100,
) -> dict:
    """Train the drafter in place, save it in `out/drafter`, return the record (also `out/drafter/training.json`).

    An interrupted run resumes from the shards in `out/pictures` and from `out/resume.pt`; the finished run removes the
    latter.

    Args:
        draw: (prompts, guidance, seed) to tokens long [N, L] drawn from the target.
        encode: prompts to the target's condition.
        captions: the data that the target draws, of `PICTURES`.

    Raises:
        ValueError: the drafter was made for another target, or `out` holds shards of another run.
    """
    drafter.check_target(target)
    target.eval().requires_grad_(False)
    torch.manual_seed(settings.seed)
    counts = [len(part) for part in torch.arange(settings.pictures).split(settings.shard_size)]
    scales = [settings.guidance_scales[k % len(settings.guidance_scales)] for k in range(len(counts))]
    prompts = [captions.training_prompts(count, (settings.seed, shard)) for shard, count in enumerate(counts)]
    seed = settings.seed * 100_003
    temperature = settings.temperature
    drawn = draw_pictures(target, draw, encode, prompts, scales, out / "pictures", seed, temperature)
    held = [captions.held_out_prompts(settings.held_out_pictures, _HELD_OUT_SEED)]
    judged = draw_pictures(
        target,
        draw,
        encode,
        held,
        [settings.guidance_scales[0]],
        out / "held_out",
        seed + _HELD_OUT_SEED,
        temperature,
    )

    groups = [
        {"params": [p for p in drafter.parameters() if p.ndim == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in drafter.parameters() if p.ndim != 2], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.95))
    descend = Descent([optimiser], settings.steps, settings.learning_rate, warmup=50)

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(drawn.tokens), size=settings.batch_size))
        return _batch(drawn, chosen, target)

    folder = out / "drafter"
    run = Trainer(
        drafter,
        settings,
        out,
        descend,
        every=every,
        reads=[target],
        parts={"drafter": drafter},
        curve_every=10,
    )
    return run.run(
        lambda tokens, features, guidance: drafter_loss(
            drafter, target, tokens, features, guidance, settings
        ),
        batch,
        lambda: {
            "acceptance_rates": acceptance_rates(drafter, target, judged, settings.unroll + 2, temperature)
        },
        lambda: drafter.save_pretrained(folder),
        folder=folder,
    )


HELP = """Train an EAGLE drafter for a model.

`python -m visual_spec.training.drafter --model shapes --out FOLDER`

The model draws the pictures that the drafter learns from. Afterwards `--out/drafter` holds the weights and
`training.json`, with the loss curve, the acceptance rate by depth and the tokens per call on held-out prompts. An
interrupted run resumes.
"""


def generators(seed: int, count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(1000 * seed + index) for index in range(count)]


def tokens_per_call(pipe: ImagePipeline, drafter: EagleDrafter, law: TokenLaw, count: int = 8) -> dict:
    """Tokens per target call on held-out prompts, a batch of `count`, by sampler."""
    condition = pipe.make_condition(captions_of(pipe).held_out_prompts(count, seed=1))
    rates = {}
    for name, sampler in (("chain", DraftedSampler()), ("tree", TreeSampler())):
        result = sampler(
            pipe.transformer,
            condition,
            law=law,
            drafter=drafter,
            generator=generators(1, count),
            batch_size=count,
        )
        settings = {key: value for key, value in sampler.config.items() if not key.startswith("_")}
        rates[name] = {**settings, "tokens_per_call": round(float(result.trace.tokens_per_call.mean()), 3)}
    return {"guidance_scale": law.guidance_scale, "temperature": law.temperature, "prompts": count, **rates}


@dataclass(kw_only=True)
class DrafterOptions(RunOptions):
    model: str = option("embedded model, or a folder with a pipeline", "shapes")


def main() -> None:
    options, settings = read_options(HELP, DrafterOptions, DrafterTraining)
    pipe = ImagePipeline.from_pretrained(options.model).to(options.device)
    pipe.sampler = AutoregressiveSampler()
    pipe.set_progress_bar_config(disable=True)

    def draw(prompts: list[str], guidance: float, seed: int) -> Tensor:
        print(f"drawing {len(prompts)} pictures with guidance {guidance}", flush=True)
        output = pipe(
            prompts,
            guidance_scale=guidance,
            temperature=settings.temperature,
            generator=generators(seed, len(prompts)),
            output_type="latent",
        )
        return output.tokens

    torch.manual_seed(settings.seed)
    drafter = EagleDrafter.for_target(pipe.transformer).to(options.device)
    captions = captions_of(pipe)
    record = train_drafter(
        drafter, pipe.transformer, draw, pipe.make_condition, settings, options.out, captions=captions
    )
    law = TokenLaw(guidance_scale=settings.guidance_scales[0], temperature=settings.temperature)
    record["decoding"] = tokens_per_call(pipe, drafter, law)
    write_json(options.out / "drafter" / "training.json", record)
    print({key: record[key] for key in ("parameters", "seconds", "acceptance_rates", "decoding")})


if __name__ == "__main__":
    run_trainer(main)
