"""Keys and shapes of BitDance's files of classes and of its tokenizer, of small sizes."""

from tests.helpers.official import Shapes


def transformer_shapes(
    tokens: int = 1, side: int = 4, bits: int = 4, dim: int = 64, width: int = 128, classes: int = 7
) -> Shapes:
    """Two layers, a head of four blocks that two layers modulate, and five positions of the class.

    Args:
        tokens: of a call.
    """
    hidden, gated, inner = -(-int(8 * dim / 3) // 256) * 256, int(1.5 * dim), int(1.5 * width)
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
    head = "head.net."
    for name, inputs in (("time_embed.mlp.0", 256), ("time_embed.mlp.2", width), ("cond_embed", dim)):
        linear(head + name, inputs, width)
    linear(f"{head}input_proj", bits, width)
    for block in range(4):
        own = f"{head}res_blocks.{block}."
        for name in ["norm"] if tokens == 1 else ["norm1", "norm2"]:
            shapes |= {f"{own}{name}.weight": (width,), f"{own}{name}.bias": (width,)}
        if tokens > 1:
            linear(f"{own}attn.wqkv", width, 3 * width)
            linear(f"{own}attn.wo", width, width)
        linear(f"{own}w1", width, 2 * inner)
        linear(f"{own}w2", inner, width)
    for block in range(2):
        linear(f"{head}ada_ln_blocks.{block}", width, (3 if tokens == 1 else 6) * width)
    linear(f"{head}final_layer.ada_ln_modulation", width, 2 * width)
    linear(f"{head}final_layer.linear", width, bits)
    return shapes


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
