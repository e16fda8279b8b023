"""The kernels themselves on a GPU, at the sizes of official models, against the definitions in PyTorch on the CPU.

Without a GPU these tests are skipped: the other files of this folder run the same kernels in Triton's interpreter, at
small sizes. (TRITON_INTERPRET=1 runs this file on a CPU too, slowly.)

Device and definition add up in different orders, so sums differ by rounding. A token may then be another one only where
two tokens' scores lie closer than that, which does not occur in these few draws; the seeds are fixed.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.tabular import TabularModel
from tests.kernels.heads import case as head_case
from tests.kernels.laws import LAWS, Window, window
from tests.kernels.layers import opened, summed
from tests.kernels.projections import KINDS, project_case
from tests.kernels.relaxing import codes, laws
from tests.kernels.verification import case, compare
from visual_spec.kernels.clustered_mass import clustered_mass_triton
from visual_spec.kernels.draw import draw_reference, draw_triton, whole_draw_triton
from visual_spec.kernels.grouped_mass import grouped_mass_triton
from visual_spec.kernels.head_step import head_step_reference, head_step_triton
from visual_spec.kernels.lantern_mass import lantern_mass_triton
from visual_spec.kernels.layers import add_norm_triton, gated_triton
from visual_spec.kernels.masked_sample import masked_sample_reference, masked_sample_triton
from visual_spec.kernels.philox import (
    philox_normal,
    philox_normal_triton,
    philox_uniform_reference,
    philox_uniform_triton,
)
from visual_spec.kernels.project import project_reference, project_triton
from visual_spec.kernels.rotary_write import rotary_write_reference, rotary_write_triton
from visual_spec.kernels.split_draw import split_draw_triton
from visual_spec.kernels.verify import verify_triton
from visual_spec.kernels.window_attention import window_attention_reference, window_attention_triton
from visual_spec.models.core.protocol import TokenGrid
from visual_spec.samplers.core.law import TokenLaw
from visual_spec.samplers.core.relaxed import (
    cluster_table,
    clustered_acceptance,
    grouped_acceptance,
    lantern_acceptance,
    neighbour_table,
)
from visual_spec.samplers.raster.autoregressive import AutoregressiveSampler
from visual_spec.samplers.raster.jacobi import SpeculativeJacobiSampler

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA GPU"),
]

VOCAB, WIDTH = (130, 2) if INTERPRETED else (16384, 16)


def there(value: Any) -> Any:
    """The same on the device, alone or in a sequence."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    return tuple(map(there, value)) if type(value) is tuple else value


def here(value: Any) -> Any:
    """The same on the CPU."""
    return value.cpu() if isinstance(value, Tensor) else tuple(map(here, value))


def drawing(given: Window, stream: int = 2, round: int = 7) -> tuple[Any, ...]:
    return (given.logits, given.keys, given.slots, torch.tensor(round), stream, given.numbers)


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [whole_draw_triton, split_draw_triton])
def test_draw(name, dtype, run):
    given = window(LAWS[name], 2, WIDTH, VOCAB, dtype=dtype)
    found = here(run(*there(drawing(given))))
    for one, other in zip(found, draw_reference(*drawing(given)), strict=True):
        assert torch.equal(one, other)
    again, _, margins = here(run(*there(drawing(given)), margins=True))
    assert torch.equal(again, found[0])
    torch.testing.assert_close(margins, draw_reference(*drawing(given), margins=True)[2], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", LAWS)
def test_masked_sample(name):
    given = window(LAWS[name], 2, WIDTH, VOCAB, seed=4)
    found = here(masked_sample_triton(*there(drawing(given))))
    expected = masked_sample_reference(*drawing(given))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[3], expected[3])
    for one, other in zip(found[1:3], expected[1:3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAWS)
def test_verify(name):
    given = case(LAWS[name], 2, max(6, WIDTH), VOCAB)
    found, expected = here(verify_triton(*there(given.arguments))), given.expected
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)
    compare((expected[0], *found[1:]), expected)


