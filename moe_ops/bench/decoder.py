"""Decoders in sizes of known models: one token a sequence and step, a static KV cache, and MoEs that are exchanged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ops.bench.cases import SHAPES, Shape


@dataclass(frozen=True)
class Sizes:
    """Everything about the decoder but its batch. The head is left out: it is the same for all."""

    shape: Shape
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    """Places of the KV cache. All are attended to: a step costs what the last one of a full cache does."""


_SHAPES = {shape.name: shape for shape in SHAPES}
_QWEN3, _DEEPSEEK, _TINY = (_SHAPES[name] for name in ("qwen3-30b-a3b", "deepseek-v3-ep8", "tiny"))
SMALL = Sizes(_TINY, 2, 4, 2, 64, 64)
# One rank of eight of DeepSeek-V3: an eighth of its experts, and grouped-query attention in the place of the latent
# one, with about what such a rank holds of that: 33 of 37 million weights a layer, 512 of 576 cached values a token.
# Without the shared expert, and without the exchange between ranks: all routes of a token stay here, so a batch of B is
# the load of the experts when eight ranks bring B tokens each.
MODELS = {
    sizes.shape.name: sizes
    for sizes in (Sizes(_QWEN3, 8, 32, 4, 128, 1024), Sizes(_DEEPSEEK, 4, 16, 2, 128, 1024), SMALL)
}
"""By the names of the shapes in cases.py."""


class TorchRouted(nn.Module):
    """Another library's experts behind transformers' router: softmax, top_k, weights that add up to 1.

    Args:
        router: (E, K). function, module: experts as transformers calls them.
    """

    router: Tensor

    def __init__(self, router: Tensor, top_k: int, function: Callable[..., Tensor], module: Any):
        super().__init__()
        self.register_buffer("router", router)
        self.top_k, self.function, self.module = top_k, function, module

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x, self.router).float().softmax(-1)
        weights, ids = scores.topk(self.top_k, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return self.function(self.module, x, ids, weights)


class Attention(nn.Module):
    """Grouped-query attention over a static cache, with normed and rotated queries and keys."""

    keys: Tensor
    values: Tensor

    def __init__(self, sizes: Sizes, batch: int, **at):
        super().__init__()
        self.sizes = sizes
        width, narrow, K = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.shape.K
        self.qkv = nn.Linear(K, width + 2 * narrow, bias=False, **at)
        self.out = nn.Linear(width, K, bias=False, **at)
        self.q_norm, self.k_norm = (nn.RMSNorm(sizes.head_dim, eps=1e-6, **at) for _ in range(2))
        for name in ("keys", "values"):
            cache = torch.randn(batch, sizes.kv_heads, sizes.context, sizes.head_dim, **at)
            self.register_buffer(name, cache, persistent=False)

    def forward(self, x: Tensor, place: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """x (B, K) at `place` (1,) int64 of the cache."""
        s, B = self.sizes, x.shape[0]
        q, k, v = self.qkv(x).split([n * s.head_dim for n in (s.heads, s.kv_heads, s.kv_heads)], -1)
        q = _rotated(self.q_norm(q.view(B, s.heads, 1, s.head_dim)), rotation)
        k = _rotated(self.k_norm(k.view(B, s.kv_heads, 1, s.head_dim)), rotation)
        self.keys.index_copy_(2, place, k)
        self.values.index_copy_(2, place, v.view(B, s.kv_heads, 1, s.head_dim))
        out = F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
        return self.out(out.reshape(B, -1))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, batch: int, moe: nn.Module, **at):
        super().__init__()
        self.attention, self.moe = Attention(sizes, batch, **at), moe
        self.before, self.between = (nn.RMSNorm(sizes.shape.K, eps=1e-6, **at) for _ in range(2))

    def forward(self, x: Tensor, place: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.before(x), place, rotation)
        return x + self.moe(self.between(x))


class Decoder(nn.Module):
    """One step: (B, K) embeddings of one token a sequence, and its place in the cache -> (B, K).

    Args:
        moes: one MoE a layer, (B, K) -> (B, K). Everything else is the same for the same seed.
    """

    def __init__(self, sizes: Sizes, batch: int, moes: Sequence[nn.Module], device: torch.device, seed: int = 0):
        super().__init__()
        at = dict(device=device, dtype=torch.bfloat16)
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            self.blocks = nn.ModuleList(Block(sizes, batch, moe, **at) for moe in moes)
        self.turns = sizes.head_dim // 2

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        turns = torch.arange(self.turns, device=x.device) * (-1.0 / self.turns)
        angle = place * 1e6**turns
        rotation = torch.cat((angle.cos(), angle.cos())).to(x.dtype), torch.cat((angle.sin(), angle.sin())).to(x.dtype)
        for block in self.blocks:
            x = block(x, place, rotation)
        return x


def _rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin
