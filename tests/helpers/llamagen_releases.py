"""Key layouts of the releases that are made of LlamaGen: gates, learned tokens, position instructions."""

from collections.abc import Iterator
from typing import Any

from tests.helpers.nar import nar_shapes
from tests.helpers.official import Shapes, transformer_shapes

# Layers and width of every official size.
SIZES = {
    "B": (12, 768), "L": (24, 1024), "XL": (36, 1280), "XXL": (48, 1536), "XXXL": (48, 2560),
    "1B": (22, 2048), "3B": (24, 3200), "7B": (32, 4096),
}  # fmt: skip
OF_NAR = {"B": (12, 768), "M": (18, 1024), "L": (24, 1024), "XL": (36, 1280), "XXL": (48, 1536)}


def flashar_shapes(layers: int, dim: int, branch: int = 1, **more: Any) -> Shapes:
    """Keys and shapes of a release: those of NAR, and the gate."""
    shapes = nar_shapes(layers, dim, branch, **more)
    vocab_size = shapes["output.weight"][0]
    inner = max(32, vocab_size // 512)
    return shapes | {
        "hv_gate_mlp.0.weight": (inner, 2 * vocab_size),
        "hv_gate_mlp.2.weight": (1, inner),
        "hv_gate_mlp.2.bias": (1,),
    }


def par_shapes(layers: int, dim: int, count: int, **more: Any) -> Shapes:
    """Keys and shapes of a release: a transformer with learned tokens."""
    learned = {"spe_tok_embeddings.special_embeddings.weight": (count - 1, dim)}
    return transformer_shapes(layers, dim, **more) | learned


def randar_shapes(layers: int, dim: int, **more: Any) -> Shapes:
    """Keys and shapes: a transformer with one embedding for all position instructions."""
    return transformer_shapes(layers, dim, **more) | {"pos_instruct_embeddings": (1, dim)}


def releases() -> Iterator[tuple[str, Shapes, Shapes]]:
    """What a file is called, its keys and shapes, and those that it holds beside the weights."""
    table = {"freqs_cis": (257, 32, 2)}
    conditions: dict[str, dict[str, Any]] = {"class": dict(classes=1000), "text": dict(caption=(120, 2048))}
    for kind, condition in conditions.items():
        for size, shape in SIZES.items():
            yield f"LlamaGen-{size}, {kind}-conditional", transformer_shapes(*shape, **condition), {}
        for size, shape in OF_NAR.items():
            yield f"NAR-{size}, {kind}-conditional", nar_shapes(*shape, **condition), table
    for size, branch in (("L", 4), ("XL", 1)):
        shapes = flashar_shapes(*SIZES[size], branch, classes=1000)
        yield f"FlashAR-{size}, class-conditional", shapes, table | {"hv_mix_logit": ()}
    for size in ("B", "L", "XL", "XXL", "3B"):
        for count in (4, 16):
            shapes = par_shapes(*SIZES[size], count, classes=1000)
            more = {"freqs_cis": (1 + count - 1 + 576, 32, 2)}
            yield f"PAR-{size}-{count}x, class-conditional", shapes, more
    for size in ("B", "L", "XL", "XXL"):
        yield f"RandAR-{size}, class-conditional", randar_shapes(*SIZES[size], classes=1000), table
