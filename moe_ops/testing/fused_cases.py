"""KernelCases of the gathered and direct layouts: their routing, and both GEMMs on its results."""

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_ops.meta.grouped_gemm import BLOCKS_M
from moe_ops.ops.pre_permute import pre_permute_gathered
from moe_ops.ops.quantize import quantize
from moe_ops.prep import MoEWeights, prepare_weights
from moe_ops.recipes import RECIPES
from moe_ops.testing.cases import FORMS, random_routing
from moe_ops.testing.kernel_check import KernelCase

NAN = float("nan")
UNREAD = 2**30
"""A token, row or size that leads far outside: what no tile owns must not be followed."""

FUSED_FORMS = [form for form in FORMS if RECIPES[form[0]].fused]
FORMULAS = {
    "silu": {},
    "limit": dict(swiglu_limit=1.5),
    "oai": dict(gemm1_alpha=1.702, gemm1_clamp_limit=2.0),
    "oai-unlimited": dict(gemm1_alpha=1.702),
    "situ": dict(activation="situ", gemm1_alpha=2.0, gemm1_clamp_limit=3.0),
}
_NO_FORMULA = dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None)


def fused_cases(large: bool = False) -> Iterator[KernelCase]:
    """small: T=0, T=1, foreign ids; each tile once full and once not, its last row tile too. A few milliseconds a
    program make the sizes. large: every tile and form, skewed routings, up to 4097 tokens."""
    form = ("fp8_block", "fp32")
    if large:
        sizes = [(T, 32, 8, 1024, 512) for T in (1, 60, 300, 900)] + [(9, 4, 2, 7168, 256), (4097, 8, 2, 256, 128)]
        calls = [(*size, *each, "uniform", m) for size in sizes for each in FUSED_FORMS for m in _tiles_for(size[0])]
        kinds = ("foreign", "repeated", "one_expert", "every_other")
        calls += [(400, 16, 4, 512, 256, *form, kind, m) for kind in kinds for m in BLOCKS_M]
        sizes = ((1, 7168, 512), (40, 1024, 256))
        direct = [(T, 32, 8, K, I, *each, "foreign") for T, K, I in sizes for each in FUSED_FORMS]
        permuted = [(T, 256, 8, 1024, 128, *form, "uniform", 64) for T in (1, 600, 4097)]
        permuted += [(4097, 128, 8, 256, 128, *each, "repeated", 16) for each in FORMS]
    else:
        calls = [(T, 3, 2, 256, 128, *each, "foreign", 16) for T in (0, 1, 9) for each in FUSED_FORMS]
        calls += [(m + 5, 3, 1, 256, 128, *each, "one_expert", m) for each in FUSED_FORMS for m in BLOCKS_M]
        calls += [(9, 4, 3, 640, 640, *each, "repeated", 32) for each in FUSED_FORMS[1:]]  # a second word of scales
        direct = [(T, 3, 2, 256, 128, *each, "foreign") for T in (0, 1, 5) for each in FUSED_FORMS]
        direct += [(2, 3, 1, 640, 640, *FUSED_FORMS[2], "uniform")]
        permuted = [(T, 5, 3, 640, 128, *each, "foreign", 16) for T in (0, 1, 9) for each in FORMS]
        permuted += [(m + 5, 4, 2, 128, 128, *form, "repeated", m) for m in BLOCKS_M]
        permuted += [(21, 4, 2, 128, 128, *form, "one_expert", 16)]
    for call in [*permuted, *calls] if large else permuted:
        yield _case("pre_permute_gathered", _permute, call)
    for call in calls:
        yield _case("gated_gemm_gathered", _gated, (*call, "silu", False))
        yield _case("grouped_gemm_gathered", _grouped, call)
    for call in direct:
        yield _case("gated_gemm_direct", _gated_direct, (*call, "silu", False))
        yield _case("grouped_gemm_direct", _grouped_direct, call)
    some = (60, 8, 2, 512, 256) if large else (5, 3, 2, 128, 128)
    for formula in FORMULAS:
        for bias in (False, True):
            yield _case("gated_gemm_gathered", _gated, (*some, *form, "uniform", 128 if bias else 16, formula, bias))
        yield _case("gated_gemm_direct", _gated_direct, (*some, "bf16", "none", "uniform", formula, True))


def _tiles_for(T: int) -> tuple[int, ...]:
    """Each tile where it is of use, and all of them on the longest list."""
    return {1: (16,), 9: (16, 128), 60: (16, 32), 300: (64,), 900: (128,)}.get(T, BLOCKS_M)


def gated_case(form: tuple[str, str], block_m: int) -> KernelCase:
    """One expert with a full tile of so many rows and one that is not."""
    return _case(
        "gated_gemm_gathered", _gated, (block_m + 5, 2, 1, 256, 128, *form, "one_expert", block_m, "oai", True)
    )


