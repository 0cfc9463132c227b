"""moe::grouped_gemm_{contiguous,masked} and moe::grouped_gemm_ws: each expert's rows times its weight."""

import torch
from torch import Tensor

from moe_ops import check
from moe_ops.backends import lazy
from moe_ops.meta import grouped_gemm as contract
from moe_ops.reference import grouped_gemm as reference
from moe_ops.registry import define_op, define_ws
from moe_ops.workspace import LAYER_SCHEMA, Stage

_OPERANDS = "Tensor x, Tensor? x_scale, Tensor w, Tensor? w_scale"

CONTIGUOUS = define_op(
    "grouped_gemm_contiguous",
    f'({_OPERANDS}, Tensor m_indices, *, str recipe, str backend="auto") -> Tensor',
    contract=contract.grouped_gemm_contiguous,
    kernels={
        "reference": reference.grouped_gemm_contiguous,
        "triton": lazy("moe_ops.kernels.grouped_gemm:grouped_gemm_contiguous"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm:grouped_gemm_contiguous"),
    },
)
MASKED = define_op(
    "grouped_gemm_masked",
    f'({_OPERANDS}, Tensor masked_m, *, str recipe, SymInt expected_m=1, str backend="auto") -> Tensor',
    contract=contract.grouped_gemm_masked,
    kernels={
        "reference": reference.grouped_gemm_masked,
        "triton": lazy("moe_ops.kernels.grouped_gemm:grouped_gemm_masked"),
        "deep_gemm": lazy("moe_ops.kernels.deep_gemm:grouped_gemm_masked"),
    },
)

_BUFFERS = {"gemm1": ("x_q", "x_scale", "gateup"), "gemm2": ("act_q", "act_scale", "down")}


def _ws(*, ws, w, w_scale, stage, expected_m, backend, **sizes) -> None:
    check.one_of("grouped_gemm_ws", "stage", stage, tuple(_BUFFERS))
    x, x_scale, out = _BUFFERS[stage]
    stage = Stage("grouped_gemm_ws", ws, w, w_scale, **sizes)
    op, hint = (CONTIGUOUS, {}) if stage.contiguous else (MASKED, {"expected_m": expected_m})
    op.into(
        (stage[out],),
        x=stage[x],
        x_scale=stage[x_scale],
        w=w,
        w_scale=w_scale,
        **stage.row_map(),
        **hint,
        recipe=stage.layer.recipe,
        backend=backend,
    )


define_ws(
    "grouped_gemm_ws",
    f"(Tensor(a!) ws, Tensor w, Tensor? w_scale, str stage, SymInt expected_m, str backend, {LAYER_SCHEMA}) -> ()",
    _ws,
)


def grouped_gemm_contiguous(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    m_indices: Tensor,
    *,
    recipe: str,
    backend: str = "auto",
) -> Tensor:
    """out[m] = dequantise(x[m]) @ dequantise(w[m_indices[m]]).T, accumulated in float32, rounded once to bf16.

    Args:
        x, x_scale: (M, K) rows and their MN-major scales, as pre_permute_contiguous returns them. M a multiple of 128.
        w, w_scale: (E, N, K) prepared weights (int8 (E, N, K / 2) for mxfp4) and their scales (prepare_weights).
        m_indices: (M,) int32. A block of 128 rows holds one expert's label and -1, and starts with the label if it has
            one: GPU kernels read that first row and compute the whole block, or skip it. The CPU refuses other blocks.
        recipe: name in RECIPES.

    Returns:
        (M, N) bf16. Rows labelled -1 are unspecified: 0 from the reference; a GPU kernel may fill the rest of a block.

    Raises:
        ValueError: shapes, strides or scale formats that do not fit, mixed blocks. TypeError: a dtype.
    """
    return torch.ops.moe.grouped_gemm_contiguous(x, x_scale, w, w_scale, m_indices, recipe=recipe, backend=backend)


def grouped_gemm_masked(
    x: Tensor,
    x_scale: Tensor | None,
    w: Tensor,
    w_scale: Tensor | None,
    masked_m: Tensor,
    *,
    recipe: str,
    expected_m: int = 1,
    backend: str = "auto",
) -> Tensor:
    """out[e, m] = dequantise(x[e, m]) @ dequantise(w[e]).T for m < masked_m[e]. As grouped_gemm_contiguous otherwise.

    Args:
        x, x_scale: (E, m_max, K) slabs and their MN-major scales, as pre_permute_masked returns them.
        masked_m: (E,) int32, valid rows of each slab.
        expected_m: mean rows an expert; tunes GPU kernels and never changes a value.

    Returns:
        (E, m_max, N) bf16. Rows past masked_m[e] are unspecified (0 from the reference).
    """
    return torch.ops.moe.grouped_gemm_masked(
        x, x_scale, w, w_scale, masked_m, expected_m=expected_m, recipe=recipe, backend=backend
    )
