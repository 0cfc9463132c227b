"""moe_ops: the DeepGEMM mixture-of-experts forward as torch.library ops. See README.md."""

import os as _os
from importlib import metadata as _metadata

# In a source checkout the contracts and stand-ins lie beside this folder; in a wheel, inside it.
_root = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if not _os.path.isdir(_os.path.join(__path__[0], "meta")) and _os.path.isfile(
    _os.path.join(_root, "meta", "__init__.py")
):
    __path__.append(_root)

if any(_metadata.distributions(name="moe-ops")):
    raise ImportError(
        "moe_ops: the distribution moe-ops is installed; it is another project with the same import name, and the two "
        "overwrite each other's files. pip uninstall moe-ops, then pip install --force-reinstall fused-moe-ops."
    )

from moe_ops.arena import Workspace, share_workspace  # noqa: E402
from moe_ops.checkpoints import load_moe_weights, load_router  # noqa: E402
from moe_ops.forward import fused_deepgemm  # noqa: E402
from moe_ops.graphs import GraphedDecode  # noqa: E402
from moe_ops.layer import MoELayer  # noqa: E402
from moe_ops.ops import (  # noqa: E402
    gated_gemm_direct,
    gated_gemm_gathered,
    gemm_nt_bf16_fp32,
    gemm_nt_fp8,
    gemm_nt_mxfp8,
    grouped_gemm_contiguous,
    grouped_gemm_direct,
    grouped_gemm_gathered,
    grouped_gemm_masked,
    hc_prenorm_gemm,
    pack_scale,
    post_permute,
    pre_permute_contiguous,
    pre_permute_gathered,
    pre_permute_masked,
    quantize,
    silu_and_quant_contiguous,
    silu_and_quant_masked,
    topk,
)
from moe_ops.planner import BufferPlan, plan  # noqa: E402
from moe_ops.prep import MoEWeights, PrepReport, prepare_weights, repack_weights  # noqa: E402
from moe_ops.registry import tag_compile_caches as _tag_compile_caches  # noqa: E402
from moe_ops.report import report  # noqa: E402
from moe_ops.tracing import tracing  # noqa: E402
from moe_ops.warmup import warmup  # noqa: E402

__version__ = "0.1.0"
_tag_compile_caches(__version__)

__all__ = [
    "BufferPlan",
    "GraphedDecode",
    "MoELayer",
    "MoEWeights",
    "PrepReport",
    "Workspace",
    "fused_deepgemm",
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
    "load_moe_weights",
    "load_router",
    "pack_scale",
    "plan",
    "post_permute",
    "pre_permute_contiguous",
    "pre_permute_gathered",
    "pre_permute_masked",
    "prepare_weights",
    "quantize",
    "repack_weights",
    "report",
    "share_workspace",
    "silu_and_quant_contiguous",
    "silu_and_quant_masked",
    "topk",
    "tracing",
    "warmup",
]
