"""A two-layer byte-level decoder whose feed-forward layers call the `moe_ops` operators.

The decoder is written once for training and for inference: each block is given the module that
runs its experts. `PreparedExperts` below is the inference one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import moe_ops

CHECKPOINT = Path(__file__).with_name("tiny_moe_lm.safetensors")


@dataclass(frozen=True)
class Config:
    """Sizes of the decoder; `hidden` is K, `intermediate` is I and `experts` is E."""

    vocab: int = 256
    layers: int = 2
    hidden: int = 128
    heads: int = 4
    intermediate: int = 256
    experts: int = 8
    topk: int = 2
    context: int = 256
    rope_base: float = 10000.0


class PreparedExperts(nn.Module):
    """The experts of one layer, prepared for one `recipe` ("bf16", "fp8_block", ...)."""

    def __init__(self, w13: Tensor, w2: Tensor, topk: int, recipe: str) -> None:
        """Take w13 (E, 2I, K) bf16, gate rows over up rows, and w2 (E, K, I) bf16."""
        super().__init__()
        prepared = moe_ops.prepare_weights(w13, w2, recipe=recipe)
        self.topk = topk
        self.recipe = recipe
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            self.register_buffer(name, getattr(prepared, name), persistent=False)

    def forward(self, x: Tensor, logits: Tensor) -> Tensor:
        """x (T, K) bf16 and router logits (T, E) bf16 to (T, K) bf16."""
        topk_weights, topk_ids = torch.ops.moe.topk(logits, self.topk, scoring="softmax", renormalize=True)
        return torch.ops.moe.fused_deepgemm(
            x,
            topk_weights,
            topk_ids,
            self.w13,
            self.w13_scale,
            self.w2,
            self.w2_scale,
            recipe=self.recipe,
        )


class Cache:
    """Keys and values of each layer, tensors (B, heads, context, K / heads) written in place.

    Their size never changes, so one compiled graph serves every position. Rows past the current
    position may be stale: attention masks them, and a new prompt simply writes over them.
    """

    def __init__(self, config: Config, batch: int, dtype: torch.dtype = torch.bfloat16) -> None:
        shape = (batch, config.heads, config.context, config.hidden // config.heads)
        self.keys = [torch.zeros(shape, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, dtype=dtype) for _ in range(config.layers)]


# An operator of its own, as in a serving engine: the fused kernel behind it is chosen by comparing
# B and S with one, which inside a graph would split prompts and single-token steps in two.
def _attend(query: Tensor, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
    """Attention of query (B, heads, S, D) over cached rows up to each of positions (S,) int64."""
    seen = torch.arange(keys.shape[2]) <= positions[:, None]
    mixed = F.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    return mixed.contiguous()


_LIBRARY = torch.library.Library("tiny_moe_lm", "FRAGMENT")
_LIBRARY.define("attend(Tensor query, Tensor keys, Tensor values, Tensor positions) -> Tensor")
_LIBRARY.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("tiny_moe_lm::attend", lambda query, *_: query.new_empty(query.shape), lib=_LIBRARY)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position for x (B, heads, S, D) with cos and sin (S, D / 2) float32."""
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, low * sin + high * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head attention with rotary position."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)
        half = config.hidden // config.heads // 2
        frequency = config.rope_base ** (-torch.arange(half) / half)
        angle = torch.arange(config.context)[:, None] * frequency
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (T, K), B sequences at positions (S,) int64, to (T, K) in the dtype of x; T = B * S.

        With a cache, its keys and values (B, heads, context, D) are updated at `positions`;
        without one, the S tokens attend to themselves only.
        """
        tokens, head_dim = positions.shape[0], x.shape[1] // self.heads
        qkv = self.qkv(x).view(-1, tokens, 3, self.heads, head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        cos, sin = self.cos[positions], self.sin[positions]
        query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
        if cache is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            keys, values = cache
            keys.index_copy_(2, positions, key)
            values.index_copy_(2, positions, value)
            mixed = torch.ops.tiny_moe_lm.attend(query, keys, values, positions)
        return self.out(mixed.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """Attention, then a routed mixture of experts, each with a pre-norm and a residual."""

    def __init__(self, config: Config, experts: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.router = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.experts = experts

    def forward(self, x: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        """x (T, K), B sequences of S positions, to (T, K)."""
        x = x + self.attention(self.attention_norm(x), positions, cache)
        rows = self.moe_norm(x)
        return x + self.experts(rows, F.linear(rows, self.router))


class TinyMoELM(nn.Module):
    """The decoder; `make_experts(layer)` supplies the experts module of each block."""

    def __init__(self, config: Config, make_experts: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.hidden)
        self.blocks = nn.ModuleList(Block(config, make_experts(layer)) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-5)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)

    def forward(self, tokens: Tensor, start: Tensor, cache: Cache | None = None) -> Tensor:
        """Next-byte logits (B, S, vocab) of tokens (B, S) int64.

        `start` () int64 is the position of the first column: a tensor, so that a compiled graph
        takes it as data rather than as a constant.
        """
        positions = start + torch.arange(tokens.shape[1])
        x = self.embedding(tokens.flatten())
        for layer, block in enumerate(self.blocks):
            state = None if cache is None else (cache.keys[layer], cache.values[layer])
            x = block(x, positions, state)
        return self.head(self.norm(x)).view(*tokens.shape, -1)


def save_checkpoint(model: TinyMoELM, path: Path, notes: dict[str, str]) -> None:
    """Write the parameters as bf16, with the config as JSON and `notes` in the metadata."""
    state = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    save_file(state, path, metadata={"config": json.dumps(asdict(model.config)), **notes})


def load_checkpoint(recipe: str, path: Path = CHECKPOINT) -> TinyMoELM:
    """Read the decoder in bf16 for inference, its experts prepared for `recipe`."""
    with safe_open(path, framework="pt") as file:
        config = Config(**json.loads(file.metadata()["config"]))
        state = {name: file.get_tensor(name) for name in file.keys()}

    def make_experts(layer: int) -> nn.Module:
        w13, w2 = (state.pop(f"blocks.{layer}.experts.{name}") for name in ("w13", "w2"))
        return PreparedExperts(w13, w2, config.topk, recipe)

    model = TinyMoELM(config, make_experts)
    # Only the parameters become bf16: the rotary tables stay float32, prepared experts as they are.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)
