"""MaskGCT written a second time: single samples, two calls where there is guidance, from weights by official names."""

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.continuous.straight import linear, norm

Weights = Mapping[str, Tensor]
DIM, LAYERS, HEADS = 16, 2, 2
SEMANTIC, PHONES, CODES, BOOKS = 40, 9, 24, 3


def network_shapes() -> dict[str, tuple[int, ...]]:
    """What both networks share, in the released key layout."""
    shapes: dict[str, tuple[int, ...]] = {"mask_emb.weight": (1, DIM), "cond_emb.weight": (SEMANTIC, DIM)}
    at = "diff_estimator"
    for name in ("diff_step_mlp", "cond_mlp"):
        shapes |= {f"{at}.{name}.0.weight": (4 * DIM, DIM), f"{at}.{name}.0.bias": (4 * DIM,)}
        shapes |= {f"{at}.{name}.2.weight": (DIM, 4 * DIM), f"{at}.{name}.2.bias": (DIM,)}
    norms = [f"{at}.norm"]
    for layer in range(LAYERS):
        part = f"{at}.layers.{layer}"
        shapes |= {f"{part}.self_attn.{name}_proj.weight": (DIM, DIM) for name in "qkvo"}
        shapes |= {f"{part}.mlp.{name}_proj.weight": (4 * DIM, DIM) for name in ("gate", "up")}
        shapes[f"{part}.mlp.down_proj.weight"] = (DIM, 4 * DIM)
        norms += [f"{part}.input_layernorm", f"{part}.post_attention_layernorm"]
    for name in norms:
        shapes |= {f"{name}.to_weight.weight": (DIM, DIM), f"{name}.to_weight.bias": (DIM,)}
    return shapes


def semantic_shapes() -> dict[str, tuple[int, ...]]:
    own = {
        "to_logit.weight": (SEMANTIC, DIM),
        "to_logit.bias": (SEMANTIC,),
        "phone_emb.weight": (PHONES + 1, DIM),
    }
    return network_shapes() | own


def acoustic_shapes(books: int) -> dict[str, tuple[int, ...]]:
    shapes = network_shapes() | {
        "layer_emb.weight": (books, DIM),
        "diff_estimator.embed_tokens.weight": (0, 256),
    }
    for book in range(books):
        shapes |= {f"token_emb.{book}.weight": (CODES, DIM), f"to_logits.{book}.weight": (CODES, DIM)}
        shapes[f"to_logits.{book}.bias"] = (CODES,)
    return shapes


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        key: 0.35 * torch.randn(shape, generator=generator, dtype=torch.float64)
        for key, shape in shapes.items()
    }


# -- networks ----------------------------------------------------------------------------------------------------------


def _two(w: Weights, name: str, x: Tensor) -> Tensor:
    return linear(w, f"{name}.2", F.silu(linear(w, f"{name}.0", x)))


