"""Parts for tests of next-scale prediction: a tokenizer that is a formula, a model that is a table, a tiny VAR."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.tiny import quiet
from visual_spec.models.core.protocol import ScaleState
from visual_spec.models.next_scale.var import VARTransformer
from visual_spec.models.next_scale.var_vq import MultiscaleVQModel
from visual_spec.pipelines.scale_image import ScaleImagePipeline
from visual_spec.samplers.scales.scales import ScaleWiseSampler


class FormulaTokenizer:
    """Random codes; a map is enlarged (by repetition), weighted by its scale, and added to the canvas."""

    def __init__(self, scales: tuple[int, ...], codebook_size: int, code_dim: int = 2, seed: int = 0) -> None:
        self.scales, self.codebook_size, self.code_dim = scales, codebook_size, code_dim
        generator = torch.Generator().manual_seed(seed)
        self.codebook = torch.randn(codebook_size, code_dim, generator=generator, dtype=torch.float64)

    def begin(self, batch_size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        side = self.scales[-1]
        return torch.zeros(batch_size, self.code_dim, side, side, device=device, dtype=dtype)

    def accumulate(self, canvas: Tensor, scale: int, tokens: Tensor) -> Tensor:
        side = self.scales[scale]
        return self.accumulate_codes(canvas, scale, self.codebook[tokens].mT.unflatten(2, (side, side)))

    def accumulate_codes(self, canvas: Tensor, scale: int, codes: Tensor) -> Tensor:
        large = F.interpolate(codes, size=canvas.shape[-2:], mode="nearest-exact")
        return canvas + ((scale + 1) ** -0.5 * large).to(canvas.dtype)

    def next_map(self, canvas: Tensor, scale: int) -> Tensor:
        return F.adaptive_avg_pool2d(canvas, self.scales[scale])

    def decode_canvas(self, canvas: Tensor) -> Tensor:
        return canvas.mean(1, keepdim=True).expand(-1, 3, -1, -1).clamp(-1, 1)


@dataclass
class TableState(ScaleState):
    tables: Tensor
    maps: list[Tensor] = field(default_factory=list)

    def drop_unconditional(self) -> None:
        super().drop_unconditional()
        self.tables = self.tables[: len(self.tables) // 2]


class TableScaleModel:
    """Logits that depend on all of the maps fed, by waves of random frequencies: no two histories share a law."""

    def __init__(
        self,
        scales: tuple[int, ...],
        vocab_size: int,
        code_dim: int = 2,
        *,
        conditions: int = 1,
        seed: int = 0,
        scale: float = 1.2,
    ) -> None:
        self.scales, self.vocab_size, self.code_dim = scales, vocab_size, code_dim
        self.conditions, self.scale = conditions, scale
        self.prefills = 0
        generator = torch.Generator().manual_seed(seed)
        sizes = [side * side for side in scales]

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.base = [random(conditions + 1, size, vocab_size) for size in sizes]
        # [features of the maps up to this scale, tables * slots * vocabulary]
        self.waves = [
            random(sum(sizes[1 : k + 1]) * code_dim, (conditions + 1) * sizes[k] * vocab_size)
            for k in range(len(sizes))
        ]

    def logits(self, tables: Tensor, maps: Sequence[Tensor]) -> Tensor:
        """[R, n * n, V] of scale len(maps), given the maps of scales 1 on of B rows."""
        base = self.base[len(maps)]
        if not maps:
            return self.scale * base[tables]
        rows = torch.cat([map.flatten(1) for map in maps], 1).double()
        rows = rows.repeat(len(tables) // len(rows), 1)
        wave = (rows @ self.waves[len(maps)]).view(-1, *base.shape)
        return self.scale * (base[tables] + 1.5 * wave[torch.arange(len(tables)), tables].sin())

    def prefill(
        self,
        condition: Tensor | None,
        *,
        batch_size: int,
        guided: bool,
        maps: Sequence[Tensor] = (),
        stop: int | None = None,
    ) -> TableState:
        self.prefills += 1
        tables = torch.zeros(batch_size, dtype=torch.long) if condition is None else condition
        if guided:
            tables = torch.cat([tables, torch.full_like(tables, self.conditions)])
        return TableState(self.logits(tables, maps), guided, tables, list(maps))

    def __call__(self, state: TableState, map: Tensor, scale: int) -> Tensor:
        state.maps[scale - 1 :] = [map]
        assert len(state.maps) == scale
        return self.logits(state.tables, state.maps)


def tiny_var(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> VARTransformer:
    """Two layers over 1 + 4 + 9 + 16 tokens out of 12; weights so large that nothing is uniform by accident."""
    settings: dict[str, Any] = dict(
        vocab_size=12, code_dim=2, dim=16, num_layers=2, num_heads=2, num_classes=5, scales=(1, 2, 3, 4)
    )
    torch.manual_seed(seed)
    model = VARTransformer(**{**settings, **changes}).eval()
    nn.Module.to(model, dtype)
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.ndim == 2 and name not in ("word_embed.weight", "lvl_embed.weight") else 0.7
        parameter.data = torch.randn_like(parameter) * spread
    return model


SIDES = (1, 2, 3, 4)
TINY_VQ: dict[str, Any] = dict(
    base_channels=4, channel_multipliers=(1, 1), blocks_per_level=1, codebook_size=12, code_dim=2, norm_groups=None
)  # fmt: skip


def tiny_var_vq(**changes: Any) -> MultiscaleVQModel:
    """The tokenizer of `tiny_var`, for pictures of 8 x 8 pixels."""
    torch.manual_seed(1)
    model = MultiscaleVQModel(**{**TINY_VQ, "scales": SIDES, **changes})
    model.quantize.embedding.weight.data.normal_()
    return model.eval()


def tiny_scale_pipeline(*, pair: bool = True, num_classes: int = 5, **parts: Any) -> ScaleImagePipeline:
    """A silent pipeline of tiny random models; `pair`: with a refiner of one layer."""
    large = tiny_var(0, torch.float32, num_classes=num_classes)
    small = tiny_var(7, torch.float32, num_layers=1, num_classes=num_classes) if pair else None
    settings = {"sampler": ScaleWiseSampler(), "refiner": small, **parts}
    return quiet(ScaleImagePipeline(transformer=large, vq_model=tiny_var_vq(), **settings))
