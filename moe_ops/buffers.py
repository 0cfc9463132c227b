"""The buffers of a forward in each layout: what the contracts say of them, and the stages in which they live."""

from dataclasses import dataclass, replace
from typing import Any

from moe_ops.meta.gated_gemm import direct_specs
from moe_ops.meta.gated_gemm import gathered_specs as gated_specs
from moe_ops.meta.grouped_gemm import BLOCKS_M, gemm_spec
from moe_ops.meta.pre_permute import contiguous_specs, gathered_specs, masked_specs
from moe_ops.meta.quantize import row_specs
from moe_ops.recipes import Recipe, get_recipe
from moe_ops.rows import align, gathered_block
from moe_ops.sizes import Layer
from moe_ops.spec import ALIGNMENT, TensorSpec

STAGES = ("pre_permute", "gemm1", "silu_and_quant", "gemm2", "post_permute")


@dataclass(frozen=True)
class Buffer:
    """One tensor of the workspace. It is written in stage `first`, last read in stage `last`, and lies at `offset`."""

    name: str
    spec: TensorSpec
    first: int
    last: int
    offset: int = 0

    @property
    def nbytes(self):
        """Bytes taken, rounded up to the alignment of offsets."""
        return align(self.spec.nbytes, ALIGNMENT)

    def at(self, offset: int) -> "Buffer":
        return replace(self, offset=offset)

    def asdict(self) -> dict[str, Any]:
        """What there is to tell of it, in plain values; bytes count the rounding, stages go by their names."""
        return {
            "name": self.name,
            "shape": list(self.spec.shape),
            "dtype": str(self.spec.dtype).removeprefix("torch."),
            "stride": list(self.spec.stride),
            "bytes": self.nbytes,
            "offset": self.offset,
            "written": STAGES[self.first],
            "last_read": STAGES[self.last],
        }


def buffers_of(layer: Layer) -> list[Buffer]:
    """The buffers of a forward in the layer's layout with their lifetimes, not placed yet."""
    return _BUFFERS[layer.layout](layer, _recipe_of(layer))


def largest_buffers_of(layer: Layer) -> list[Buffer]:
    """The same, large enough for every token count up to T: fewer tokens may have the smallest row tiles."""
    if layer.layout == "gathered":
        return _gathered(layer, _recipe_of(layer), BLOCKS_M[0])
    return buffers_of(layer)


def _recipe_of(layer: Layer) -> Recipe:
    return get_recipe("plan", layer.recipe, layer.scale_format)


def _staged(layer: Layer, recipe: Recipe) -> list[Buffer]:
    contiguous = layer.layout == "contiguous"
    specs = contiguous_specs if contiguous else masked_specs
    x_q, x_scale, row_map, src2dst, *ends, scratch = specs(
        layer.T, layer.K, layer.top_k, layer.E, recipe, layer.scale_format
    )
    rows = x_q.shape[:-1]
    act_q, act_scale = row_specs(*rows, layer.I, recipe=recipe, scale_format=layer.scale_format)
    return [
        Buffer("src2dst", src2dst, 0, 4),
        Buffer("m_indices" if contiguous else "masked_m", row_map, 0, 3),
        *(Buffer("ends", spec, 0, 3) for spec in ends),
        Buffer("scratch", scratch, 0, 0),
        Buffer("x_q", x_q, 0, 1),
        Buffer("x_scale", x_scale, 0, 1),
        Buffer("gateup", gemm_spec(*rows, N=2 * layer.I), 1, 2),
        Buffer("act_q", act_q, 2, 3),
        Buffer("act_scale", act_scale, 2, 3),
        Buffer("down", gemm_spec(*rows, N=layer.K), 3, 4),
    ]


def _gathered(layer: Layer, recipe: Recipe, block_m: int | None = None) -> list[Buffer]:
    block_m = block_m or gathered_block(layer.whole, layer.top_k, layer.experts)
    x_q, x_scale, row_token, tiles, src2dst, scratch = gathered_specs(
        layer.T, layer.K, layer.top_k, layer.E, recipe, layer.scale_format, block_m
    )
    rows = row_token.shape[0]
    act_q, act_scale = gated_specs(rows, layer.I, recipe, layer.scale_format)
    return [
        Buffer("src2dst", src2dst, 0, 4),
        Buffer("tiles", tiles, 0, 3),
        Buffer("scratch", scratch, 0, 0),
        Buffer("x_q", x_q, 0, 1),
        Buffer("x_scale", x_scale, 0, 1),
        Buffer("row_token", row_token, 0, 1),
        Buffer("act_q", act_q, 1, 3),
        Buffer("act_scale", act_scale, 1, 3),
        Buffer("down", gemm_spec(rows, N=layer.K), 3, 4),
    ]


def _direct(layer: Layer, recipe: Recipe) -> list[Buffer]:
    act, src2dst = direct_specs(layer.T, layer.top_k, layer.I)
    return [
        Buffer("act", act, 1, 3),
        Buffer("src2dst", src2dst, 1, 4),
        Buffer("down", gemm_spec(act.shape[0], N=layer.K), 3, 4),
    ]


_BUFFERS = {"contiguous": _staged, "masked": _staged, "gathered": _gathered, "direct": _direct}
