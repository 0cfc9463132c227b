"""transformers' experts implementation "deepgemm", compiled around the library's calls: fp8 blocks.

transformers fetches its build of the library from a hub; here it is given the installed one.
"""

import importlib
from dataclasses import fields
from typing import Any

from moe_ops.bench.peers.deep_gemm_pair import why_no_deep_gemm
from moe_ops.bench.peers.transformers_grouped_mm import CompiledExperts, experts_module, why_no_transformers
from moe_ops.kernels.deep_gemm import library


class TransformersDeepGemm(CompiledExperts):
    name = "transformers deepgemm"
    recipe = "fp8_block"
    fullgraph = False

    def why_not(self) -> str | None:
        return why_no_transformers() or why_no_deep_gemm(self.case)

    def function(self) -> Any:
        integration: Any = importlib.import_module("transformers.integrations.deepgemm")
        dg: Any = library()
        known = dict(
            fp8_fp4_matmul=dg.fp8_fp4_gemm_nt,
            grouped_fp8_fp4_matmul_nt=dg.m_grouped_fp8_fp4_gemm_nt_contiguous,
            grouped_fp8_fp4_matmul_nn=dg.m_grouped_fp8_fp4_gemm_nn_contiguous,
            grouped_bf16_matmul_nt=dg.m_grouped_bf16_gemm_nt_contiguous,
            grouped_bf16_matmul_nn=dg.m_grouped_bf16_gemm_nn_contiguous,
            per_token_cast_to_fp8=dg.utils.per_token_cast_to_fp8,
            transform_sf_into_required_layout=dg.transform_sf_into_required_layout,
            m_alignment=dg.get_mk_alignment_for_contiguous_layout(),
        )
        names = [field.name for field in fields(integration.DeepGEMM)]
        integration._DEEPGEMM = integration.DeepGEMM(**{name: known.get(name) for name in names})
        return integration.deepgemm_fp8_fp4_experts_forward

    def module(self) -> Any:
        weights = self.case.weights
        return experts_module(
            self.case,
            gate_up_proj_scale_inv=weights.w13_scale,
            down_proj_scale_inv=weights.w2_scale,
            block_size=[128, 128],
            activation_scheme="dynamic",
            _deepgemm_disabled=False,
        )
