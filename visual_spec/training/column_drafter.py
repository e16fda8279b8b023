"""Train a `ColumnEagleDrafter` for a trained MusicGen, on clips that the target generates itself.

The target's training clips are available at once and serve as a start, but its own clips differ from them: a drafter
whose columns were kept in 45 % of cases on true clips had 33 % kept on generated ones.

The aim is that drafted columns are kept. The loss is the cross entropy between the drafter's laws and the target's,
guided and at the sampling temperature; or, at the end, the share of refused columns. The drafter is unrolled over
several steps on its own features, as in decoding (EAGLE-3; see `ColumnEagleDrafter.unrolled`). The target is not
changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from transformers import EncodecModel, MusicgenForCausalLM

from visual_spec.data.tunes import NUM_FORMS, NUM_FRAMES, caption, held_out_prompts, sample_tunes
from visual_spec.files.documents import write_json
from visual_spec.models.columns.musicgen import MusicgenColumnModel
from visual_spec.models.core.fingerprint import fingerprint
from visual_spec.models.core.settings import Count, OneOf, Within, read_fields
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.pipelines.audio import AudioPipeline
from visual_spec.prototype.drafted_columns.eagle import ColumnEagleDrafter
from visual_spec.prototype.drafted_columns.sampler import DraftedColumnSampler
from visual_spec.samplers.raster.columns import ColumnAutoregressiveSampler
from visual_spec.training.drafter import generators
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    read_options,
    run_trainer,
)
from visual_spec.training.tokens import stored, tokenize_tunes

OBJECTIVES = ("cross-entropy", "refusals")

Draw = Callable[[list[str], int], Tensor]

_HELD_OUT_SEED = 777
_PART = 50  # clips whose features are computed together
_SHARD = 100  # clips that are generated together


@dataclass(frozen=True)
class ColumnDrafterTraining:
    """Settings of a run. Clip i of a batch uses guidance `guidance_scales[i]`, cyclically. `drawn`: train on clips that
    the target generates, instead of true ones. `objective` is one of `OBJECTIVES`.
    """

    drawn: bool = True
    objective: Annotated[str, OneOf(OBJECTIVES)] = option(
        "what is minimised", "cross-entropy", choices=OBJECTIVES
    )
    clips: Count = 6000
    held_out_clips: Count = 100
    steps: Count = 4000
    batch_size: Count = 16
    unroll: Count = 2
    unroll_decay: float = 0.8
    guidance_scales: list[float] = field(default_factory=lambda: [1.5])
    temperature: Annotated[float, Within(above=0)] = 0.8
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    bfloat16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        read_fields(self)
        if not self.guidance_scales:
            raise ValueError("guidance_scales is empty; pass at least one scale.")


@dataclass
class HeardClips:
    """Clips, with the target's outputs that training needs.

    Attributes:
        sequence: int16 [N, S, K], the steps of the pattern.
        last: float16 [2, N, S, dim], the input of the target's heads, conditional and unconditional; position s
            predicts step s.
        early: float16 [N, S, taps * dim], the tapped layers, conditional.
    """

    sequence: Tensor
    last: Tensor
    early: Tensor

    def batch(self, chosen: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen clips on the device."""
        parts = self.sequence[chosen].long(), self.last[:, chosen].float(), self.early[chosen].float()
        return parts[0].to(device), parts[1].to(device), parts[2].to(device)


def play(
    draw: Draw,
    encoder: CaptionEncoder,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    cache: Path | None = None,
    owner: str = "",
) -> tuple[Tensor, Tensor]:
    """Return word ids [N, T] of captions, and codes int16 [N, K, T] that the target generates for them.

    `cache`, a folder, stores them shard by shard if given.

    Args:
        draw: (prompts, seed) to codes long [N, K, T].
        owner: identifies the target and its law in the cache.

    Raises:
        ValueError: `cache` holds clips of another target, or under another law.
    """
    words, codes = [], []
    for start in range(0, count, _SHARD):
        tunes = sample_tunes(min(_SHARD, count - start), seed * 100_003 + start, held_out=held_out)
        prompts = [caption(tune, index % NUM_FORMS) for index, tune in enumerate(tunes)]
        path = cache / f"played_{seed}_{int(held_out)}_{start}_{len(tunes)}.pt" if cache else None
        drawn = partial(draw, prompts, seed * 100_003 + start)
        others = "clips that another model played, or under another law"
        played = stored(path, owner, others, lambda drawn=drawn: {"codes": drawn().to("cpu", torch.int16)})
        words.append(encoder.word_ids(prompts).cpu())
        codes.append(played["codes"])
    return torch.cat(words), torch.cat(codes)


