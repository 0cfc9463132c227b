"""max_workspace_bytes: a call in parts.

On a CPU the reference's matrix products may round otherwise for other row counts, so general inputs are compared
within the recipe's tolerance there, and bit for bit on inputs whose every sum is exact; tests/gpu/test_decode.py
compares all bits.
"""

import pytest
import torch

import moe_ops
from moe_ops.choice import choose
from moe_ops.planner import plan_layer, split
from moe_ops.sizes import Layer
from moe_ops.testing import LayerCase, assert_bits_equal, poisoned, relative_error

SIZES = dict(E=4, K=256, I=128, top_k=2)


def run(case, inputs, weights, **more):
    arguments = dict(recipe=case.recipe, layout=case.layout, **case.attributes) | more
    return torch.ops.moe.fused_deepgemm(*inputs, **weights.tensors(), **arguments)


def exact_case(T):
    """bf16 experts whose sums have one term that is not zero, of few bits: no order of summation can round."""
    E, K, I = 4, 256, 128
    generator = torch.Generator().manual_seed(3)
    column = torch.randint(0, K, (E, 2 * I), generator=generator)
    w13 = torch.zeros(E, 2 * I, K).scatter_(2, column[:, :, None], 1.0)
    w2 = torch.zeros(E, K, I).scatter_(2, torch.randint(0, I, (E, K, 1), generator=generator), 1.0)
    x = torch.randn(T, K, generator=generator).bfloat16()
    ids = torch.rand(T, E, generator=generator).argsort(1)[:, :2].int()
    weights = torch.full((T, 2), 0.5)
    return (x, weights, ids), moe_ops.prepare_weights(w13, w2, recipe="bf16")


