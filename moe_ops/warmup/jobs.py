"""What a run needs compiled: one job for each way in which a layer's kernels differ, and how a job is run."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_ops import forward as _ops  # noqa: F401  registers the ops
from moe_ops.choice import choose
from moe_ops.layer import MoELayer, arguments_of
from moe_ops.meta.grouped_gemm import BLOCKS_M
from moe_ops.planner import plan_layer, resolve
from moe_ops.rows import BLOCK, align, ceil_div, contiguous_rows, gathered_block, gathered_tiles
from moe_ops.sizes import Layer


@dataclass(frozen=True)
class Form:
    """A tensor's form without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: Tensor) -> "Form":
        return cls(tuple(tensor.shape), tensor.stride(), str(tensor.dtype).removeprefix("torch."))

    def zeros(self, device: torch.device | str) -> Tensor:
        dtype = getattr(torch, self.dtype)
        stored = torch.uint8 if dtype.itemsize == 1 else dtype  # fp8 cannot be filled on every device
        return torch.empty_strided(self.shape, self.stride, dtype=stored, device=device).zero_().view(dtype)

    @property
    def nbytes(self) -> int:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return extent * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Job:
    """One forward that compiles what calls of its kind need."""

    sizes: Layer
    """Its T is a token count that was asked for."""
    experts: str
    """Arguments of fused_deepgemm, as JSON: layout, backend, formula ..."""
    routing: str
    """Arguments of topk, as JSON."""
    tensors: tuple[tuple[str, Form], ...]
    """The weights by argument."""
    tables: tuple[tuple[str, Form], ...]
    """The router's bias and hash table, where it has them."""
    dtype: str
    """Of hidden states."""
    logits: str
    """Dtype of the router's logits."""
    hidden: int
    """K."""
    way: tuple
    """What decides which kernels are compiled. Jobs that agree in all but T are one."""

    @property
    def digest(self) -> str:
        """The same for jobs that compile the same."""
        kind = asdict(replace(self, sizes=replace(self.sizes, T=0)))
        return hashlib.sha256(json.dumps(kind, sort_keys=True).encode()).hexdigest()[:16]

    def call_bytes(self, device: torch.device | str) -> int:
        """Memory that one run takes above the weights: workspace, tokens, result, routes."""
        experts = json.loads(self.experts)
        choice = choose("warmup", self.sizes, experts.get("backend", "auto"), device)
        total = plan_layer(self.sizes, choice).total_bytes
        tokens = self.sizes.T * self.hidden * getattr(torch, self.dtype).itemsize
        routes = self.sizes.T * (8 * self.sizes.top_k + 4 * self.sizes.E)
        return min(total, experts.get("max_workspace_bytes", total)) + 2 * tokens + routes

    @property
    def weight_bytes(self) -> int:
        return sum(form.nbytes for _, form in self.tensors)

    def run(self, device: torch.device | str, weights: dict[str, Tensor | None] | None = None) -> None:
        """Compiles by running the layer once: on its weights, or on zeros of their form."""
        if weights is None:
            made = {name: form.zeros(device) for name, form in self.tensors}
            weights = {"w13_scale": None, "w2_scale": None, **made}  # bf16 has none
        generator = torch.Generator(device).manual_seed(0)

        def random(width: int, dtype: str) -> Tensor:
            made = torch.randn(self.sizes.T, width, generator=generator, device=device)
            return made.to(getattr(torch, dtype))

        routing, experts = json.loads(self.routing), json.loads(self.experts)
        tables = {name: form.zeros(device) for name, form in self.tables}
        if "hash_table" in tables:
            tables["token_ids"] = torch.zeros(self.sizes.T, dtype=torch.int64, device=device)
        with torch.no_grad():
            routes = torch.ops.moe.topk(random(self.sizes.E, self.logits), **tables, **routing)
            torch.ops.moe.fused_deepgemm(random(self.hidden, self.dtype), *routes, **weights, **experts)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)


def way_of(layer: Layer, backend: str, device: torch.device | str) -> tuple:
    """What decides which kernels a call takes, apart from the layer's sizes. tests/aot compares it with the kernels.

    deep_gemm chooses by the exact row count, so there each has a kernel of its own.
    """
    choice = choose("warmup", layer, backend, device)
    made = resolve(layer, choice)
    T, routes = layer.T, layer.T * layer.top_k
    mean = ceil_div(routes, layer.experts)
    sizes = [T, routes, align(T, 4), align(routes, 4)]  # the last two: columns of scales
    if made.layout == "direct":
        detail: Any = 0
    elif made.layout == "gathered":
        detail = gathered_block(T, layer.top_k, layer.experts)
        sizes.append(gathered_tiles(routes, layer.E, detail))
    elif choice.backend in ("deep_gemm", "auto"):
        detail = contiguous_rows(T, layer.top_k, layer.E) if made.layout == "contiguous" else mean
    else:
        M = contiguous_rows(T, layer.top_k, layer.E)
        rows = max(1, M - layer.E * BLOCK) // layer.E if made.layout == "contiguous" else mean
        detail = next((tile for tile in BLOCKS_M if tile >= rows), BLOCKS_M[-1])
    return (made.layout, choice.backend, choice.fp8, detail, *map(_kind_of_size, sizes))


def _kind_of_size(size: int) -> tuple:
    """What kernels tell apart in a size: Triton compiles anew for 1 and for multiples of 16, and launchers choose their
    blocks by powers of two."""
    return size == 1, size % 16 == 0, size.bit_length(), max(size - 1, 0).bit_length()


def jobs_of(layers: Iterable[MoELayer], tokens: Iterable[int], device: torch.device | str, dtype: torch.dtype):
    """The jobs of these layers at these token counts, each once: {digest: (job, a layer that has its weights)}."""
    found: dict[str, tuple[Job, MoELayer]] = {}
    for layer in layers:
        for T in sorted(set(tokens)):
            job = job_of(layer, T, device, dtype)
            found.setdefault(job.digest, (job, layer))
    return found


def job_of(layer: MoELayer, T: int, device: torch.device | str, dtype: torch.dtype) -> Job:
    sizes = replace(layer.sizes, T=T)
    experts, routing = arguments_of(layer.experts), arguments_of(layer.routing)
    return Job(
        sizes,
        json.dumps(experts, sort_keys=True),
        json.dumps(routing, sort_keys=True),
        _forms(layer.expert_tensors()),
        _forms(dict(bias=layer.bias, hash_table=layer.hash_table)),
        str(dtype).removeprefix("torch."),
        str(layer.router_weight.dtype).removeprefix("torch."),
        sizes.K,
        way_of(sizes, experts.get("backend", "auto"), device),
    )


def _forms(tensors: dict[str, Tensor | None]) -> tuple[tuple[str, Form], ...]:
    return tuple((name, Form.of(tensor)) for name, tensor in tensors.items() if tensor is not None)