def test_verify_reads_half_precision_and_draws_nothing():
    given = case(LAWS["both"], 2, 2, VOCAB, draw_stream=-1, dtype=torch.bfloat16)
    found = here(verify_triton(*there(given.arguments)))
    assert torch.equal(found[1], given.expected[1]) and found[3].shape == (2, 0)


def test_logits_without_a_law_are_reported():
    given = window(TokenLaw(top_k=4, top_p=0.9), 1, 4, VOCAB)
    given.logits[0, 0, 5] = torch.nan
    given.logits[0, 1, 30] = torch.inf
    given.logits[0, 2] = -torch.inf
    tokens, finite, _ = here(draw_triton(*there(drawing(given))))
    assert finite.tolist() == [[False, False, False, True]]
    assert ((tokens >= 0) & (tokens < VOCAB)).all()


@pytest.mark.parametrize("rule", ["grouped", "clustered", "lantern"])
def test_relaxed_masses(rule):
    vocab_size = min(VOCAB, 4096)
    given, book = laws(2, WIDTH, vocab_size), codes(vocab_size)
    near, clusters = neighbour_table(book, 64), cluster_table(book, 9)
    kernels: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "grouped": (grouped_mass_triton, (book, 24, 0.15, 3.0)),
        "clustered": (clustered_mass_triton, (clusters,)),
        "lantern": (lantern_mass_triton, (near, 0.1, True)),
    }
    expected = {
        "grouped": lambda: grouped_acceptance(*given, size=24, gap=0.15, distance=3.0, codebook=book),
        "clustered": lambda: clustered_acceptance(*given, clusters=clusters),
        "lantern": lambda: lantern_acceptance(*given, neighbours=near, delta=0.1, factor=None),
    }
    kernel, more = kernels[rule]
    found = here(kernel(*there(given), *there(more)))
    torch.testing.assert_close(found, expected[rule](), rtol=1e-4, atol=1e-6)


# Widths of the heads of MAR-B, L and H; rows of a batch of 1, 8 and 64 with guidance.
@pytest.mark.parametrize(
    "width, count", [(40, 3)] if INTERPRETED else [(1024, 64), (1280, 8), (1536, 1), (192, 20)]
)
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, dict(learned=False, guided=False, noisy=False)], ids=str)
def test_head_step(width, count, dtype, settings):
    given = head_case(count, 16, width, 2, dtype=dtype, **settings)
    x, modulations, weights, *rest = given.arguments
    with torch.no_grad():
        found = here(
            head_step_triton(there(x), there(modulations), list(map(there, weights)), *map(there, rest))
        )
        rounded = head_step_reference(*given.arguments)
    for one, other, exact in zip(found, rounded, given.expected, strict=True):
        # Not further from the exact computation than the definition in this dtype.
        allowed = 1.5 * float((other - exact).abs().max()) + 1e-5 * float(exact.abs().max())
        assert float((one - exact).abs().max()) <= allowed


HALF = torch.float16 if INTERPRETED else torch.bfloat16
# Rows, positions, heads, heads of keys, numbers of a head, and places: LlamaGen-XL, its prompt, 3B, and Emu3.
LAYERS = (
    [(2, 3, 4, 2, 12, 150)]
    if INTERPRETED
    else [
        (2, 32, 20, 20, 64, 728),
        (2, 120, 20, 20, 64, 728),
        (4, 1, 32, 32, 100, 700),
        (2, 16, 32, 8, 128, 4096),
    ]
)


