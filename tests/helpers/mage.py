"""A tiny MAGE, and random weights in its official layout."""

import torch
from torch import Tensor

from visual_spec.models.masked.mage import MageTransformer

CODES, DIM, LAYERS, HEADS, SIDE, CLASSES = 11, 12, 2, 3, 4, 5
HIDDEN = 256  # of the SwiGLU layer: two thirds of four times the width, rounded up to a multiple of 256


def official_shapes(proj: int, registers: int) -> dict[str, tuple[int, ...]]:
    """The released key layout of the Halton sampler's MaskGIT, written from its description."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_emb.weight": (CLASSES + 1, DIM),
        "tok_emb.weight": (CODES + 1, DIM),
        "pos_emb.weight": (SIDE**2, DIM),
        "last_norm.norm_final.weight": (DIM,),
        "last_norm.norm_final.bias": (DIM,),
        "last_norm.mlp.1.weight": (2 * DIM, DIM),
        "last_norm.mlp.1.bias": (2 * DIM,),
        "head.bias": (CODES + 1,),
    }
    if registers:
        shapes["reg_tokens.weight"] = (registers, DIM)
    if proj == 2:
        shapes |= {"in_proj.weight": (DIM, DIM, 2, 2), "out_proj.weight": (4 * DIM, DIM, 1, 1)}
    for layer in range(LAYERS):
        start = f"transformer.layers.{layer}."
        shapes |= {
            f"{start}mlp.1.weight": (6 * DIM, DIM),
            f"{start}mlp.1.bias": (6 * DIM,),
            f"{start}ln1.weight": (DIM,),
            f"{start}ln2.weight": (DIM,),
            **{f"{start}attn.{part}.weight": (DIM, DIM) for part in ("wq", "wk", "wv", "wo")},
            f"{start}ff.w1.weight": (HIDDEN, DIM),
            f"{start}ff.w3.weight": (HIDDEN, DIM),
            f"{start}ff.w2.weight": (DIM, HIDDEN),
        }
    return shapes


def official_weights(proj: int = 1, registers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {
        key: 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in official_shapes(proj, registers).items()
    }
    return weights | {"head.weight": weights["tok_emb.weight"].clone()}


def tiny_mage() -> MageTransformer:
    torch.manual_seed(0)
    model = MageTransformer(CODES, 12, 2, 3, 8, 1, 2, grid_size=4, num_classes=6, class_id=13)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()