@pytest.mark.parametrize("layout", ["auto", "contiguous", "masked", "gathered", "direct"])
def test_chunks_have_the_bits_of_the_whole_where_sums_are_exact(layout):
    inputs, weights = exact_case(300)
    call = dict(**weights.tensors(), recipe="bf16", layout=layout)
    want = torch.ops.moe.fused_deepgemm(*inputs, **call)
    whole = moe_ops.plan(T=300, **SIZES, recipe="bf16", layout=layout).total_bytes
    for budget in (whole, whole - 1, whole // 2, whole // 5):
        try:
            chunks = moe_ops.plan(T=300, **SIZES, recipe="bf16", layout=layout, max_workspace_bytes=budget).chunks
        except ValueError:  # one token takes a block of rows an expert in the masked layout
            continue
        assert sum(chunks) == 300 and (len(chunks) > 1) == (budget < whole)
        assert_bits_equal(torch.ops.moe.fused_deepgemm(*inputs, **call, max_workspace_bytes=budget), want)


@pytest.mark.parametrize(
    "case", [LayerCase(r, T=300, bias=True) for r in ("bf16", "fp8_block", "mxfp8", "mxfp4")], ids=str
)
def test_chunks_are_the_whole_within_the_recipe(case):
    inputs, weights = case.build()
    want = run(case, inputs, weights)
    budget = moe_ops.plan(T=300, **SIZES, recipe=case.recipe).total_bytes // 2
    workspace = poisoned(budget + 512)
    got = run(case, inputs, weights, max_workspace_bytes=budget, workspace=workspace)
    assert relative_error(got, want) <= 1e-2
    assert (workspace[budget:] == 0xFF).all()


def test_chunks_keep_foreign_routes_and_every_option():
    attributes = dict(swiglu_limit=1.5, routed_scaling_factor=2.5)
    case = LayerCase("mxfp4", T=260, distribution="foreign", bias=True, attributes=attributes, dtype=torch.float16)
    inputs, weights = case.build()
    got = run(case, inputs, weights, max_workspace_bytes=moe_ops.plan(T=64, **SIZES, recipe="mxfp4").total_bytes)
    assert got.dtype == torch.float16
    assert relative_error(got, run(case, inputs, weights)) <= 1e-2


def test_chunks_fit_an_arena_that_is_smaller_than_the_budget():
    """Eager calls whose tokens fit the budget and not the arena, as compiled ones."""
    case = LayerCase("fp8_block", T=300)
    inputs, weights = case.build()
    needed = moe_ops.plan(T=300, **SIZES, recipe="fp8_block").total_bytes
    call = dict(workspace=poisoned(needed // 2), max_workspace_bytes=needed + 256)
    assert relative_error(run(case, inputs, weights, **call), run(case, inputs, weights)) <= 1e-2


@pytest.mark.parametrize("T", [0, 1])
def test_chunks_of_no_tokens_and_of_one(T):
    case = LayerCase("fp8_block", T=T)
    inputs, weights = case.build()
    assert_bits_equal(run(case, inputs, weights, max_workspace_bytes=1 << 20), run(case, inputs, weights))


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("layout", ["auto", "contiguous", "gathered"])
def test_chunks_fit_the_budget_and_are_even(arch, layout):
    layer = Layer(16384, 8, 128, 2048, 768, "fp8_block", "fp32", layout)
    choice = choose("plan", layer, "auto", arch)
    chunks = split(layer, choice, 64 << 20)
    assert sum(chunks) == 16384 and max(chunks) - min(chunks) <= 1
    for tokens in set(chunks):
        part = Layer(tokens, *list(vars(layer).values())[1:-1], of=16384)
        assert choose("plan", part, "auto", arch) == choice
        assert plan_layer(part, choice).total_bytes <= 64 << 20
    one_less = -(-16384 // (len(chunks) - 1))
    part = Layer(one_less, *list(vars(layer).values())[1:-1], of=16384)
    assert plan_layer(part, choice).total_bytes > 64 << 20  # fewer parts would not fit


def test_chunks_show_in_the_plan():
    plan = moe_ops.plan(T=300, **SIZES, recipe="fp8_block", max_workspace_bytes=1 << 19)
    assert f"300 tokens in {len(plan.chunks)} chunks of at most {max(plan.chunks)}" in str(plan)
    assert plan.total_bytes <= plan.workspace_bytes <= 1 << 19


def test_chunks_budget_for_less_than_a_token_is_refused_with_the_least():
    with pytest.raises(
        ValueError, match="max_workspace_bytes must be enough for one token; got 10. Pass at least"
    ) as told:
        moe_ops.plan(T=300, **SIZES, recipe="fp8_block", max_workspace_bytes=10)
    least = int(str(told.value).split("at least ")[1].rstrip("."))
    assert moe_ops.plan(T=300, **SIZES, recipe="fp8_block", max_workspace_bytes=least).chunks == (1,) * 300
    case = LayerCase("fp8_block", T=9)
    inputs, weights = case.build()
    for budget in (10, -1):
        with pytest.raises(ValueError, match="max_workspace_bytes must be"):
            run(case, inputs, weights, max_workspace_bytes=budget)


@pytest.mark.slow
def test_chunks_compile_to_one_graph_for_every_token_count():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    (x, *routes), weights = exact_case(700)

    def layer(x, topk_weights, topk_ids):
        call = dict(**weights.tensors(), recipe="bf16")
        return torch.ops.moe.fused_deepgemm(x, topk_weights, topk_ids, **call, max_workspace_bytes=1 << 20)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for T in (3, 2, 64, 129, 700):  # first, T = top_k would be taken for one size
            part = [tensor[:T].clone() for tensor in (x, *routes)]  # a view's base would be guarded too
            assert_bits_equal(compiled(*part), layer(*part), f"T={T}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_chunks_of_a_layer():
    weights = moe_ops.prepare_weights(torch.randn(4, 256, 256) / 16, torch.randn(4, 256, 128) / 11, recipe="bf16")
    router = torch.randn(4, 256).bfloat16()
    plain = moe_ops.MoELayer(router, weights, top_k=2)
    bounded = moe_ops.MoELayer(router, weights, top_k=2, max_workspace_bytes=1 << 20)
    x = torch.randn(700, 256).bfloat16()
    assert relative_error(bounded(x), plain(x)) <= 1e-2