@pytest.mark.parametrize("sizes", LAYERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_window_attention_and_cache_write(sizes, dtype):
    rows, positions, heads, groups, dim, size = sizes
    draw = torch.Generator().manual_seed(0)
    projected = torch.randn(rows, positions, heads + 2 * groups, dim, generator=draw).to(dtype)
    keys, values = torch.randn(2, rows, groups, size, dim, generator=draw).to(dtype)
    first = torch.randint(size - positions, (rows, 1), generator=draw)
    places, mask = first + torch.arange(positions), torch.rand(rows, 7, generator=draw) > 0.5
    angles = 6 * torch.rand(rows, positions, 1, 1, dim // 2, generator=draw)
    cosine, sine = angles.cos(), angles.sin()
    turns = torch.stack([cosine, cosine], -1), torch.stack([-sine, sine], -1)
    held = there((keys, values))
    queries = rotary_write_triton(there(projected), *there(turns), *held, places=there(places))
    expected = rotary_write_reference(projected, *turns, keys, values, places)
    near: dict[str, Any] = (
        dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    )
    for one, other in zip(here((queries, *held)), (expected, keys, values), strict=True):
        torch.testing.assert_close(one, other, **near)
    found = window_attention_triton(
        queries, *held, places=there(places), prefix_mask=there(mask), scale=dim**-0.5
    )
    exact = [here(one).double() for one in (queries, *held)]
    expected = window_attention_reference(*exact, places=places, prefix_mask=mask, scale=dim**-0.5)
    torch.testing.assert_close(here(found).double(), expected, **near)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_sum_norm_and_gate(dtype):
    x, change, weight = torch.randn(3, 6, 1280, generator=torch.Generator().manual_seed(0)).to(dtype)
    near: dict[str, Any] = (
        dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=2e-2, atol=2e-2)
    )
    found = here(add_norm_triton(*there((x, change, weight[0])), eps=1e-5))
    for one, other in zip(found, summed(x, change, weight[0], 1e-5), strict=True):
        torch.testing.assert_close(one.double(), other, **near)
    found = here(gated_triton(*there((x, change))))
    torch.testing.assert_close(found.double(), opened(x, change), **near)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise(dtype):
    keys = torch.randint(-(2**63), 2**63 - 1, (3,), generator=torch.Generator().manual_seed(0))
    slots, count = torch.tensor([[0, 5, 2**32 - 1]]).repeat(3, 1), 1026 if INTERPRETED else 16384
    out = torch.full((3, 3, count), float("nan"), dtype=dtype, device=DEVICE)
    found = philox_uniform_triton(out.clone(), there(keys), there(slots), 3, 9, 5)
    expected = philox_uniform_reference(keys, slots, count, 3, 9, 5, dtype)
    assert torch.equal(here(found), expected)  # bit for bit
    normal = philox_normal_triton(out.clone(), there(keys), there(slots), 3, 9, 5)
    near: dict[str, Any] = dict(rtol=1e-5, atol=1e-5) if dtype == torch.float32 else dict(rtol=0, atol=4e-14)
    torch.testing.assert_close(here(normal), philox_normal(keys, slots, count, 3, 9, 5, dtype), **near)


@pytest.mark.skipif(INTERPRETED, reason="samplers ask for the kernels on a GPU only")
@pytest.mark.parametrize(
    "sampler",
    [
        AutoregressiveSampler(),
        SpeculativeJacobiSampler(6),
        SpeculativeJacobiSampler(6, "maximal", "exact"),
        SpeculativeJacobiSampler(6, "gumbel", "exact", "last_law"),
        SpeculativeJacobiSampler(6, "maximal", "exact", drafts="repaired"),
        SpeculativeJacobiSampler(6, initial_draft="up", graph=3),
        SpeculativeJacobiSampler(6, acceptance="grouped", relaxation={"code_distance": None}),
        SpeculativeJacobiSampler(6, acceptance="clustered", relaxation={"group_size": 3}),
    ],
    ids=lambda sampler: (
        f"{type(sampler).__name__}-{sampler.config.get('acceptance')}-{sampler.config.get('coupling')}-"
        f"{sampler.config.get('graph')}-{sampler.config.get('drafts')}"
    ),
)
def test_samplers_decode_on_the_device_as_on_the_cpu(sampler):
    def decode(device: str) -> Any:
        model = TabularModel(TokenGrid(6, 6), 16, order=2, conditions=3, dependence=0.2, dtype=torch.float32)
        return sampler(
            model.to(device),
            torch.tensor([2, 0, 1, 2], device=device),
            law=TokenLaw(guidance_scale=2.0, top_k=9, top_p=0.9),
            generator=[torch.Generator().manual_seed(seed) for seed in range(4)],
            batch_size=4,
            **({"codebook": codes(16).to(device)} if getattr(sampler, "needs_codebook", False) else {}),
        )

    found, expected = decode("cuda"), decode("cpu")
    assert torch.equal(found.tokens.cpu(), expected.tokens)
    assert torch.equal(found.trace.target_calls.cpu(), expected.trace.target_calls)


# Of LlamaGen-XL: the widest layer, and the one with the longest sums.
@pytest.mark.parametrize("inputs, outputs", [(90, 18)] if INTERPRETED else [(1280, 7168), (3584, 1280)])
@pytest.mark.parametrize("dtype", [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_project_has_the_same_bits_whatever_the_rows(kind, dtype, inputs, outputs):
    most = 3 if INTERPRETED else 128
    given = project_case(most, inputs=inputs, outputs=outputs, dtype=dtype, **KINDS[kind])
    whole = project_triton(*there(given.arguments))
    near = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(whole.cpu(), project_reference(*given.arguments), rtol=near, atol=near)
    for width in (1, 2, 32, 64):
        assert torch.equal(project_triton(*there(given.rows(slice(width)))), whole[:width])
    for row in range(0, most, 19):
        assert torch.equal(
            project_triton(*there(given.rows(slice(row, row + 1))), early=False), whole[row : row + 1]
        )


@pytest.mark.parametrize("window", [2, 5] if INTERPRETED else [2, 16, 64])
def test_attention_in_one_order_has_the_same_bits_whatever_the_window(window):
    sizes = (1, 2, 40, 16) if INTERPRETED else (2, 20, 760, 64)
    rows, heads, size, dim = sizes
    dtype = torch.float32 if INTERPRETED else torch.bfloat16
    keys, values = torch.randn(2, *sizes).to(DEVICE, dtype)
    queries = torch.randn(rows, window, heads, dim).to(DEVICE, dtype)
    places = (torch.arange(window) + size // 2).repeat(rows, 1).to(DEVICE)
    mask = torch.ones(rows, 5, dtype=torch.bool, device=DEVICE)
    found = window_attention_triton(queries, keys, values, places, mask, dim**-0.5, True)
    for at in range(window):
        one = slice(at, at + 1)
        alone = window_attention_triton(queries[:, one], keys, values, places[:, one], mask, dim**-0.5, True)
        assert torch.equal(alone, found[:, one])


@pytest.mark.skipif(INTERPRETED, reason="programs run one after the other there")
@pytest.mark.parametrize("one_order", [False, True])
def test_attention_has_the_same_bits_in_every_launch_and_recording(one_order):
    """Whichever program ends last, on two streams at once, each with its own cache."""

    def case(seed: int) -> tuple[Any, ...]:
        draw = torch.Generator().manual_seed(seed)
        keys, values = torch.randn(2, 4, 20, 1500, 64, generator=draw).to(DEVICE, torch.bfloat16)
        queries = torch.randn(4, 32, 20, 64, generator=draw).to(DEVICE, torch.bfloat16)
        places = (torch.randint(1400, (4, 1), generator=draw) + torch.arange(32)).to(DEVICE)
        mask = torch.ones(4, 120, dtype=torch.bool, device=DEVICE)
        return queries, keys, values, places, mask, 0.125, one_order

    cases = [case(0), case(1)]
    expected = [window_attention_triton(*given) for given in cases]
    torch.cuda.synchronize()
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in cases], []
    for graph, given in zip(graphs, cases, strict=True):
        with torch.cuda.graph(graph):
            outputs.append([window_attention_triton(*given) for _ in range(9)])
    streams = [torch.cuda.Stream() for _ in cases]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for found, one in zip(outputs, expected, strict=True):
            assert all(torch.equal(each, one) for each in found)
    for found, given in zip(expected, cases, strict=True):
        assert torch.equal(window_attention_triton(*given), found)
