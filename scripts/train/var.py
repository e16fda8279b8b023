"""Train the embedded VAR and FlexVAR on the token maps of `shapes`, and fine-tune pairs for collaborative decoding.

Cross entropy of all tokens of all scales under teacher forcing. A tenth of the classes is replaced by the null class,
so that guidance works (Tian et al. 2024, section 4; Ho and Salimans 2022).

A FlexVAR (arXiv 2502.20313) sees another list of scales at every step, as in its public trainer, but half of the lists
are shorter, and all end at the last scale. Its tokenizer comes from `shapes` and does not change.

The pictures and their classes come from `visual_spec.data.shapes_classes`.

For CoDe (Chen et al. 2025, section 3.3) a drafter is trained further on the scales below N only, by cross entropy. A
refiner learns the large model's laws, first of all scales, then increasingly of the scales from N on. With
`teacher_guidance` it learns the guided laws (Meng et al. 2023, section 3.1, for one guidance scale), and afterwards
draws without guidance, with half of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.train.classes import class_accuracy, object_slots, sample_one_object_scenes
from scripts.train.tokenizer import to_pixels
from visual_spec.data.shapes import render
from visual_spec.data.shapes_classes import CLASSES, class_of
from visual_spec.files.documents import write_json
from visual_spec.models.core.checkpoints import read_written, write_content
from visual_spec.models.core.settings import Count, OneOf, Share, Within, read_fields
from visual_spec.models.next_scale.flexvar import FlexVARTransformer, FlexVQModel
from visual_spec.models.next_scale.scale_budget import offsets_of
from visual_spec.models.next_scale.var import SCALES, VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.stages import Stage, code_stages
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
from visual_spec.training.tokens import to_signed

_DROPPED_FROM = (
    0.9,
    0.95,
    0.98,
    0.99,
)  # FlexVAR's trainer drops a scale for each of these that a number exceeds
_MOST_SLOTS = sum(side * side for side in SCALES[256])  # of a list of scales


@dataclass(frozen=True)
class VarTraining:
    """Settings of a run.

    Attributes:
        object_weight: weight in the loss of slots that show part of the object; other slots have 1.
        scales_from: the first scale that counts in the loss to the end.
        scales_until: the first scale that is neither fed nor trained; None: all are.
        earlier_weight: weight of the scales before `scales_from` at the first step; it falls linearly to 0 at half of
            the steps. CoDe's refiner has 1.
        teacher_guidance: the teacher's guidance scale at the last scale; it grows from none at the first, like the
            sampler's ramp. 1: its laws are learned unguided. Otherwise they are computed once for the scales from
            `scales_from` on and kept in memory: two bytes for each code of each slot of each scene.
        student_weight: of SAR's second pass (arXiv 2512.06421), in which a FlexVAR predicts the last map from its own
            draw of the one before; 0.01 in its public recipe.
        student_target: what it is to predict there: what it draws after the true map ("drawn", CSFL), or the "tokens".
        student_guidance: None: its likeliest codes are its draws, as in the public recipe for d16. Else they are drawn
            from 900 of 96 % at most, under guidance that rises from half of this to this; 1.2 by default there.
        bfloat16: compute the matrix products in bfloat16: faster on a GPU, and on CPUs with support.
    """

    steps: Count = 6000
    batch_size: Count = 32
    scenes: Count = 24000
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    label_dropout: Share = 0.1
    object_weight: Annotated[float, Within(0)] = 3.0
    scales_from: int = 0
    scales_until: int | None = None
    earlier_weight: Annotated[float, Within(0)] = 0.0
    teacher_guidance: float = 1.0
    student_weight: Annotated[float, Within(0)] = 0.0
    student_target: Annotated[str, OneOf(("drawn", "tokens"))] = "drawn"
    student_guidance: Annotated[float | None, Within(0, none="the likeliest codes")] = None
    bfloat16: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        read_fields(self)
        if self.scales_from < 0 or (self.scales_until is not None and self.scales_until <= self.scales_from):
            raise ValueError(
                f"scales_from={self.scales_from} and scales_until={self.scales_until} leave no scale to train; pass "
                "0 <= scales_from < scales_until."
            )
        if self.teacher_guidance != 1 and (self.label_dropout or self.earlier_weight or self.scales_until):
            raise ValueError(
                f"teacher_guidance={self.teacher_guidance} with label_dropout={self.label_dropout}, "
                f"earlier_weight={self.earlier_weight}, scales_until={self.scales_until}; a refiner that learns guided "
                "laws draws with a class and without guidance: pass 0, 0 and None."
            )

    def trained_scales(self, count: int) -> int:
        """Return how many of a model's `count` scales are fed and trained."""
        return count if self.scales_until is None else self.scales_until


