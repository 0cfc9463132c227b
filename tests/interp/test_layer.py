"""The whole layer through moe::fused_deepgemm(backend="triton"), every tile, and what kernels do instead of raising."""

import re
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import fused_deepgemm, plan, rows
from moe_ops.kernels import gated_gemm as gated_kernels
from moe_ops.kernels import grouped_gemm as gemm_kernels
from moe_ops.kernels import pre_permute as permute_kernels
from moe_ops.kernels import pre_permute_gathered as gathered_kernels
from moe_ops.kernels.gated_gemm import GATED_TILES
from moe_ops.kernels.grouped_gemm import TILES, kind_of
from moe_ops.prep import repack_weights
from moe_ops.recipes import RECIPES
from moe_ops.rows import FUSED, LAYOUTS
from moe_ops.testing import FORMS, PATTERNS, LayerCase, assert_bits_equal, poisoned, relative_error
from moe_ops.testing.fused_cases import FUSED_FORMS, fused_cases, gated_case
from moe_ops.testing.kernel_cases import grouped_gemm_cases, pre_permute_cases
from moe_ops.testing.kernel_check import check_kernel

LAYER = 1e-2
"""Relative error between two layers that differ in rounding: a code of GEMM2's input that flips is 6 % of its value."""
FUSED_LAYER = 2e-2
"""The same where GEMM1 ends with the activation: the reference rounds its product to bf16, so more codes flip."""

CASES = [
    LayerCase(recipe, None if scale == "none" else scale, layout=layout, T=5, bias=True)
    for recipe, scale in FORMS
    for layout in ("contiguous", "masked")
]
CASES += [
    LayerCase(recipe, None if scale == "none" else scale, layout=layout, T=5, bias=True)
    for recipe, scale in FUSED_FORMS
    for layout in FUSED
]
CASES += [LayerCase("fp8_block", T=T, distribution="foreign") for T in (0, 1, 6)]
CASES += [LayerCase("fp8_block", T=6, distribution="repeated")]
CASES += [
    LayerCase("mxfp4", T=4, distribution="one_expert", attributes=dict(swiglu_limit=1.5)),
    LayerCase("bf16", T=4, K=80, I=48, attributes=dict(gemm1_alpha=1.702, gemm1_clamp_limit=2.0)),
    LayerCase("mxfp8", T=4, K=96, I=160, attributes=dict(activation="situ", gemm1_alpha=2.0, gemm1_clamp_limit=3.0)),
    LayerCase("fp8_block", T=3, dtype=torch.float32, attributes=dict(routed_scaling_factor=2.5)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layer_matches_reference(case):
    inputs, weights = case.build()
    bound = FUSED_LAYER if case.layout in FUSED else LAYER
    assert relative_error(case.run(inputs, weights, backend="triton"), case.run(inputs, weights)) <= bound


@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_layer_reads_nothing_it_did_not_write(layout):
    case = LayerCase("fp8_block", layout=layout, T=4, distribution="foreign")
    inputs, weights = case.build()
    sizes = dict(T=4, E=case.E, K=case.K, I=case.I, top_k=case.top_k, recipe=case.recipe, layout=layout)
    arenas = [poisoned(plan(**sizes).total_bytes, pattern) for pattern in PATTERNS]
    want, *others = (case.run(inputs, weights, backend="triton", workspace=arena) for arena in arenas)
    for got in others:
        assert_bits_equal(got, want)


def test_layer_of_a_rank_in_the_middle():
    case = LayerCase("mxfp8", T=4, distribution="foreign")
    (x, topk_weights, topk_ids), weights = case.build()
    arguments = dict(recipe=case.recipe, expert_start=3, num_experts=9, **weights.tensors())
    got, want = (
        fused_deepgemm(x, topk_weights, topk_ids.long(), backend=backend, **arguments)
        for backend in ("triton", "reference")
    )
    assert relative_error(got, want) <= LAYER


TILED = [
    pytest.param(arch, case, tile, id=f"{arch}-{case}-{tile.rows}")
    for arch in ("sm90", "sm100")
    for case in grouped_gemm_cases()
    if "-T5-" in case.name and case.name.endswith("-m1")
    for kind in [kind_of(RECIPES[case.name.split("-")[0]], case.name.split("-")[1])]
    for tile in TILES[arch][kind]
    if arch == "sm90" or tile not in TILES["sm90"][kind]
]


@pytest.mark.parametrize("arch, case, tile", TILED)
def test_every_tile_multiplies_right(arch, case, tile):
    with mock.patch.object(gemm_kernels, "choose_tile", lambda *_: tile):
        check_kernel(case)


GATED = [
    pytest.param(arch, kind, block_m, id=f"{arch}-{kind}-{block_m}")
    for arch, kinds in GATED_TILES.items()
    for kind, tiles in kinds.items()
    for block_m, tile in tiles.items()
    if tile != GATED_TILES["sm90"][kind][block_m]  # those are the interpreter's own
]


@pytest.mark.parametrize("arch, kind, block_m", GATED)
def test_every_gated_tile_multiplies_right(arch, kind, block_m):
    form = {"bf16": ("bf16", "none"), "block": ("fp8_block", "fp32"), "packed": ("fp8_block", "ue8m0")}[kind]
    with mock.patch.object(gated_kernels, "arch_of", lambda *_: arch):
        check_kernel(gated_case(form, block_m))


CHUNKED = [case for case in pre_permute_cases() if "-k3-" in case.name]
CHUNKED += [case for case in fused_cases() if case.op == "pre_permute_gathered" and "-k3-" in case.name]


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_routing_in_chunks_gives_the_same_rows(case):
    """The form for many routes, on few: chunks of 16 routes, and counters for as many in the contract's scratch."""
    with (
        mock.patch.object(rows, "ROUTE_CHUNK", 16),
        mock.patch.multiple(permute_kernels, ROUTE_CHUNK=16, _SCANNED=0),
        mock.patch.multiple(gathered_kernels, ROUTE_CHUNK=16, _SCANNED=0),
    ):
        check_kernel(case)


@pytest.mark.parametrize("layout", FUSED)
@pytest.mark.parametrize(
    "recipe, sizes, reason",
    [
        ("mxfp8", {}, "The {layout} layout has no kernels for mxfp8."),
        ("mxfp4", {}, "The {layout} layout has no kernels for mxfp4."),
        ("bf16", dict(K=80, I=48), "The {layout} layout needs K and I to be multiples of 128."),
    ],
)
def test_a_layout_that_cannot_be_is_refused_in_words(recipe, sizes, reason, layout):
    case = LayerCase(recipe, layout=layout, T=3, **sizes)
    assert layout not in case.layouts
    with pytest.raises(ValueError, match=re.escape(reason.format(layout=layout))):
        case.run(*case.build(), backend="triton")


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS[1:] if layout != "gathered"])
def test_repacked_weights_have_one_layout(layout):
    case = LayerCase("mxfp4", T=3)
    inputs, weights = case.build()
    repacked = repack_weights(weights, fp8=False)
    with pytest.raises(ValueError, match="must be auto or gathered; got"):
        case.run(inputs, repacked, backend="triton", layout=layout, weight_format=repacked.weight_format)


