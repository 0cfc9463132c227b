"""MoELayer: buffers that survive what users do to modules, the router, shared experts, odd shapes."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.recipes import RECIPES
from moe_ops.testing import FORMS, assert_bits_equal

E, K, I = 8, 256, 128


def build(recipe: str = "fp8_block", scale_format: str | None = None, bias: bool = False, **more) -> moe_ops.MoELayer:
    biases = dict(w13_bias=torch.randn(E, 2 * I) / 4, w2_bias=torch.randn(E, K) / 4) if bias else {}
    w13, w2 = torch.randn(E, 2 * I, K) / K**0.5, torch.randn(E, K, I) / I**0.5
    weights = moe_ops.prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format, **biases)
    return moe_ops.MoELayer(torch.randn(E, K).bfloat16(), weights, top_k=2, **more)


def hidden(*shape) -> torch.Tensor:
    return torch.randn(*shape, K).bfloat16()


@pytest.mark.parametrize("recipe", RECIPES)
def test_layer_is_router_plus_experts(recipe):
    layer, x = build(recipe, bias=True, routed_scaling_factor=2.5, swiglu_limit=2.0), hidden(9)
    topk_weights, topk_ids = moe_ops.topk(x @ layer.router_weight.T, 2)
    expected = moe_ops.fused_deepgemm(
        x,
        topk_weights,
        topk_ids,
        layer.w13,
        layer.w13_scale,
        layer.w2,
        layer.w2_scale,
        w13_bias=layer.w13_bias,
        w2_bias=layer.w2_bias,
        recipe=recipe,
        routed_scaling_factor=2.5,
        swiglu_limit=2.0,
    )
    assert_bits_equal(layer(x), expected)


def test_layer_takes_any_leading_shape():
    layer, x = build(), hidden(3, 5)
    assert_bits_equal(layer(x), layer(x.flatten(0, 1)).view(3, 5, K))
    assert layer(hidden(0, 5)).shape == (0, 5, K)
    assert_bits_equal(layer(x.transpose(0, 1)), layer(x.transpose(0, 1).contiguous()))


def through_torch(state, path):
    torch.save(state, path)
    return torch.load(path)


def through_safetensors(state, path):
    from safetensors.torch import load_file, save_file

    save_file(state, path)
    return load_file(path)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("store", [through_torch, through_safetensors])
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_layer_state_dict_round_trip(recipe, scale_format, store, assign, tmp_path):
    """Files keep what the GEMMs need, the strides of packed scales included; the layer they came from is unchanged."""
    layer, x = nn.Sequential(build(recipe, scale_format, bias=True)), hidden(9)
    other = nn.Sequential(build(recipe, scale_format, bias=True))
    expected = layer(x)
    other.load_state_dict(store(layer.state_dict(), tmp_path / "state"), assign=assign)
    assert_bits_equal(other(x), expected)
    assert_bits_equal(layer(x), expected)
    assert_bits_equal(copy.deepcopy(other)(x), expected)


def test_layer_refuses_a_state_dict_of_another_recipe():
    """mxfp8 and block fp8 with packed scales have the same shapes at K = I = 128, and mean different numbers."""
    w13, w2 = torch.randn(2, 256, 128), torch.randn(2, 128, 128)
    block, mx = (
        moe_ops.MoELayer(
            torch.randn(2, 128), moe_ops.prepare_weights(w13, w2, recipe=recipe, scale_format="ue8m0"), top_k=1
        )
        for recipe in ("fp8_block", "mxfp8")
    )
    with pytest.raises(ValueError) as caught:
        block.load_state_dict(mx.state_dict())
    assert str(caught.value) == (
        "MoELayer: state_dict must be of fp8_block ue8m0 weights; got mxfp8 ue8m0. "
        "Build the layer from weights prepared alike."
    )


@pytest.mark.parametrize(
    "bad, message",
    [
        ({"top_k": 9}, "topk: top_k must be between 1 and the number of experts 8; got 9. Lower it."),
        (
            {"scoring": "relu"},
            "topk: scoring must be one of softmax, sigmoid, sqrtsoftplus, sqrtsoftplus_log1p; got 'relu'. "
            "Choose one of them.",
        ),
        ({"bias": torch.zeros(3)}, "topk: bias must be of shape (E,) = (8,); got (3,). One value per expert."),
        (
            {"activation": "gelu"},
            "fused_deepgemm: activation must be one of silu, situ; got 'gelu'. Choose one of them.",
        ),
        ({"swiglu_limit": -1.0}, "fused_deepgemm: swiglu_limit must be positive; got -1.0. Pass None for no clamp."),
        (
            {"layout": "psum"},
            "fused_deepgemm: layout must be one of auto, contiguous, masked, gathered, direct; got 'psum'. "
            "Choose one of them.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_layer_refuses_at_construction(bad, message):
    weights = moe_ops.prepare_weights(torch.randn(E, 2 * I, K), torch.randn(E, K, I), recipe="bf16")
    with pytest.raises(ValueError) as caught:
        moe_ops.MoELayer(torch.randn(E, K), weights, **{"top_k": 2, **bad})
    assert str(caught.value) == message


def test_layer_refuses_what_is_no_token():
    layer = build()
    for bad, kind, message in (
        (None, TypeError, "hidden_states must be a tensor; got NoneType. Convert it."),
        ([1.0], TypeError, "hidden_states must be a tensor; got list. Convert it."),
        (
            torch.zeros(K),
            ValueError,
            "hidden_states must be of shape (..., K) with K=256; got (256,). Unsqueeze a single token.",
        ),
        (
            torch.zeros(3, 7),
            ValueError,
            "hidden_states must be of shape (..., K) with K=256; got (3, 7). Unsqueeze a single token.",
        ),
    ):
        with pytest.raises(kind) as caught:
            layer(bad)
        assert str(caught.value) == f"MoELayer.forward: {message}"


@pytest.mark.parametrize("setting", ["torch.set_default_dtype(torch.float16)", "torch.set_default_device('meta')"])
def test_layer_works_whatever_the_defaults_were_at_import(setting):
    """A model loader may import the package under its own default dtype or device."""
    script = f"""
