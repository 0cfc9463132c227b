"""Sizes that no group divides: padded with zeros at preparation, the layer equal to the unpadded reference."""

from dataclasses import replace

import pytest
import torch

from moe_ops import MoELayer, fused_deepgemm, prepare_weights
from moe_ops.prep.source import Source, scale_shape
from moe_ops.recipes import RECIPES
from moe_ops.reference.moe import moe
from moe_ops.testing import FORMS, assert_bits_equal, random_routing, relative_error
from moe_ops.testing.checkpoints import meaning

SIZES = [(128, 192), (128, 576), (64, 2880), (2880, 64), (200, 80)]


@pytest.mark.parametrize("K, I", SIZES, ids=str)
@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_padding_is_invisible(recipe, scale_format, K, I):
    E, T = 2, 16
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(E, 2 * I, K, generator=generator) / K**0.5
    w2 = torch.randn(E, K, I, generator=generator) / I**0.5
    biases = dict(w13_bias=torch.randn(E, 2 * I, generator=generator), w2_bias=torch.randn(E, K, generator=generator))
    weights = prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format, **biases)
    granule = RECIPES[recipe].granule
    assert (weights.padding.K, weights.padding.I) == (-K % granule, -I % granule)
    assert (weights.K, weights.I) == (K + weights.padding.K, I + weights.padding.I)

    truth = meaning(weights)
    x = torch.randn(T, K, generator=generator).bfloat16()
    routing = random_routing(T, E, 2, "uniform", generator)
    for formula in ({}, {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}):
        out = fused_deepgemm(weights.pad_hidden(x), *routing, **weights.tensors(), recipe=recipe, **formula)
        assert (out[:, K:] == 0).all()
        want = moe(x, *routing, truth.w13, truth.w2, **biases, **formula)
        assert relative_error(weights.cut_hidden(out), want) <= RECIPES[recipe].max_diff

    layer = MoELayer(torch.randn(E, K, generator=generator).bfloat16(), weights, top_k=2)
    got = layer(x.view(2, 8, K))
    assert got.shape == (2, 8, K)
    chosen = torch.ops.moe.topk(torch.nn.functional.linear(x, layer.router_weight), 2)
    want = fused_deepgemm(weights.pad_hidden(x), *chosen, **weights.tensors(), recipe=recipe)
    assert_bits_equal(got.flatten(0, 1), weights.cut_hidden(want))


@pytest.mark.parametrize("recipe, scale_format", FORMS)
def test_padding_holds_zeros_and_finite_scales(recipe, scale_format):
    """Padded rows and columns of quantised sources too, each half of w13 on its own."""
    I, K = 192, 160
    w13, w2 = torch.randn(1, 2 * I, K), torch.randn(1, K, I)
    made = prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format)
    gate, up = made.w13.view(torch.uint8 if recipe != "bf16" else torch.int16).chunk(2, 1)
    pack = RECIPES[recipe].w_pack
    for half in (gate, up):
        assert (half[:, I:] == 0).all() and (half[:, :, K // pack :] == 0).all()
    assert (made.w2.view(gate.dtype)[:, K:] == 0).all() and (made.w2.view(gate.dtype)[:, :, I // pack :] == 0).all()
    for scale in (made.w13_scale, made.w2_scale):
        if scale is not None and scale.dtype == torch.float32:
            assert (scale > 0).all() and scale.isfinite().all()


def test_padding_none_leaves_the_layer_alone():
    weights = prepare_weights(torch.randn(2, 256, 128), torch.randn(2, 128, 128), recipe="fp8_block")
    x = torch.randn(3, 128)
    assert weights.pad_hidden(x) is x
    assert weights.report is not None and "padded" not in str(weights.report)


@pytest.mark.parametrize("recipe", ["fp8_block", "mxfp4"])
def test_padding_traces_whole(recipe):
    """A padded layer is one graph for every token count, as an unpadded one is."""
    torch._dynamo.reset()
    w13, w2 = torch.randn(4, 2 * 192, 200), torch.randn(4, 200, 192)
    layer = MoELayer(torch.randn(4, 200).bfloat16(), prepare_weights(w13, w2, recipe=recipe), top_k=2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for T in (2, 37, 130):
        x = torch.randn(T, 200).bfloat16()
        with torch._dynamo.config.patch(error_on_recompile=T > 2), torch.no_grad():
            assert_bits_equal(compiled(x), layer(x), f"T={T}")


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp8", "fp8_block", "fp8_channel"])
def test_padding_of_quantised_sources_has_scale_one(kind):
    """What is appended to a checkpoint's own values and scales: zeros, scaled by 1."""
    source = Source(kind, torch.ones(130, 65, dtype=torch.uint8), None, (128, 128))
    if kind != "mxfp4":
        source = Source(kind, torch.ones(130, 130).to(torch.float8_e4m3fn), None, (128, 128))
    shape = scale_shape(kind, 130, 130)
    mx = kind.startswith("mx")
    scale = torch.full(shape, 100, dtype=torch.uint8) if mx else torch.full(shape, 0.25)
    padded = replace(source, scale=scale).padded(384, 384)
    assert padded.shape == (384, 384) and padded.factors.shape == scale_shape(kind, 384, 384)
    rows, columns = shape
    assert (padded.factors[:rows, :columns] == scale).all()
    assert (padded.factors[rows:] == (127 if mx else 1)).all()
    assert (padded.factors[:rows, columns:] == (127 if mx else 1)).all()
    assert (padded.float()[130:] == 0).all() and (padded.float()[:, 130:] == 0).all()
