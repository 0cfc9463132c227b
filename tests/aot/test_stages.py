"""The kernels around the GEMMs compile for every recipe and option, without spills and within the limits."""

import pytest
import torch

from moe_ops.ops.pack_scale import PACK_SCALE
from moe_ops.ops.post_permute import POST_PERMUTE
from moe_ops.ops.pre_permute import CONTIGUOUS as PRE_CONTIGUOUS
from moe_ops.ops.pre_permute import MASKED as PRE_MASKED
from moe_ops.ops.quantize import QUANTIZE
from moe_ops.ops.silu_and_quant import CONTIGUOUS as ACT_CONTIGUOUS
from moe_ops.ops.silu_and_quant import MASKED as ACT_MASKED
from moe_ops.ops.topk import TOPK
from moe_ops.testing import FORMS
from moe_ops.testing.aot import compiling, launch

ARCHS = ("sm90", "sm100")
each_arch = pytest.mark.parametrize("arch", ARCHS)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def ints(*shape, dtype=torch.int32):
    return meta(*shape, dtype=dtype)


def check(arch, *calls):
    """Compiles what each (op, arguments) launches; returns the kernels' names."""
    with compiling(arch) as kernels:
        for op, arguments in calls:
            launch(op, **arguments)
    for kernel in kernels:
        kernel.check()
    return [kernel.name for kernel in kernels]


@each_arch
@pytest.mark.parametrize("dtype", ["e4m3", "e2m1"])
@pytest.mark.parametrize("granularity", ["token", "block"])
def test_quantize(granularity, dtype, arch):
    x = meta(4, 300, 1024)
    check(
        arch,
        *(
            (QUANTIZE, dict(x=x, granularity=granularity, group=group, dtype=dtype, scale_format=scale_format))
            for group in (32, 128)
            for scale_format in ("fp32", "ue8m0")
        ),
    )


@each_arch
def test_pre_permute(arch):
    """A few routes in two launches, many in three. The forms share the routing: in one test, it is compiled once."""
    few, many = ["_route_kernel", "_scatter_kernel"], ["_count_kernel", "_place_kernel", "_scatter_kernel"]
    for recipe, scale_format in FORMS:
        form = dict(num_local_experts=128, expert_start=0, recipe=recipe, scale_format=scale_format)
        for T, kernels in ((64, few), (4096, many)):
            arguments = dict(hidden_states=meta(T, 2048), topk_ids=ints(T, 8), **form)
            assert check(arch, (PRE_CONTIGUOUS, arguments), (PRE_MASKED, arguments)) == kernels * 2


@each_arch
@pytest.mark.parametrize("E, top_k, tokens", [(8, 2, (1,)), (1024, 32, (1, 8192))])
def test_pre_permute_sizes(E, top_k, tokens, arch):
    """The routing of many tokens to few experts lies between the largest here and test_sizes_of_one."""
    for T in tokens:
        arguments = dict(num_local_experts=E, expert_start=0, recipe="fp8_block", scale_format="fp32")
        tensors = dict(hidden_states=meta(T, 7168), topk_ids=ints(T, top_k, dtype=torch.int64))
        check(arch, (PRE_CONTIGUOUS, tensors | arguments))


SILU = dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None)
FORMULAS = {
    "silu": SILU,
    "limit": SILU | dict(swiglu_limit=7.0),
    "oai": SILU | dict(gemm1_alpha=1.702, gemm1_clamp_limit=7.0),
    "situ": SILU | dict(activation="situ", gemm1_alpha=4.0, gemm1_clamp_limit=25.0),
}


ACTS = [pytest.param(SILU, *form, id="-".join(form)) for form in FORMS]
ACTS += [pytest.param(FORMULAS[name], "fp8_block", "fp32", id=name) for name in ("limit", "oai", "situ")]


@each_arch
@pytest.mark.parametrize("formula, recipe, scale_format", ACTS)
def test_silu_and_quant(formula, recipe, scale_format, arch):
    common = formula | dict(recipe=recipe, scale_format=scale_format)
    contiguous = dict(gateup=meta(1024, 1536), m_indices=ints(1024), bias=None, **common)
    masked = dict(gateup=meta(8, 256, 1536), masked_m=ints(8), bias=meta(8, 1536), **common)
    check(arch, (ACT_CONTIGUOUS, contiguous), (ACT_MASKED, masked))