@pytest.mark.parametrize("T", [0, 5])
def test_layer_of_repacked_weights(T):
    case = LayerCase("mxfp4", T=T, layout="gathered", distribution="foreign", bias=True)
    inputs, weights = case.build()
    repacked = repack_weights(weights, fp8=False)
    form = dict(weight_format=repacked.weight_format)
    got, want = (case.run(inputs, repacked, backend=backend, **form) for backend in ("triton", "reference"))
    assert relative_error(got, want) <= LAYER


def test_topk_masks_what_the_reference_refuses():
    """A card cannot raise: a token id outside the table, or an expert id outside the model, leaves its slot empty."""
    logits, table = torch.randn(4, 8), torch.tensor([[7, 0], [3, 99], [-5, 1]])
    token_ids = torch.tensor([0, 1, 2, 3])
    weights, ids = moe_ops.topk(logits, 2, hash_table=table, token_ids=token_ids, num_shared=1, backend="triton")
    assert ids.tolist() == [[7, 0, 8], [3, -1, 8], [-1, 1, 8], [-1, -1, 8]]
    assert weights[1].tolist() == [1, 0, 1] and weights[2].tolist() == [0, 1, 1] and weights[3].tolist() == [0, 0, 1]


def test_pack_scale_rounds_up_what_the_reference_refuses():
    packed = moe_ops.pack_scale(torch.tensor([[1.5, 2.0, 3.0, 0.0]]), 1, backend="triton")
    assert [packed.item() >> shift & 255 for shift in (0, 8, 16, 24)] == [128, 128, 129, 1]
