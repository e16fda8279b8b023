"""Train the embedded chunk-by-chunk video model `motion_causal`: a small Wan and its caption encoder.

Flow matching with clean history (teacher forcing; "Self-Forcing", 2506.08009, section 3.2, describes it as the plain
recipe). Each chunk of a clip is noised, and the model predicts its flow from the clean chunks before it. Both passes
come from `CausalWan`: training and drawing attend alike by construction.

Latents are frames of `motion` at a quarter of their size, 16 x 16 pixels of three colours. Clips show one shape on a
plain background with a still camera. A small model learns their colours and motion first, in a quarter of an hour of
one core, and their shapes over hours.

A model that has only seen clean history drifts on its own. So the history carries a little noise at the timestep of
clean frames, and some clips are cut out of the middle of longer ones: there the history, not the caption, says where
things go. The first chunk of a cut is read, never learned.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn

from scripts.train.motion import motion_vocabulary
from scripts.train.motion_small import SCALE, sample_plain_clips, small_frames
from visual_spec.data.motion import caption
from visual_spec.data.shapes import CELL
from visual_spec.models.text.caption_encoder import CaptionEncoder
from visual_spec.models.video.causal_wan import CausalWan
from visual_spec.models.video.frame_cache import Full
from visual_spec.training.loop import (
    Descent,
    RunOptions,
    Trainer,
    muon_and_adamw,
    option,
    print_record,
    read_options,
    round_matrices,
)


@dataclass(frozen=True)
class CausalVideoTraining:
    """Settings of a run.

    A clip has `chunks` chunks of `chunk` frames. `cut_share` of the clips start at one of the frames 1 to `latest_cut`
    of a longer one. Noise levels are uniform before a shift; the history's noise is uniform up to `history_noise`.
    Weights are averaged with `average_decay`.
    """

    steps: int = 2000
    batch_size: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    chunk: int = 2
    chunks: int = 4
    cut_share: float = 0.4
    latest_cut: int = 16
    shift: float = 3.0
    history_noise: float = 0.3
    near_weight: float = 4.0
    average_decay: float = 0.995
    bfloat16: bool = False
    seed: int = 0

    @property
    def frames(self) -> int:
        """Frames of a clip: the training length."""
        return self.chunk * self.chunks


def place_weights(latents: Tensor, near_weight: float) -> Tensor:
    """Return the weight of every place of clips [B, 3, T, h, w], float [B, T, h, w].

    The first frame, and places at most a step away from an object in the frame before, weigh `near_weight`, others 1.
    """
    ground = latents[:, :, :1, :1, :1]  # no shape reaches the corner
    objects = ((latents[:, :, :-1] - ground).abs().amax(1) > 0.1).float()
    reach = CELL // SCALE
    near = F.max_pool2d(objects, 2 * reach + 1, stride=1, padding=reach) > 0  # [B, T - 1, h, w]
    near = torch.cat([torch.ones_like(near[:, :1]), near], 1)
    return torch.where(near, near_weight, 1.0)


def draw_clips(
    step: int, settings: CausalVideoTraining, *, held_out: bool = False
) -> tuple[list[str], Tensor, Tensor]:
    """Return the clips of a step: captions, latents [B, 3, T, h, w], and which are cuts, bool [B]."""
    rng = np.random.default_rng((settings.seed, step, held_out))
    clips = sample_plain_clips(settings.batch_size, rng, held_out=held_out)
    cut = rng.random(len(clips)) < settings.cut_share
    starts = np.where(cut, rng.integers(1, settings.latest_cut + 1, len(clips)), 0).tolist()
    latents = [small_frames(clip, start, settings.frames) for clip, start in zip(clips, starts, strict=True)]
    return [caption(clip) for clip in clips], torch.stack(latents), torch.from_numpy(cut)


def chunk_losses(
    causal: CausalWan,
    embeds: Tensor,
    latents: Tensor,
    cut: Tensor,
    settings: CausalVideoTraining,
    generator: torch.Generator,
) -> Tensor:
    """The loss of every chunk, [chunks]: squared error of the flow, over places by weight.

    Args:
        embeds: [B, T, E], the captions.
        latents, cut: as `draw_clips` returns them.
        generator: of the noise, on the CPU.
    """

    def normal(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator).to(latents.device)

    def uniform() -> Tensor:
        return torch.rand(len(latents), 1, 1, 1, 1, generator=generator).to(latents.device)

    weights = place_weights(latents, settings.near_weight)
    height, width = latents.shape[3:]
    state = causal.begin(embeds, height, width, settings.frames)
    losses = []
    for index, (clean, weight) in enumerate(
        zip(latents.split(settings.chunk, 2), weights.split(settings.chunk, 1), strict=True)
    ):
        share, noise = uniform(), normal(clean.shape)
        level = settings.shift * share / (1 + (settings.shift - 1) * share)
        flow = causal.forward(state, (1 - level) * clean + level * noise, 1000 * level.flatten())
        error = (flow - (noise - clean)).square().mean(1) * weight  # [B, f, h, w]
        rows = error.mean((1, 2, 3)) / weight.mean((1, 2, 3))
        learned = torch.ones_like(rows) if index else (~cut).to(rows)
        losses.append((rows * learned).sum() / learned.sum().clamp_min(1))
        if index + 1 < settings.chunks:
            causal.commit(state, clean + settings.history_noise * uniform() * normal(clean.shape))
    return torch.stack(losses)


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Start blocks as the identity: gates are open, and what would go through them is zero.

    The modulation by the timestep starts at nothing, too, so early steps are spent on what the words mean.
    """
    blocks: Any = model.blocks
    for block in blocks:
        for layer in (block.attn1.to_out[0], block.attn2.to_out[0], block.ffn.net[2]):
            layer.weight.zero_()
            layer.bias.zero_()
        block.scale_shift_table.zero_()
        block.scale_shift_table[:, [2, 5]] = 1.0  # the gates of attention and of the feed-forward part
    last: list[Any] = [model.proj_out, model.condition_embedder.time_proj]  # pyright: ignore
    for layer in last:
        layer.weight.zero_()
        layer.bias.zero_()


