"""A linear layer of few rows, whose sums have one order however many rows there are: `project`.

Libraries choose the kernel of a matrix product by its shape, and every kernel adds up in its own order: in 16 bits a
token's logits then depend on how many tokens are beside it in a call. Here the inputs of a row are dealt in blocks to
four lanes in turn; a lane adds up its blocks in ascending order, in float32, and lanes are added in pairs. Rows and
tiles of outputs change none of it:

    tile     weights are the long side of the tensor cores' product and rows the short one, padded to 16, 32 or 64.
             A lane is a warp. In 16 bits every warp of every tile runs m16n8k16, four times a block
    before   RMSNorm of the row, its mean square added up in one order too
    after    scale of weights in 8 bits, bias, then the gate of a SwiGLU layer or the residual sum

In the interpreter and in the PTX this can be seen; that the hardware adds the 16 products of an instruction alike in
every column is taken for granted, and a test on the device asks it.

Kernels may start before the one that they read from has ended (programmatic dependent launch, compute capability 9.0):
they ask for their weights first, and wait then.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from visual_spec.kernels.launch import FLOATS, cuda, dependent, fused, on_gpu, triton

LANES = 4
# Inputs of a lane's block, by the bytes of a number of x.
BLOCKS = {2: 64, 4: 16, 8: 16}
# Types of weights in 8 bits, which a 16-bit number holds exactly.
BYTES = (torch.int8, torch.float8_e4m3fn)
# Inputs that are squared at a time.
_PIECE = 32
# Outputs of a program and its stages of loads, by the bytes of a number and its rows: no more fit into the registers.
# Bits do not depend on them.
_TILES = {2: {16: (16, 4), 32: (32, 4), 64: (32, 3)}, 4: {16: (16, 3), 32: (16, 3)}}
# The same with a gate, whose outputs have two sums each.
_GATED = {2: {16: (16, 4), 32: (16, 4), 64: (16, 2)}, 4: {16: (16, 3), 32: (16, 3)}}


def project(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 1e-5,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gate: bool = False,
) -> Tensor:
    """Return `x @ weight.T`, each row with the same bits whatever the rows beside it.

    Args:
        x: [..., K].
        weight: [N, K], of the dtype of x; or int8 or float8_e4m3fn with a `scale`.
        norm: [K], factors of an RMSNorm (Zhang, Sennrich 2019) of x before the product; None: none.
        eps: added to the mean square.
        scale: float32 [N], what the rows of a weight in 8 bits are multiplied by.
        bias: [N], added to the product.
        residual: [..., N], added last.
        gate: the first half of the outputs are gates (Shazeer 2020): returns SiLU(first half) * second half.

    Returns:
        [..., N], or [..., N / 2] with `gate`, in the dtype of x. On CUDA by the Triton kernel where no gradients are
        asked for, elsewhere by `project_reference`.

    Raises:
        ValueError: the shapes do not fit each other, `gate` is asked for with a residual or an odd N, or a scale is
            missing or not needed.
        TypeError: a dtype that is not as above.
    """
    _check(x, weight, norm, scale, bias, residual, gate)
    if fused(x):
        return _project_op(x, weight, norm, eps, scale, bias, residual, gate)
    return project_reference(x, weight, norm, eps, scale, bias, residual, gate)


def _check(
    x: Tensor, weight: Tensor, norm: Tensor | None, scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, gate: bool,
) -> None:  # fmt: skip
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; pass [..., K] and [N, K]."
        )
    outputs, inputs = weight.shape
    for name, vector, size in (("norm", norm, inputs), ("scale", scale, outputs), ("bias", bias, outputs)):
        if vector is not None and vector.shape != (size,):
            raise ValueError(f"{name} has shape {tuple(vector.shape)}; pass [{size}].")
    if gate and (outputs % 2 or residual is not None):
        raise ValueError(
            f"gate=True with {outputs} outputs and residual={'None' if residual is None else 'a tensor'}; pass gates "
            "and values one below the other, and no residual."
        )
    if residual is not None and residual.shape != (*x.shape[:-1], outputs):
        raise ValueError(
            f"residual has shape {tuple(residual.shape)}; pass {(*x.shape[:-1], outputs)}, as the product."
        )
    if (weight.dtype in BYTES) != (scale is not None):
        raise ValueError(
            f"weight is {weight.dtype} and scale {'missing' if scale is None else 'given'}; pass a scale with "
            "int8 and float8_e4m3fn, and with no other type."
        )
    others = [one for one in (norm, bias, residual) if one is not None]
    same = [one.dtype for one in ([weight, *others] if scale is None else others)]
    if set(same) - {x.dtype} or (scale is not None and scale.dtype != torch.float32):
        raise TypeError(
            f"x is {x.dtype}, and beside it are {', '.join(map(str, same))}; pass one type, and a scale in float32."
        )


def project_reference(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 1e-5, scale: Tensor | None = None,
    bias: Tensor | None = None, residual: Tensor | None = None, gate: bool = False,
) -> Tensor:  # fmt: skip
    """The definition of `project`, in PyTorch, on any device: its order of sums, in float32, or float64 for such x.

    The sum of a block is rounded once; a device rounds within a block too.
    """
    kind, (outputs, inputs), rows = torch.promote_types(x.dtype, torch.float32), weight.shape, x.shape[:-1]
    block = BLOCKS[x.element_size()]
    values = x.reshape(-1, inputs)
    if norm is not None:
        pieces = F.pad(values.to(kind), (0, -inputs % _PIECE)).unflatten(-1, (-1, _PIECE)).square()
        squares = torch.zeros_like(pieces[:, 0])
        for piece in pieces.unbind(1):
            squares = squares + piece
        while squares.shape[-1] > 1:
            squares = squares.unflatten(-1, (2, -1)).sum(-2)
        values = (values.to(kind) * (1 / (squares / inputs + eps).sqrt())).to(x.dtype) * norm
    wide = [F.pad(one.double(), (0, -inputs % (LANES * block))) for one in (values, weight.to(x.dtype))]
    blocks = [
        one.unflatten(-1, (-1, LANES, block)).permute(1, 2, 0, 3) for one in wide
    ]  # [steps, lanes, _, block]
    total = torch.zeros(LANES, len(values), outputs, dtype=kind, device=x.device)
    for ours, theirs in zip(*blocks, strict=True):
        total = total + (ours @ theirs.mT).to(kind)
    while len(total) > 1:
        total = total.unflatten(0, (2, -1)).sum(0)
    out = total[0] if scale is None else total[0] * scale
    out = (out if bias is None else out + bias.to(kind)).to(x.dtype).unflatten(0, rows)
    if gate:
        first, second = out.chunk(2, -1)
        return F.silu(first) * second
    return out if residual is None else residual + out


@custom_op("visual_spec::project", mutates_args=())
def _project_op(
    x: Tensor, weight: Tensor, norm: Tensor | None, eps: float, scale: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, gate: bool,
) -> Tensor:  # fmt: skip
    function = project_triton if on_gpu(x) else project_reference
    return function(x, weight, norm, eps, scale, bias, residual, gate)


@_project_op.register_fake
def _projected_like(x: Tensor, weight: Tensor, *rest: Tensor | float | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight) // (2 if rest[-1] else 1))


def project_triton(
    x: Tensor, weight: Tensor, norm: Tensor | None = None, eps: float = 1e-5, scale: Tensor | None = None,
    bias: Tensor | None = None, residual: Tensor | None = None, gate: bool = False, *,
    tile: tuple[int, int, int] | None = None, early: bool | None = None,
) -> Tensor:  # fmt: skip
    """`project` by the Triton kernel.

    Args:
        tile: rows and outputs of a program, and its stages of loads; None: by the number of rows.
        early: whether the kernel may start before the one before it has ended; None: where the device can.

    Raises:
        TypeError: a dtype that the kernel does not take.
    """
    if x.dtype not in FLOATS:
        raise TypeError(f"x is {x.dtype}; pass float32, bfloat16 or float16.")
    out = _projected_like(x, weight, gate)
    outputs, inputs = weight.shape
    rows, outputs = prod(x.shape[:-1]), outputs // (2 if gate else 1)
    if out.numel() == 0:
        return out
    if tile is None:
        tiles = (_GATED if gate else _TILES)[x.element_size()]
        most = next((most for most in tiles if most >= rows), max(tiles))
        tile = most, *tiles[most]
    early = dependent(x.device) if early is None else early
    contiguous = [out if one is None else one.contiguous() for one in (norm, scale, bias, residual)]
    with torch.cuda.device_of(x):
        _project_kernel[(-(-outputs // tile[1]), -(-rows // tile[0]))](
            out, x.contiguous(), weight.contiguous(), *contiguous, rows, outputs, eps, INPUTS=inputs, ROWS=tile[0],
            OUTPUTS=tile[1], LANES=LANES, BLOCK=BLOCKS[x.element_size()], PIECE=_PIECE, NORM=norm is not None,
            SCALE=scale is not None, BIAS=bias is not None, RESIDUAL=residual is not None, GATE=gate,
            LINE=128 // weight.element_size(), EARLY=early, num_warps=LANES, num_stages=tile[2],
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip
    return out


if triton is not None:
    from triton import language as tl

    @triton.jit
    def _ask(weight, output, INPUTS: tl.constexpr, LINE: tl.constexpr):
        """Move rows of the weights into the second-level cache, a line of 128 bytes at a time."""
        for step in range((INPUTS + 16 * LINE - 1) // (16 * LINE)):
            line = tl.minimum((step * 16 + tl.arange(0, 16)) * LINE, INPUTS - 1)
            at = weight + output.to(tl.int64)[:, None] * INPUTS + line[None]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )

    @triton.jit
    def _finish(total, output, scale, bias, kind, BIAS: tl.constexpr, SCALE: tl.constexpr):
        """Lanes [4, outputs, rows] added in pairs, which no layout reorders; then scale and bias, and rounded."""
        total = tl.reshape(total, [2, 2, total.shape[1], total.shape[2]])
        done = tl.sum(tl.sum(total, 0), 0)
        if SCALE:
            done *= tl.load(scale + output)[:, None]
        if BIAS:
            added = tl.load(bias + output).to(tl.float32)[:, None]
            done = done + added
        return done.to(kind)

    @triton.jit(do_not_specialize=["rows"])  # one kernel for calls of one row and of several
    def _project_kernel(
        out, x, weight, norm, scale, bias, residual, rows, outputs, eps, INPUTS: tl.constexpr, ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr,
        SCALE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, LINE: tl.constexpr,
        EARLY: tl.constexpr,
    ):  # fmt: skip
        """Some outputs of some rows."""
        kind = out.dtype.element_ty
        output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        there = tl.minimum(output, outputs - 1)  # so that weights are loaded without a mask
        if EARLY:
            cuda.gdc_launch_dependents()
            _ask(weight, there, INPUTS, LINE)
            if GATE:
                _ask(weight, there + outputs, INPUTS, LINE)
            cuda.gdc_wait()  # before anything that another kernel writes is read or written
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        known = row < rows
        mine = x + row.to(tl.int64) * INPUTS
        if NORM:
            squares = tl.zeros([ROWS, PIECE], tl.float32)
            for step in range((INPUTS + PIECE - 1) // PIECE):
                number = step * PIECE + tl.arange(0, PIECE)[None]
                value = tl.load(mine[:, None] + number, mask=known[:, None] & (number < INPUTS), other=0.0)
                squares += value.to(tl.float32) * value.to(tl.float32)
            squares = tl.reshape(squares, [ROWS, 2, 2, 2, 2, 2])
            square = tl.sum(tl.sum(tl.sum(tl.sum(tl.sum(squares, 1), 1), 1), 1), 1)
            inverse = (1.0 / tl.sqrt(square / INPUTS + eps))[None, :, None]
        lane = tl.arange(0, LANES)[:, None, None]
        mine = mine[None, :, None]
        theirs = weight + there.to(tl.int64)[None, :, None] * INPUTS
        total = tl.zeros([LANES, OUTPUTS, ROWS], tl.float32)
        second = total
        for step in range((INPUTS + LANES * BLOCK - 1) // (LANES * BLOCK)):
            number = (step * LANES + lane) * BLOCK + tl.arange(0, BLOCK)[None, None]
            inside = number < INPUTS
            value = tl.load(mine + number, mask=inside & known[None, :, None], other=0.0)
            if NORM:
                by = tl.load(norm + number, mask=inside, other=0.0).to(tl.float32)
                value = (value.to(tl.float32) * inverse).to(kind)
                value = (value.to(tl.float32) * by).to(kind)
            value = tl.permute(value, (0, 2, 1))
            weights = tl.load(theirs + number, mask=inside, other=0.0).to(kind)
            total = tl.dot(weights, value, total, input_precision="ieee")
            if GATE:
                weights = tl.load(theirs + outputs.to(tl.int64) * INPUTS + number, mask=inside, other=0.0).to(
                    kind
                )
                second = tl.dot(weights, value, second, input_precision="ieee")
        done = _finish(total, there, scale, bias, kind, BIAS, SCALE)
        if GATE:
            opened = done.to(tl.float32)
            opened = (opened / (1.0 + tl.exp(-opened))).to(kind).to(tl.float32)  # rounded as by `gated`
            other = _finish(second, there + outputs, scale, bias, kind, BIAS, SCALE)
            done = (opened * other.to(tl.float32)).to(kind)
        to = row.to(tl.int64)[None] * outputs + output[:, None]
        inside = known[None] & (output < outputs)[:, None]
        if RESIDUAL:
            before = tl.load(residual + to, mask=inside, other=0.0).to(tl.float32)
            done = (before + done.to(tl.float32)).to(kind)
        tl.store(out + to, done, mask=inside)
