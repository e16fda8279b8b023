"""Models of published sizes, shrunk to what a test can hold."""

from typing import Any

import torch

from benchmarks.sizes import models
from tests.models.next_token import tiny_transformers


def tiny(family: str, **settings: Any) -> models.OfficialModel:
    """A model of transformers' real class, tiny, described as an official one."""
    module = getattr(tiny_transformers, family)(torch.float32)
    inputs: dict[str, Any] = dict(janus=dict(), chameleon=dict(layout="lumina-mgpt", image_sizes=(4, 4)))
    more = inputs.get(family, dict(image_sizes=(3, 5))) | dict(top_k=5, first=1, last=3) | settings
    return models.of_transformers(f"tiny-{family}", 64, module, **more)