@each_arch
@pytest.mark.parametrize("mode, top_k", [("sum", 1), ("sum", 8), ("routewise", 8), ("sum", 32)])
def test_post_permute(mode, top_k, arch):
    """top_k unrolls the loop: one route and 32 differ from eight in length alone."""

    def arguments(T, **more):
        given = dict(topk_weights=meta(T, top_k, dtype=torch.float32), topk_ids=None, bias=None, dtype=None)
        common = dict(rows=meta(8, 256, 2048), src2dst=ints(T, top_k), expert_start=0, routed_scaling_factor=2.5)
        return given | common | more | dict(mode=mode)

    bias = dict(bias=meta(8, 2048), topk_ids=ints(512, top_k))
    check(arch, (POST_PERMUTE, arguments(8)), (POST_PERMUTE, arguments(512, **bias)))


PLAIN = dict(
    scoring="softmax",
    bias=None,
    softcap=None,
    renormalize=True,
    num_groups=1,
    topk_group=1,
    group_score="top2",
    routed_scaling_factor=1.0,
    scale_output=False,
    num_shared=0,
    hash_table=None,
    token_ids=None,
    num_token_non_padded=None,
)
ROUTERS = {
    "softmax-128": (128, dict(top_k=8)),
    "softcap-8": (8, dict(top_k=2, softcap=30.0)),
    "deepseek-v3": (256, dict(top_k=8, scoring="sigmoid", bias=True, num_groups=8, topk_group=4, num_shared=1)),
    "deepseek-v2": (160, dict(top_k=6, num_groups=8, topk_group=3, group_score="max", renormalize=False)),
    "sqrtsoftplus-1024": (1024, dict(top_k=32, scoring="sqrtsoftplus", bias=True)),
    "hash": (256, dict(top_k=6, scoring="sqrtsoftplus_log1p", hash=True)),
}


@each_arch
@pytest.mark.parametrize("E, form", ROUTERS.values(), ids=ROUTERS)
def test_topk(E, form, arch):
    arguments = PLAIN | form | dict(logits=meta(512, E, dtype=torch.float32), num_token_non_padded=ints(1))
    if form.get("bias"):
        arguments["bias"] = meta(E, dtype=torch.float32)
    if arguments.pop("hash", False):
        arguments |= dict(hash_table=ints(1000, form["top_k"]), token_ids=ints(512, dtype=torch.int64))
    check(arch, (TOPK, arguments))


@each_arch
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.float8_e8m0fnu], ids=lambda d: str(d)[6:])
def test_pack_scale(dtype, arch):
    scale_formats = ("fp32", "ue8m0") if dtype == torch.float32 else ("ue8m0",)
    scale = meta(8, 12, 16, dtype=dtype)
    check(
        arch,
        *((PACK_SCALE, dict(scale=scale, mn=1536, rows_per_scale=128, scale_format=form)) for form in scale_formats),
    )


def test_sizes_of_one():
    """Triton makes an argument of 1 a constant, which is no tensor: kernels must not treat it as one."""
    plain = SILU | dict(recipe="bf16", scale_format="none", bias=None)
    routing = dict(num_local_experts=1, expert_start=1, recipe="bf16", scale_format="none")
    kinds = dict(group=16, dtype="e4m3", scale_format="ue8m0")
    grouped = PLAIN | dict(top_k=1, num_groups=4, topk_group=1, group_score="max")
    rows = dict(topk_weights=None, topk_ids=ints(1, 1), expert_start=1, routed_scaling_factor=1.0, dtype=None)
    check(
        "sm90",
        (QUANTIZE, dict(x=meta(1, 1, 16), granularity="token", **kinds)),
        (QUANTIZE, dict(x=meta(1, 1), granularity="block", **kinds)),
        (PRE_CONTIGUOUS, dict(hidden_states=meta(1, 1), topk_ids=ints(1, 1), **routing)),
        (PRE_MASKED, dict(hidden_states=meta(5000, 1), topk_ids=ints(5000, 1), **routing)),
        (ACT_CONTIGUOUS, dict(gateup=meta(1, 2), m_indices=ints(1), **plain)),
        (ACT_MASKED, dict(gateup=meta(1, 1, 2), masked_m=ints(1), **plain)),
        (POST_PERMUTE, dict(rows=meta(1, 1), src2dst=ints(1, 1), bias=meta(1, 1), mode="sum", **rows)),
        (TOPK, PLAIN | dict(logits=meta(1, 1), top_k=1)),
        (TOPK, grouped | dict(logits=meta(1, 4))),
        (PACK_SCALE, dict(scale=ints(1, 1, dtype=torch.uint8), mn=1, rows_per_scale=1, scale_format="ue8m0")),
    )
