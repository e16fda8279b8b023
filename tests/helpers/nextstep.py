"""The head of NextStep with the names of its public code, written anew, and its sampling step by step."""

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.in_ln = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 3 * width))

    def forward(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(mixed).chunk(3, -1)
        return hidden + gate * self.mlp(self.in_ln(hidden) * (1 + scale) + shift)


class _Final(nn.Module):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.norm_final = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.linear = nn.Linear(width, size)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))

    def forward(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(mixed).chunk(2, -1)
        return self.linear(self.norm_final(hidden) * (1 + scale) + shift)


class _Times(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, times: Tensor) -> Tensor:
        rates = 10000.0 ** (-torch.arange(128, dtype=torch.float32) / 128)
        angles = times[:, None].float() * rates
        dtype = next(self.parameters()).dtype
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(dtype))


class SimpleMLPAdaLN(nn.Module):
    def __init__(self, size: int, context: int, width: int, layers: int) -> None:
        super().__init__()
        self.time_embed = _Times(width)
        self.cond_embed = nn.Linear(context, width)
        self.input_proj = nn.Linear(size, width)
        self.res_blocks = nn.ModuleList([_Block(width) for _ in range(layers)])
        self.final_layer = _Final(width, size)

    def forward(self, token: Tensor, times: Tensor, condition: Tensor) -> Tensor:
        hidden, mixed = self.input_proj(token), self.time_embed(times) + self.cond_embed(condition)
        for block in self.res_blocks:
            hidden = block(hidden, mixed)
        return self.final_layer(hidden, mixed)


class FlowMatchingHead(nn.Module):
    def __init__(self, size: int = 5, context: int = 12, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.input_dim = size
        self.net = SimpleMLPAdaLN(size, context, width, layers)

    def sample(
        self,
        c: Tensor,
        cfg: float = 1.0,
        cfg2: float = 1.0,
        timesteps_shift: float = 1.0,
        num_sampling_steps: int = 20,
        last_step_size: float = 0.04,
        noise_repeat: int = 1,
    ) -> Tensor:
        groups = 1 + (cfg > 1) + (cfg2 > 1)
        rows = len(c) // groups

        def draw() -> Tensor:
            return torch.randn(noise_repeat, self.input_dim).repeat(rows // noise_repeat, 1)

        def velocity(token: Tensor, time: Tensor) -> Tensor:
            made = self.net(torch.cat([token] * groups).to(c.dtype), time.expand(len(c)).to(c), c).float()
            parts = made.chunk(groups)
            if groups == 3:
                return parts[2] + cfg2 * (parts[1] - parts[2]) + cfg * (parts[0] - parts[1])
            return parts[0] if groups == 1 else parts[1] + cfg * (parts[0] - parts[1])

        times = torch.linspace(0, 1 - last_step_size, num_sampling_steps)
        times = times / (timesteps_shift - (timesteps_shift - 1) * times)
        token = draw()
        for time, after in zip(times[:-1], times[1:], strict=True):
            flow = velocity(token, time)
            score = (time * flow - token) / ((1 - time) ** 2 + time * (1 - time))
            mean = token + (flow + (1 - time) * score) * (after - time)
            token = mean + (2 * (1 - time)).sqrt() * (after - time).sqrt() * draw()
        return (token + velocity(token, times[-1]) * last_step_size).to(c.dtype)


class NextStep(nn.Module):
    """What `accelerate` reads of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.image_head = FlowMatchingHead()


def filled(model: nn.Module) -> nn.Module:
    """Weights by the order of their names, the same for every implementation with these names."""
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return model.eval()


def conditions(rows: int) -> Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(1))