def llama(w: Weights, x: Tensor, time: float) -> Tensor:
    """Features [S, dim] of `x [S, dim]`, at positions 0 to S - 1, head by head."""
    half = DIM // 2
    angles = [time * math.exp(-math.log(10000) / (half - 1) * i) for i in range(half)]
    told = torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=x.dtype)
    told = _two(w, "diff_estimator.diff_step_mlp", told)

    def normed(name: str, x: Tensor) -> Tensor:
        return linear(w, f"{name}.to_weight", told) * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def turned(x: Tensor) -> Tensor:
        pairs = DIM // HEADS // 2
        out = torch.empty_like(x)
        for i in range(pairs):
            angle = torch.arange(len(x), dtype=x.dtype) * 10000 ** (-2 * i / (DIM // HEADS))
            a, b = x[:, i], x[:, i + pairs]
            out[:, i], out[:, i + pairs] = (
                a * angle.cos() - b * angle.sin(),
                b * angle.cos() + a * angle.sin(),
            )
        return out

    for layer in range(LAYERS):
        part = f"diff_estimator.layers.{layer}"
        h = normed(f"{part}.input_layernorm", x)
        q, k, v = (h @ w[f"{part}.self_attn.{name}_proj.weight"].T for name in "qkv")
        seen = [
            (turned(a) @ turned(b).T / math.sqrt(DIM / HEADS)).softmax(-1) @ c
            for a, b, c in zip(q.chunk(HEADS, -1), k.chunk(HEADS, -1), v.chunk(HEADS, -1), strict=True)
        ]
        x = x + torch.cat(seen, -1) @ w[f"{part}.self_attn.o_proj.weight"].T
        h = normed(f"{part}.post_attention_layernorm", x)
        gate, up = (h @ w[f"{part}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w[f"{part}.mlp.down_proj.weight"].T
    return normed("diff_estimator.norm", x)


def guided(wanted: Tensor, free: Tensor, scale: float, rescale: float) -> Tensor:
    """As published, whose `cfg` is the scale less 1."""
    led = wanted + (scale - 1) * (wanted - free)
    return rescale * led * wanted.std() / led.std() + (1 - rescale) * led


def semantic_logits(
    w: Weights, phones: Tensor, prompt: Tensor, codes: Tensor, time: float, scale: float, rescale: float
) -> Tensor:
    """Logits [L, V] of one sample, of `codes [L]` with -1 where they are hidden."""
    target = torch.where((codes < 0)[:, None], w["mask_emb.weight"], w["cond_emb.weight"][codes.clamp(min=0)])
    said = _two(w, "diff_estimator.cond_mlp", w["phone_emb.weight"][phones])
    features = llama(w, torch.cat([said, w["cond_emb.weight"][prompt], target]), time)[-len(codes) :]
    if scale > 1:
        features = guided(features, llama(w, target, time), scale, rescale)
    return linear(w, "to_logit", features)


def acoustic_logits(
    w: Weights,
    book: int,
    semantic: Tensor,
    prompt: Tensor,
    codes: Tensor,
    time: float,
    scale: float,
    rescale: float,
) -> Tensor:
    """Logits [L, V] of one sample and codebook, of `codes [L, K]` with -1 where they are hidden."""
    books = len(w["layer_emb.weight"])
    told = _two(w, "diff_estimator.cond_mlp", w["cond_emb.weight"][semantic] + w["layer_emb.weight"][book])
    lead = sum(w[f"token_emb.{k}.weight"][prompt[:, k]] for k in range(books))
    target = torch.zeros(len(codes), DIM, dtype=torch.float64)
    for k in range(books):
        for at in range(len(codes)):
            code = int(codes[at, k])
            target[at] += w["mask_emb.weight"][0] if code < 0 else w[f"token_emb.{k}.weight"][code]
    assert isinstance(lead, Tensor)
    features = llama(w, torch.cat([lead, target]) + told, time)[-len(codes) :]
    if scale > 1:
        features = guided(features, llama(w, target + told[-len(codes) :], time), scale, rescale)
    return linear(w, f"to_logits.{book}", features)


# -- decoding ----------------------------------------------------------------------------------------------------------


def decoded(
    logits: Callable[[Tensor, float], Tensor],
    length: int,
    steps: int,
    temperature: float,
    kept: int,
    gumbel: Callable[[int], Tensor],
    choice: Callable[[int], Tensor],
) -> Tensor:
    """One codebook as published: codes [L].

    Args:
        logits: [L, V] of codes with -1 where they are hidden, at a time.
        kept: how many of the likeliest codes are drawn from.
        gumbel, choice: the noise [L, V] of a step's draws, and [L] of its scores.
    """
    codes = torch.full((length,), -1)
    for step in range(steps):
        time, hidden = 1 - step / steps, codes < 0
        scores = logits(codes, time)
        least = scores.topk(kept, dim=-1).values[:, -1:]
        scores = torch.where(scores < least, -math.inf, scores)
        if step < steps - 1:
            drawn = (scores / (temperature * time) + gumbel(step)).argmax(-1)
        else:
            drawn = (scores / 0.2 + gumbel(step)).argmax(-1) if steps == 1 else scores.argmax(-1)
        codes = torch.where(hidden, drawn, codes)
        left = math.floor(length * math.sin(math.pi / 2 * (1 - (step + 1) / steps)))
        if left == 0:
            break
        sure = scores.softmax(-1).gather(1, drawn[:, None])[:, 0] + time * choice(step)
        again = torch.where(hidden, 1 - sure, -math.inf).topk(left).indices
        codes[again] = -1
    return codes


# -- codecs ------------------------------------------------------------------------------------------------------------


def plain_conv(w: Weights, name: str, x: Tensor, dilation: int = 1, stride: int = 1, pad: int = 0) -> Tensor:
    """`x [C, T]` through a convolution whose weight is a direction and a length, as stored."""
    v, g = w[f"{name}.weight_v"], w[f"{name}.weight_g"]
    weight = torch.stack([row / row.square().sum().sqrt() * length for row, length in zip(v, g, strict=True)])
    return F.conv1d(x[None], weight, w[f"{name}.bias"], stride, pad, dilation)[0]


def snake(w: Weights, name: str, x: Tensor) -> Tensor:
    alpha = w[f"{name}.alpha"][0]
    return x + torch.sin(alpha * x) ** 2 / (alpha + 1e-9)


def acoustic_encoder(w: Weights, wave: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Latents [C, T] of a wave [N], from the official encoder's list of lists."""
    x = plain_conv(w, "block.0", wave[None], pad=3)
    for i, stride in enumerate(strides, 1):
        for unit, dilation in enumerate((1, 3, 9)):
            at = f"block.{i}.block.{unit}.block"
            y = plain_conv(w, f"{at}.1", snake(w, f"{at}.0", x), dilation, pad=3 * dilation)
            x = x + plain_conv(w, f"{at}.3", snake(w, f"{at}.2", y))
        x = snake(w, f"block.{i}.block.3", x)
        x = plain_conv(w, f"block.{i}.block.4", x, stride=stride, pad=math.ceil(stride / 2))
    last = len(strides) + 1
    return plain_conv(w, f"block.{last + 1}", snake(w, f"block.{last}", x), pad=1)


def backbone(w: Weights, name: str, x: Tensor, layers: int) -> Tensor:
    """Vocos's features [T, dim] of `x [C, T]`."""
    y = F.conv1d(x[None], w[f"{name}.embed.weight"], w[f"{name}.embed.bias"], padding=3)[0].T
    y = norm(y, w, f"{name}.norm")
    for i in range(layers):
        at = f"{name}.convnext.{i}"
        h = F.conv1d(
            y.T[None], w[f"{at}.dwconv.weight"], w[f"{at}.dwconv.bias"], padding=3, groups=y.shape[1]
        )
        h = linear(w, f"{at}.pwconv1", norm(h[0].T, w, f"{at}.norm"))
        h = 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))
        y = y + w[f"{at}.gamma"] * linear(w, f"{at}.pwconv2", h)
    return norm(y, w, f"{name}.final_layer_norm")


def codes_of(w: Weights, x: Tensor, books: int) -> Tensor:
    """Residual codes [K, T] of `x [C, T]`: the nearest directions."""
    found = []
    for k in range(books):
        at = f"quantizer.quantizers.{k}"
        table = w[f"{at}.codebook.weight"]
        inner = plain_conv(w, f"{at}.in_project", x).T
        inner = inner / inner.norm(dim=1, keepdim=True)
        own = torch.cdist(inner, table / table.norm(dim=1, keepdim=True)).argmin(1)
        found.append(own)
        x = x - plain_conv(w, f"{at}.out_project", table[own].T)
    return torch.stack(found)


def spectrum_wave(w: Weights, features: Tensor, frame: int, hop: int) -> Tensor:
    """The wave [T * hop] of features [T, dim], frame by frame."""
    out = linear(w, "model.head.out", features)
    total = torch.zeros(len(out) * hop + frame - hop, dtype=torch.float64)
    weight, window = torch.zeros_like(total), torch.hann_window(frame, dtype=torch.float64)
    for t, row in enumerate(out):
        magnitude, phase = row.chunk(2)
        magnitude = magnitude.exp().clamp(max=100)
        piece = torch.fft.irfft(magnitude * torch.complex(phase.cos(), phase.sin()), frame)
        total[t * hop : t * hop + frame] += piece * window
        weight[t * hop : t * hop + frame] += window**2
    cut = (frame - hop) // 2
    return (total / weight)[cut : len(total) - cut]
