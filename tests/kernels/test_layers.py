"""Kernels of transformer layers: definitions, operators and kernels against loops in float64."""

import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.helpers.compiled_kernels import check_compiles, check_traced, compiled, registers
from tests.kernels.layers import PLACES, opened, summed, window_case, write_case
from visual_spec.kernels import launch, layers
from visual_spec.kernels import rotary_write as write_module
from visual_spec.kernels import window_attention as module
from visual_spec.kernels.layers import add_norm, gated
from visual_spec.kernels.rotary_write import rotary_write
from visual_spec.kernels.window_attention import window_attention

KERNEL = "_attention_kernel"


@pytest.mark.parametrize("name", PLACES)
def test_window_attention(name):
    given = window_case(PLACES[name], dtype=torch.float64, stale=1e4)
    torch.testing.assert_close(window_attention(*given.arguments), given.expected, rtol=1e-12, atol=1e-12)


def test_rotary_write():
    given = write_case(dtype=torch.float64)
    queries = rotary_write(given.projected, given.turns, given.keys, given.values, given.places)
    for found, expected in zip((queries, given.keys, given.values), given.expected, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # angles are float32


def test_add_norm_and_gated():
    hidden, change, weight = torch.randn(3, 2, 4, 12, dtype=torch.float64).unbind()
    found, expected = add_norm(hidden, change, weight[0, 0], 1e-3), summed(hidden, change, weight[0, 0], 1e-3)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gated(hidden, change), opened(hidden, change), rtol=1e-12, atol=1e-12)


def test_gradients_go_through_the_definitions(monkeypatch):
    """Operators have none, so they are not asked where gradients are."""
    monkeypatch.setattr(launch, "on_gpu", lambda tensor: True)
    hidden = torch.randn(2, 4, 12, requires_grad=True)
    total, normed = add_norm(hidden, hidden.detach(), torch.ones(12), 1e-5)
    (total.sum() + normed.square().sum() + gated(hidden, hidden).sum()).backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert not launch.fused(hidden) and not module.takes(hidden, 64)
    with torch.no_grad():
        assert launch.fused(hidden) and not launch.fused(hidden.double())
        assert module.takes(hidden, 128) and not module.takes(hidden, 129)


def test_shapes_that_do_not_fit_are_refused():
    queries, keys, values, places, mask, _ = window_case(PLACES["window"]).arguments
    wrong = {
        "queries have shape": (queries[0], keys, values, places, mask),
        r"\[R, G, S, D\].*multiple": (queries[:, :, :3], keys, values, places, mask),
        r"places.*\[3, 5\]": (queries, keys, values, places[:, :2], mask),
        r"prefix.*\(2, 7\)": (queries, keys, values, places, mask[:2]),
    }
    for text, arguments in wrong.items():
        with pytest.raises(ValueError, match=text):
            window_attention(*arguments)
    projected, turns, keys, values, places, _ = write_case()
    for text, arguments in {
        "keys": (projected, turns, keys[:, :, :, :4], values, places),
        "H at least 1": (projected[:, :, :4], turns, keys, values, places),
        r"places.*\[3, 5\]": (projected, turns, keys, values, places[:1]),
        r"\(3, 2, 1, 1, 6, 2\)": (projected, (turns[0], turns[1][:, :2]), keys, values, places),
    }.items():
        with pytest.raises(ValueError, match=text):
            rotary_write(*arguments)
    with pytest.raises(ValueError, match=r"\(3, 5, 4, 12\)"):
        gated(queries, queries[:1])
    with pytest.raises(ValueError, match="weight"):
        add_norm(queries, queries, torch.ones(3), 1e-5)


def test_operators_are_known_to_tracers_of_gpu_code():
    attended, written = window_case(PLACES["window"]), write_case()
    x, ops = torch.randn(2, 3, 12), torch.ops.visual_spec
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (ops.window_attention, attended.arguments),
        (ops.rotary_write, (written.projected, *written.turns, written.keys, written.values, written.places)),
        (ops.add_norm, (x, x, x[0, 0], 1e-5)),
        (ops.gated, (x, x)),
    ]
    for op, arguments in calls:
        check_traced(op, arguments, strides=True)


# Positions, heads, heads of keys, numbers of a head, and most registers of a thread by the assembler: LlamaGen-XL one
# by one and by windows, its prompt, Emu3, 3B.
SHAPES = [
    (torch.bfloat16, 1, 20, 20, 64, 96),
    (torch.bfloat16, 32, 20, 20, 64, 128),
    (torch.bfloat16, 120, 20, 20, 64, 168),
    (torch.bfloat16, 32, 32, 8, 128, 255),
    (torch.bfloat16, 32, 32, 32, 100, 255),
    (torch.float32, 32, 20, 20, 64, 96),
    (torch.float32, 32, 32, 8, 128, 96),
]


@pytest.mark.parametrize("one_order", [False, True])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_attention_compiles_for_hopper(tmp_path, sizes, one_order):
    pytest.importorskip("triton")
    dtype, window, heads, groups, dim, most = sizes
    keys = torch.zeros(2, groups, 728, dim, dtype=dtype)
    queries, places = torch.zeros(2, window, heads, dim, dtype=dtype), torch.zeros(2, window).long()
    given = queries, keys, keys, places, torch.ones(2, 120, dtype=torch.bool), 0.1, one_order
    binary = check_compiles(tmp_path, module, KERNEL, lambda: module.window_attention_triton(*given))
    assert registers(binary, tmp_path) <= most


