"""What the kernels of the gathered and direct layouts must give: activations of a product that nobody rounded.

The CPU references round the product to bf16, as the layouts do that write it to memory, so they are not the judge here.
"""

import torch
from torch import Tensor

from moe_ops.recipes import RECIPES
from moe_ops.reference.quantize import quantize_groups, stored
from moe_ops.reference.silu_and_quant import gated
from moe_ops.testing.decode import decode_rows, decode_weight

_FORMULA = ("activation", "swiglu_limit", "gemm1_alpha", "gemm1_clamp_limit")


def spans(tiles: Tensor) -> list[tuple[int, int, int]]:
    """(expert, first row, row behind the last) of every tile in use."""
    return [(e, first, first + rows) for e, first, rows in tiles.T.tolist() if e >= 0]


def gathered_act(arguments: dict) -> tuple[Tensor, Tensor]:
    """(activations of gated_gemm_gathered decoded after their quantisation, mask of rows that a tile owns)."""
    row, tiles = RECIPES[arguments["recipe"]], arguments["tiles"]
    x = decode_rows(arguments["x"], arguments["x_scale"], row)
    w = decode_weight(arguments["w"], arguments["w_scale"], row)
    act = torch.zeros(len(arguments["row_token"]), w.shape[1] // 2)
    live = torch.zeros(len(act), dtype=torch.bool)
    for e, first, end in spans(tiles):
        token = arguments["row_token"][first:end].long()
        act[first:end], live[first:end] = _act(x[token] @ w[e].T, arguments, e), True
    return decoded(act, arguments), live


def direct_act(arguments: dict) -> tuple[Tensor, Tensor]:
    """(float32 activations of gated_gemm_direct, mask of rows that a route to this rank owns)."""
    row, ids = RECIPES[arguments["recipe"]], arguments["topk_ids"].flatten().long() - arguments["expert_start"]
    live, top_k = routes_here(arguments), arguments["topk_ids"].shape[1]
    x = decoded(arguments["hidden_states"].float(), arguments)
    w = decode_weight(arguments["w"], arguments["w_scale"], row)
    act = torch.zeros(len(ids), w.shape[1] // 2)
    for r in live.nonzero().flatten().tolist():
        act[r] = _act(x[r // top_k] @ w[ids[r]].T, arguments, ids[r])
    return act, live


def routes_here(arguments: dict) -> Tensor:
    """Mask of the routes whose expert is on this rank."""
    local = arguments["topk_ids"].flatten().long() - arguments["expert_start"]
    return (local >= 0) & (local < len(arguments["w"])) & (arguments["topk_ids"].flatten() >= 0)


def tiled_rows(arguments: dict) -> Tensor:
    """Mask of the rows of x that a tile owns."""
    live = torch.zeros(len(arguments["x"]), dtype=torch.bool)
    for _, first, end in spans(arguments["tiles"]):
        live[first:end] = True
    return live


def decoded(rows: Tensor, arguments: dict) -> Tensor:
    """float64 of float32 rows after the recipe's quantisation."""
    row, scale_format = RECIPES[arguments["recipe"]], arguments["scale_format"]
    if not row.quantised:
        return rows.to(row.x_dtype).double()
    values, scale = quantize_groups(rows, row.x_group, scale_format)
    return decode_rows(values, stored(scale, scale_format), row)


def _act(product: Tensor, arguments: dict, expert) -> Tensor:
    h = product.float()
    if arguments["bias"] is not None:
        h = h + arguments["bias"][expert].float()
    return gated(*h.chunk(2, -1), **{name: arguments[name] for name in _FORMULA})
