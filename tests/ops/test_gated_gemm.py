"""moe::gated_gemm_{gathered,direct} against float64 products and formulas, and moe::gated_gemm_ws on an arena."""

import pytest
import torch

from moe_ops import gated_gemm_direct, gated_gemm_gathered, pre_permute_gathered
from moe_ops.recipes import RECIPES
from moe_ops.testing import LayerCase, assert_bits_equal, decode_rows, decode_weight
from moe_ops.testing.fused_cases import FORMULAS, FUSED_FORMS

each_form = pytest.mark.parametrize("recipe, scale_format", FUSED_FORMS, ids=["-".join(form) for form in FUSED_FORMS])
each_formula = pytest.mark.parametrize("formula", FORMULAS)

# Of a bf16 product, 2^-9, carried by formulas whose slope is below 2 here, and of the activation's own rounding:
# bf16, or e4m3 of three mantissa bits, against the largest value of its group.
ROUNDED = {"bf16": 2.0**-7, "fp8_block": 2.0**-3}


def build(recipe, scale_format, T=21, E=4, top_k=2, *, bias=True, distribution="foreign"):
    """(hidden states, ids, prepared weights)."""
    form = None if scale_format == "none" else scale_format
    case = LayerCase(recipe, form, T=T, E=E, top_k=top_k, bias=bias, distribution=distribution)
    (x, _, ids), weights = case.build()
    return x, ids, weights


def exact(gateup, formula):
    """The gated activation in float64, written out."""
    gate, up = gateup.double().chunk(2, -1)
    alpha, limit = formula.get("gemm1_alpha"), formula.get("gemm1_clamp_limit", formula.get("swiglu_limit"))
    sigmoid = torch.special.expit
    if formula.get("activation") == "situ":
        return alpha * torch.tanh(gate / alpha) * sigmoid(gate) * limit * torch.tanh(up / limit)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * sigmoid(gate) * up if alpha is None else gate * sigmoid(alpha * gate) * (up + 1)


def rows_of(x, recipe, scale_format):
    """Hidden states as the op reads them: quantised by token."""
    if recipe == "bf16":
        return x.double()
    ids = torch.zeros(len(x), 1, dtype=torch.int32)
    form = dict(num_local_experts=1, block_m=16, recipe=recipe, scale_format=scale_format)
    q, scale, *_ = pre_permute_gathered(x, ids, **form)
    return decode_rows(q, scale, RECIPES[recipe])


