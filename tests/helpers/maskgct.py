"""Random weights in the official layouts of MaskGCT, and a tiny pipeline of them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

from tests.models.masked import maskgct_straight as straight
from tests.models.masked.maskgct_straight import BOOKS, CODES, HEADS, SEMANTIC
from visual_spec.pipelines.maskgct import MaskgctPipeline
from visual_spec.samplers.masked.presets import PRESETS

STRIDES, FRAME, CODE_DIM, LATENT, VOCOS, HIDDEN = (2, 3), 16, 4, 10, 12, 20


def random_codes(seed: int, *shape: int, below: int = SEMANTIC) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def normed(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    """A convolution whose weight is stored as direction and length."""
    return {
        f"{name}.weight_v": shape,
        f"{name}.weight_g": (shape[0], 1, 1),
        f"{name}.bias": (shape[0],),
    }


def encoder_shapes() -> dict[str, tuple[int, ...]]:
    dim = 4
    shapes = normed("block.0", dim, 1, 7)
    for i, stride in enumerate(STRIDES, 1):
        for unit in range(3):
            at = f"block.{i}.block.{unit}.block"
            shapes |= {f"{at}.0.alpha": (1, dim, 1), f"{at}.2.alpha": (1, dim, 1)}
            shapes |= normed(f"{at}.1", dim, dim, 7) | normed(f"{at}.3", dim, dim, 1)
        shapes |= {f"block.{i}.block.3.alpha": (1, dim, 1)}
        shapes |= normed(f"block.{i}.block.4", 2 * dim, dim, 2 * stride)
        dim *= 2
    last = len(STRIDES) + 1
    return shapes | {f"block.{last}.alpha": (1, dim, 1)} | normed(f"block.{last + 1}", LATENT, dim, 3)


def vocos_shapes(name: str, channels: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.embed.weight": (VOCOS, channels, 7),
        f"{name}.embed.bias": (VOCOS,),
    }
    norms = [f"{name}.norm", f"{name}.final_layer_norm"]
    for i in range(2):
        at = f"{name}.convnext.{i}"
        shapes |= {f"{at}.dwconv.weight": (VOCOS, 1, 7), f"{at}.dwconv.bias": (VOCOS,)}
        shapes |= {f"{at}.pwconv1.weight": (HIDDEN, VOCOS), f"{at}.pwconv1.bias": (HIDDEN,)}
        shapes |= {f"{at}.pwconv2.weight": (VOCOS, HIDDEN), f"{at}.pwconv2.bias": (VOCOS,)}
        shapes[f"{at}.gamma"] = (VOCOS,)
        norms.append(f"{at}.norm")
    return shapes | {f"{at}.{part}": (VOCOS,) for at in norms for part in ("weight", "bias")}


def codebook_shapes(channels: int, books: int, codes: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(books):
        at = f"quantizer.quantizers.{k}"
        shapes |= normed(f"{at}.in_project", CODE_DIM, channels, 1)
        shapes |= normed(f"{at}.out_project", channels, CODE_DIM, 1)
        shapes[f"{at}.codebook.weight"] = (codes, CODE_DIM)
    return shapes


def decoder_shapes() -> dict[str, tuple[int, ...]]:
    head = {"model.head.out.weight": (FRAME + 2, VOCOS), "model.head.out.bias": (FRAME + 2,)}
    return codebook_shapes(LATENT, BOOKS, CODES) | vocos_shapes("model.backbone", LATENT) | head


def semantic_codec_shapes(dim: int) -> dict[str, tuple[int, ...]]:
    linear = {"1.weight": (dim, VOCOS), "1.bias": (dim,)}
    shapes = codebook_shapes(dim, 1, SEMANTIC)
    for side in ("encoder", "decoder"):
        shapes |= vocos_shapes(f"{side}.0", dim) | {f"{side}.{key}": size for key, size in linear.items()}
    return shapes


def write_codecs(folder, feature_dim: int = 8) -> dict[str, dict[str, Tensor]]:
    """The official files of both codecs in a folder, and their weights by the name of the file."""
    made = {
        "encoder": straight.random_weights(encoder_shapes(), 3),
        "decoder": straight.random_weights(decoder_shapes(), 4),
        "semantic_codec": straight.random_weights(semantic_codec_shapes(feature_dim), 5),
    }
    window = {"model.head.istft.window": torch.hann_window(FRAME, dtype=torch.float64)}
    for name, weights in made.items():
        save_file(weights | (window if name == "decoder" else {}), folder / f"{name}.safetensors")
    generator = torch.Generator().manual_seed(6)
    moments = {
        "mean": torch.randn(feature_dim, generator=generator, dtype=torch.float64),
        "var": torch.rand(feature_dim, generator=generator, dtype=torch.float64) + 0.5,
    }
    torch.save(moments, folder / "stats.pt")
    return made | {"stats": moments}


def speech_encoder() -> Wav2Vec2BertModel:
    torch.manual_seed(0)
    config = Wav2Vec2BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        feature_projection_input_dim=160,
    )  # fmt: skip
    return Wav2Vec2BertModel(config).eval()


def write_official(folder: Path) -> None:
    """A small copy of the official repository."""
    names = {
        "t2s_model": (straight.semantic_shapes(), 0),
        "s2a_model/s2a_model_1layer": (straight.acoustic_shapes(1), 1),
        "s2a_model/s2a_model_full": (straight.acoustic_shapes(BOOKS), 2),
    }
    for name, (shapes, seed) in names.items():
        (folder / name).mkdir(parents=True)
        save_file(straight.random_weights(shapes, seed), folder / name / "model.safetensors")
    write_codecs(folder)
    for name, place in {
        "encoder": "acoustic_codec/model",
        "decoder": "acoustic_codec/model_1",
        "semantic_codec": "semantic_codec/model",
    }.items():
        target = folder / f"{place}.safetensors"
        target.parent.mkdir(exist_ok=True)
        (folder / f"{name}.safetensors").rename(target)


def maskgct_pipeline(official: Path) -> MaskgctPipeline:
    """The pipeline of `write_official`'s files, with few steps."""
    made = MaskgctPipeline.from_official(
        official,
        speech_encoder(),
        statistics=official / "stats.pt",
        num_heads=HEADS,
        dtype=torch.float32,
        default_top_k=6,
        default_acoustic_top_k=5,
    )
    made.semantic_codec.register_to_config(feature_layer=1)
    made.sampler = PRESETS["maskgct"].sampler(steps=3)
    made.acoustic_sampler = PRESETS["maskgct-acoustic"].sampler(steps=(3, 2, 1))
    made.set_progress_bar_config(disable=True)
    return made


def given_prompt() -> dict[str, Any]:
    return {
        "prompt_semantic": random_codes(1, 7),
        "prompt_acoustic": random_codes(2, 8, BOOKS, below=CODES),  # one frame longer, as real ones may be
    }