def _case(op: str, build, arguments: tuple) -> KernelCase:
    letters = ("T", "E", "k", "K", "I")
    sizes = (f"{letter}{size}" for letter, size in zip(letters, arguments, strict=False))
    return KernelCase(op, "-".join((*sizes, *map(str, arguments[5:]))), lambda: build(*arguments))


def _inputs(T, E, top_k, K, distribution) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T + E)
    size = torch.exp2(2 * torch.randn(T, 1, generator=generator))
    x = (torch.randn(T, K, generator=generator) * size).bfloat16()
    x[T // 2 + 1 :, K // 3] = NAN  # of some tokens: nothing of it may reach others
    ids = random_routing(T, E, top_k, distribution, generator)[1]
    return x, ids.long() if T % 2 else ids


def _weights(E, K, I, recipe, scale_format) -> MoEWeights:
    generator = torch.Generator().manual_seed(K)
    w13 = torch.randn(E, 2 * I, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, I, generator=generator) / I**0.5
    return prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format if recipe != "bf16" else None)


def _attributes(E, I, scale_format, formula, bias) -> dict:
    more = dict(bias=torch.randn(E, 2 * I, generator=torch.Generator().manual_seed(1)) if bias else None)
    return _NO_FORMULA | FORMULAS[formula] | more | dict(scale_format=scale_format)


def _permute(T, E, top_k, K, I, recipe, scale_format, distribution, block_m) -> dict:
    x, ids = _inputs(T, E, top_k, K, distribution)
    form = dict(recipe=recipe, scale_format=scale_format, block_m=block_m)
    return dict(hidden_states=x, topk_ids=ids, num_local_experts=E, expert_start=int(distribution == "foreign"), **form)


def _gated(T, E, top_k, K, I, recipe, scale_format, distribution, block_m, formula, bias) -> dict:
    call = _permute(T, E, top_k, K, I, recipe, scale_format, distribution, block_m)
    x, x_scale, row_token, tiles, _ = pre_permute_gathered(**call, backend="reference")
    row_token[int(tiles[2][tiles[0] >= 0].sum()) :] = UNREAD
    tiles[1:, tiles[0] < 0] = UNREAD
    w = _weights(E, K, I, recipe, scale_format)
    rows = dict(x=x, x_scale=x_scale if RECIPES[recipe].quantised else None, row_token=row_token, tiles=tiles)
    weight = dict(w=w.w13, w_scale=w.w13_scale, recipe=recipe, weight_format="natural")
    return rows | weight | dict(block_m=block_m) | _attributes(E, I, scale_format, formula, bias)


def _grouped(T, E, top_k, K, I, recipe, scale_format, distribution, block_m) -> dict:
    """GEMM2, on random rows. Those of no tile are finite: a NaN in bf16 may look like poison that nobody touched."""
    call = _permute(T, E, top_k, K, I, recipe, scale_format, distribution, block_m)
    tiles, row = pre_permute_gathered(**call, backend="reference")[3], RECIPES[recipe]
    act = torch.randn(T * top_k, I, generator=torch.Generator().manual_seed(2))
    tiles[1:, tiles[0] < 0] = UNREAD
    x, x_scale = act.to(row.x_dtype), None
    if row.quantised:
        x, x_scale = quantize(act, group=row.x_group, scale_format=scale_format, backend="reference")
    w = _weights(E, K, I, recipe, scale_format)
    weight = dict(w=w.w2, w_scale=w.w2_scale, recipe=recipe, weight_format="natural")
    return dict(x=x, x_scale=x_scale, tiles=tiles, block_m=block_m, **weight)


def _gated_direct(T, E, top_k, K, I, recipe, scale_format, distribution, formula, bias) -> dict:
    x, ids = _inputs(T, E, top_k, K, distribution)
    w = _weights(E, K, I, recipe, scale_format)
    weight = dict(w=w.w13, w_scale=w.w13_scale, recipe=recipe, expert_start=int(distribution == "foreign"))
    return dict(hidden_states=x, topk_ids=ids, **weight, **_attributes(E, I, scale_format, formula, bias))


def _grouped_direct(T, E, top_k, K, I, recipe, scale_format, distribution) -> dict:
    ids = _inputs(T, E, top_k, K, distribution)[1]
    w = _weights(E, K, I, recipe, scale_format)
    weight = dict(w=w.w2, w_scale=w.w2_scale, recipe=recipe, scale_format=scale_format)
    act = torch.randn(T * top_k, I, generator=torch.Generator().manual_seed(2))
    return dict(x=act, topk_ids=ids, **weight, expert_start=int(distribution == "foreign"))
