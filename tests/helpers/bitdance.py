"""Keys and shapes of BitDance's files of classes and of its tokenizer, and a folder of texts, of small sizes."""

import json
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.helpers.mar import random_weights
from tests.helpers.official import Shapes


def number(signs: Tensor) -> int:
    """The signs as the bits of one number, the first one highest."""
    return int("".join("1" if value > 0 else "0" for value in signs.flatten().tolist()), 2)


def head_shapes(
    start: str, tokens: int, bits: int = 4, dim: int = 64, width: int = 128, gated: bool = True
) -> Shapes:
    """A head of four blocks that two layers modulate, of keys that begin with `start`."""
    shapes, inner = {}, int(1.5 * width)

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes.update({f"{start}{name}.weight": (outputs, inputs), f"{start}{name}.bias": (outputs,)})

    for name, inputs in (("time_embed.mlp.0", 256), ("time_embed.mlp.2", width), ("cond_embed", dim)):
        linear(name, inputs, width)
    linear("input_proj", bits, width)
    for block in range(4):
        own = f"res_blocks.{block}."
        for name in ["norm"] if tokens == 1 else ["norm1", "norm2"]:
            shapes |= {f"{start}{own}{name}.weight": (width,), f"{start}{own}{name}.bias": (width,)}
        if tokens > 1:
            linear(f"{own}attn.wqkv", width, 3 * width)
            linear(f"{own}attn.wo", width, width)
        linear(f"{own}w1" if gated else f"{own}mlp.0", width, (1 + gated) * inner)
        linear(f"{own}w2" if gated else f"{own}mlp.2", inner, width)
    for block in range(2):
        linear(f"ada_ln_blocks.{block}", width, (3 if tokens == 1 else 6) * width)
    linear("final_layer.ada_ln_modulation", width, 2 * width)
    linear("final_layer.linear", width, bits)
    return shapes


def transformer_shapes(
    tokens: int = 1, side: int = 4, bits: int = 4, dim: int = 64, width: int = 128, classes: int = 7
) -> Shapes:
    """Two layers, a head of four blocks that two layers modulate, and five positions of the class.

    Args:
        tokens: of a call.
    """
    hidden, gated = -(-int(8 * dim / 3) // 256) * 256, int(1.5 * dim)
    shapes: Shapes = {} if tokens == 1 else {"query_token": (1, tokens - 1, dim)}
    shapes |= {"cls_embedding.weight": (classes + 1, 5 * dim), "pos_for_diff.weight": (side * side, dim)}
    shapes |= {f"{name}.weight": (dim,) for name in ("emb_norm", "norm")}

    def linear(name: str, inputs: int, outputs: int) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)})

    linear("proj_in.w1", bits, 2 * gated)
    linear("proj_in.w2", gated, dim)
    for layer in range(2):
        own = f"layers.{layer}."
        shapes |= {f"{own}attention.wqkv.weight": (3 * dim, dim), f"{own}attention.wo.weight": (dim, dim)}
        shapes |= {f"{own}feed_forward.w1.weight": (2 * hidden, dim)}
        shapes |= {f"{own}feed_forward.w2.weight": (dim, hidden)}
        shapes |= {f"{own}{name}.weight": (dim,) for name in ("attention_norm", "ffn_norm")}
    return shapes | head_shapes("head.net.", tokens, bits, dim, width)


def tokenizer_shapes(widths: tuple[int, ...] = (32, 64), count: int = 1, bits: int = 4) -> Shapes:
    """Each level but the last halves a picture; `count` residual blocks a level."""
    shapes: Shapes = {}

    def conv(name: str, inputs: int, outputs: int, kernel: int = 3, bias: bool = True) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs, kernel, kernel)})
        shapes.update({f"{name}.bias": (outputs,)} if bias else {})

    def norm(name: str, width: int) -> None:
        shapes.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    def residual(name: str, inputs: int, outputs: int) -> None:
        for index, width in ((1, inputs), (2, outputs)):
            norm(f"{name}.norm{index}", width)
            conv(f"{name}.conv{index}", width, outputs, bias=False)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1, bias=False)

    last = len(widths) - 1
    for net, up in (("encoder", False), ("decoder", True)):
        conv(f"{net}.conv_in", bits if up else 3, widths[last] if up else widths[0], bias=up)
        for block in range(count):
            residual(f"{net}.mid_block.{block}", widths[last], widths[last])
        for level, width in enumerate(widths):
            inputs = widths[min(level + 1, last)] if up else widths[max(level - 1, 0)]
            own = f"{net}.{'up' if up else 'down'}.{level}"
            for block in range(count):
                residual(f"{own}.block.{block}", width if block else inputs, width)
            if up and level:
                conv(f"{own}.upsample.conv1", width, 4 * width)
            if not up and level < last:
                conv(f"{own}.downsample", width, width)
            for name in ("gamma", "beta") if up else ():
                shapes[f"decoder.adaptive.{level}.{name}.weight"] = (inputs, bits)
                shapes[f"decoder.adaptive.{level}.{name}.bias"] = (inputs,)
        norm(f"{net}.norm_out", widths[0] if up else widths[last])
        conv(f"{net}.conv_out", widths[0] if up else widths[last], 3 if up else bits, 3 if up else 1)
    return shapes


def text_folder(folder: Path, tokens: int, gated: bool = True) -> Path:
    """A folder of texts, of characters, with ids for sizes of up to 16 tokens."""
    names = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", *(f"<|res_{side}|>" for side in range(1, 17))]
    names += [f"<|query_{index}|>" for index in range(1, tokens)]
    characters = {chr(32 + index): index for index in range(95)} | {"\n": 95, "<unk>": 96}
    words = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_special_tokens({"additional_special_tokens": names})  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
    )
    model = Qwen3ForCausalLM(config)
    model.load_state_dict(random_weights({key: tuple(one.shape) for key, one in model.state_dict().items()}))
    model.save_pretrained(folder)
    head = dict(ch_target=4, ch_cond=64, ch_latent=128, depth_latent=4, depth_adanln=2)
    head |= dict(parallel_num=tokens, use_swiglu=gated, time_shift=1.0)
    (folder / "vision_head_config.json").write_text(json.dumps(head))
    projector = {"fc1.weight": (64, 4), "fc1.bias": (64,), "fc2.weight": (64, 64), "fc2.bias": (64,)}
    parts = {"vision_head": head_shapes("net.", tokens, gated=gated), "projector": projector}
    for name, shapes in (parts | {"ae": tokenizer_shapes()}).items():
        save_file(random_weights(shapes), folder / f"{name}.safetensors")
    return folder