def new_model(dim: int = 128, num_layers: int = 4, num_heads: int = 4) -> tuple[Any, CaptionEncoder]:
    """Return a fresh Wan for these latents, and a caption encoder."""
    words = [word for word in motion_vocabulary() if word != "past"]  # no second shape
    encoder = CaptionEncoder(words, dim=64, num_layers=0, num_heads=4, max_words=17)
    model: Any = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=num_heads,
        attention_head_dim=dim // num_heads,
        in_channels=3,
        out_channels=3,
        text_dim=encoder.config["dim"],
        freq_dim=64,
        ffn_dim=4 * dim,
        num_layers=num_layers,
    )
    initialise(model)
    return model, encoder


def train_causal_video(
    model: Any,
    encoder: CaptionEncoder,
    settings: CausalVideoTraining,
    out: Path,
    *,
    every: int = 100,
) -> dict[str, Any]:
    """Train both networks in place, on their device; save them in `out/transformer` and `out/text_encoder`; return the
    record.

    An interrupted run resumes from `out/resume.pt`; the finished run removes it.
    """
    torch.manual_seed(settings.seed)
    device = model.device
    modules = nn.ModuleDict({"transformer": model, "text_encoder": encoder}).train()
    average = torch.optim.swa_utils.AveragedModel(
        modules, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(settings.average_decay)
    )
    optimisers = muon_and_adamw(
        model.blocks, modules.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    causal = CausalWan(model, Full())

    def judged() -> dict[str, Any]:
        modules.load_state_dict(average.module.state_dict())
        round_matrices(model, out / "transformer")
        round_matrices(encoder, out / "text_encoder")
        held_out = _held_out_losses(causal, encoder, settings, device)
        causal.release()
        return {"held_out_loss_by_chunk": held_out}

    parts = {"modules": modules, "average": average}
    run = Trainer(modules, settings, out, descend, every=every, parts=parts)
    return run.run(
        lambda step: _losses(causal, encoder, step, settings, device).mean(),
        lambda step: (step,),
        judged,
        after=lambda step: average.update_parameters(modules),
    )


def _losses(
    causal: CausalWan,
    encoder: CaptionEncoder,
    step: int,
    settings: CausalVideoTraining,
    device: torch.device,
    held_out: bool = False,
) -> Tensor:
    prompts, latents, cut = draw_clips(step, settings, held_out=held_out)
    words = encoder.word_ids(prompts).to(device)
    generator = torch.Generator().manual_seed(10_000_019 * (2 * settings.seed + held_out + 1) + step)
    with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
        embeds = encoder(words).features
        return chunk_losses(causal, embeds, latents.to(device), cut.to(device), settings, generator)


@torch.no_grad()
def _held_out_losses(
    causal: CausalWan,
    encoder: CaptionEncoder,
    settings: CausalVideoTraining,
    device: torch.device,
    batches: int = 8,
) -> list[float]:
    """Return the mean loss of each chunk on held-out captions, with the weights as they are stored."""
    losses = [_losses(causal, encoder, step, settings, device, held_out=True) for step in range(batches)]
    return [round(value, 4) for value in torch.stack(losses).mean(0).tolist()]


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded chunk-by-chunk video model and its caption encoder.

`python scripts/train causal_video --out FOLDER`

Afterwards `--out` holds `transformer/` and `text_encoder/`, with matrices in 8 bits, and `training.json` with the loss
curve. An interrupted run resumes.
"""


@dataclass(kw_only=True)
class Options(RunOptions):
    start_from: Path | None = option("folder with transformer/ and text_encoder/ to start from", None)
    dim: int = 128
    num_layers: int = 4
    num_heads: int = 4


def main() -> None:
    options, settings = read_options(HELP, Options, CausalVideoTraining)
    torch.manual_seed(settings.seed)
    model, encoder = new_model(options.dim, options.num_layers, options.num_heads)
    if options.start_from is not None:
        for name, part in (("transformer", model), ("text_encoder", encoder)):
            part.load_state_dict(type(part).from_pretrained(options.start_from / name).state_dict())
    for part in (model, encoder):
        part.to(options.device)
    record = train_causal_video(model, encoder, settings, options.out)
    print_record(record)
