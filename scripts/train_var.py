"""Train the embedded VAR on shapes: `python scripts/train_var.py --tokenizer FOLDER --out FOLDER --size large`.

Fine-tuning a pair for collaborative decoding at N:
  the drafter: --start-from LARGE --scales-until N
  the refiner: --start-from SMALL --teacher LARGE --scales-from N
  one that draws without guidance: the same with --teacher-guidance 2 --label-dropout 0

Afterwards `--out` holds the weights and `training.json`, with the loss curve, held-out losses and the class accuracy of
pictures drawn with them. An interrupted run resumes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from visual_spec.data.shapes_classes import CLASSES, class_accuracy
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.scales import ScaleWiseSampler, Stage, code_stages
from visual_spec.training.loop import write_json
from visual_spec.training.var import VarTraining, deepened, initialise, train_var
from visual_spec.training.var_tokenizer import to_pixels

SIZES: dict[str, dict[str, Any]] = {
    "large": {"dim": 256, "num_layers": 8, "num_heads": 4},
    "small": {"dim": 128, "num_layers": 4, "num_heads": 2},
}


def accuracy_of_draws(
    model: VARTransformer | list[Stage], vq_model: MultiscaleVQModel, guidance: float, count: int
) -> dict:
    """Class accuracy of pictures that a model or a schedule of models draws, about as many of each class."""
    found, labels = [], torch.arange(count) % len(CLASSES)
    for start in range(0, count, 24):
        part = labels[start : start + 24]
        generators = [torch.Generator().manual_seed(1000 + start + i) for i in range(len(part))]
        result = ScaleWiseSampler()(
            model,
            vq_model,
            part,
            law=TokenLaw(guidance_scale=guidance),
            generator=generators,
            batch_size=len(part),
        )
        with torch.no_grad():
            found.append(vq_model.decode_canvas(result.canvas).cpu())
    accuracy = class_accuracy(to_pixels(torch.cat(found)), labels.tolist())
    return {"pictures": count, "guidance_scale": guidance, **accuracy}


def main() -> None:
    defaults = VarTraining()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokenizer", type=Path, required=True, help="folder that train_var_tokenizer.py wrote"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for weights and training.json; resumes if interrupted"
    )
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--dim", type=int, help="in place of that of --size, as the next two")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--num-heads", type=int)
    parser.add_argument(
        "--start-from",
        type=Path,
        help="folder of a trained model to go on with; more --num-layers than it has are added behind its own",
    )
    parser.add_argument("--teacher", type=Path, help="folder of a model whose laws are learned")
    parser.add_argument("--scales-from", type=int, default=0, help="the first scale that counts to the end")
    parser.add_argument("--scales-until", type=int, help="the first scale that is not trained")
    parser.add_argument(
        "--earlier-weight",
        type=float,
        help="of scales before --scales-from at the first step; default: 1 with a teacher, else 0",
    )
    parser.add_argument(
        "--teacher-guidance",
        type=float,
        default=defaults.teacher_guidance,
        help="learn the teacher's laws as they are under this guidance scale; 1: without guidance",
    )
    parser.add_argument("--label-dropout", type=float, default=defaults.label_dropout)
    parser.add_argument("--steps", type=int, default=defaults.steps)
    parser.add_argument("--batch-size", type=int, default=defaults.batch_size)
    parser.add_argument("--scenes", type=int, default=defaults.scenes)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--bfloat16", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1 ...")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--judged-pictures", type=int, default=480, help="drawn for the class accuracy; 0: none"
    )
    parser.add_argument("--guidance-scale", type=float, default=2.0, help="of these pictures")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    vq_model = MultiscaleVQModel.from_pretrained(arguments.tokenizer)
    if arguments.start_from is not None:
        model = VARTransformer.from_pretrained(arguments.start_from)
        if arguments.num_layers is not None:
            model = deepened(model, arguments.num_layers)
    else:
        size = {name: getattr(arguments, name) or value for name, value in SIZES[arguments.size].items()}
        model = VARTransformer(
            vocab_size=vq_model.codebook_size,
            code_dim=vq_model.code_dim,
            scales=vq_model.scales,
            num_classes=len(CLASSES),
            **size,
        )
        initialise(model)
    teacher = None if arguments.teacher is None else VARTransformer.from_pretrained(arguments.teacher)
    earlier = arguments.earlier_weight
    settings = VarTraining(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        scenes=arguments.scenes,
        learning_rate=arguments.learning_rate,
        label_dropout=arguments.label_dropout,
        scales_from=arguments.scales_from,
        scales_until=arguments.scales_until,
        earlier_weight=(0.0 if teacher is None else 1.0) if earlier is None else earlier,
        teacher_guidance=arguments.teacher_guidance,
        bfloat16=arguments.bfloat16,
        compile=arguments.compile,
        seed=arguments.seed,
    )
    model = model.to(arguments.device)
    record = train_var(model, vq_model, settings, arguments.out, teacher=teacher)
    if arguments.judged_pictures and settings.scales_until is None:
        # A refiner is judged as it will be used: behind the model that it learned from.
        first = settings.scales_from
        drawing = model
        if teacher is not None and first:
            # One that learned guided laws draws them without guidance.
            own_law = TokenLaw() if settings.teacher_guidance != 1 else None
            drawing = code_stages(teacher, model, first, small_law=own_law)
        record["drawn"] = accuracy_of_draws(
            drawing, vq_model, arguments.guidance_scale, arguments.judged_pictures
        )
        write_json(arguments.out / "training.json", record)
    print({name: value for name, value in record.items() if name not in ("settings", "loss")})


if __name__ == "__main__":
    main()