def expected(x, ids, weights, formula, recipe, scale_format):
    """float64 activation of each route, (T * top_k, I); zero for routes to others."""
    rows = rows_of(x, recipe, scale_format)
    w = decode_weight(weights.w13, weights.w13_scale, RECIPES[recipe])
    out = torch.zeros(ids.numel(), w.shape[1] // 2, dtype=torch.float64)
    for route, expert in enumerate(ids.flatten().tolist()):
        if 0 <= expert < len(w):
            product = w[expert] @ rows[route // ids.shape[1]]
            if weights.w13_bias is not None:
                product = product + weights.w13_bias[expert].double()
            out[route] = exact(product, formula)
    return out


def gathered(x, ids, weights, recipe, scale_format, block_m=16, **formula):
    """(act_q, act_scale, src2dst, live rows)."""
    form = dict(recipe=recipe, scale_format=scale_format, block_m=block_m)
    q, scale, row_token, tiles, src2dst = pre_permute_gathered(x, ids, num_local_experts=len(weights.w13), **form)
    scale = scale if RECIPES[recipe].quantised else None
    call = (q, scale, row_token, tiles, weights.w13, weights.w13_scale)
    return (*gated_gemm_gathered(*call, bias=weights.w13_bias, **form, **formula), src2dst)


def assert_near(got, want, recipe):
    bound = ROUNDED[recipe] * want.abs().amax(-1, keepdim=True) + 1e-6
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.parametrize("block_m", [16, 32, 64, 128])
@each_formula
@each_form
def test_gated_gemm_gathered_matches_float64(recipe, scale_format, formula, block_m):
    x, ids, weights = build(recipe, scale_format)
    act, scale, src2dst = gathered(x, ids, weights, recipe, scale_format, block_m, **FORMULAS[formula])
    row = RECIPES[recipe]
    got = decode_rows(act, scale if row.quantised else None, row)
    want = expected(x, ids, weights, FORMULAS[formula], recipe, scale_format)
    here = src2dst.flatten() >= 0
    assert torch.equal(here, ((ids >= 0) & (ids < 4)).flatten()) and here.any() and not here.all()
    assert_near(got[src2dst.flatten()[here].long()], want[here], recipe)


@each_formula
@each_form
def test_gated_gemm_direct_matches_float64(recipe, scale_format, formula):
    x, ids, weights = build(recipe, scale_format)
    form = dict(recipe=recipe, scale_format=scale_format, **FORMULAS[formula])
    act, src2dst = gated_gemm_direct(x, ids, weights.w13, weights.w13_scale, bias=weights.w13_bias, **form)
    here = ((ids >= 0) & (ids < 4)).flatten()
    routes = torch.arange(ids.numel(), dtype=torch.int32)
    assert torch.equal(src2dst.flatten(), torch.where(here, routes, -1)) and act.dtype == torch.float32
    assert_near(act[here], expected(x, ids, weights, FORMULAS[formula], recipe, scale_format)[here], "bf16")


@pytest.mark.parametrize("T", [0, 1, 5])
@each_form
def test_gated_gemm_meets_its_contract(recipe, scale_format, T, meets_contract):
    x, ids, weights = build(recipe, scale_format, T, distribution="uniform")
    form, I = dict(recipe=recipe, scale_format=scale_format), weights.w2.shape[2]
    wanted = (((2 * T, I), torch.float32, (I, 1)), ((T, 2), torch.int32, (2, 1)))
    call = (x, ids, weights.w13, weights.w13_scale)
    meets_contract(torch.ops.moe.gated_gemm_direct.default, wanted, *call, bias=weights.w13_bias, **form)
    form |= dict(block_m=16)
    q, scale, row_token, tiles, _ = pre_permute_gathered(x, ids, num_local_experts=4, **form)
    empty = (((0,), torch.float32, (1,)),)
    if recipe != "bf16":
        dtype = torch.float32 if scale_format == "fp32" else torch.int32
        empty = (((2 * T, 1), dtype, (1, -(-2 * T // 4) * 4)),)
    wanted = (((2 * T, I), RECIPES[recipe].x_dtype, (I, 1)), *empty)
    call = (q, scale if recipe != "bf16" else None, row_token, tiles, weights.w13, weights.w13_scale)
    meets_contract(torch.ops.moe.gated_gemm_gathered.default, wanted, *call, **form)


@pytest.mark.parametrize("layout", ["gathered", "direct"])
@each_form
def test_gated_gemm_ws_writes_its_buffers_alone(recipe, scale_format, layout, arena, integers, meets_contract):
    x, ids, weights = build(recipe, scale_format, bias=False)
    form, K, I = dict(recipe=recipe, scale_format=scale_format), x.shape[1], weights.w2.shape[2]
    space = arena(T=21, top_k=2, E=4, K=K, I=I, **form, layout=layout)
    torch.ops.moe.pre_permute_ws(space.ws, x, ids, 0, **space.sizes)
    call = (x, ids, weights.w13, weights.w13_scale, None, None, None, "silu", None, None, None, 0)
    before, here = space.ws.clone(), ((ids >= 0) & (ids < 4)).flatten()
    if layout == "direct":
        want = gated_gemm_direct(*call[:4], **form)
        written, rows = dict(act=here, src2dst=slice(None)), here
    else:
        want = gathered(x, ids, weights, recipe, scale_format)
        rows = torch.arange(len(here)) < here.sum()
        written = dict(act_q=rows, act_scale=rows) if recipe != "bf16" else dict(act_q=rows)
    with space.writes_only(**written):
        torch.ops.moe.gated_gemm_ws(space.ws, *call, **space.sizes)
    for name, result in zip(written, want, strict=False):
        mask = slice(None) if name == "src2dst" else rows
        assert_bits_equal(integers(space[name])[mask], integers(result)[mask], name)
    meets_contract(torch.ops.moe.gated_gemm_ws.default, (), *call, **space.sizes, ws=before)


ONE_OF = "Choose one of them."
OTHERS = "Others run in the contiguous and masked layouts."
REFUSED = {
    "recipe must be bf16, fp8_block or repacked mxfp4; got mxfp8. " + OTHERS: dict(
        recipe="mxfp8", scale_format="ue8m0"
    ),
    f"activation must be one of silu, situ; got 'gelu'. {ONE_OF}": dict(activation="gelu"),
    "scale_format must be one of none; got 'fp32'. These are the formats of recipe bf16.": dict(scale_format="fp32"),
    "expert_start must be at least 0; got -1. It is this rank's first expert id.": dict(expert_start=-1),
    "w must be of shape (E, 2 I, K); got (256, 256). Use moe_ops.prepare_weights.": dict(
        w=torch.zeros(256, 256).bfloat16()
    ),
    "bias must be of shape (E, 2 I) = (4, 256); got (4, 128). One row per local expert.": dict(
        bias=torch.zeros(4, 128)
    ),
}


@pytest.mark.parametrize("sentence", REFUSED, ids=lambda sentence: sentence.split(" must")[0])
def test_gated_gemm_explains_itself(sentence, says):
    x, ids, weights = build("bf16", "none")
    call = dict(hidden_states=x, topk_ids=ids, w=weights.w13, w_scale=None, recipe="bf16", scale_format="none")
    with says(ValueError, f"gated_gemm_direct: {sentence}"):
        gated_gemm_direct(**call | REFUSED[sentence])


def test_gated_gemm_explains_itself_about_tiles(says):
    x, ids, weights = build("bf16", "none")
    form = dict(recipe="bf16", scale_format="none")
    q, _, row_token, tiles, _ = pre_permute_gathered(x, ids, num_local_experts=4, block_m=16, **form)
    for bad, sentence in (
        (dict(block_m=24), f"block_m must be one of 16, 32, 64, 128; got 24. {ONE_OF}"),
        (dict(tiles=tiles[:2]), "tiles must be of shape (3, any) (3, tiles); got (2, 8)."),
    ):
        call = dict(tiles=tiles, block_m=16) | bad
        with pytest.raises(ValueError, match="gated_gemm_gathered: " + sentence[:9]) as caught:
            gated_gemm_gathered(q, None, row_token, w=weights.w13, w_scale=None, **call, **form)
        assert str(caught.value).startswith("gated_gemm_gathered: " + sentence.split(" must")[0] + " must be")


@pytest.mark.parametrize("name", ["hidden_states", "w"])
def test_gated_gemm_explains_itself_about_gradients(name, refuses_gradients):
    x, ids, weights = build("bf16", "none")
    call = dict(hidden_states=x, topk_ids=ids, w=weights.w13, w_scale=None, recipe="bf16", scale_format="none")
    refuses_gradients("gated_gemm_direct", gated_gemm_direct, call, name)
