"""For a GPU that need not be there: the kernels compile, without spilling registers, and the operators are traced."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.compiled_kernels import check_compiles, check_traced, compiled
from tests.kernels.laws import window
from tests.kernels.relaxing import codes, laws
from tests.kernels.verification import case
from visual_spec.kernels import (
    clustered_mass,
    draw,
    grouped_mass,
    jacobi_step,
    lantern_mass,
    masked_sample,
    philox,
    split_draw,
    verify,
)
from visual_spec.samplers.core.law import TokenLaw

LAW = TokenLaw(guidance_scale=2.0, top_k=20, top_p=0.9, guidance_until=9)


@pytest.mark.parametrize("name", ["draw", "margins", "masked", "verify", "grouped", "clustered", "lantern"])
def test_compiles_for_hopper(tmp_path, name):
    here = window(LAW, dtype=torch.bfloat16)
    drawing = (here.logits, here.keys, here.slots, torch.tensor(0), 0, here.numbers)
    relaxed = laws()
    module, kernel, call = {
        "draw": (draw, "_draw_kernel", lambda: draw.draw_triton(*drawing)),
        "margins": (draw, "_draw_kernel", lambda: draw.draw_triton(*drawing, margins=True)),
        "masked": (masked_sample, "_masked_kernel", lambda: masked_sample.masked_sample_triton(*drawing)),
        "verify": (
            verify,
            "_verify_kernel",
            lambda: verify.verify_triton(*case(LAW, dtype=torch.bfloat16).arguments),
        ),
        "grouped": (
            grouped_mass,
            "_grouped_kernel",
            lambda: grouped_mass.grouped_mass_triton(*relaxed, codes(), 14, 0.15, 0.5),
        ),
        "clustered": (
            clustered_mass,
            "_clustered_kernel",
            lambda: clustered_mass.clustered_mass_triton(*relaxed, torch.arange(37)),
        ),
        "lantern": (
            lantern_mass,
            "_lantern_kernel",
            lambda: lantern_mass.lantern_mass_triton(*relaxed, torch.zeros(37, 5).int(), 0.1, True),
        ),
    }[name]
    check_compiles(tmp_path, module, kernel, call)


@pytest.mark.parametrize("kernel", ["_split_kernel", "_merge_kernel"])
@pytest.mark.parametrize(
    "law",
    [LAW, replace(LAW, top_k=2000, top_p=1.0), TokenLaw(top_p=0.9), TokenLaw(guidance_scale=2.0)],
    ids=["both", "top-k", "top-p", "none"],
)
def test_split_draws_compile_for_hopper(tmp_path, kernel, law):
    here = window(law, 1, 2, 65536, dtype=torch.bfloat16)
    drawing = (here.logits, here.keys, here.slots, None, 0, here.numbers)
    check_compiles(tmp_path, split_draw, kernel, lambda: split_draw.split_draw_triton(*drawing, margins=True))


@pytest.mark.parametrize("pictured", [False, True])
def test_the_step_of_jacobi_compiles_for_hopper(tmp_path, pictured):
    """As of LlamaGen-XL, 24 x 24 tokens at window 32, guided; and of a clip with a picture drawn beforehand."""
    tokens, numbers = torch.zeros(2, 3, 608, dtype=torch.long)[0], torch.ones(3, dtype=torch.long)
    picture, steady = (tokens, None) if pictured else (None, tokens)
    ahead, grid = None if pictured else numbers, (3, 4, 3) if pictured else (1, 24, 24)

    def begin() -> Any:
        return jacobi_step.open_window(tokens, tokens, numbers, steady, ahead, picture, 32, 12, 24)

    check_compiles(tmp_path, jacobi_step, "_open_kernel", begin)
    window = torch.zeros(3, 32, dtype=torch.long)
    copies, near = torch.zeros(3, 12, dtype=torch.long), window > 0
    counts = (numbers, numbers, tokens, numbers, steady, ahead, picture)

    def end() -> Any:
        drawn = (window, window, window, None if pictured else copies, near)
        jacobi_step.close_window(tokens, *counts, *drawn, torch.tensor(1), 32, 576, 2 * pictured, grid)

    check_compiles(tmp_path, jacobi_step, "_close_kernel", end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fill", [philox.philox_uniform_triton, philox.philox_normal_triton])
def test_noise_compiles_for_hopper(fill, dtype):
    out, slots = torch.zeros(2, 3, 7, dtype=dtype), torch.arange(6).view(2, 3)
    binary = compiled(philox, "_philox_kernel", lambda: fill(out, torch.arange(2), slots, 7, 5, 2))
    # Twice pi in float64, which no literal of Triton's is sure to be.
    assert ("401921FB54442D18" in binary.asm["ptx"]) == (fill is philox.philox_normal_triton)


def test_operators_are_known_to_tracers_of_gpu_code():
    """By shape and dtype, without a launch."""
    here = case(LAW, dtype=torch.bfloat16)
    ops, given = torch.ops.visual_spec, here.arguments
    drawing = (
        here.window.logits,
        here.window.keys,
        here.window.slots,
        torch.tensor(0),
        0,
        *here.window.numbers,
    )
    calls = {
        ops.draw: drawing,
        ops.masked_sample: drawing,
        ops.verify: (*given[:-1], *given[-1]),
        ops.grouped_mass: (*laws(), codes(), 14, 0.15, 0.5),
        ops.clustered_mass: (*laws(), torch.arange(37)),
        ops.lantern_mass: (*laws(), torch.zeros(37, 5).int(), 0.1, True),
    }
    for op, arguments in calls.items():
        # The kernel of `verify` is the only one without a definition that runs here.
        check_traced(op, arguments, here.expected if op is ops.verify else None)
