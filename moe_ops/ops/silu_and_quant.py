"""moe::silu_and_quant_{contiguous,masked} and moe::silu_and_quant_ws: the gated activation, quantised for GEMM2."""

import torch
from torch import Tensor

from moe_ops.backends import lazy
from moe_ops.meta import silu_and_quant as contract
from moe_ops.reference import silu_and_quant as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.workspace import LAYER_SCHEMA, Stage

FORMULA_SCHEMA = (
    'str activation="silu", float? swiglu_limit=None, float? gemm1_alpha=None, float? gemm1_clamp_limit=None'
)
"""Which gated activation, in the schema of every op that computes one."""
_ATTRIBUTES = f'str recipe, str scale_format="fp32", {FORMULA_SCHEMA}, Tensor? bias=None, str backend="auto"'

CONTIGUOUS = define_op(
    "silu_and_quant_contiguous",
    f"(Tensor gateup, Tensor m_indices, *, {_ATTRIBUTES}) -> (Tensor act_q, Tensor act_scale)",
    contract=contract.silu_and_quant_contiguous,
    kernels={
        "reference": reference.silu_and_quant_contiguous,
        "triton": lazy("moe_ops.kernels.silu_and_quant:silu_and_quant_contiguous"),
    },
)
MASKED = define_op(
    "silu_and_quant_masked",
    f"(Tensor gateup, Tensor masked_m, *, {_ATTRIBUTES}) -> (Tensor act_q, Tensor act_scale)",
    contract=contract.silu_and_quant_masked,
    kernels={
        "reference": reference.silu_and_quant_masked,
        "triton": lazy("moe_ops.kernels.silu_and_quant:silu_and_quant_masked"),
    },
)


def _ws(
    *,
    ws,
    bias,
    activation,
    swiglu_limit,
    gemm1_alpha,
    gemm1_clamp_limit,
    backend,
    **sizes,
) -> None:
    stage = Stage("silu_and_quant_ws", ws, bias, backend=backend, **sizes)
    if stage.fused:  # gated_gemm_ws did it
        return
    op = CONTIGUOUS if stage.layer.layout == "contiguous" else MASKED
    op.into(
        (stage["act_q"], stage["act_scale"]),
        gateup=stage["gateup"],
        **stage.row_map(),
        recipe=stage.layer.recipe,
        scale_format=stage.layer.scale_format,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        backend=backend,
    )


define_ws(
    "silu_and_quant_ws",
    "(Tensor(a!) ws, Tensor? bias, str activation, float? swiglu_limit, float? gemm1_alpha, "
    f"float? gemm1_clamp_limit, {LAYER_SCHEMA}) -> ()",
    _ws,
)


def silu_and_quant_contiguous(
    gateup: Tensor,
    m_indices: Tensor,
    *,
    recipe: str,
    scale_format: str = "fp32",
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gated activation of each valid row, in float32 from the bf16 it reads to the one rounding it writes.

    With g, u the gate and up halves after the bias:
        silu                                    g * sigmoid(g) * u
        silu, swiglu_limit=L                    the same with g = min(g, L), u = clamp(u, -L, L)    (DeepSeek-V4)
        silu, gemm1_alpha=a, gemm1_clamp_limit=L  g * sigmoid(a g) * (u + 1), g and u clamped alike  (gpt-oss)
        situ, gemm1_alpha=b, gemm1_clamp_limit=c  b tanh(g / b) sigmoid(g) * c tanh(u / c)

    Args:
        gateup: (M, 2 I) bf16, gate in [:, :I], up in [:, I:].
        m_indices: (M,) int32. Rows labelled -1 are neither read nor written.
        recipe, scale_format: of the prepared weights; they fix what GEMM2 reads.
        bias: (E, 2 I) float, added in float32 to the rows of its expert.

    Returns:
        act_q: (M, I) in the recipe's dtype. act_scale: as quantize returns it, MN-major; empty for bf16.

    Raises:
        ValueError: I is not a multiple of the recipe's group; attributes that name no formula. TypeError: a dtype.
    """
    return torch.ops.moe.silu_and_quant_contiguous(
        gateup,
        m_indices,
        recipe=recipe,
        scale_format=scale_format,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        backend=backend,
    )


def silu_and_quant_masked(
    gateup: Tensor,
    masked_m: Tensor,
    *,
    recipe: str,
    scale_format: str = "fp32",
    activation: str = "silu",
    swiglu_limit: float | None = None,
    gemm1_alpha: float | None = None,
    gemm1_clamp_limit: float | None = None,
    bias: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """As silu_and_quant_contiguous, on slabs.

    Args:
        gateup: (E, m_max, 2 I) bf16.
        masked_m: (E,) int32. Rows past masked_m[e] are neither read nor written.

    Returns:
        act_q: (E, m_max, I) in the recipe's dtype. act_scale: MN-major; empty for bf16.
    """
    return torch.ops.moe.silu_and_quant_masked(
        gateup,
        masked_m,
        recipe=recipe,
        scale_format=scale_format,
        activation=activation,
        swiglu_limit=swiglu_limit,
        gemm1_alpha=gemm1_alpha,
        gemm1_clamp_limit=gemm1_clamp_limit,
        bias=bias,
        backend=backend,
    )
