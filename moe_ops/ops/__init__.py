"""The ops: one file per verb, each with its public functions and their registration. Importing this registers all."""

from moe_ops.ops.gated_gemm import gated_gemm_direct, gated_gemm_gathered
from moe_ops.ops.gemm_nt_bf16_fp32 import gemm_nt_bf16_fp32
from moe_ops.ops.gemm_nt_fp8 import gemm_nt_fp8
from moe_ops.ops.gemm_nt_mxfp8 import gemm_nt_mxfp8
from moe_ops.ops.grouped_gemm import (
    grouped_gemm_contiguous,
    grouped_gemm_direct,
    grouped_gemm_gathered,
    grouped_gemm_masked,
)
from moe_ops.ops.hc_prenorm_gemm import hc_prenorm_gemm
from moe_ops.ops.pack_scale import pack_scale
from moe_ops.ops.post_permute import post_permute
from moe_ops.ops.pre_permute import pre_permute_contiguous, pre_permute_gathered, pre_permute_masked
from moe_ops.ops.quantize import quantize
from moe_ops.ops.silu_and_quant import silu_and_quant_contiguous, silu_and_quant_masked
from moe_ops.ops.topk import topk

__all__ = [
    "gated_gemm_direct",
    "gated_gemm_gathered",
    "gemm_nt_bf16_fp32",
    "gemm_nt_fp8",
    "gemm_nt_mxfp8",
    "grouped_gemm_contiguous",
    "grouped_gemm_direct",
    "grouped_gemm_gathered",
    "grouped_gemm_masked",
    "hc_prenorm_gemm",
    "pack_scale",
    "post_permute",
    "pre_permute_contiguous",
    "pre_permute_gathered",
    "pre_permute_masked",
    "quantize",
    "silu_and_quant_contiguous",
    "silu_and_quant_masked",
    "topk",
]
