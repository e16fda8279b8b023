"""What a picture of a next-scale model costs: arithmetic and memory traffic, counted on the real modules.

They run on PyTorch's meta device, where tensors have shapes and no values: every matrix product and every weight that
is read shows, whatever the size. Nothing is measured here; `visual_spec.eval.speed.scale_bench` does that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from visual_spec.models.next_scale.scale_cache import CompressedVAR
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales.scales import ScaleWiseSampler
from visual_spec.samplers.scales.schedule import ScaleSchedule
from visual_spec.samplers.scales.stages import Stage, prefill


@dataclass(frozen=True)
class ScaleCost:
    """The cost of one decode of one picture, the tokenizer's small part between the scales left out.

    Attributes:
        flops: of all matrix products: two for a multiplication and an addition.
        weight_bytes: weights read from memory, each once a forward; of tables only the rows that are looked up, which
            is next to nothing, are left out.
        cache_bytes: keys and values that attention reads, the current map's among them: each once a forward.
        forwards: of all models.
    """

    flops: int
    weight_bytes: int
    cache_bytes: int
    forwards: int

    def in_batch(self, batch_size: int) -> dict[str, float]:
        """What a picture costs in a batch, whose pictures share the weights that are read; for the record of a row."""
        weights = self.weight_bytes / batch_size
        return {
            "flops_per_image": self.flops,
            "weight_bytes_per_image": weights,
            "cache_bytes_per_image": self.cache_bytes,
            "bytes_per_image": weights + self.cache_bytes,
            "forwards": self.forwards,
        }


def pipeline_on_meta(
    transformer: Mapping[str, object],
    vq_model: Mapping[str, object],
    refiner: Mapping[str, object] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    kinds: Mapping[str, type[nn.Module]] | None = None,
    sampler: ScaleWiseSampler | None = None,
    **settings: Any,
) -> ScaleImagePipeline:
    """A pipeline on the meta device.

    Args:
        transformer, vq_model, refiner: constructor arguments of its parts.
        dtype: of the weights.
        kinds: classes of the parts, by their names, where they are no `VARTransformer` and `MultiscaleVQModel`.
        sampler: default `ScaleWiseSampler()`.
        settings: of the pipeline.
    """

    def build(name: str, config: Mapping[str, object]) -> Any:
        kind: Any = (kinds or {}).get(name, MultiscaleVQModel if name == "vq_model" else VARTransformer)
        with torch.device("meta"):
            return nn.Module.to(kind.from_config(config), dtype).eval()

    return ScaleImagePipeline(
        build("transformer", transformer),
        build("vq_model", vq_model),
        sampler or ScaleWiseSampler(),
        refiner=None if refiner is None else build("refiner", refiner),
        **settings,
    )


def like_on_meta(pipe: ScaleImagePipeline) -> ScaleImagePipeline:
    """The pipeline's shapes on the meta device, with its settings."""
    refiner = None if pipe.refiner is None else dict(pipe.refiner.config)
    law = (f"default_{name}" for name in ("guidance_scale", "top_k", "top_p"))
    names = ("budget", "refiner_budget", "refiner_guidance_scale", "refiner_first_scale", *law)
    settings = {name: pipe.config[name] for name in names}
    return pipeline_on_meta(
        dict(pipe.transformer.config),
        dict(pipe.vq_model.config),
        refiner,
        dtype=pipe.transformer.dtype,
        kinds={name: type(part) for name, part in pipe.components.items() if isinstance(part, nn.Module)},
        sampler=pipe.sampler,
        **settings,
    )


@torch.no_grad()
def count_decode(
    stages: Sequence[Stage], *, guided: bool, schedule: ScaleSchedule | None = None
) -> ScaleCost:
    """Run the forwards of a schedule of models on the meta device, in the order in which a sampler does, and count.

    Args:
        stages: of models of `pipeline_on_meta`, or of these with a compressed cache.
        guided: with an unconditional row beside the picture's row, in stages without a law of their own.
        schedule: what the sampler leaves out; None: nothing.
    """
    plan = (schedule or ScaleSchedule()).at(stages[-1].scales.stop)
    runs = [list(run) for _, run in groupby(plan.cut(stages), key=lambda stage: id(stage.model))]
    counter = _Counter([_network(run[0].model) for run in runs])
    labels = torch.zeros(1, dtype=torch.long, device="meta")
    forwards = 0
    flops = FlopCounterMode(display=False)
    with flops, _Attention(counter), counter:
        for run in runs:
            model, network = run[0].model, _network(run[0].model)
            weight = network.word_embed.weight
            first, stop = run[0].scales.start, run[-1].scales.stop

            def map_of(scale: int, network: Any = network, weight: Tensor = weight) -> Tensor:
                side = network.scales[scale]
                return weight.new_empty(1, network.code_dim, side, side)

            known = [map_of(scale) for scale in range(1, first + 1)]
            with counter.forward():
                state = prefill(run, labels, guided, 1, known, plan)
            for scale in range(first + 1, stop):
                if state.guided and not plan.guides(scale):
                    state.drop_unconditional()
                with counter.forward():
                    model(state, map_of(scale), scale)
            forwards += stop - first
    return ScaleCost(flops.get_total_flops(), counter.weight_bytes, counter.cache_bytes, forwards)


def _network(model: Any) -> Any:
    return model.model if isinstance(model, CompressedVAR) else model


class _Counter(TorchDispatchMode):
    """Counts what the operations of a forward read.

    A weight is read once a forward, and so are the keys and values of a layer, which later scales of a prefill find in
    the processor's own memory.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        tables = {id(m.weight) for net in networks for m in net.modules() if isinstance(m, nn.Embedding)}
        weights = [p for network in networks for p in network.parameters() if id(p) not in tables]
        self._weights = {_place(weight)[0] for weight in weights}
        self._read: dict[tuple[int, int | None], int] = {}
        self._kept: list[Tensor] = []  # so that no two tensors of a forward have one place
        self.weight_bytes = self.cache_bytes = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Within: one forward."""
        yield
        self.weight_bytes += sum(size for place, size in self._read.items() if place[1] is None)
        self.cache_bytes += sum(size for place, size in self._read.items() if place[1] is not None)
        self._read.clear()
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        result = func(*args, **(kwargs or {}))
        made = _place(result)[0] if isinstance(result, Tensor) else None
        for value in (one for arg in args for one in (arg if isinstance(arg, (list, tuple)) else (arg,))):
            if isinstance(value, Tensor):
                place = _place(value)[0]
                # A view reads nothing; of a table of positions the part that is added is read.
                if place in self._weights and place != made:
                    self.note(value)
        return result

    def note(self, tensor: Tensor, *, attended: bool = False) -> None:
        """Count what is read of a tensor: a weight, or keys or values that are attended to."""
        storage, offset = _place(tensor)
        place = (storage, offset if attended else None)
        self._read[place] = max(self._read.get(place, 0), tensor.nelement() * tensor.element_size())
        self._kept.append(tensor)


class _Attention(TorchFunctionMode):
    """Tells a counter the keys and values of attention, which runs in many operations without a device."""

    def __init__(self, counter: _Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func is F.scaled_dot_product_attention:
            self._counter.note(args[1], attended=True)
            self._counter.note(args[2], attended=True)
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())
