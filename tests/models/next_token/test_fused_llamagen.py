"""LlamaGen's calls on a GPU: the kernels of its layers, how many launches a call takes, and compiled blocks.

The kernels run in Triton's interpreter. Launches are counted on tensors that have a CUDA device and no numbers.
"""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.tiny import tiny_transformer
from tests.helpers.without_numbers import NoHost, stand_in, without_numbers
from tests.kernels.layers import window_case, write_case
from visual_spec.kernels import launch, layers, project, rotary_write, window_attention
from visual_spec.models.core.projections import fuse_projections
from visual_spec.models.next_token.llamagen import PRESETS, LlamaGenTransformer, TextCondition

KERNELS = ("add_norm", "gated", "rotary_write", "project", "window_attention")
_NO_WORK = ("empty", "new_empty", "empty_like", "empty_strided", "_unsafe_view", "_reshape_alias")


pytestmark = pytest.mark.skipif(launch.triton is None, reason="needs a Triton whose kernels take tuples")


class Launches(TorchDispatchMode):
    """Counts what a device would have to launch: an operator once."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if func.namespace != "prim" and not func.is_view and name not in _NO_WORK:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", KERNELS)
def test_operators_launch_once(monkeypatch, name):
    pytest.importorskip("triton")
    launched: list[str] = []

    class Watched:
        def __init__(self, kernel: str) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **kwargs: launched.append(self.kernel)

    homes = {"rotary_write": rotary_write, "window_attention": window_attention, "project": project}
    module: Any = homes.get(name, layers)
    for kernel in [one for one in vars(module) if one.endswith("_kernel")]:
        monkeypatch.setattr(module, kernel, Watched(kernel))
    x, written = torch.zeros(2, 3, 8), write_case()
    arguments: dict[str, Any] = {
        "add_norm": (x, x, x[0, 0], 1e-5),
        "gated": (x, x),
        "project": (x, x[0, 0][None]),
        "rotary_write": (written.projected, *written.turns, written.keys, written.values, written.places),
        "window_attention": window_case([[3]]).arguments,
    }
    getattr(module, f"{name}_triton")(*arguments[name])
    assert len(launched) == 1
    monkeypatch.setitem(globals(), "_NO_WORK", (*_NO_WORK, "fill_"))  # of empty tensors, by tests alone
    with Launches() as others:  # such as one that zeroes what attention counts in
        getattr(module, f"{name}_triton")(*arguments[name])
    assert len(launched) == 2 and others.count == 0


def launches(monkeypatch: pytest.MonkeyPatch, joined: bool, kernel: bool = False) -> tuple[int, int]:
    """Launches of the prompt and of a call of LlamaGen-XL: 24 x 24 tokens, guided, windows of 32, bfloat16."""
    stand_in(monkeypatch)
    sizes: dict[str, Any] = dict(grid_size=24, prefix_length=120, num_classes=None, caption_dim=2048)
    with torch.device("meta"):
        whole: Any = LlamaGenTransformer(**PRESETS["XL"], **sizes)
    if joined:
        fuse_projections(whole, kernel=kernel)
    mask = torch.ones(1, 120, dtype=torch.bool)
    condition = TextCondition(torch.zeros(1, 120, 2048, dtype=torch.bfloat16), mask)
    monkeypatch.setattr(LlamaGenTransformer, "check_condition", lambda *_: None)  # reads the mask, once
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole, condition = without_numbers(whole.to(torch.bfloat16).eval()), without_numbers(condition)
        with Launches() as prompt:
            state = whole.prefill(condition, batch_size=1, guided=True, window=32)
        tokens, slots = (torch.zeros(1, 32, dtype=torch.long, device="cuda") for _ in range(2))
        with NoHost(), Launches() as call:
            logits = whole(state, tokens, slots)
        assert logits.shape == (2, 32, 16384) and logits.device.type == "cuda"
    return prompt.count, call.count


@pytest.mark.parametrize("joined", [False, True])
def test_a_call_of_xl_takes_at_most_600_launches(monkeypatch, joined):
    prompt, call = launches(monkeypatch, joined)
    layers = PRESETS["XL"]["num_layers"]
    # Four products, or five, and a cache write, attention, two sums with norms and a gate.
    assert (9 if joined else 10) * layers < call < (9 if joined else 10) * layers + 40
    assert call <= 600 and prompt <= 600


def test_in_one_order_a_layer_takes_six_launches(monkeypatch):
    _, call = launches(monkeypatch, True, True)
    layers = PRESETS["XL"]["num_layers"]
    # Four linear layers with what stands around them, a cache write, and attention.
    assert 6 * layers < call < 6 * layers + 40


# -- compiled blocks ---------------------------------------------------------------------------------------------------


def test_compiled_blocks_are_the_ones_that_run():
    graphs, ran = [], []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)

        def run(*args: Any) -> Any:
            ran.append(graph)
            return graph.forward(*args)

        return run

    model: Any = tiny_transformer(num_layers=5)
    condition = TextCondition(torch.randn(2, 6, 8), torch.ones(2, 6, dtype=torch.bool))
    tokens = torch.randint(0, 12, (2, 4))
    windows = [torch.tensor([[first] * 2]).T + torch.arange(4) for first in range(5)]

    def calls() -> list[torch.Tensor]:
        state = model.prefill(condition, batch_size=2, guided=True, window=4)
        return [state.logits, *(model(state, tokens, slots) for slots in windows)]

    torch.compiler.reset()
    try:
        expected = calls()
        model.compile_repeated_blocks(backend=backend)
        found = calls()
    finally:
        torch.compiler.reset()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert len(ran) == 5 * 6  # every block, in every call
    assert len(graphs) <= 5  # the layers share a graph
