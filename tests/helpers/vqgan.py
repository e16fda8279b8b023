"""A VQGAN in straight lines, by the official key layout, and the keys and shapes of its releases."""

import itertools
import re

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


def networks(
    width: int,
    multipliers: tuple[int, ...],
    blocks: int,
    encoded: int,
    decoded: int,
    *,
    attends: str,
    joined: bool = False,
) -> Shapes:
    """Keys and shapes of `encoder` and `decoder`: `blocks` residual blocks a level, one more on the way up.

    Args:
        encoded, decoded: the channels that the encoder ends in, and those that the decoder begins with.
        attends: where attention follows each block, as a pattern of `encoder.down.0` or `encoder.mid`.
        joined: queries, keys and values are one convolution.
    """
    shapes: Shapes = {}
    widths = [width * multiplier for multiplier in multipliers]
    last = len(widths) - 1

    def conv(name: str, inputs: int, outputs: int, kernel: int = 3) -> None:
        shapes.update({f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)})

    def norm(name: str, channels: int) -> None:
        shapes.update({f"{name}.weight": (channels,), f"{name}.bias": (channels,)})

    def residual(name: str, inputs: int, outputs: int) -> None:
        for index, channels in ((1, inputs), (2, outputs)):
            norm(f"{name}.norm{index}", channels)
            conv(f"{name}.conv{index}", channels, outputs)
        if inputs != outputs:
            conv(f"{name}.nin_shortcut", inputs, outputs, 1)

    def attend(level: str, name: str, channels: int) -> None:
        if re.search(attends, level):
            norm(f"{level}.{name}.norm", channels)
            parts = [("qkv", 3)] if joined else [("q", 1), ("k", 1), ("v", 1)]
            for part, times in [*parts, ("proj_out", 1)]:
                conv(f"{level}.{name}.{part}", channels, times * channels, 1)

    for net, inputs, outputs in (("encoder", 3, encoded), ("decoder", decoded, 3)):
        here, up = width if net == "encoder" else widths[-1], net == "decoder"
        conv(f"{net}.conv_in", inputs, here)
        for level in reversed(range(last + 1)) if up else range(last + 1):
            at = f"{net}.{'up' if up else 'down'}.{level}"
            for block in range(blocks + up):
                residual(f"{at}.block.{block}", here, widths[level])
                here = widths[level]
                attend(at, f"attn.{block}", here)
            if level != (0 if up else last):
                conv(f"{at}.{'upsample' if up else 'downsample'}.conv", here, here)
        for block in ("block_1", "block_2"):
            residual(f"{net}.mid.{block}", widths[-1], widths[-1])
        attend(f"{net}.mid", "attn_1", widths[-1])
        norm(f"{net}.norm_out", here)
        conv(f"{net}.conv_out", here, outputs)
    return shapes


def convolution(name: str, inputs: int, outputs: int, kernel: int = 1) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, kernel, kernel), f"{name}.bias": (outputs,)}


def norm(x: Tensor, weights: Weights, name: str, groups: int) -> Tensor:
    b, c, h, w = x.shape
    parts = x.reshape(b, groups, -1)
    mean, variance = parts.mean(-1, keepdim=True), parts.var(-1, keepdim=True, unbiased=False)
    x = ((parts - mean) / (variance + 1e-6).sqrt()).reshape(b, c, h, w)
    return x * weights[f"{name}.weight"][:, None, None] + weights[f"{name}.bias"][:, None, None]


def conv(x: Tensor, weights: Weights, name: str, stride: int = 1, padding: int = 1) -> Tensor:
    return F.conv2d(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"), stride, padding)


def swish(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def res_block(x: Tensor, weights: Weights, name: str, groups: int) -> Tensor:
    h = conv(swish(norm(x, weights, f"{name}.norm1", groups)), weights, f"{name}.conv1")
    h = conv(swish(norm(h, weights, f"{name}.norm2", groups)), weights, f"{name}.conv2")
    shortcut = f"{name}.nin_shortcut"
    return h + (conv(x, weights, shortcut, padding=0) if f"{shortcut}.weight" in weights else x)


def attention(x: Tensor, weights: Weights, name: str, groups: int) -> Tensor:
    """Every place by a plain sum over all of them; as it came where there is no such attention."""
    if f"{name}.norm.weight" not in weights:
        return x
    h = norm(x, weights, f"{name}.norm", groups)
    joined = f"{name}.qkv.weight" in weights
    parts = [conv(h, weights, f"{name}.{part}", padding=0) for part in (["qkv"] if joined else "qkv")]
    q, k, v = (part.flatten(2) for part in (parts[0].chunk(3, 1) if joined else parts))  # [B, C, N]
    out = torch.zeros_like(q)
    for row, place in itertools.product(range(len(q)), range(q.shape[2])):
        scores = (q[row, :, place, None] * k[row]).sum(0) / q.shape[1] ** 0.5
        shares = (scores - scores.max()).exp()
        out[row, :, place] = (v[row] * shares).sum(1) / shares.sum()
    return x + conv(out.reshape(x.shape), weights, f"{name}.proj_out", padding=0)


def level_of(x: Tensor, weights: Weights, at: str, groups: int) -> Tensor:
    """Its blocks one after the other, each with the attention after it."""
    for block in itertools.takewhile(lambda i: f"{at}.block.{i}.norm1.weight" in weights, itertools.count()):
        x = attention(
            res_block(x, weights, f"{at}.block.{block}", groups), weights, f"{at}.attn.{block}", groups
        )
    return x


def middle(x: Tensor, weights: Weights, net: str, groups: int) -> Tensor:
    x = attention(res_block(x, weights, f"{net}.mid.block_1", groups), weights, f"{net}.mid.attn_1", groups)
    return res_block(x, weights, f"{net}.mid.block_2", groups)


def encoded(x: Tensor, weights: Weights, groups: int) -> Tensor:
    """What the encoder makes of pictures [B, 3, H, W]; smaller levels are padded on the right and below only."""
    x, level = conv(x, weights, "encoder.conv_in"), 0
    while f"encoder.down.{level}.block.0.norm1.weight" in weights:
        x = level_of(x, weights, f"encoder.down.{level}", groups)
        if f"encoder.down.{level}.downsample.conv.weight" in weights:
            name = f"encoder.down.{level}.downsample.conv"
            x = conv(F.pad(x, (0, 1, 0, 1)), weights, name, stride=2, padding=0)
        level += 1
    x = swish(norm(middle(x, weights, "encoder", groups), weights, "encoder.norm_out", groups))
    return conv(x, weights, "encoder.conv_out")


def decoded(x: Tensor, weights: Weights, groups: int) -> Tensor:
    """What the decoder makes of latents [B, D, h, w]."""
    x = middle(conv(x, weights, "decoder.conv_in"), weights, "decoder", groups)
    levels = sum(
        re.fullmatch(r"decoder\.up\.\d+\.block\.0\.norm1\.weight", key) is not None for key in weights
    )
    for level in reversed(range(levels)):
        x = level_of(x, weights, f"decoder.up.{level}", groups)
        if level:
            x = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = conv(x, weights, f"decoder.up.{level}.upsample.conv")
    return conv(swish(norm(x, weights, "decoder.norm_out", groups)), weights, "decoder.conv_out")


def mean_matrix(size: int, target: int) -> Tensor:
    """Means over bins, which overlap where the sizes do not divide: `[target, size]`."""
    matrix = torch.zeros(target, size, dtype=torch.float64)
    for i in range(target):
        first, end = i * size // target, -(-(i + 1) * size // target)
        matrix[i, first:end] = 1 / (end - first)
    return matrix
