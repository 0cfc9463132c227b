"""The buffer plan: no live overlap, the lower bound, the closed form, and a table that can be read."""

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_ops
from moe_ops import backends
from moe_ops.arch import ARCHS
from moe_ops.buffers import STAGES
from moe_ops.choice import _choose, choose, layouts
from moe_ops.planner import plan_layer, workspace_bytes
from moe_ops.rows import BLOCK, LAYOUTS, align, contiguous_rows, masked_rows, masked_tokens
from moe_ops.sizes import Layer
from moe_ops.spec import ALIGNMENT
from moe_ops.testing import FORMS

MIB = 1 << 20
DEEPSEEK_V3 = dict(E=32, K=7168, I=2048, top_k=8)  # on one of 8 ranks


def sized(T, top_k, E, K, I, fmt, layout) -> Layer:
    """A layer in this layout, or in the first one that holds it."""
    layer = Layer(T, top_k, E, 128 * K, 128 * I, *fmt)
    return layer.with_layout(layout if layout in ("auto", *layouts(layer)) else "contiguous")


layers = st.builds(
    sized,
    st.integers(0, 600),
    st.integers(1, 10),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from(FORMS),
    st.sampled_from(LAYOUTS),
)


def planned(layer, device):
    return plan_layer(layer, choose("plan", layer, "auto", device))


@settings(derandomize=True, deadline=None, max_examples=1500)
@given(layers, st.sampled_from(ARCHS))
def test_plan_is_sound_and_optimal(layer, arch):
    """Buffers alive in one stage never overlap; offsets are aligned; the total is the most that is alive at once."""
    plan = planned(layer, arch)
    for buffer in plan.buffers:
        assert buffer.offset % ALIGNMENT == 0 and buffer.offset + buffer.spec.nbytes <= plan.total_bytes
    for a, b in itertools.combinations(plan.buffers, 2):
        together = a.first <= b.last and b.first <= a.last
        apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
        assert not together or apart, f"{a.name} and {b.name} overlap in {layer}"
    # Activations of the gathered layout outlive a hand-over, so they do not lie where the routing's scratch was.
    scratch = sum(b.nbytes for b in plan.buffers if b.name == "scratch" and plan.layer.layout == "gathered")
    assert plan.lower_bound_bytes <= plan.total_bytes <= plan.lower_bound_bytes + scratch
    assert plan.total_bytes <= plan.unplanned_bytes


@settings(derandomize=True, deadline=None, max_examples=1500)
@given(layers, st.integers(0, 600), st.sampled_from(ARCHS), st.sampled_from(backends.BACKENDS), st.booleans())
def test_closed_form_covers_every_smaller_token_count(layer, fewer, arch, backend, with_deep_gemm):
    smaller = layer.with_layout(layer.layout, min(fewer, layer.T))
    _choose.cache_clear()
    with mock.patch.object(backends, "why_not_grouped", lambda *_: None if with_deep_gemm else "It is missing."):
        needed = plan_layer(smaller, choose("plan", smaller, backend, arch)).total_bytes
    _choose.cache_clear()
    assert needed <= workspace_bytes(layer, backend, arch) <= workspace_bytes(layer, backend)


@pytest.mark.parametrize("recipe, scale_format", [("fp8_block", "fp32"), ("bf16", "none")])
def test_closed_form_on_one_device_is_its_own_plan(recipe, scale_format):
    """Where few tokens take few rows of scratch, those of other devices' layouts, which take many, are not counted."""
    for T in (1, 8, 64, 256, 512):
        layer = Layer(T, 8, 128, 2048, 768, recipe, scale_format)
        largest = max(planned(layer.with_layout("auto", tokens), "sm90").total_bytes for tokens in range(1, T + 1))
        assert largest <= workspace_bytes(layer, device="sm90") <= 1.01 * largest
        assert workspace_bytes(layer, device="sm100") > 5 * largest