def test_a_program_counts_itself_after_all_its_threads_have_written():
    """And is told of what the others have written before they counted, by an atomic of the whole GPU."""
    pytest.importorskip("triton")
    keys, mask = torch.zeros(2, 20, 728, 64, dtype=torch.bfloat16), torch.ones(2, 120, dtype=torch.bool)
    queries, places = torch.zeros(2, 32, 20, 64, dtype=torch.bfloat16), torch.zeros(2, 32).long()
    given = queries, keys, keys, places, mask, 0.1
    text = compiled(module, KERNEL, lambda: module.window_attention_triton(*given)).asm["ptx"]
    # Stores of the whole text, of parts and their masses, of the counter, and of what is combined.
    order = re.findall(r"bar\.sync|\b(?:st|ld|atom|red)\.global[.\w]*", text)
    (count,) = (at for at, one in enumerate(order) if one.startswith(("atom", "red")))
    assert order[count] == "atom.global.gpu.acq_rel.add.u32"
    assert order[count - 1] == order[count + 1] == "bar.sync" and order[count - 2].startswith("st.global")
    assert order[count + 2].startswith("st.global") and order[count + 3].startswith("ld.global")
    assert not any(".nc" in one for one in order[count:])  # such loads need not see what the kernel writes


@pytest.mark.skipif(launch.triton is None, reason="the buffers are the kernel's")
def test_calls_of_a_cache_share_counters_and_a_recording_without_any_has_its_own(monkeypatch):
    cache, other = torch.zeros(2, 3, 5, 7), torch.zeros(3, 5, 7)
    first = module._counters(cache[0], 6)
    assert first.dtype == torch.int32 and first.tolist() == [0] * 6
    assert module._counters(cache[1, 1:], 6) is first
    assert module._counters(cache[0], 4) is not first and module._counters(other, 6) is not first
    known = len(module._COUNTERS)
    del cache, other
    assert len(module._COUNTERS) == known - 2
    with FakeTensorMode():
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        cache = torch.empty(2, 5, device="cuda")
        recorded = module._counters(cache, 6)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        kept = module._counters(cache, 6)
        assert kept is not recorded and module._counters(cache, 6) is kept


@pytest.mark.parametrize("name", ["add_norm", "gated", "rotary_write"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiles_for_hopper(tmp_path, name, dtype):
    pytest.importorskip("triton")
    x, turn = torch.zeros(2, 4, 4096, dtype=dtype), torch.zeros(2, 4, 1, 1, 64, 2)
    held, places = torch.zeros(2, 8, 700, 128, dtype=dtype), torch.zeros(2, 4).long()
    projected = torch.zeros(2, 4, 48, 128, dtype=dtype)
    where, call = {
        "add_norm": (layers, lambda: layers.add_norm_triton(x, x, x[0, 0], 1e-5)),
        "gated": (layers, lambda: layers.gated_triton(x, x)),
        "rotary_write": (
            write_module,
            lambda: write_module.rotary_write_triton(projected, turn, turn, held, held, places),
        ),
    }[name]
    check_compiles(tmp_path, where, f"_{name}_kernel", call)


def test_in_one_order_kernels_wait_before_they_read_or_write(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "dependent", lambda device: True)
    keys = torch.zeros(2, 20, 728, 64, dtype=torch.bfloat16)
    queries, places = torch.zeros(2, 32, 20, 64, dtype=torch.bfloat16), torch.zeros(2, 32).long()
    mask, turn = torch.ones(2, 120, dtype=torch.bool), torch.zeros(2, 32, 1, 1, 32, 2)
    projected = torch.zeros(2, 32, 60, 64, dtype=torch.bfloat16)

    def attends(one_order: bool = True) -> Any:
        return module.window_attention_triton(queries, keys, keys, places, mask, 0.1, one_order)

    def writes() -> Any:
        return write_module.rotary_write_triton(projected, turn, turn, keys, keys, places, True)

    for home, kernel, call in (
        (module, KERNEL, attends),
        (write_module, "_rotary_write_kernel", writes),
    ):
        text = check_compiles(tmp_path, home, kernel, call).asm["ptx"]
        assert text.index("griddepcontrol.launch_dependents") < text.index("griddepcontrol.wait")
        reads = [
            found.start() for found in re.finditer(r"(?:ld|st|atom)\.global|cp\.async\.c[ag]\.shared", text)
        ]
        assert text.index("griddepcontrol.wait") < min(reads)
    apart = check_compiles(tmp_path, module, KERNEL, lambda: attends(False))
    assert "griddepcontrol" not in apart.asm["ptx"]


def test_attention_in_one_order_is_one_kernel_for_every_window():
    """So a query's sums are those of the same program; without it a window of 64 has other tiles than one token."""
    pytest.importorskip("triton")
    keys, mask = torch.zeros(2, 20, 728, 64, dtype=torch.bfloat16), torch.ones(2, 120, dtype=torch.bool)

    def text(window: int, one_order: bool) -> str:
        queries, places = torch.zeros(2, window, 20, 64, dtype=torch.bfloat16), torch.zeros(2, window).long()
        given = queries, keys, keys, places, mask, 0.1, one_order
        return compiled(module, KERNEL, lambda: module.window_attention_triton(*given)).asm["ptx"]

    assert len({text(window, True) for window in (1, 2, 32, 64)}) == 1
    assert text(1, False) != text(64, False)
    (own,) = (one for one in module._attention_kernel.params if one.name == "window")
    assert own.do_not_specialize  # a window of 1 is else another compilation
