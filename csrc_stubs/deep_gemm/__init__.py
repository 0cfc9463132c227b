"""Stands in for deep_gemm on a machine without a card.

For whoever tests code that calls deep_gemm: hand this module over instead. It has the functions an
expert layer calls, with the names, arguments and defaults of sgl-deep-gemm 0.2.0, in plain torch on
any device. A call the library would refuse, or that would stop its kernel, raises an exception that
names the function, the argument, the rule, the value and the way out; a call that passes computes
the numbers.

    from moe_ops.csrc_stubs import deep_gemm

    with deep_gemm.arch(9):  # as on Hopper
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((x, x_scale), (w, w_scale), d, m_indices)

The rules differ between Hopper (9), data-centre Blackwell (10) and workstation Blackwell (12). The
environment variable DG_STUB_ARCH chooses one, 10 without it; `with deep_gemm.arch(n)` overrides it.

Where the library leaves something open, this is the strictest choice:
 * Rows of d that no group owns (skipped blocks, rows past masked_m) are not touched. The library
   leaves them, zeroes them or computes them with some group, by card and block size.
 * A group id, count or end outside its range raises; the library reads or writes elsewhere.
 * A scale that is no power of two always raises where it has to be packed.

Not here:
 * time, memory and launch limits: tile choice, shared memory, the first call's compilation;
 * rounding inside a kernel: products are summed in float64 and rounded once;
 * blocks smaller than the alignment, which sm90 and sm120 may use (64 rows);
 * an older torch's DLPack, which resets the stride of a width-1 packed scale on return;
 * what an expert layer does not call: k-grouped GEMMs, einsum, attention logits, cuBLASLt, mega
   kernels, NVFP4.
"""

from typing import NoReturn

from . import settings, testing, utils
from ._arch import arch
from .gemm_dense import (
    bf16_gemm_nn,
    bf16_gemm_nt,
    bf16_gemm_tn,
    bf16_gemm_tt,
    fp8_fp4_gemm_nn,
    fp8_fp4_gemm_nt,
    fp8_fp4_gemm_tn,
    fp8_fp4_gemm_tt,
)
from .gemm_grouped import (
    m_grouped_bf16_gemm_nn_contiguous,
    m_grouped_bf16_gemm_nt_contiguous,
    m_grouped_bf16_gemm_nt_masked,
    m_grouped_fp8_fp4_gemm_nn_contiguous,
    m_grouped_fp8_fp4_gemm_nt_contiguous,
    m_grouped_fp8_fp4_gemm_nt_masked,
)
from .hyperconnection import tf32_hc_prenorm_gemm
from .scales import transform_sf_into_required_layout
from .settings import (
    get_deterministic_algorithms,
    get_num_sms,
    get_pdl,
    get_tc_util,
    set_block_size_multiple_of,
    set_ignore_compile_dims,
    set_num_sms,
    set_pdl,
    set_tc_util,
    use_deterministic_algorithms,
)
from .utils import *  # noqa: F403  the library re-exports its helpers the same way

__version__ = "0.2.0"  # of the library whose interface this is

fp4_gemm_nt = fp8_fp4_gemm_nt
fp8_gemm_nt = fp8_fp4_gemm_nt
fp8_gemm_nn = fp8_fp4_gemm_nn
fp8_gemm_tn = fp8_fp4_gemm_tn
fp8_gemm_tt = fp8_fp4_gemm_tt
m_grouped_fp4_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous
m_grouped_fp4_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
m_grouped_fp8_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_fp4_gemm_nt_masked
bf16_m_grouped_gemm_nt_masked = m_grouped_bf16_gemm_nt_masked

__all__ = [
    "arch",
    "bf16_gemm_nn",
    "bf16_gemm_nt",
    "bf16_gemm_tn",
    "bf16_gemm_tt",
    "bf16_m_grouped_gemm_nt_masked",
    "fp4_gemm_nt",
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "get_deterministic_algorithms",
    "get_num_sms",
    "get_pdl",
    "get_tc_util",
    "m_grouped_bf16_gemm_nn_contiguous",
    "m_grouped_bf16_gemm_nt_contiguous",
    "m_grouped_bf16_gemm_nt_masked",
    "m_grouped_fp4_gemm_nt_contiguous",
    "m_grouped_fp4_gemm_nt_masked",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "set_block_size_multiple_of",
    "set_ignore_compile_dims",
    "set_num_sms",
    "set_pdl",
    "set_tc_util",
    "settings",
    "testing",
    "tf32_hc_prenorm_gemm",
    "transform_sf_into_required_layout",
    "use_deterministic_algorithms",
    "utils",
]
__all__ += utils.__all__


def __getattr__(name: str) -> NoReturn:
    """AttributeError, so that hasattr still answers; says what is and is not here."""
    raise AttributeError(
        f"deep_gemm: the stand-in has no {name}. It has what an expert layer calls: "
        "grouped and dense GEMMs, layouts of scales, casts and settings."
    )
