"""What warm-up takes for one kind of call is one to the compiler: the same kernels, specialised alike."""

from collections import defaultdict
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction

from moe_ops import check
from moe_ops.meta.grouped_gemm import weight_scale_spec
from moe_ops.ops.topk import TOPK
from moe_ops.recipes import RECIPES
from moe_ops.registry import STAGES
from moe_ops.sizes import Layer
from moe_ops.testing import aot
from moe_ops.warmup.jobs import way_of
from moe_ops.workspace import sizes_of

E, K, I, TOP_K = 16, 512, 256, 4
TOKENS = [*range(1, 36), *range(60, 70), *range(124, 134), 200, 208, *range(254, 261), *range(1020, 1030), 2048, 2500]
ROUTER = dict(scoring="softmax", bias=None, softcap=None, renormalize=True, num_groups=1, topk_group=1)
ROUTER |= dict(group_score="top2", routed_scaling_factor=1.0, scale_output=False, num_shared=0, hash_table=None)


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def kernels_of(layer: Layer) -> set:
    """(name, key of its specialisation) of every kernel that a router and a forward launch. Nothing is compiled."""
    T, row = layer.T, RECIPES[layer.recipe]
    x, ids = meta(T, K, dtype=torch.bfloat16), meta(T, TOP_K, dtype=torch.int32)
    weight = {}
    for name, N, depth in (("w13", 2 * I, K), ("w2", K, I)):
        weight[name] = meta(E, N, depth // row.w_pack, dtype=row.w_dtype)
        weight[f"{name}_scale"] = weight_scale_spec(E, N, depth, row, layer.scale_format).empty("meta")
    given = dict.fromkeys(("w13_fp8", "w13_fp8_scale", "w2_fp8", "w2_fp8_scale", "w13_bias", "w2_bias"))
    given |= dict(activation="silu", swiglu_limit=None, gemm1_alpha=None, gemm1_clamp_limit=None, expert_start=0)
    names = ("backend", "T", "top_k", "E", "K", "I", "recipe", "scale_format", "layout", "num_experts")
    names += ("weight_format", "has_fp8")
    sizes = dict(zip(names, sizes_of(layer, "triton"), strict=True))
    found = set()

    def note(self, key, *_):
        found.add((self.fn.__name__, key))

    with (
        aot.compiling("sm90"),
        mock.patch.object(JITFunction, "_do_compile", note),
        mock.patch.object(aot, "_read", lambda *_: None),
        mock.patch("moe_ops.backends._check_triton", lambda *_: None),
        mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()),  # meta has none
        mock.patch.multiple(check, workspace=lambda *_, **__: None, apart=lambda *_: None),  # meta has no addresses
    ):
        aot.launch(
            TOPK,
            logits=meta(T, E, dtype=torch.float32),
            top_k=TOP_K,
            token_ids=None,
            num_token_non_padded=None,
            **ROUTER,
        )
        STAGES["fused_deepgemm_ws"](
            ws=meta(1 << 30, dtype=torch.uint8),
            hidden_states=x,
            topk_ids=ids,
            topk_weights=meta(T, TOP_K, dtype=torch.float32),
            routed_scaling_factor=1.0,
            max_workspace_bytes=1 << 30,
            **weight,
            **given,
            **sizes,
        )
    return found


@pytest.mark.parametrize("layout", ["auto", "contiguous", "masked"])
def test_calls_of_one_way_take_the_same_kernels(layout):
    ways = defaultdict(list)
    for T in TOKENS:
        layer = Layer(T, TOP_K, E, K, I, "fp8_block", "fp32", layout)
        ways[way_of(layer, "triton", "sm90")].append((T, kernels_of(layer)))
    assert any(len(calls) > 1 for calls in ways.values()) and len(ways) > 4
    for calls in ways.values():
        first, kernels = calls[0]
        for T, others in calls[1:]:
            names = sorted(name for name, _ in kernels ^ others)
            assert not names, f"{layout}: {first} and {T} tokens count as one, and differ in {names}"
