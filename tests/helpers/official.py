"""Official LlamaGen checkpoints in miniature: the released key layout, written from its description, random weights."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import vqgan
from visual_spec.models.next_token import llamagen, llamagen_vq

Shapes = dict[str, tuple[int, ...]]

TINY = {"num_layers": 2, "num_heads": 2, "dim": 16}
TINY_VQ: dict[str, Any] = dict(
    base_channels=8, channel_multipliers=(1, 2), blocks_per_level=1, latent_channels=8, norm_groups=4
)


def add_tiny_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llamagen.PRESETS, "tiny", TINY)
    monkeypatch.setitem(llamagen_vq.PRESETS, "tiny", TINY_VQ)


def transformer_shapes(
    layers: int, dim: int, *, vocab: int = 16384, classes: int | None = None, caption: tuple | None = None
) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a transformer. `caption`: (prefix length, width of the T5 features)."""
    hidden = math.ceil((2 * 4 * dim // 3) / 256) * 256
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (vocab, dim),
        "norm.weight": (dim,),
        "output.weight": (vocab, dim),
    }
    for layer in range(layers):
        for name, shape in {
            "attention.wqkv": (3 * dim, dim),
            "attention.wo": (dim, dim),
            "feed_forward.w1": (hidden, dim),
            "feed_forward.w3": (hidden, dim),
            "feed_forward.w2": (dim, hidden),
            "attention_norm": (dim,),
            "ffn_norm": (dim,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    if classes is not None:
        shapes["cls_embedding.embedding_table.weight"] = (classes + 1, dim)
    if caption is not None:
        shapes["cls_embedding.uncond_embedding"] = caption
        shapes["cls_embedding.cap_proj.fc1.weight"] = (dim, caption[1])
        shapes["cls_embedding.cap_proj.fc2.weight"] = (dim, dim)
    return shapes


def tokenizer_shapes(
    multipliers: tuple[int, ...],
    *,
    width: int = 128,
    blocks: int = 2,
    latent: int = 256,
    codes: int = 16384,
    code_width: int = 8,
) -> dict[str, tuple[int, ...]]:
    """Keys and shapes of a tokenizer: levels are numbered in the order in which they run."""
    last = len(multipliers) - 1
    shapes = vqgan.convolution("quant_conv", latent, code_width)
    shapes |= vqgan.convolution("post_quant_conv", code_width, latent)
    plain = vqgan.networks(width, multipliers, blocks, latent, latent, attends=rf"\.{last}$|mid")
    for key, shape in plain.items():
        key = re.sub(r"down\.(\d+)", r"conv_blocks.\1", key)
        key = re.sub(r"up\.(\d+)", lambda level: f"conv_blocks.{last - int(level[1])}", key)
        key = key.replace(".block.", ".res.").replace("mid.attn_1", "mid.1")
        key = key.replace("mid.block_1", "mid.0").replace("mid.block_2", "mid.2")
        shapes[key] = shape
    return shapes | {"quantize.embedding.weight": (codes, code_width)}


def lpd_shapes(layers: int = 2, dim: int = 16, vocab: int = 12, classes: int = 7, side: int = 3) -> Shapes:
    """Keys and shapes of an LPD, in the order of its public code, on which random weights depend."""
    shapes: Shapes = {
        "fake_latent": (1, dim),
        "pos_embed": (1, side * side + 1, dim),
        "mask_token": (1, 1, dim),
    }
    shapes |= {"class_emb.weight": (classes, dim), "token_emb.weight": (vocab, dim)}
    parts: list[tuple[str, tuple[int, ...]]] = [("z_proj_ln", (dim,))]
    for layer in range(layers):
        sizes = {"norm1": (dim,), "attn.qkv": (3 * dim, dim), "attn.proj": (dim, dim), "norm2": (dim,)}
        sizes |= {"mlp.fc1": (4 * dim, dim), "mlp.fc2": (dim, 4 * dim)}
        parts += [(f"blocks.{layer}.{name}", shape) for name, shape in sizes.items()]
    for name, shape in [*parts, ("norm", (dim,))]:
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    return shapes | {"head.weight": (vocab, dim)}


def arpg_shapes(layers: int = 4, dim: int = 16, vocab: int = 12, classes: int = 7) -> Shapes:
    """Keys and shapes of an ARPG, likewise."""
    hidden = -(-int(8 * dim / 3) // 256) * 256
    shapes: Shapes = {"embeddings.weight": (vocab + classes + 3, dim)}
    for half, names in (("self_dec", ("to_q", "to_k", "to_v", "proj")), ("cross_dec", ("to_q", "proj"))):
        for layer in range(layers // 2):
            own = f"layers.{half}.{layer}."
            shapes |= {f"{own}attn.{name}.weight": (dim, dim) for name in names}
            shapes |= {f"{own}ffn.{name}.weight": (hidden, dim) for name in ("w1", "w3")}
            shapes |= {f"{own}ffn.w2.weight": (dim, hidden)}
            shapes |= {f"{own}{name}.weight": (dim,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {
        "layers.norm.weight": (dim,),
        "layers.to_k.weight": (dim, dim),
        "layers.to_v.weight": (dim, dim),
    }
    return shapes | {"norm.weight": (dim,), "head.weight": (vocab, dim)}


def random_weights(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (torch.randn(shape, generator=generator) * 0.3 + (1.0 if "norm" in name else 0.0)).to(dtype)
        for name, shape in shapes.items()
    }


CLASS_SHAPES = transformer_shapes(2, 16, vocab=12, classes=7)
TEXT_SHAPES = transformer_shapes(2, 16, vocab=12, caption=(6, 8))
VQ_SHAPES = tokenizer_shapes((1, 2), width=8, blocks=1, latent=8, codes=12, code_width=4)


def write_class_model(folder: Path, **container) -> Path:
    """A class-conditional transformer for the 12 tokens of `write_tokenizer`."""
    path = folder / "c2i_tiny.pt"
    torch.save({"model": random_weights(CLASS_SHAPES), **container}, path)
    return path


def write_text_model(folder: Path) -> Path:
    """A text-conditional transformer that reads 6 words of 8 channels."""
    path = folder / "t2i_tiny.pt"
    torch.save({"model": random_weights(TEXT_SHAPES)}, path)
    return path


def write_tokenizer(folder: Path) -> Path:
    """A tokenizer of 2 x 2 pixel tokens."""
    path = folder / "vq_tiny.pt"
    weights = random_weights(VQ_SHAPES)
    torch.save({"model": {**weights, "quantize.codebook_used": torch.zeros(65536)}}, path)
    return path