@pytest.mark.parametrize("layout", ["contiguous", "masked", "auto"])
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_closed_form_of_a_traced_size_is_the_plan(recipe, scale_format, layout):
    """The size that a compiled graph computes, at every T of a sweep: what the plan says for a fixed layout, and
    enough for either where the graph decides."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    env = ShapeEnv()
    T = env.create_symintnode(
        env.create_symbol(64, torch._dynamo.source.ConstantSource("T"), dynamic_dim=DimDynamic.DYNAMIC), hint=64
    )
    for device in (None, *ARCHS):
        traced = workspace_bytes(Layer(T, 2, 8, 256, 128, recipe, scale_format, layout), device=device)
        assert not env.guards
        expression, symbol = traced.node.expr, T.node.expr
        for tokens in range(2, 700, 23):
            closed = int(expression.subs(symbol, tokens))
            layer = Layer(tokens, 2, 8, 256, 128, recipe, scale_format, layout)
            assert closed == workspace_bytes(layer, device=device)
            totals = [planned(layer, arch).total_bytes for arch in (ARCHS if device is None else (device,))]
            assert closed >= max(totals) if layout == "auto" else {closed} == set(totals)


def test_contiguous_rows_is_the_worst_case():
    """Brute force over all ways to spread the routes of T tokens over E experts."""
    for T, top_k, E in itertools.product(range(4), range(1, 4), range(1, 4)):
        worst = 0
        for counts in itertools.product(range(T + 1), repeat=E):  # a token names an expert at most once
            if sum(counts) <= T * min(top_k, E):
                worst = max(worst, sum(align(count, BLOCK) for count in counts))
        assert contiguous_rows(T, top_k, E) == worst, (T, top_k, E)
    for T, E in ((300, 2), (129, 3)):
        worst = max(
            sum(align(count, BLOCK) for count in counts)
            for counts in itertools.product(range(0, T + 1), repeat=E - 1)
            for counts in [(*counts, min(T, max(0, T * 1 - sum(counts))))]
            if sum(counts) <= T
        )
        assert contiguous_rows(T, 1, E) == worst, (T, E)


def test_masked_slab_holds_every_token():
    assert [masked_rows(T) for T in (0, 1, 128, 129)] == [0, 128, 128, 256]


def test_plan_of_deepseek_v3_fits():
    plan = moe_ops.plan(T=4096, **DEEPSEEK_V3, recipe="fp8_block", layout="contiguous")
    assert plan.total_bytes == plan.lower_bound_bytes <= 640 * MIB
    assert plan.unplanned_bytes > 1.9 * plan.total_bytes


def test_plan_prints_every_byte():
    text = str(moe_ops.plan(T=4096, **DEEPSEEK_V3, recipe="fp8_block", layout="contiguous"))
    for name in ("src2dst", "m_indices", "x_q", "x_scale", "gateup", "act_q", "act_scale", "down"):
        assert f"\n{name} " in text
    assert "36736x7168  float8_e4m3fn  7168,1" in text
    assert "total 576.51 MiB | lower bound 576.51 MiB | without reuse 1122.50 MiB" in text
    assert "layout=contiguous (as asked)" in text and all(stage in text for stage in STAGES)


def test_plan_auto_says_what_it_chose():
    """Mean rows an expert, T * 8 / 32 here, decide; direct and gathered have kernels for bf16 and fp8 blocks."""
    sizes = dict(**DEEPSEEK_V3, recipe="fp8_block", arch="sm90")
    printed = str(moe_ops.plan(T=8, **sizes))
    assert "layout=gathered (auto: gathered up to 32 mean rows an expert, GEMMs by triton)" in printed
    chosen = {T: moe_ops.plan(T=T, **sizes).layer.layout for T in (1, 2, 128, 129)}
    assert chosen == {1: "direct", 2: "gathered", 128: "gathered", 129: "contiguous"}


def test_plan_auto_gives_masked_slabs_up_to_a_number_of_rows():
    most = masked_tokens(DEEPSEEK_V3["E"])
    sizes = dict(**DEEPSEEK_V3, recipe="mxfp8", arch="sm100")
    assert [moe_ops.plan(T=T, **sizes).layer.layout for T in (most, most + 1)] == ["masked", "contiguous"]


def test_plan_refuses_a_layout_without_kernels():
    with pytest.raises(ValueError) as caught:
        moe_ops.plan(T=8, **DEEPSEEK_V3, recipe="mxfp8", layout="gathered")
    assert str(caught.value) == (
        "plan: layout must be auto or one of contiguous, masked here; got 'gathered'. "
        "The gathered layout has no kernels for mxfp8. Pass auto."
    )


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plan_draws_itself(tmp_path, suffix):
    pytest.importorskip("matplotlib", reason="the chart is the extra `plot`")
    path = tmp_path / f"plan.{suffix}"
    moe_ops.plan(T=4096, **DEEPSEEK_V3, recipe="fp8_block").draw(str(path))
    assert path.stat().st_size > 5000


def test_plan_masked_slabs_at_prefill_are_only_planned():
    """Slabs that no card could hold cost nothing to plan, and auto avoids them."""
    sizes = dict(T=262144, E=16, K=7168, I=2048, top_k=8, recipe="fp8_block")
    masked, auto = (moe_ops.plan(**sizes, layout=layout) for layout in ("masked", "auto"))
    assert auto.layer.layout == "contiguous" and masked.total_bytes > 1.9 * auto.total_bytes


def test_planner_greedy_by_size_would_take_more():
    """Why buffers alternate between the ends: the usual greedy placement is not optimal for this chain."""
    plan = moe_ops.plan(T=4096, **DEEPSEEK_V3, recipe="bf16", layout="contiguous")
    placed = []
    for buffer in sorted(plan.buffers, key=lambda b: -b.nbytes):
        offset = 0
        for other in sorted(placed, key=lambda b: b.offset):
            together = other.first <= buffer.last and buffer.first <= other.last
            if together and offset < other.offset + other.nbytes and other.offset < offset + buffer.nbytes:
                offset = other.offset + other.nbytes
        placed.append(buffer.at(offset))
    assert max(b.offset + b.nbytes for b in placed) > 1.15 * plan.total_bytes


@pytest.mark.parametrize(
    "bad, message",
    [
        (
            {"recipe": "int4"},
            "plan: recipe must be one of bf16, fp8_block, mxfp8, mxfp4; got 'int4'. Choose one of them.",
        ),
        (
            {"scale_format": "none"},
            "plan: scale_format must be one of fp32, ue8m0; got 'none'. These are the formats of recipe fp8_block.",
        ),
        ({"T": -1}, "plan: T must be an integer >= 0; got -1. Check it."),
        (
            {"num_experts": 0},
            "plan: num_experts must be at least E = 32, or -1; got 0. It counts the experts of all ranks.",
        ),
        (
            {"I": 1000},
            "plan: I must be a multiple of 128; got 1000. Recipe fp8_block scales that many columns together; pad with "
            "zeros.",
        ),
        (
            {"layout": "psum"},
            "plan: layout must be one of auto, contiguous, masked, gathered, direct; got 'psum'. Choose one of them.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_plan_explains_itself(bad, message):
    with pytest.raises(ValueError) as caught:
        moe_ops.plan(**{**DEEPSEEK_V3, "T": 8, "recipe": "fp8_block", **bad})
    assert str(caught.value) == message