import torch
{setting}
import moe_ops
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
for recipe in moe_ops.recipes.RECIPES:
    w = moe_ops.prepare_weights(torch.randn(4, 256, 128), torch.randn(4, 128, 128), recipe=recipe)
    out = moe_ops.MoELayer(torch.randn(4, 128), w, top_k=2)(torch.randn(5, 128))
    assert out.dtype == torch.float32 and out.isfinite().all() and out.any()
print("fine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to(torch.bfloat16)])
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_layer_cast_leaves_prepared_weights_alone(recipe, scale_format, cast):
    """`.half()` on a model must not turn fp8 values and fp32 scales into halves."""
    layer, x = build(recipe, scale_format), hidden(9)
    expected = layer(x)
    before = {name: (t.dtype, t.stride()) for name, t in layer.named_buffers() if name != "router_weight"}
    cast(layer)
    assert {name: (t.dtype, t.stride()) for name, t in layer.named_buffers() if name != "router_weight"} == before
    layer.router_weight = layer.router_weight.bfloat16()
    assert_bits_equal(layer(x), expected)


@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_layer_moves_keep_strides(recipe, scale_format):
    """A move to another device keeps the MN-major strides (meta stands in for a card here)."""
    layer = build(recipe, scale_format)
    strides = {name: t.stride() for name, t in layer.named_buffers()}
    moved = layer.to("meta")
    assert {name: t.stride() for name, t in moved.named_buffers()} == strides


def test_layer_adds_the_shared_expert_once():
    shared = nn.Linear(K, K, bias=False).bfloat16().requires_grad_(False)
    layer, x = build(shared_expert=shared), hidden(9)
    with_shared = layer(x)
    layer.shared_expert = None
    assert_bits_equal(with_shared, layer(x) + shared(x))


def test_layer_routes_by_hash():
    table = torch.randint(0, E, (50, 2), dtype=torch.int32)
    layer, x, ids = build(scoring="sqrtsoftplus", hash_table=table), hidden(2, 4), torch.randint(0, 50, (2, 4))
    topk_weights, topk_ids = moe_ops.topk(
        x.flatten(0, 1) @ layer.router_weight.T, 2, scoring="sqrtsoftplus", hash_table=table, token_ids=ids.flatten()
    )
    assert torch.equal(topk_ids, table[ids.flatten()])
    tensors = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    expected = moe_ops.fused_deepgemm(x.flatten(0, 1), topk_weights, topk_ids, *tensors, recipe="fp8_block")
    assert_bits_equal(layer(x, ids), expected.view(2, 4, K))
    with pytest.raises(ValueError) as caught:
        layer(x)
    assert str(caught.value) == (
        "MoELayer.forward: token_ids must be given to a layer that routes by hash, and to no other; got None. "
        "Check which layers have a hash table."
    )


def test_layer_adds_the_router_bias_to_the_logits():
    bias = torch.randn(E).bfloat16()
    layer, x = build(router_bias=bias), hidden(9)
    topk_weights, topk_ids = moe_ops.topk(nn.functional.linear(x, layer.router_weight, bias), 2)
    tensors = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale)
    assert_bits_equal(layer(x), moe_ops.fused_deepgemm(x, topk_weights, topk_ids, *tensors, recipe="fp8_block"))
    assert layer.half().router_bias.dtype == torch.float16


def test_layer_explains_a_router_of_another_size():
    weights = moe_ops.prepare_weights(torch.randn(E, 2 * I, K), torch.randn(E, K, I), recipe="bf16")
    with pytest.raises(ValueError) as caught:
        moe_ops.MoELayer(torch.randn(E, K + 1), weights, top_k=2)
    assert str(caught.value) == (
        "MoELayer: router_weight must be of shape (E, K) = (8, 256); got (8, 257). One row per expert."
    )


def test_layer_prints_what_it_is():
    assert "E=8, K=256, I=128" in repr(build()) and "fp8_block" in repr(build())