# -- pictures as tokens -----------------------------------------------------------------------------------------------


@torch.no_grad()
def tokenize_classes(
    vq_model: MultiscaleVQModel | FlexVQModel,
    count: int,
    seed: int,
    *,
    held_out: bool = False,
    cache: Path | None = None,
) -> tuple[Tensor, Tensor]:
    """Return classes, long `[N]`, and tokens, int32 `[N, L]`, of scenes of one object. `cache`, a folder, stores them.

    Raises:
        ValueError: `cache` holds the tokens of another tokenizer.
    """
    codebook = vq_model.quantize.embedding.weight.detach().cpu()
    path = cache / f"tokens_{count}_{seed}_{int(held_out)}.pt" if cache else None
    if path and path.exists():
        saved = read_written(path)
        if not torch.equal(saved["codebook"], codebook) or saved["tokens"].shape[1] != vq_model.num_tokens:
            raise ValueError(
                f"{path} holds tokens of another tokenizer; pass another --out folder, or remove it."
            )
        return saved["labels"], saved["tokens"]
    scenes = sample_one_object_scenes(count, seed, held_out=held_out)
    tokens = []
    for start in range(0, count, 40):
        pixels = np.stack([render(scene, vq_model.image_size) for scene in scenes[start : start + 40]])
        pictures = to_signed(torch.from_numpy(pixels).to(vq_model.device))
        tokens.append(vq_model.encode_tokens(pictures).to("cpu", torch.int32))
    labels = torch.tensor([class_of(scene) for scene in scenes])
    if path:
        write_content(path, {"labels": labels, "tokens": torch.cat(tokens), "codebook": codebook})
    return labels, torch.cat(tokens)


# -- training ---------------------------------------------------------------------------------------------------------


def random_scales(rng: np.random.Generator, last: int) -> tuple[int, ...]:
    """Return a list of scales for a step: half of the time as FlexVAR's trainer draws it, else of 4 to 9 scales."""
    small, large = (np.arange(low, min(high, last)) for low, high in ((3, 11), (11, 16)))
    inner = [2, *rng.permutation(small)[:5], *rng.permutation(large)[:2]]
    chance = rng.random()
    drops = sum(chance > bound for bound in _DROPPED_FROM) if rng.random() < 0.5 else rng.integers(1, 7)
    kept = sorted(int(side) for side in rng.permutation(inner)[int(drops) :] if side < last)
    while kept and 1 + sum(side * side for side in [*kept, last]) > max(_MOST_SLOTS, last * last + 1):
        kept.pop(rng.integers(max(0, len(kept) - 3), len(kept)))
    return 1, *kept, last


@torch.no_grad()
def start_from_codes(model: FlexVARTransformer, vq_model: FlexVQModel) -> None:
    """Start a FlexVAR so that it repeats the code at a place: its head reads what the embedding of a code writes."""
    model.head.weight.copy_(0.6 * vq_model.codebook @ model.word_embed.weight.T)


def initialise(model: VARTransformer) -> None:
    """Initialise the embeddings at a scale of order one.

    The official initialisation is small everywhere, for long training: AdaLN gets a class of size 0.02, and passes on
    its square. A short training of a small model never learns to use such a condition (docs/LOG.md).
    """
    torch.nn.init.normal_(model.class_emb.weight)
    torch.nn.init.normal_(model.word_embed.weight, std=model.code_dim**-0.5)
    learned = [] if isinstance(model, FlexVARTransformer) else [model.pos_1LC, model.lvl_embed.weight]
    for table in (model.pos_start, *learned):
        torch.nn.init.normal_(table, std=0.3)


def deepened(model: VARTransformer, num_layers: int) -> VARTransformer:
    """Return a deeper model that computes the same: the new layers come last, and their gains are 0.

    Raises:
        ValueError: the model already has that many layers, or its layers share an AdaLN.
    """
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    if num_layers <= config["num_layers"] or config["shared_adaln"]:
        raise ValueError(
            f"num_layers={num_layers} for a model of {config['num_layers']} layers; pass more, and a model whose "
            "layers have an AdaLN each."
        )
    deeper: Any = VARTransformer(**{**config, "num_layers": num_layers})
    deeper.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        for block in deeper.blocks[config["num_layers"] :]:
            block.ada_lin[1].weight[: 2 * config["dim"]] = 0
    return deeper


