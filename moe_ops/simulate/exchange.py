"""Bytes that every rank sends to every other, by format and wire. Rows are senders, the diagonal is what stays.

torch: what TorchTransport hands to the collectives, exactly. Bytes count once, from the rank that has them to the rank
that gets them, however a library carries them on the way; a sum over ranks is an exchange of parts, and an all-reduce
one more of the sums. deep_ep: what the library's kernels send as we read them (one message a route and a header of 16
bytes in the low-latency ones; a token once to each rank of its node, and once to each other node, where one rank
passes it on, in the normal ones). That one was never measured here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_ops.dispatch import FORMATS, Dispatcher
from moe_ops.dispatch.deepep_ll import GROUP
from moe_ops.dispatch.wire import Wire
from moe_ops.parallel import Form, ParallelSizes
from moe_ops.rows import ceil_div
from moe_ops.simulate.routing import Routes

WIRES = {
    "torch": tuple(FORMATS),
    "deep_ep": ("deepep_ll", "deepep_normal"),
}
"""Wire -> formats whose bytes are worked out here."""
_HEADER = 16
_BF16 = 2


def same(ranks: int, size: int, stride: int = 1) -> Tensor:
    """(ranks, ranks) float64, 1 for ranks in the same group: `size` ranks, `stride` apart."""
    rank = torch.arange(ranks)
    group = rank // (size * stride) * stride + rank % stride
    return (group[:, None] == group).double()


def around(
    sizes: ParallelSizes, form: Form, tokens: Sequence[int], max_tokens: int, K: int, top_k: int
) -> tuple[Tensor, Tensor]:
    """(before, after) the experts: the collectives of a form, without a dispatcher's own. tokens: of each group."""
    world, tp = sizes.world, sizes.attn_tp
    before = after = torch.zeros(world, world, dtype=torch.float64)
    row = _BF16 * K
    if form.before == "gather":
        before = same(world, sizes.token_groups, tp) * (max_tokens * (row + 8 * top_k))
    if form.after == "reduce_scatter":
        after = same(world, world) * (max_tokens * row)
    elif form.after == "all_gather":
        share = torch.tensor([ceil_div(T, tp) for T in tokens]).repeat_interleave(tp)
        after = same(world, tp) * (share * row)[:, None]
    elif form.after in ("all_reduce", "all_reduce_and_cut"):
        rows = tokens[0] if form.after == "all_reduce" else sizes.token_groups * max_tokens
        after = same(world, world) * (2 * rows * row / world)
    return before, after


def of_format(form: Dispatcher, wire: str, routes: Routes, per_node: int) -> tuple[Tensor, Tensor]:
    """(dispatch, combine) of a format that exchanges tokens and is in WIRES[wire]."""
    if wire == "deep_ep":
        return _of_deep_ep(form, routes, per_node)
    setup, ranks = form.setup, form.transport.size
    row, beside = _BF16 * setup.K, 8 * setup.top_k
    sent: Wire | None = getattr(form, "wire", None)  # None: bf16, as flashinfer's
    packet = (row if sent is None else sent.nbytes) + beside
    if form.needs_host_counts:
        visits = routes.visits.double()
        return visits * packet + 8, visits.T * row
    everyone = torch.full((ranks, ranks), float(setup.max_tokens or 0), dtype=torch.float64)
    back = row if form.sums == "partial sums" else setup.top_k * row
    return everyone * packet, everyone * back


def _of_deep_ep(form: Dispatcher, routes: Routes, per_node: int) -> tuple[Tensor, Tensor]:
    setup, ranks = form.setup, form.transport.size
    row = _BF16 * setup.K
    values = setup.K + 4 * (setup.K // GROUP) if form.wire.payload == "fp8" else row  # type: ignore[attr-defined]
    if form.needs_host_counts:
        tokens = _through_nodes(routes, per_node)
        return tokens * (values + 12 * setup.top_k), tokens.T * row
    messages = routes.rows.double().unflatten(1, (ranks, -1)).sum(2)
    return messages * (values + _HEADER), messages.T * row


def _through_nodes(routes: Routes, per_node: int) -> Tensor:
    """(ranks, ranks) tokens on each link when a token crosses to a node once, to the rank at its own place there."""
    visits, ranks = routes.visits.double(), len(routes.visits)
    rank = torch.arange(ranks)
    node, place = rank // per_node, rank % per_node
    paths = visits * (node[:, None] == node)
    for there in range(routes.node_visits.shape[1]):
        away = (node != there).nonzero().flatten()
        gate = (there * per_node + place[away]).clamp(max=ranks - 1)
        paths.index_put_((away, gate), routes.node_visits[away, there].double(), accumulate=True)
        inside = (node == there).nonzero().flatten()
        passed = torch.zeros(ranks, len(inside), dtype=torch.float64)
        passed.index_add_(0, gate, visits[away][:, inside])
        paths[:, inside] += passed
    return paths
