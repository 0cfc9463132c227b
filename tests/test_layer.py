"""MoELayer: buffers that survive what users do to modules, the router, shared experts, odd shapes."""

import io

import pytest
import torch
from torch import nn

import moe_ops
from moe_ops.recipes import RECIPES
from moe_ops.testing import assert_bits_equal

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


@pytest.mark.parametrize("recipe, scale_format", [(r.name, s) for r in RECIPES.values() for s in r.scale_formats])
def test_layer_state_dict_round_trip(recipe, scale_format):
    """torch.save keeps what the GEMMs need, the strides of packed scales included."""
    layer, other, x = build(recipe, scale_format, bias=True), build(recipe, scale_format, bias=True), hidden(9)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert_bits_equal(other(x), layer(x))


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.float(), lambda m: m.to(torch.bfloat16)])
@pytest.mark.parametrize("recipe, scale_format", [(r.name, s) for r in RECIPES.values() for s in r.scale_formats])
def test_layer_cast_leaves_prepared_weights_alone(recipe, scale_format, cast):
    """`.half()` on a model must not turn fp8 values and fp32 scales into halves."""
    layer, x = build(recipe, scale_format), hidden(9)
    expected = layer(x)
    before = {name: (t.dtype, t.stride()) for name, t in layer.named_buffers() if name != "router_weight"}
    cast(layer)
    assert {name: (t.dtype, t.stride()) for name, t in layer.named_buffers() if name != "router_weight"} == before
    layer.router_weight = layer.router_weight.bfloat16()
    assert_bits_equal(layer(x), expected)


@pytest.mark.parametrize("recipe, scale_format", [(r.name, s) for r in RECIPES.values() for s in r.scale_formats])
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
        "MoELayer.forward: token_ids must be given to a layer that routes by hash; got None. Pass it."
    )


def test_layer_explains_a_router_of_another_size():
    weights = moe_ops.prepare_weights(torch.randn(E, 2 * I, K), torch.randn(E, K, I), recipe="bf16")
    with pytest.raises(ValueError) as caught:
        moe_ops.MoELayer(torch.randn(E, K + 1), weights, top_k=2)
    assert str(caught.value) == (
        "MoELayer: router_weight must be of shape (E, K) = (8, 256); got (8, 257). One row per expert of weights."
    )


def test_layer_prints_what_it_is():
    assert "E=8, K=256, I=128" in repr(build()) and "fp8_block" in repr(build())