def slot_weights(scales: tuple[int, ...], settings: VarTraining, step: int) -> Tensor:
    """Return the loss weight of every trained slot, `[L]`, scale after scale."""
    fading = settings.earlier_weight * max(0.0, 1.0 - 2.0 * step / settings.steps)
    parts = [
        torch.full((side * side,), 1.0 if scale >= settings.scales_from else fading)
        for scale, side in enumerate(scales[: settings.trained_scales(len(scales))])
    ]
    return torch.cat(parts)


@torch.no_grad()
def guided_laws(
    teacher: VARTransformer,
    vq_model: MultiscaleVQModel | FlexVQModel,
    labels: Tensor,
    tokens: Tensor,
    settings: VarTraining,
) -> Tensor:
    """Return the teacher's log-probabilities, float16 `[N, l, V]` on the CPU, at the slots of scales `scales_from` on.

    Guidance grows from none at the first scale to `teacher_guidance` at the last.
    """
    device, scales = teacher.device, teacher.scales
    areas = torch.tensor([side * side for side in scales])
    strength = 1 + (settings.teacher_guidance - 1) * torch.linspace(0, 1, len(scales)).repeat_interleave(
        areas
    )
    first = int(areas[: settings.scales_from].sum())
    strength = strength[first:, None].to(device)  # [l, 1]
    laws = torch.empty(len(tokens), len(strength), teacher.vocab_size, dtype=torch.float16)
    for start in range(0, len(tokens), 16):
        rows = slice(start, start + 16)
        label_ids, maps = labels[rows].to(device), vq_model.maps_of(tokens[rows].to(device).long())
        nobody = torch.ones_like(label_ids, dtype=torch.bool)
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            conditional = teacher.teacher_forced(maps, label_ids)[:, first:].float()
            null = teacher.teacher_forced(maps, label_ids, nobody)[:, first:].float()
        laws[rows] = (null + strength * (conditional - null)).log_softmax(-1).half().cpu()
    return laws


def slot_losses(logits: Tensor, tokens: Tensor, teacher_logits: Tensor | None = None) -> Tensor:
    """Return the loss `[B, L]` of every slot: cross entropy of the tokens, or the divergence KL(teacher, model).

    If the teacher's logits are fewer, `[B, l, V]`, they belong to the last slots; the others have loss 0.
    """
    if teacher_logits is None:
        return F.cross_entropy(logits.mT, tokens, reduction="none")
    early = logits.shape[1] - teacher_logits.shape[1]
    teacher, model = teacher_logits.log_softmax(-1), logits[:, early:].log_softmax(-1)
    return F.pad(F.kl_div(model, teacher, reduction="none", log_target=True).sum(-1), (early, 0))