def true_clips(
    codec: EncodecModel,
    encoder: CaptionEncoder,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    cache: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the same as `play` for true clips of `tunes`, each with one of the forms of its caption."""
    words, codes = tokenize_tunes(codec, encoder, count, seed, held_out=held_out, cache=cache)
    every = torch.arange(count)
    return words[every, every % NUM_FORMS], codes


@torch.no_grad()
def hear(
    target: MusicgenColumnModel,
    encoder: CaptionEncoder,
    words: Tensor,
    codes: Tensor,
    taps: tuple[int, ...],
    bfloat16: bool = False,
) -> HeardClips:
    """Return the target's features of whole clips.

    Args:
        words: word ids [N, T] of their captions.
        codes: [N, K, T].
    """
    sequence, last, early = [], [], []
    for some_words, some in zip(words.split(_PART), codes.split(_PART), strict=True):
        states, seen = target.encoder_states(encoder(some_words.to(target.device)), guided=True)
        steps = target.pattern.apply(some.long().to(target.device), target.special_id).transpose(1, 2)
        with torch.autocast(target.device.type, torch.bfloat16, enabled=bfloat16):
            layers = target.features(steps.repeat(2, 1, 1), states, seen)
        sequence.append(steps.to("cpu", torch.int16))
        last.append(torch.stack(layers[-1].chunk(2)).to("cpu", torch.float16))
        tapped = [layers[tap - 1].chunk(2)[0] for tap in taps] or [layers[-1].chunk(2)[0][..., :0]]
        early.append(torch.cat(tapped, -1).to("cpu", torch.float16))
    return HeardClips(torch.cat(sequence), torch.cat(last, 1), torch.cat(early))


def predictions(
    drafter: ColumnEagleDrafter,
    target: MusicgenColumnModel,
    sequence: Tensor,
    last: Tensor,
    early: Tensor,
    guidance: Tensor,
    steps: int,
) -> tuple[Tensor, list[Tensor]]:
    """Guided logits of steps 1 to S - 1, [B, S - 1, K, V]: the target's, and the drafter's after 1, 2, ... drafts.

    Args:
        sequence, last, early: a batch of `HeardClips`.
        guidance: [B], scales; 1 or below is no guidance.
    """
    dim, scale = last.shape[-1], guidance[:, None, None].clamp(min=1)
    layers: list[Tensor] = [last.flatten(0, 1)] * drafter.config["num_layers"]
    for index, tap in enumerate(drafter.config["taps"]):
        layers[tap - 1] = early[..., index * dim : (index + 1) * dim].repeat(2, 1, 1)
    features = drafter.read(layers, True, scale)
    wanted = target.score(last[1] + scale * (last[0] - last[1]))[:, 1:]
    unrolled = drafter.unrolled(target, sequence[:, :-1], features[:, :-1], steps)
    return wanted, [target.score(predicted) for predicted in unrolled]


def drafter_loss(
    wanted: Tensor, drafted: list[Tensor], valid: Tensor, temperature: float, decay: float
) -> Tensor:
    """Return the cross entropy to the target's laws, the mean over codes and unrolled steps; each step weighs `decay`
    times the previous one.

    Args:
        wanted, drafted: from `predictions`.
        valid: bool [S, K], the entries that hold codes.
    """
    law, counted = (wanted / temperature).softmax(-1), valid[1:].to(wanted.dtype)  # [S - 1, K]
    losses = []
    for step, logits in enumerate(drafted):
        entropy = -(law * (logits.float() / temperature).log_softmax(-1)).sum(-1)  # [B, S - 1, K]
        there = counted[step:]  # the first columns cannot be so far from the target's last feature
        losses.append((entropy[:, step:] * there).sum() / (there.sum() * len(entropy)))
    return _decayed(losses, decay)


def kept_shares(
    wanted: Tensor,
    drafted: list[Tensor],
    valid: Tensor,
    temperature: float,
    generator: torch.Generator | None = None,
    draws: int = 8,
) -> list[Tensor]:
    """Return estimates of how often a column drafted after 1, 2, ... drafts is kept, [B, S - 1], [B, S - 2], ...

    This is 1 - TVD(P, Q) = E[min(1, Q(x) / P(x))] over columns x drawn from the target's law P; it has a gradient.

    Args:
        wanted, drafted, valid: as in `drafter_loss`.
        draws: columns drawn from each law of the target.
    """
    law = (wanted.detach().float() / temperature).log_softmax(-1)  # [B, S - 1, K, V]
    drawn = torch.multinomial(law.exp().flatten(0, 2), draws, replacement=True, generator=generator)
    drawn = drawn.view(*law.shape[:-1], draws)
    shares = []
    for step, logits in enumerate(drafted):
        draft = (logits.float() / temperature).log_softmax(-1)
        ratio = (draft.gather(-1, drawn) - law.gather(-1, drawn)).masked_fill(~valid[1:, :, None], 0).sum(-2)
        # The first columns cannot be so far from the target's last feature.
        shares.append(ratio[:, step:].clamp(max=0).exp().mean(-1))
    return shares


def refusal_loss(
    wanted: Tensor,
    drafted: list[Tensor],
    valid: Tensor,
    temperature: float,
    decay: float,
    generator: torch.Generator | None = None,
    draws: int = 8,
) -> Tensor:
    """The share of drafted columns that are refused, weighted as in `drafter_loss`; for arguments see `kept_shares`.

    This is the final measure. Unlike the cross entropy it ignores columns that are kept anyway, or never will be. So it
    helps after training with the cross entropy, not before.
    """
    shares = kept_shares(wanted, drafted, valid, temperature, generator, draws)
    return _decayed([1 - share.mean() for share in shares], decay)


def _decayed(losses: list[Tensor], decay: float) -> Tensor:
    """Return the mean of the losses, each weighted `decay` times the previous one."""
    weights = [decay**step for step in range(len(losses))]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True)) / sum(weights)  # pyright: ignore


@torch.no_grad()
def acceptance_rates(
    drafter: ColumnEagleDrafter,
    target: MusicgenColumnModel,
    clips: HeardClips,
    settings: ColumnDrafterTraining,
    depth: int,
) -> list[float]:
    """Return the probability that a column drafted 1, 2, ... columns after the last exact one is kept, given that those
    before it were kept: the mean of `kept_shares` along the clips."""
    kept, count = [0.0] * depth, [0] * depth
    generator = torch.Generator(target.device).manual_seed(_HELD_OUT_SEED)
    valid = target.valid.to(target.device)
    for chosen in torch.arange(len(clips.sequence)).split(20):
        batch = clips.batch(chosen, target.device)
        guidance = torch.full((len(chosen),), settings.guidance_scales[0], device=target.device)
        wanted, drafted = predictions(drafter, target, *batch, guidance, depth)
        for step, share in enumerate(kept_shares(wanted, drafted, valid, settings.temperature, generator)):
            kept[step] += float(share.sum())
            count[step] += share.numel()
    return [round(mass / number, 4) for mass, number in zip(kept, count, strict=True)]


def train_column_drafter(
    drafter: ColumnEagleDrafter,
    model: MusicgenForCausalLM,
    encoder: CaptionEncoder,
    codec: EncodecModel,
    draw: Draw,
    settings: ColumnDrafterTraining,
    out: Path,
    *,
    every: int = 200,
) -> dict:
    """Train the drafter in place, save it in `out/drafter`, return the record (also `out/drafter/training.json`).

    An interrupted run resumes from the codes in `out` and from `out/resume.pt`; the finished run removes the latter.
    The features of all clips are held in memory: 0.3 MB a clip of `tunes`.

    Args:
        draw: (prompts, seed) to codes long [N, K, T], under the law that the drafter will serve.

    Raises:
        ValueError: the drafter was made for another target, or `out` holds codes of another codec, target or law.
    """
    drafter.check_target(MusicgenColumnModel(model, NUM_FRAMES))
    if settings.drawn:
        owner = f"{fingerprint([model, encoder])} {tuple(settings.guidance_scales)} {settings.temperature}"
        clips = partial(play, draw, encoder, owner=owner)
    else:
        clips = partial(true_clips, codec, encoder)
    words, codes = clips(settings.clips, settings.seed + 1, cache=out)
    judged_words, judged_codes = clips(settings.held_out_clips, _HELD_OUT_SEED, held_out=True, cache=out)
    target = MusicgenColumnModel(model, codes.shape[-1])
    model.eval().requires_grad_(False)
    encoder.eval().requires_grad_(False)
    torch.manual_seed(settings.seed)
    taps = tuple(drafter.config["taps"])
    heard = hear(target, encoder, words, codes, taps, settings.bfloat16)
    judged = hear(target, encoder, judged_words, judged_codes, taps)

    optimisers = muon_and_adamw(
        drafter.blocks, list(drafter.parameters()), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate, warmup=50)
    scales = torch.tensor(settings.guidance_scales, device=target.device)
    guidance = scales[torch.arange(settings.batch_size, device=target.device) % len(scales)]
    valid = target.valid.to(target.device)

    def batch(step: int) -> tuple[int | Tensor, ...]:
        rng = np.random.default_rng((settings.seed, step))
        chosen = torch.from_numpy(rng.integers(len(codes), size=settings.batch_size))
        return step, *heard.batch(chosen, target.device)

    def loss(step: int, sequence: Tensor, last: Tensor, early: Tensor) -> Tensor:
        with torch.autocast(target.device.type, torch.bfloat16, enabled=settings.bfloat16):
            wanted, drafted = predictions(drafter, target, sequence, last, early, guidance, settings.unroll)
        measured = wanted, drafted, valid, settings.temperature, settings.unroll_decay
        if settings.objective == "refusals":
            generator = torch.Generator(target.device).manual_seed(1_000_003 * settings.seed + step)
            return refusal_loss(*measured, generator)
        return drafter_loss(*measured)

    folder, depth = out / "drafter", settings.unroll + 2
    parts = {"drafter": drafter}
    run = Trainer(drafter, settings, out, descend, every=every, reads=[model, encoder], parts=parts)
    return run.run(
        loss,
        batch,
        lambda: {"acceptance_rates": acceptance_rates(drafter, target, judged, settings, depth)},
        lambda: drafter.save_pretrained(folder),
        folder=folder,
    )


HELP = """Train an EAGLE drafter of columns for a music model.

`python -m visual_spec.training.column_drafter --out FOLDER`

It learns from clips that the model plays, or with `--true-clips` from clips of `tunes`, under the model's own guidance
and temperature; `--start-from` goes on with a drafter made before. Afterwards `--out/drafter` holds the weights and
`training.json`, with the loss curve, the acceptance rate by depth and the columns per call on held-out prompts. An
interrupted run resumes.
"""


def columns_per_call(pipe: AudioPipeline, count: int = 8) -> dict:
    """Columns per target call on held-out prompts, a batch of `count`, under the pipeline's own law."""
    prompts, rates = held_out_prompts(count, seed=1), {}
    for acceptance in ("exact", "identical"):
        pipe.sampler = DraftedColumnSampler(acceptance=acceptance)
        result = pipe(prompts, generator=generators(1, count), output_type="latent")
        rates[acceptance] = round(float(result.trace.tokens_per_call.mean()), 3)
    return {"prompts": count, "num_drafts": pipe.sampler.config["num_drafts"], **rates}


@dataclass(kw_only=True)
class ColumnDrafterOptions(RunOptions):
    model: str = option("embedded model, or a folder with a pipeline", "tunes")
    num_blocks: int = option("layers of a fresh drafter", 2)
    start_from: Path | None = option("folder of a drafter to go on with", None)
    true_clips: bool = option("learn from clips of tunes, not of the model", False)


def main() -> None:
    options, settings = read_options(HELP, ColumnDrafterOptions, ColumnDrafterTraining)
    pipe = AudioPipeline.from_pretrained(options.model).to(options.device)
    pipe.set_progress_bar_config(disable=True)
    law = pipe.make_law()
    settings = replace(
        settings,
        drawn=not options.true_clips,
        guidance_scales=[law.guidance_scale],
        temperature=law.temperature,
    )
    torch.manual_seed(settings.seed)
    first = options.start_from
    if first is None:
        drafter = ColumnEagleDrafter.for_target(pipe.transformer, num_blocks=options.num_blocks)
    else:
        drafter = ColumnEagleDrafter.from_pretrained(first)
    drafter.to(options.device)
    pipe.sampler = ColumnAutoregressiveSampler()

    def draw(prompts: list[str], seed: int) -> Tensor:
        print(f"playing {len(prompts)} clips", flush=True)
        return pipe(prompts, generator=generators(seed, len(prompts)), output_type="latent").codes

    record = train_column_drafter(
        drafter, pipe.transformer, pipe.text_encoder, pipe.codec, draw, settings, options.out
    )
    pipe.drafter = drafter
    record["decoding"] = columns_per_call(pipe)
    if first is not None and (first / "training.json").exists():
        earlier = json.loads((first / "training.json").read_text())
        record["started_from"] = {key: value for key, value in earlier.items() if key != "loss"}
    write_json(options.out / "drafter" / "training.json", record)
    print({key: record[key] for key in ("parameters", "seconds", "acceptance_rates", "decoding")})


if __name__ == "__main__":
    run_trainer(main)
