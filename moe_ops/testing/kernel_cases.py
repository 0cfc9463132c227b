"""Calls of every op that a kernel must get right: options, dtypes, strides, and the edges of each.

`CASES` are small enough for Triton's interpreter, which takes milliseconds a program. `LARGE` are for a card.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from moe_ops.meta.quantize import GROUPS
from moe_ops.ops.pre_permute import pre_permute_contiguous, pre_permute_masked
from moe_ops.prep import prepare_weights
from moe_ops.recipes import RECIPES
from moe_ops.rows import BLOCK
from moe_ops.testing.cases import FORMS, random_routing
from moe_ops.testing.dense_cases import dense_cases
from moe_ops.testing.fused_cases import FORMULAS, fused_cases
from moe_ops.testing.kernel_check import KernelCase

NAN, INF = float("nan"), float("inf")


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def values(*shape, dtype=torch.bfloat16, seed: int = 0, spread: float = 4.0) -> Tensor:
    """Rows of very different size, with what quantisation finds hard: NaN, infinities, zeros, halves of a step."""
    generator = _generator(seed)
    size = torch.exp2(spread * torch.randn(*shape[:-1], 1, generator=generator))
    x = torch.randn(*shape, generator=generator) * size
    rows = x.view(-1, shape[-1])
    if len(rows) > 4:
        rows[0, 1], rows[1, 2], rows[1, 3], rows[2, 5] = NAN, INF, -INF, -NAN
        rows[3] = 0.0
        rows[4] = torch.arange(shape[-1]) % 64 / 4 - 8  # every halfway point of e2m1 and many of e4m3
    return x.to(dtype)


def quantize_cases() -> Iterator[KernelCase]:
    for granularity, dtype, scale in product(("token", "block"), ("e4m3", "e2m1"), ("fp32", "ue8m0")):
        options = dict(granularity=granularity, dtype=dtype, scale_format=scale)
        for group in GROUPS:
            yield _quantize(f"{group}", lambda: values(7, 512), group=group, **options)
        yield _quantize("slabs", lambda: values(2, 5, 384, dtype=torch.float32), group=128, **options)
    for name, x in {
        "fp16": lambda: values(6, 640, dtype=torch.float16, spread=1),
        "every-bf16": lambda: torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).view(-1, 128),
        "huge": lambda: torch.full((2, 128), 3e38),
        "tiny": lambda: torch.full((2, 128), 1e-38),
        "columns": lambda: values(256, 9, dtype=torch.float32).T,
        "nobody": lambda: values(0, 128),
    }.items():
        for scale in ("fp32", "ue8m0"):
            yield _quantize(name, x, granularity="token", group=128, dtype="e4m3", scale_format=scale)
    yield _quantize("ragged", lambda: values(70, 90), granularity="block", group=64, dtype="e4m3", scale_format="fp32")


def _quantize(name, x, **options) -> KernelCase:
    parts = (name, options["granularity"], options["dtype"], options["scale_format"])
    return KernelCase("quantize", "-".join(parts), lambda: dict(x=x(), **options))


def pack_scale_cases() -> Iterator[KernelCase]:
    def build(shape, mn, per, kind, scale_format):
        byte = torch.randint(1, 255, shape, dtype=torch.uint8, generator=_generator(0))
        scale = {
            "uint8": lambda: byte,
            "e8m0": lambda: byte.view(torch.float8_e8m0fnu),
            "fp32": lambda: torch.ldexp(torch.ones(shape), byte.int() - 127),
            "columns": lambda: torch.ldexp(torch.ones(shape), byte.int() - 127).mT.contiguous().mT,
        }[kind]()
        return dict(scale=scale, mn=mn, rows_per_scale=per, scale_format=scale_format)

    for G, per, kind in product((1, 4, 7), (1, 128), ("uint8", "e8m0", "fp32", "columns")):
        shape = (3, -(-300 // per), G)
        for scale_format in ("ue8m0",) if kind in ("uint8", "e8m0") else ("ue8m0", "fp32"):
            arguments = (shape, 300, per, kind, scale_format)
            yield KernelCase("pack_scale", f"{G}-{per}-{kind}-{scale_format}", lambda a=arguments: build(*a))


def pre_permute_cases(large: bool = False) -> Iterator[KernelCase]:
    def build(T, E, top_k, K, distribution, recipe, scale, start, dtype, ids_dtype, columns=False):
        ids = random_routing(T, E, top_k, distribution, _generator(T + E))[1]
        x = values(K, T, dtype=dtype).T if columns else values(T, K, dtype=dtype)
        return dict(
            hidden_states=x,
            topk_ids=ids.to(ids_dtype).T.contiguous().T if columns else ids.to(ids_dtype),
            num_local_experts=E,
            recipe=recipe,
            scale_format=scale,
            expert_start=start,
        )

    bf16, fp32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64
    both, one = ("contiguous", "masked"), ("contiguous",)
    if large:
        calls = [(both, T, 128, 8, 2048, "uniform", *form, 0, bf16, i32) for T in (512, 513) for form in FORMS]
        calls += [(one, 4096, 128, 8, 2048, "uniform", *form, 0, bf16, i32) for form in FORMS]
        calls += [(both, 600, 32, 8, 7168, kind, "fp8_block", "fp32", 5, bf16, i64) for kind in ("foreign", "repeated")]
        calls += [(one, 4096, 1024, 32, 128, "uniform", "fp8_block", "ue8m0", 0, bf16, i32)]
        calls += [(one, 5, 520, 8, 32, "uniform", "mxfp8", "ue8m0", 0, bf16, i32)]
        # More than 4096 routes, each token's padded to 32: the chunked form.
        calls += [(both, 130, 40, 17, 32, "repeated", "mxfp8", "ue8m0", 2, bf16, i32)]
    else:
        calls = [(both, T, 5, 3, 640, "foreign", *form, 2, bf16, i32) for T in (0, 1, 9) for form in FORMS]
        calls += [(both, 9, 6, 4, 128, kind, "fp8_block", "fp32", 0, fp32, i64) for kind in ("repeated", "one_expert")]
        calls += [(both, 9, 6, 6, 128, "every_other", "mxfp8", "ue8m0", 0, torch.float16, i32)]
        calls += [(both, 140, 3, 1, 50, "uniform", "bf16", "none", 0, fp32, i32)]
        calls += [(both, 7, 4, 2, 256, "uniform", "fp8_block", "fp32", 0, bf16, i32, True)]
        calls += [(one, 5, 70, 8, 32, "uniform", "mxfp8", "ue8m0", 0, bf16, i32)]
    for layouts, *call in calls:
        for layout in layouts:
            name = "-".join(map(str, (f"T{call[0]}-E{call[1]}-k{call[2]}-K{call[3]}", *call[4:8])))
            name += "-columns" if len(call) > 10 else ""
            arguments: tuple = tuple(call)
            yield KernelCase(f"pre_permute_{layout}", name, lambda a=arguments: build(*a))


def silu_and_quant_cases(large: bool = False) -> Iterator[KernelCase]:
    def build(layout, I, counts, m_max, recipe, scale, formula, bias):
        E = len(counts)
        gateup = values(E * m_max, 2 * I, spread=1.0)
        attributes = dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None) | formula
        attributes |= dict(recipe=recipe, scale_format=scale)
        attributes["bias"] = torch.randn(E, 2 * I, generator=_generator(1)) if bias else None
        if layout == "masked":
            return dict(gateup=gateup.view(E, m_max, 2 * I), masked_m=torch.tensor(counts).int(), **attributes)
        return dict(gateup=gateup, m_indices=labels(counts, m_max), **attributes)

    sizes = (768, [300, 0, 7, 512], 512) if large else (640, [9, 0, 3], 16)
    ragged = (96, [3, 5], 8)
    for (recipe, scale), layout in product(FORMS, ("contiguous", "masked")):
        for formula, bias in product(FORMULAS, (False, True) if recipe in ("fp8_block",) else (False,)):
            arguments: tuple = (layout, *sizes, recipe, scale, FORMULAS[formula], bias)
            name = f"{recipe}-{scale}-{formula}{'-bias' * bias}"
            yield KernelCase(f"silu_and_quant_{layout}", name, lambda a=arguments: build(*a))
        if recipe in ("bf16", "mxfp8"):
            arguments = (layout, *ragged, recipe, scale, {}, True)
            yield KernelCase(f"silu_and_quant_{layout}", f"{recipe}-ragged", lambda a=arguments: build(*a))


def labels(counts: list[int], m_max: int) -> Tensor:
    """m_indices of slabs of m_max rows: the expert of each valid row, -1 behind."""
    slots = torch.arange(m_max)
    return torch.cat([torch.where(slots < count, expert, -1) for expert, count in enumerate(counts)]).int()


def ends_of(m_indices: Tensor, E: int) -> Tensor:
    """The row behind each expert's last; one without rows ends where it would start."""
    counts = torch.bincount(m_indices[m_indices >= 0], minlength=E)
    taken = -(-counts // BLOCK) * BLOCK
    return (taken.cumsum(0) - taken + counts).int()


def grouped_gemm_cases(large: bool = False) -> Iterator[KernelCase]:
    def build(layout, recipe, scale, N, K, T, E, top_k, distribution, expected):
        row = RECIPES[recipe]
        weights = prepare_weights(
            torch.randn(E, N, K, generator=_generator(0)) / K**0.5,
            torch.zeros(E, K, N // 2),
            recipe=recipe,
            scale_format=scale if row.quantised else None,
        )
        ids = random_routing(T, E, top_k, distribution, _generator(1))[1]
        x = torch.randn(T, K, generator=_generator(2))
        permute = pre_permute_contiguous if layout == "contiguous" else pre_permute_masked
        x_q, x_scale, rows, _ = permute(x, ids, num_local_experts=E, recipe=recipe, scale_format=scale)
        operands = dict(x=x_q, x_scale=x_scale if row.quantised else None, recipe=recipe)
        operands |= dict(w=weights.w13, w_scale=weights.w13_scale)
        if layout == "contiguous":
            return operands | dict(m_indices=rows, ends=None if T < 20 else ends_of(rows, E))
        return operands | dict(masked_m=rows, expected_m=expected)

    for recipe, scale in FORMS:
        granule = max(RECIPES[recipe].granule, 16)
        if large:
            calls = [(1024, 2048, T, 8, 4, "uniform", max(1, T // 2)) for T in (1, 60, 700, 2000)]
            calls += [(2 * granule, 5 * granule, 40, 8, 4, "foreign", 20)]
            calls += [(256, 7168, 64, 8, 4, "every_other", 32)]
        else:
            calls = [(2 * granule, 5 * granule, 5, 3, 2, "foreign", expected) for expected in (0, 1, 64)]
            calls += [(256, 640, 20, 3, 1, "one_expert", 1), (256, 256, 0, 2, 2, "uniform", 0)]
        for call, layout in product(calls, ("contiguous", "masked")):
            if layout == "contiguous" and call[-1] not in (0, 1) and not large:
                continue  # the hint exists in the masked form alone
            N, K, T, E, top_k, distribution, expected = call
            name = f"{recipe}-{scale}-N{N}-K{K}-T{T}-E{E}-{distribution}-m{expected}"
            arguments = (layout, recipe, scale, *call)
            yield KernelCase(f"grouped_gemm_{layout}", name, lambda a=arguments: build(*a))


def post_permute_cases(large: bool = False) -> Iterator[KernelCase]:
    def build(T, M, K, top_k, mode, dtype, out_dtype, weighted, bias, slabs=False):
        generator = _generator(3)
        rows = torch.randn(M, K, generator=generator).to(dtype)
        src2dst = torch.randint(-1, M, (T, top_k), generator=generator).int()
        if T > 1:
            src2dst[1] = -1
        weights = torch.rand(T, top_k, generator=generator)
        weights[src2dst < 0] = NAN  # what the weight of a route that is not here holds does not matter
        return dict(
            rows=rows.view(2, M // 2, K) if slabs else rows,
            src2dst=src2dst,
            topk_weights=weights if weighted else None,
            topk_ids=torch.randint(4, 8, (T, top_k), generator=generator) if bias else None,
            bias=torch.randn(4, K, generator=generator) if bias else None,
            expert_start=4,
            routed_scaling_factor=2.5,
            mode=mode,
            dtype=out_dtype,
        )

    bf16, fp32 = torch.bfloat16, torch.float32
    if large:
        calls = [
            (T, 3000, K, 8, mode, bf16, None, True, T == 64) for T in (64, 700) for K in (2048, 7168) for mode in MODES
        ]
    else:
        calls = [
            (5, 64, 1100, 3, *rest) for rest in product(MODES, (bf16, fp32), (None,), (False, True), (False, True))
        ]
        calls += [(T, 64, 64, top_k, "sum", bf16, fp32, True, False, True) for T, top_k in ((0, 32), (1, 32), (64, 3))]
    for call in calls:
        name = "-".join(str(part).removeprefix("torch.") for part in call)
        arguments: tuple = call
        yield KernelCase("post_permute", name, lambda a=arguments: build(*a))


MODES = ("sum", "routewise")

ROUTERS = {
    "softmax": {},
    "raw": dict(renormalize=False),
    "softcap": dict(softcap=3.0),
    "sigmoid-bias": dict(scoring="sigmoid", bias=True),
    "sqrtsoftplus-bias": dict(scoring="sqrtsoftplus", bias=True, routed_scaling_factor=1.5, num_shared=1),
    "log1p": dict(scoring="sqrtsoftplus_log1p", scale_output=True, routed_scaling_factor=2.5),
    "top2-groups": dict(scoring="sigmoid", bias=True, num_groups=4, topk_group=2, num_shared=2),
    "max-groups": dict(num_groups=4, topk_group=2, group_score="max", renormalize=False),
    "hash": dict(scoring="sqrtsoftplus", hash=True, num_shared=1),
    "padded": dict(scoring="sigmoid", padded=True),
}


def topk_cases(large: bool = False) -> Iterator[KernelCase]:
    def build(T, E, top_k, dtype, form):
        generator = _generator(T + E)
        form = dict(form)
        # On a grid: ties are exact, and other keys lie apart by more than a card's exp is wrong.
        logits = (torch.randint(-48, 49, (T, E), generator=generator) / 8).to(dtype)
        if T > 3 and not form.get("hash"):
            logits[0, -2], logits[0, -1] = 7.0, NAN  # a NaN in the best group still ranks before other groups
            logits[1, : E // 2], logits[2] = NAN, NAN
            logits[3, 0], logits[3, 2] = INF, -INF
        plain = dict(scoring="softmax", bias=None, softcap=None, renormalize=True, num_groups=1, topk_group=1)
        plain |= dict(group_score="top2", routed_scaling_factor=1.0, scale_output=False, num_shared=0)
        plain |= dict(hash_table=None, token_ids=None, num_token_non_padded=None)
        if form.pop("bias", False):
            form["bias"] = torch.randint(-8, 9, (E,), generator=generator) / 4
        if form.pop("hash", False):
            table = torch.rand(11, E, generator=generator).argsort(1)[:, :top_k].int()
            form |= dict(hash_table=table, token_ids=torch.randint(0, 11, (T,), generator=generator))
        if form.pop("padded", False):
            form["num_token_non_padded"] = torch.tensor(T // 2, dtype=torch.int32)
        return dict(logits=logits, top_k=top_k, **(plain | form))

    for name, form in ROUTERS.items():
        groups = form.get("num_groups", 1)
        sizes = [(T, E, k) for T in (300,) for E, k in ((8, 2), (160, 6), (1024, 32))] if large else []
        sizes = sizes or [(5, 24, 3), (5, 8, 4), (2, 160, 6), (0, 8, 2), (1, 8 * groups, 4), (2, 1024, 32)]
        for T, E, top_k in sizes:
            dtypes = (torch.float32, torch.bfloat16) if T == 5 else (torch.float32,)
            for dtype in dtypes:
                arguments = (T, E, min(top_k, E // groups * form.get("topk_group", 1)), dtype, form)
                label = f"{name}-T{T}-E{E}-k{top_k}-{str(dtype)[6:]}"
                yield KernelCase("topk", label, lambda a=arguments: build(*a))


_SIZED = (
    pre_permute_cases,
    silu_and_quant_cases,
    grouped_gemm_cases,
    fused_cases,
    dense_cases,
    post_permute_cases,
    topk_cases,
)
CASES = [*quantize_cases(), *pack_scale_cases(), *(case for cases in _SIZED for case in cases())]
LARGE = [case for cases in _SIZED for case in cases(large=True)]
