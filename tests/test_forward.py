"""moe::fused_deepgemm against the judge: every recipe, layout, scale format, activation and kind of routing."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ops import MoELayer, plan
from moe_ops.recipes import RECIPES
from moe_ops.rows import LAYOUTS
from moe_ops.testing import FORMS, PATTERNS, LayerCase, assert_bits_equal, check_op, poisoned, relative_error
from moe_ops.testing.cases import DISTRIBUTIONS

ACTIVATIONS = [
    {},
    {"swiglu_limit": 2.0},
    {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 2.5},
    {"gemm1_alpha": 1.702},
    {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 4.0},
]


def same_for_all(case: LayerCase, **more) -> torch.Tensor:
    """Runs the case in every layout, also in poisoned arenas; all must be the same bits. Returns them.

    Fresh memory is full of PATTERNS[0] here (conftest.py).
    """
    inputs, weights = case.build()
    results = []
    for layout in case.layouts:
        for pattern in PATTERNS[1:]:
            sizes = dict(T=case.T, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe=case.recipe)
            needed = plan(**sizes, layout=layout, scale_format=weights.scale_format).workspace_bytes
            ws = poisoned(needed, pattern)
            results.append(case.run(inputs, weights, layout=layout, workspace=ws, **more))
        results.append(case.run(inputs, weights, layout=layout, **more))
    for result in results[1:]:
        assert_bits_equal(result, results[0], str(case))
    error = relative_error(results[0], case.judge(inputs, weights, **more))
    assert error <= case.max_diff, f"{case}: relative error {error:.4f} above {case.max_diff}"
    return results[0]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("attributes", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_forward_activations(recipe, scale_format, attributes, bias):
    same_for_all(LayerCase(recipe, scale_format, attributes=attributes, bias=bias))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_forward_distributions(recipe, scale_format, distribution):
    # K = 1024 and I = 640: packed scale words of width 2 and of width 2 with missing bytes
    case = LayerCase(recipe, scale_format, T=21, E=6, K=1024, I=640, top_k=3, distribution=distribution)
    same_for_all(case, routed_scaling_factor=2.5)


cases = st.builds(
    lambda fmt, T, E, top_k, K, I, distribution, seed: LayerCase(
        *fmt, T=T, E=E, K=128 * K, I=128 * I, top_k=min(top_k, E), distribution=distribution, seed=seed
    ),
    st.sampled_from(FORMS),
    st.sampled_from([0, 1, 2, 7, 33, 129, 140]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from(DISTRIBUTIONS),
    st.integers(0, 99),
)


@settings(derandomize=True, deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases)
def test_forward_any_shape(case):
    """Layouts and reruns agree bit for bit; the error is the recipe's once there are enough values to average over."""
    inputs, weights = case.build()
    results = [case.run(inputs, weights, layout=layout) for layout in case.layouts * 2]
    for result in results[1:]:
        assert_bits_equal(result, results[0], str(case))
    assert results[0].shape == (case.T, case.K) and results[0].dtype == case.dtype
    assert results[0].isfinite().all()
    # A single row averages over few roundings: allow twice the recipe's tolerance there.
    allowed = case.max_diff * (1 if case.T * case.K >= 4096 else 2)
    assert relative_error(results[0], case.judge(inputs, weights)) <= allowed


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_forward_keeps_the_dtype_of_hidden_states(recipe, scale_format, dtype):
    assert same_for_all(LayerCase(recipe, scale_format, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_without_tokens(recipe):
    case = LayerCase(recipe, T=0)
    inputs, weights = case.build()
    for layout in case.layouts:
        out = case.run(inputs, weights, layout=layout)
        assert out.shape == (0, case.K) and out.dtype == case.dtype and out.is_contiguous()


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_with_every_id_foreign_is_zero(recipe):
    case = LayerCase(recipe, bias=True)
    (x, weights_, ids), weights = case.build()
    for foreign in (torch.full_like(ids, -1), ids + case.E, ids - case.E):
        out = case.run((x, weights_, foreign), weights)
        assert_bits_equal(out, torch.zeros_like(x))


def test_forward_weights_of_absent_routes_do_not_matter():
    """A route that is not here contributes nothing, whatever its weight holds."""
    case = LayerCase("fp8_block", distribution="foreign")
    (x, topk_weights, ids), weights = case.build()
    absent = (ids < 0) | (ids >= case.E)
    garbage = topk_weights.masked_fill(absent, float("nan"))
    assert_bits_equal(case.run((x, garbage, ids), weights), case.run((x, topk_weights, ids), weights))


def test_forward_nan_stays_in_its_token():
    case = LayerCase("fp8_block", T=9)
    (x, topk_weights, ids), weights = case.build()
    clean = case.run((x, topk_weights, ids), weights)
    for bad in (float("nan"), float("inf")):
        dirty = x.clone()
        dirty[4, 17] = bad
        out = case.run((dirty, topk_weights, ids), weights)
        assert out[4].isnan().all()
        assert_bits_equal(out[torch.arange(9) != 4], clean[torch.arange(9) != 4])


@pytest.mark.parametrize("distribution", ["uniform", "repeated", "foreign"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_expert_ranks_sum_to_the_whole(recipe, distribution):
    """Two ranks with half of the experts each; the second one's ids start at 4. fp32 output, so the sum is exact."""
    case = LayerCase(recipe, E=8, top_k=3, distribution=distribution, dtype=torch.float32, bias=True)
    inputs, weights = case.build()
    whole = case.run(inputs, weights)
    parts = []
    for rank in range(2):
        mine = slice(4 * rank, 4 * rank + 4)
        tensors = {name: None if t is None else t[mine] for name, t in weights.tensors().items()}
        tensors = {name: t.contiguous() if name in ("w13", "w2") else t for name, t in tensors.items() if t is not None}
        tensors = {"w13_scale": None, "w2_scale": None, **tensors}
        parts.append(
            torch.ops.moe.fused_deepgemm(*inputs, **tensors, recipe=recipe, expert_start=4 * rank, num_experts=8)
        )
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    judged = case.judge(inputs, weights)
    assert relative_error(parts[0] + parts[1], judged) <= case.max_diff


def test_forward_routed_scaling_factor_scales_every_route_once():
    case = LayerCase("fp8_block", dtype=torch.float32)
    inputs, weights = case.build()
    plain = case.run(inputs, weights)
    torch.testing.assert_close(case.run(inputs, weights, routed_scaling_factor=2.5), plain * 2.5, rtol=0, atol=0)


def test_forward_padding_rows_change_nothing():
    """Rows marked -1, as bucketing adds them: the others keep their bits, and the padding is zero."""
    case = LayerCase("mxfp8", T=8)
    (x, topk_weights, ids), weights = case.build()
    padded = (
        torch.cat([x, x[:1].expand(248, -1)]),
        torch.cat([topk_weights, topk_weights[:1].expand(248, -1)]),
        torch.cat([ids, torch.full((248, case.top_k), -1, dtype=torch.int32)]),
    )
    out = case.run(padded, weights)
    assert_bits_equal(out[:8], case.run((x, topk_weights, ids), weights))
    assert not out[8:].any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_stale_arena_of_another_routing(layout):
    """Different routings and token counts through one arena: nothing of an earlier call is read."""
    case = LayerCase("fp8_block", T=140, distribution="repeated")
    inputs, weights = case.build()
    sizes = dict(T=140, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe=case.recipe)
    arena = poisoned(plan(**sizes, layout=layout).workspace_bytes)
    for T in (140, 3, 77, 1, 140):
        for shift in range(2):
            few = tuple(t.roll(shift, 0)[:T] for t in inputs)
            assert_bits_equal(
                case.run(few, weights, layout=layout, workspace=arena), case.run(few, weights, layout=layout)
            )


def test_forward_leaves_its_inputs_alone():
    case = LayerCase("mxfp4", bias=True)
    inputs, weights = case.build()
    tensors = [*inputs, *(t for t in weights.tensors().values() if t is not None)]
    before = [(t.data_ptr(), t.untyped_storage().nbytes(), t.clone()) for t in tensors]
    out = case.run(inputs, weights)
    for tensor, (pointer, nbytes, values) in zip(tensors, before, strict=True):
        assert tensor.data_ptr() == pointer and tensor.untyped_storage().nbytes() == nbytes
        assert_bits_equal(tensor, values)
        assert out.untyped_storage().data_ptr() != pointer


def test_forward_result_is_not_part_of_the_workspace():
    case = LayerCase("bf16")
    inputs, weights = case.build()
    sizes = dict(T=case.T, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe="bf16")
    arena = poisoned(plan(**sizes).workspace_bytes)
    out = case.run(inputs, weights, workspace=arena)
    kept = out.clone()
    arena.fill_(255)
    assert_bits_equal(out, kept)


def test_forward_ids_may_be_int64_and_weights_bf16():
    case = LayerCase("fp8_block")
    (x, topk_weights, ids), weights = case.build()
    assert_bits_equal(case.run((x, topk_weights, ids.long()), weights), case.run((x, topk_weights, ids), weights))
    low = topk_weights.bfloat16()
    assert_bits_equal(case.run((x, low, ids), weights), case.run((x, low.float(), ids), weights))


def test_forward_row_past_the_grid_limit():
    """More tokens than the 65535 blocks of a grid dimension. Checked on a sample; the rest against a second run."""
    case = LayerCase("bf16", T=65537, E=2, K=128, I=128, top_k=1)
    inputs, weights = case.build()
    out = case.run(inputs, weights)
    sample = torch.tensor([0, 1, 65534, 65535, 65536])
    some = tuple(t[sample] for t in inputs)
    assert relative_error(out[sample], case.judge(some, weights)) <= case.max_diff
    assert_bits_equal(case.run(inputs, weights, layout="masked"), out)


@pytest.mark.parametrize("arena", [False, True], ids=["fresh", "arena"])
@pytest.mark.parametrize("T", [0, 1, 5])
def test_forward_meets_its_schema(T, arena):
    """The composite itself: what it mutates is what its schema says."""
    case = LayerCase("bf16", T=T)
    inputs, weights = case.build()
    sizes = dict(T=8, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe="bf16")
    more = {"workspace": poisoned(plan(**sizes).workspace_bytes)} if arena else {}
    check_op(torch.ops.moe.fused_deepgemm.default, *inputs, **weights.tensors(), recipe="bf16", **more)


def test_forward_uses_the_arena_it_is_given():
    case = LayerCase("fp8_block")
    inputs, weights = case.build()
    sizes = dict(T=case.T, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe=case.recipe)
    arena = poisoned(plan(**sizes).workspace_bytes)
    layer = MoELayer(torch.randn(case.E, case.K), weights, top_k=2)
    layer(inputs[0], workspace=arena)
    assert (arena != 0xFF).any()


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_under_autocast_is_the_same(recipe):
    case = LayerCase(recipe, bias=True)
    inputs, weights = case.build()
    expected = case.run(inputs, weights)
    with torch.autocast("cpu", torch.bfloat16):
        assert_bits_equal(case.run(inputs, weights), expected)


def test_forward_refuses_more_rows_than_int32_counts():
    sizes = dict(top_k=1, E=32, K=128, I=128, recipe="bf16")
    with pytest.raises(ValueError) as caught:
        plan(T=2**27, **sizes, layout="masked")
    assert str(caught.value) == (
        "pre_permute: the number of rows must be below 2^31; got 4294967296. "
        "Split the tokens, or take the contiguous layout."
    )