def _draw_batch(
    scales: tuple[int, ...], objects: Tensor, settings: VarTraining, step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scenes of a step, bool `[B]` of dropped labels, and the weights of their tokens `[B, L]`.

    One generator per step, so that a resumed run sees the same data. `objects`: float `[N, L]`, 1 at slots of objects.
    """
    rng = np.random.default_rng((settings.seed, step))
    chosen = torch.from_numpy(rng.integers(len(objects), size=settings.batch_size))
    dropped = torch.from_numpy(rng.random(settings.batch_size) < settings.label_dropout)
    weights = slot_weights(scales, settings, step)  # [L]
    return chosen, dropped, weights * (1 + (settings.object_weight - 1) * objects[chosen, : len(weights)])


def _loss(
    model: VARTransformer,
    maps: list[Tensor],
    token_ids: Tensor,
    label_ids: Tensor,
    dropped: Tensor,
    weights: Tensor,
    teacher_logits: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the loss [], and the logits `[B, L, V]`."""
    logits = model.teacher_forced(maps, label_ids, dropped)
    with torch.autocast(logits.device.type, enabled=False):
        losses = slot_losses(logits.float(), token_ids, teacher_logits)
        return (losses * weights).mean() / weights.mean(), logits


def student_loss(
    model: FlexVARTransformer,
    vq_model: FlexVQModel,
    logits: Tensor,
    maps: list[Tensor],
    token_ids: Tensor,
    label_ids: Tensor,
    settings: VarTraining,
    step: int,
) -> Tensor:
    """Return SAR's loss [] of the last map, predicted from the model's own draw of the one before.

    Args:
        logits: `[B, L, V]` of the pass over the true `maps`.
    """
    last = len(model.scales) - 1
    before, start = model.offsets[last - 1], model.offsets[last]
    numbers = torch.Generator(logits.device).manual_seed(settings.seed + (step << 20))
    with torch.no_grad():
        drawn = logits.argmax(-1)
        if settings.student_guidance is not None:
            null = model.teacher_forced(maps, label_ids, torch.ones_like(label_ids, dtype=torch.bool))
            for scale, slots in ((last - 1, slice(before, start)), (last, slice(start, None))):
                scale_guidance = 1 + settings.student_guidance * 0.5 * (1 + scale / last)
                law = TokenLaw(scale_guidance, top_k=min(900, logits.shape[-1]), top_p=0.96)
                shares = law(torch.cat([logits[:, slots], null[:, slots]]).float(), True).exp()
                drawn[:, slots] = torch.multinomial(shares.flatten(0, 1), 1, generator=numbers).view(
                    len(logits), -1
                )
        codes = vq_model.codes_of(drawn[:, before:start], last - 1, logits)
        map = vq_model.next_map(codes, last)
        wanted = (drawn if settings.student_target == "drawn" else token_ids)[:, start:]
        dropped = torch.rand(len(logits), generator=numbers, device=logits.device) < settings.label_dropout
    return F.cross_entropy(model.student_forced(map, label_ids, dropped).float().mT, wanted)


@dataclass
class Lessons:
    """The laws that a teacher gives. `laws`: float16 `[N, L, V]` of all scenes under guidance, or None."""

    teacher: VARTransformer
    laws: Tensor | None
    bfloat16: bool

    def logits(self, maps: list[Tensor], chosen: Tensor, label_ids: Tensor, dropped: Tensor) -> Tensor:
        """Return logits `[B, L, V]` of the chosen scenes, or of their input maps where no laws are kept."""
        device = label_ids.device
        if self.laws is not None:
            return self.laws[chosen].to(device).float()
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16):
            return self.teacher.teacher_forced(maps, label_ids, dropped).float()


def train_var(
    model: VARTransformer,
    vq_model: MultiscaleVQModel | FlexVQModel,
    settings: VarTraining,
    out: Path,
    *,
    teacher: VARTransformer | None = None,
    every: int = 250,
) -> dict:
    """Train in place, save the weights in `out`, and return the record, which is also written to `out/training.json`.

    Runs on the model's device and starts from its weights: call `initialise` first for a new model. An interrupted run
    resumes from `out/resume.pt` with the same result; the finished run removes it.

    Args:
        teacher: a model over the same tokenizer, whose laws are learned in place of the tokens. It is not changed.

    Raises:
        ValueError: models and tokenizer differ in scales, codebooks or classes; `scales_from` or `scales_until` is
            after the last scale; or `out` holds tokens of another tokenizer.
    """
    _check_fit(model, vq_model, settings, teacher)
    device = model.device
    vq_model.eval().to(device)  # pyright: ignore[reportArgumentType]
    torch.manual_seed(settings.seed)
    flexible = isinstance(model, FlexVARTransformer)
    sides = tuple(range(1, model.scales[-1] + 1)) if flexible else model.scales  # of the tokens that are kept
    kept = vq_model.at(sides) if isinstance(vq_model, FlexVQModel) else vq_model
    labels, tokens = tokenize_classes(kept, settings.scenes, settings.seed + 1, cache=out)
    scenes = sample_one_object_scenes(settings.scenes, settings.seed + 1)
    objects = torch.from_numpy(object_slots(scenes, sides))  # [N, L]
    offsets = offsets_of(sides)
    lessons = None
    if teacher is not None:
        teacher.eval().requires_grad_(False).to(device)  # pyright: ignore[reportArgumentType]
        guided = settings.teacher_guidance != 1
        laws = guided_laws(teacher, vq_model, labels, tokens, settings) if guided else None
        lessons = Lessons(teacher, laws, settings.bfloat16)
    optimisers = muon_and_adamw(
        model.blocks, model.parameters(), settings.learning_rate, settings.weight_decay
    )
    descend = Descent(optimisers, settings.steps, settings.learning_rate)
    reads = [vq_model, *([] if teacher is None else [teacher])]
    run = Trainer(model, settings, out, descend, every=every, reads=reads)

    def batch(step: int) -> tuple[Any, ...]:
        learner: Any = model
        read: Any = vq_model
        drawn, shown = tokens, objects
        if flexible:
            scales = random_scales(np.random.default_rng((settings.seed, step, 1)), model.scales[-1])
            learner, read = model.at(scales), read.at(scales)
            slots = torch.cat([torch.arange(offsets[n - 1], offsets[n]) for n in scales])
            drawn, shown = tokens[:, slots], objects[:, slots]
        chosen, dropped, weights = _draw_batch(learner.scales, shown, settings, step)
        dropped = dropped.to(device)
        token_ids, label_ids = drawn[chosen].to(device).long(), labels[chosen].to(device)
        with torch.no_grad():
            maps = read.maps_of(token_ids)[: settings.trained_scales(len(learner.scales)) - 1]
            taught = None if lessons is None else lessons.logits(maps, chosen, label_ids, dropped)
        return step, learner, maps, token_ids[:, : weights.shape[1]], label_ids, dropped, weights, taught

    def loss(
        step: int, learner: Any, maps: list[Tensor], token_ids: Tensor, label_ids: Tensor, *more: Any
    ) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.bfloat16):
            total, logits = _loss(learner, maps, token_ids, label_ids, *more)
            if settings.student_weight:
                read: Any = vq_model.at(learner.scales)  # pyright: ignore[reportAttributeAccessIssue]
                own = student_loss(learner, read, logits, maps, token_ids, label_ids, settings, step)
                total = total + settings.student_weight * own
            return total

    def judged() -> dict[str, Any]:
        if flexible:
            round_matrices(model, out)
        return held_out_losses(model, vq_model)

    return run.run(loss, batch, judged, lambda: None if flexible else model.save_pretrained(out))


