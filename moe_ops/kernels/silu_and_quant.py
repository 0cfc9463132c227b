"""Triton kernels of moe::silu_and_quant_contiguous and moe::silu_and_quant_masked."""

import triton
import triton.language as tl

from moe_ops.kernels.launch import gdc_launch_dependents, gdc_wait, given, jit, pdl
from moe_ops.kernels.numeric import fast_sigmoid, pack_words, quantize_groups, tanh
from moe_ops.recipes import get_recipe

# (columns of a group, scales packed) -> rows, groups and warps of a tile. Rows fill 32-byte sectors of MN-major scales;
# packed scales are written as words of four groups.
_TILES = {(32, True): (16, 4, 4), (128, True): (8, 4, 4), (128, False): (8, 2, 4)}


# One float32 tile of the gated activation. A NaN passes through the limits.
@jit
def gated(gate, up, alpha, limit, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr):
    if FORM == "situ":
        return alpha * tanh(gate / alpha) * fast_sigmoid(gate) * (limit * tanh(up / limit))
    else:
        if HAS_LIMIT:
            gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
            up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        if FORM == "oai":
            return gate * fast_sigmoid(alpha * gate) * (up + 1.0)
        else:
            return gate * fast_sigmoid(gate) * up


# BLOCK_M rows times GROUPS groups of columns. Pointers are those of the rows' slab.
@jit
def _tile(
    gateup_ptr, stride_gm, stride_gn,
    bias_ptr, stride_be, stride_bn,
    act_ptr, stride_am,
    scale_ptr, stride_sg,
    row, live, expert, part, I, alpha, limit,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr, QUANTISED: tl.constexpr,
    UE8M0: tl.constexpr,
):  # fmt: skip
    group = part * GROUPS + tl.arange(0, GROUPS)
    column = (group[:, None] * GROUP + tl.arange(0, GROUP)[None, :])[None, :, :]
    mask = live[:, None, None] & (column < I)
    row = row.to(tl.int64)
    gate_ptrs = gateup_ptr + row[:, None, None] * stride_gm + column.to(tl.int64) * stride_gn
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + tl.cast(I, tl.int64) * stride_gn, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert[:, None, None].to(tl.int64) * stride_be + column * stride_bn
        gate += tl.load(bias_ptrs, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias_ptrs + I * stride_bn, mask=mask, other=0.0).to(tl.float32)
    act = gated(gate, up, alpha, limit, FORM, HAS_LIMIT)
    act_ptrs = act_ptr + row[:, None, None] * stride_am + column
    if QUANTISED:
        q, scale, byte = quantize_groups(act, UE8M0)
        tl.store(act_ptrs, q, mask=mask)
        whole = live[:, None] & (group * GROUP < I)[None, :]
        if UE8M0:
            words = pack_words(tl.where(whole, byte, 0))  # bytes past the last group are 0
            tl.store(scale_ptr + part.to(tl.int64) * stride_sg + row, words, mask=live)
        else:
            tl.store(scale_ptr + group[None, :].to(tl.int64) * stride_sg + row[:, None], scale, mask=whole)
    else:
        tl.store(act_ptrs, act.to(act_ptr.dtype.element_ty), mask=mask)


