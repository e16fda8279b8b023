"""A tiny MAGE and its tokenizer, with random weights in their official layouts."""

import torch
from torch import Tensor

from visual_spec.models.masked.mage import MageTransformer
from visual_spec.models.masked.mage_vq import load_mage_tokenizer
from visual_spec.pipelines.mage_image import MageImagePipeline
from visual_spec.samplers.masked.masked import MaskedSampler
from visual_spec.samplers.masked.policies import Choice

CODES, DIM, LAYERS, HEADS, SIDE, CLASSES = 11, 12, 2, 3, 4, 5
CODE_DIM, GROUPS = 6, 2  # of the tokenizer
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


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        key: 0.4 * torch.randn(shape, generator=draw, dtype=torch.float64) for key, shape in shapes.items()
    }


def official_weights(proj: int = 1, registers: int = 1, seed: int = 0) -> dict[str, Tensor]:
    weights = _random(official_shapes(proj, registers), seed)
    return weights | {"head.weight": weights["tok_emb.weight"].clone()}


def tiny_mage() -> MageTransformer:
    torch.manual_seed(0)
    model = MageTransformer(CODES, 12, 2, 3, 8, 1, 2, grid_size=4, num_classes=6, class_id=13)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def tokenizer_shapes() -> dict[str, tuple[int, ...]]:
    """The released keys of the tokenizer at a small size: two levels, of which the second is twice as wide."""
    shapes: dict[str, tuple[int, ...]] = {"quantize.embedding.weight": (CODES, CODE_DIM)}

    def block(at: str, before: int, after: int) -> None:
        shapes.update({
            f"{at}.norm1.weight": (before,), f"{at}.norm1.bias": (before,),
            f"{at}.conv1.weight": (after, before, 3, 3),
            f"{at}.norm2.weight": (after,), f"{at}.norm2.bias": (after,),
            f"{at}.conv2.weight": (after, after, 3, 3),
        })  # fmt: skip
        if before != after:
            shapes[f"{at}.nin_shortcut.weight"] = (after, after, 1, 1)

    for level, (before, after) in enumerate(((4, 4), (4, 8))):
        block(f"encoder.down.{level}.block.0", before, after)
        block(f"encoder.down.{level}.block.1", after, after)
    for level, (before, after) in ((1, (8, 8)), (0, (8, 4))):
        block(f"decoder.up.{level}.block.0", before, after)
        block(f"decoder.up.{level}.block.1", after, after)
    for side in ("encoder", "decoder"):
        for name in ("block_1", "block_2"):
            block(f"{side}.mid.{name}", 8, 8)
    last = {"encoder": 8, "decoder": 4}
    for side, width in last.items():
        shapes |= {f"{side}.norm_out.weight": (width,), f"{side}.norm_out.bias": (width,)}
    return shapes | {
        "encoder.conv_in.weight": (4, 3, 3, 3),
        "encoder.conv_out.weight": (CODE_DIM, 8, 1, 1),
        "encoder.conv_out.bias": (CODE_DIM,),
        "decoder.conv_in.weight": (8, CODE_DIM, 3, 3),
        "decoder.conv_in.bias": (8,),
        "decoder.up.1.upsample.conv.weight": (8, 8, 3, 3),
        "decoder.up.1.upsample.conv.bias": (8,),
        "decoder.conv_out.weight": (3, 4, 3, 3),
        "decoder.conv_out.bias": (3,),
    }


def tokenizer_weights() -> dict[str, Tensor]:
    return _random(tokenizer_shapes(), 4)


def mage_pipeline() -> MageImagePipeline:
    tokenizer = load_mage_tokenizer(tokenizer_weights(), image_size=8, norm_groups=GROUPS)
    sampler = MaskedSampler(steps=4, choice=Choice(choice_temperature=6.0))
    pipe = MageImagePipeline(tiny_mage().float(), tokenizer.float().eval(), sampler)
    pipe.set_progress_bar_config(disable=True)
    return pipe
