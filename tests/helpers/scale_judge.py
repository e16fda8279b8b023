"""A judge of classes for evaluations of scales."""

import numpy as np
import torch

from visual_spec.eval.quality.samples import Judge
from visual_spec.models.shapes_features import ShapesFeatures


def score(label, picture):
    total = int(picture.astype(np.int64).sum())
    return {"one_object": bool(total % 2), "colour": total % 3 == 0, "shape": total % 5 < int(label)}


def make_judge() -> Judge:
    torch.manual_seed(3)
    network = ShapesFeatures({"a": 2}, num_features=4, image_size=16, channels=2).eval()
    network.spread.fill_(0.01)
    return Judge(score, {"shapes": network})
