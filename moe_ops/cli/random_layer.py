"""A layer with random weights, for the commands that run one of given sizes."""

import torch

import moe_ops
from moe_ops.arch import default_scale_format
from moe_ops.cli.sizes import Sizes
from moe_ops.recipes import RECIPES


def random_layer(found: Sizes, recipe: str, layout: str, backend: str, device: torch.device) -> moe_ops.MoELayer:
    """Random weights. A rank of several holds its share, and routes among these alone."""
    torch.manual_seed(0)
    E, K, I = found.E, found.K, found.I
    w13 = torch.randn(E, 2 * I, K, dtype=torch.bfloat16, device=device) / K**0.5
    w2 = torch.randn(E, K, I, dtype=torch.bfloat16, device=device) / I**0.5
    scale_format = default_scale_format(RECIPES[recipe], device)
    weights = moe_ops.prepare_weights(w13, w2, recipe=recipe, scale_format=scale_format)
    router = torch.randn(E, K, dtype=torch.bfloat16, device=device)
    return moe_ops.MoELayer(router, weights, top_k=found.top_k, layout=layout, backend=backend)