# BLOCK_M rows; those labelled -1 are neither read nor written. Grid (row blocks, groups / GROUPS).
@jit
def _silu_and_quant_contiguous_kernel(
    gateup_ptr, stride_gm, stride_gn,
    m_indices_ptr,
    bias_ptr, stride_be, stride_bn,
    act_ptr, stride_am,
    scale_ptr, stride_sg,
    M, I, alpha, limit,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr,
    QUANTISED: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.load(m_indices_ptr + row, mask=row < M, other=-1)
    if tl.max(expert, 0) >= 0:
        _tile(
            gateup_ptr, stride_gm, stride_gn, bias_ptr, stride_be, stride_bn, act_ptr, stride_am, scale_ptr, stride_sg,
            row, expert >= 0, expert, tl.program_id(1), I, alpha, limit,
            GROUPS, GROUP, FORM, HAS_LIMIT, QUANTISED, UE8M0,
        )  # fmt: skip


# Row blocks of one slab, those of other workers left out, so that an empty slab costs a few programs and nothing else.
# Grid (workers, groups / GROUPS, experts).
@jit
def _silu_and_quant_masked_kernel(
    gateup_ptr, stride_ge, stride_gm, stride_gn,
    masked_m_ptr,
    bias_ptr, stride_be, stride_bn,
    act_ptr, stride_ae, stride_am,
    scale_ptr, stride_se, stride_sg,
    I, alpha, limit,
    BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, FORM: tl.constexpr, HAS_LIMIT: tl.constexpr,
    QUANTISED: tl.constexpr, UE8M0: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slab = tl.program_id(2).to(tl.int64)
    valid = tl.load(masked_m_ptr + slab)
    gateup_ptr += slab * stride_ge
    act_ptr += slab * stride_ae
    scale_ptr += slab * stride_se
    expert = tl.full((BLOCK_M,), 0, tl.int32) + tl.program_id(2)
    for start in range(tl.program_id(0) * BLOCK_M, valid, tl.num_programs(0) * BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        _tile(
            gateup_ptr, stride_gm, stride_gn, bias_ptr, stride_be, stride_bn, act_ptr, stride_am, scale_ptr, stride_sg,
            row, row < valid, expert, tl.program_id(1), I, alpha, limit,
            GROUPS, GROUP, FORM, HAS_LIMIT, QUANTISED, UE8M0,
        )  # fmt: skip


def silu_and_quant_contiguous(outputs, *, gateup, m_indices, bias, **attributes) -> None:
    """moe::silu_and_quant_contiguous."""
    act, scale = outputs
    I = act.shape[1]
    formula, flags = formula_of("silu_and_quant_contiguous", **attributes)
    flags |= _tile_of(attributes["recipe"], flags["UE8M0"])
    grid = (triton.cdiv(len(gateup), flags["BLOCK_M"]), triton.cdiv(I, flags["GROUPS"] * flags["GROUP"]))
    _silu_and_quant_contiguous_kernel[grid](
        gateup, *gateup.stride(), m_indices, *given(bias), act, act.stride(0), scale, scale.stride(-1),
        len(gateup), I, *formula, **flags, **pdl(gateup.device),
    )  # fmt: skip


def silu_and_quant_masked(outputs, *, gateup, masked_m, bias, **attributes) -> None:
    """moe::silu_and_quant_masked."""
    act, scale = outputs
    E, m_max, I = act.shape
    formula, flags = formula_of("silu_and_quant_masked", **attributes)
    flags |= _tile_of(attributes["recipe"], flags["UE8M0"])
    blocks = triton.cdiv(m_max, flags["BLOCK_M"])
    grid = (min(blocks, max(4, blocks // 8)), triton.cdiv(I, flags["GROUPS"] * flags["GROUP"]), E)
    strides = (0, 0) if scale.dim() == 1 else (scale.stride(0), scale.stride(2))
    _silu_and_quant_masked_kernel[grid](
        gateup, *gateup.stride(), masked_m, *given(bias), act, act.stride(0), act.stride(1), scale, *strides,
        I, *formula, **flags, **pdl(gateup.device),
    )  # fmt: skip


def formula_of(op, *, recipe, scale_format, activation, swiglu_limit, gemm1_alpha, gemm1_clamp_limit):
    """((alpha, limit), constants of a kernel that calls `gated` and quantises)."""
    row = get_recipe(op, recipe)
    form = "situ" if activation == "situ" else "silu" if gemm1_alpha is None else "oai"
    limit = swiglu_limit if gemm1_alpha is None else gemm1_clamp_limit
    flags = dict(FORM=form, HAS_LIMIT=limit is not None, QUANTISED=row.quantised, UE8M0=scale_format == "ue8m0")
    return (gemm1_alpha or 0.0, limit or 0.0), flags


def _tile_of(recipe: str, packed: bool) -> dict:
    group = get_recipe("silu_and_quant", recipe).x_group or 128
    rows, groups, warps = _TILES[group, packed]
    return dict(BLOCK_M=rows, GROUPS=groups, GROUP=group, num_warps=warps)
