"""moe::fused_deepgemm against the judge: every recipe, layout, scale format, activation and kind of routing."""

import pytest
import torch

from moe_ops import plan
from moe_ops.recipes import RECIPES
from moe_ops.rows import LAYOUTS
from moe_ops.testing import PATTERNS, LayerCase, assert_bits_equal, poisoned, relative_error
from moe_ops.testing.cases import DISTRIBUTIONS

FORMATS = [(recipe.name, scale) for recipe in RECIPES.values() for scale in recipe.scale_formats]
ACTIVATIONS = [
    {},
    {"swiglu_limit": 2.0},
    {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 2.5},
    {"gemm1_alpha": 1.702},
    {"activation": "situ", "gemm1_alpha": 3.0, "gemm1_clamp_limit": 4.0},
]


def same_for_both(case: LayerCase, **more) -> torch.Tensor:
    """Runs the case in both layouts, twice, in poisoned arenas; all must be the same bits. Returns them."""
    inputs, weights = case.build()
    results = []
    for layout in LAYOUTS:
        for pattern in PATTERNS:
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
@pytest.mark.parametrize("recipe, scale_format", FORMATS)
def test_forward_activations(recipe, scale_format, attributes, bias):
    same_for_both(LayerCase(recipe, scale_format, attributes=attributes, bias=bias))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("recipe, scale_format", FORMATS)
def test_forward_distributions(recipe, scale_format, distribution):
    # K = 1024 and I = 640: packed scale words of width 2 and of width 2 with missing bytes
    case = LayerCase(recipe, scale_format, T=21, E=6, K=1024, I=640, top_k=3, distribution=distribution)
    same_for_both(case, routed_scaling_factor=2.5)