@torch.no_grad()
def held_out_losses(
    model: VARTransformer, vq_model: MultiscaleVQModel | FlexVQModel, count: int = 400
) -> dict:
    """Return the cross entropy in nats a token on held-out scenes: `held_out_loss`, and `held_out_loss_by_scale`."""
    labels, tokens = tokenize_classes(vq_model, count, 777, held_out=True)
    rows = []
    for label_ids, token_ids in zip(labels.split(20), tokens.split(20), strict=True):
        token_ids = token_ids.to(model.device).long()
        logits = model.teacher_forced(vq_model.maps_of(token_ids), label_ids.to(model.device))
        rows.append(slot_losses(logits.float(), token_ids).cpu())
    losses = torch.cat(rows)  # [N, L]
    bounds = [0, *accumulate(side * side for side in model.scales)]
    by_scale = [round(losses[:, first:end].mean().item(), 4) for first, end in pairwise(bounds)]
    return {"held_out_loss": round(losses.mean().item(), 4), "held_out_loss_by_scale": by_scale}


def _check_fit(
    model: VARTransformer,
    vq_model: MultiscaleVQModel | FlexVQModel,
    settings: VarTraining,
    teacher: VARTransformer | None,
) -> None:
    sizes = {
        "the tokenizer": (vq_model.scales, vq_model.codebook_size, vq_model.code_dim),
        "the model": (model.scales, model.vocab_size, model.code_dim),
    }
    if teacher is not None:
        sizes["the teacher"] = (teacher.scales, teacher.vocab_size, teacher.code_dim)
    if len(set(sizes.values())) > 1:
        listed = "; ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"scales, codebook size and code length differ: {listed}. Train them over one tokenizer."
        )
    if settings.student_weight and (teacher is not None or not isinstance(model, FlexVARTransformer)):
        raise ValueError(
            f"student_weight={settings.student_weight}, which is of a FlexVAR without a teacher; pass 0."
        )
    for name, network in {"the model": model, "the teacher": teacher}.items():
        if network is not None and network.config["num_classes"] != len(CLASSES):
            raise ValueError(
                f"{name} has {network.config['num_classes']} classes; the data has {len(CLASSES)}."
            )
    last = len(model.scales)
    if settings.scales_from >= last or settings.trained_scales(last) > last:
        raise ValueError(
            f"scales_from={settings.scales_from}, scales_until={settings.scales_until}; the model has {last} scales."
        )


# -- the command line --------------------------------------------------------------------------------------------------

