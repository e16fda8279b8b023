"""ControlAR: pictures along a control picture."""

import math

import torch

from visual_spec.files.pictures import unit_pixels
from visual_spec.models.next_token.controlar import ControlledCondition
from visual_spec.models.next_token.llamagen import TextCondition
from visual_spec.pipelines.repaint import Pictures
from visual_spec.pipelines.steps import check_each, listed


def check_control(
    control: Pictures | None, strength: float, count: int, height: int | None, width: int | None
) -> tuple[int, int]:
    """Height and width of the control pictures, and of what is drawn along them.

    Args:
        control, strength, height, width: as `control`, `control_strength`, `height` and `width` of `ImagePipeline`.
        count: prompts.

    Raises:
        ValueError: control pictures that are missing, do not fit each other or the call, or a strength that is none.
    """
    if control is None:
        raise ValueError("this model draws along a control picture; pass control.")
    if not math.isfinite(strength):
        raise ValueError(f"control_strength={strength}; pass a finite number, 1 for the trained one.")
    pictures = listed(control)
    check_each(len(pictures), "control pictures", count)
    sizes = {tuple(unit_pixels(picture, "control").shape[-2:]) for picture in pictures}
    if len(sizes) > 1:
        raise ValueError(f"control pictures of several sizes, {sorted(sizes)}; resize them to one.")
    (own,) = sizes
    if height not in (None, own[0]) or width not in (None, own[1]):
        raise ValueError(
            f"control of {own[0]} x {own[1]} pixels for a picture of height={height}, width={width}; resize it, or "
            "leave height and width out."
        )
    return own[0], own[1]


def controlled(condition: TextCondition, control: Pictures, strength: float) -> ControlledCondition:
    """The condition with the control pictures of its rows."""
    pictures = torch.stack([unit_pixels(picture, "control") for picture in listed(control)])
    rows = len(condition.features)
    each = rows if len(pictures) == 1 else rows // len(pictures)
    return ControlledCondition(
        condition.features,
        condition.mask,
        negative=condition.negative,
        control=(2 * pictures - 1).repeat_interleave(each, 0).to(condition.features.device),
        strength=strength,
    )