HELP = """Train the embedded VAR on shapes, or a FlexVAR: a transformer of --size flexible.

`python scripts/train var --tokenizer FOLDER --out FOLDER --size large`

Fine-tuning a pair for collaborative decoding at N:
  the drafter: --start-from LARGE --scales-until N
  the refiner: --start-from SMALL --teacher LARGE --scales-from N --earlier-weight 1
  one that draws without guidance: --start-from SMALL --teacher LARGE --scales-from N --teacher-guidance 2
    --label-dropout 0

Afterwards `--out` holds the weights and `training.json`, with the loss curve, held-out losses and the class accuracy of
pictures drawn with them. An interrupted run resumes.
"""


SIZES: dict[str, dict[str, Any]] = {
    "large": {"dim": 256, "num_layers": 8, "num_heads": 4},
    "small": {"dim": 128, "num_layers": 4, "num_heads": 2},
    "flexible": {"dim": 96, "num_layers": 5, "num_heads": 3},
}


def accuracy_of_draws(
    model: VARTransformer | list[Stage],
    vq_model: MultiscaleVQModel | FlexVQModel,
    guidance: float,
    count: int,
) -> dict:
    """Class accuracy of pictures that a model or a schedule of models draws, about as many of each class."""
    pictures, labels = [], torch.arange(count) % len(CLASSES)
    for start in range(0, count, 24):
        part = labels[start : start + 24]
        generators = [torch.Generator().manual_seed(1000 + start + i) for i in range(len(part))]
        result = ScaleWiseSampler()(
            model,
            part,
            tokenizer=vq_model,
            law=TokenLaw(guidance_scale=guidance),
            generator=generators,
            batch_size=len(part),
        )
        with torch.no_grad():
            pictures.append(vq_model.decode_canvas(result.canvas).cpu())
    accuracy = class_accuracy(to_pixels(torch.cat(pictures)), labels.tolist())
    return {"pictures": count, "guidance_scale": guidance, **accuracy}


@dataclass(kw_only=True)
class Options(RunOptions):
    tokenizer: Path = option(
        "folder that python scripts/train var_tokenizer wrote; for a FlexVAR the one of shapes"
    )
    size: str = option("large, small or flexible", "large", choices=list(SIZES))
    dim: int | None = option("in place of the one of --size, as the next two", None)
    num_layers: int | None = None
    num_heads: int | None = None
    start_from: Path | None = option(
        "folder of a trained model to go on with; more --num-layers than it has are added after its own",
        None,
    )
    teacher: Path | None = option("folder of a model whose laws are learned", None)
    judged_pictures: int = option("drawn for the class accuracy; 0: none", 480)
    guidance_scale: float = option("of these pictures", 2.0)


def main() -> None:
    options, settings = read_options(HELP, Options, VarTraining)
    torch.manual_seed(settings.seed)
    flexible = options.size == "flexible"
    vq_model: Any = (FlexVQModel if flexible else MultiscaleVQModel).from_pretrained(options.tokenizer)
    kind: Any = FlexVARTransformer if flexible else VARTransformer
    if options.start_from is not None:
        model = kind.from_pretrained(options.start_from)
        if options.num_layers is not None:
            model = deepened(model, options.num_layers)
    else:
        size = {name: getattr(options, name) or value for name, value in SIZES[options.size].items()}
        own = {"shared_adaln": True, "position_side": vq_model.scales[-1]} if flexible else {}
        model = kind(
            vocab_size=vq_model.codebook_size,
            code_dim=vq_model.code_dim,
            scales=vq_model.scales,
            num_classes=len(CLASSES),
            **size,
            **own,
        )
        initialise(model)
        if flexible:
            start_from_codes(model, vq_model)
    teacher = None if options.teacher is None else VARTransformer.from_pretrained(options.teacher)
    model = model.to(options.device)
    record = train_var(model, vq_model, settings, options.out, teacher=teacher)
    if options.judged_pictures and settings.scales_until is None:
        # A refiner is judged as it will be used: after the model that it learned from.
        first = settings.scales_from
        drawing = model
        if teacher is not None and first:
            # One that learned guided laws draws them without guidance.
            own_law = TokenLaw() if settings.teacher_guidance != 1 else None
            drawing = code_stages(teacher, model, first, small_law=own_law)
        record["drawn"] = accuracy_of_draws(
            drawing, vq_model, options.guidance_scale, options.judged_pictures
        )
        write_json(options.out / "training.json", record)
    print_record(record)
