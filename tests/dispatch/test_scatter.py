"""The row maps against loops over tokens and routes, and against moe::pre_permute_*."""

import pytest
import torch

from moe_ops.dispatch.experts import pack_rows
from moe_ops.dispatch.scatter import (
    expand_to_slab,
    m_indices_from_psum,
    number_routes,
    row_sources,
    scatter_tokens,
    slab_to_expand,
    weigh,
)
from moe_ops.dispatch.wire import Tokens
from moe_ops.rows import BLOCK, contiguous_rows
from moe_ops.testing import assert_bits_equal, random_routing
from moe_ops.testing.cases import DISTRIBUTIONS

E = 4


def routing(distribution, T=37, top_k=3, seed=0):
    return random_routing(T, E, top_k, distribution, torch.Generator().manual_seed(seed))[1]


@pytest.mark.parametrize("T", [0, 1, 37, 300])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scatter_sorts_as_pre_permute_does(distribution, T):
    """Same rows, same order, same scales, for both layouts; padding aside."""
    ids = routing(distribution, T)
    x = torch.randn(T, 256).bfloat16()
    values, scale = torch.ops.moe.quantize(x, group=128, scale_format="fp32")
    routes = number_routes(ids, E)
    M = contiguous_rows(T, 3, E)
    want = torch.ops.moe.pre_permute_contiguous(x, ids, num_local_experts=E, recipe="fp8_block")
    assert_bits_equal(routes.in_blocks(), want[3], "src2dst")
    m_indices = m_indices_from_psum(routes.psum, M)
    assert_bits_equal(m_indices, want[2], "m_indices")
    if T:
        x_q, x_scale = pack_rows(scatter_tokens(Tokens(values, scale), routes.in_blocks(), M))
        used = m_indices >= 0
        assert x_scale is not None and x_scale.stride() == want[1].stride()
        assert_bits_equal(x_q.view(torch.uint8)[used], want[0].view(torch.uint8)[used], "x_q")
        assert_bits_equal(x_scale[used], want[1][used], "x_scale")
    want = torch.ops.moe.pre_permute_masked(x, ids, num_local_experts=E, recipe="fp8_block")
    assert_bits_equal(routes.counts.int(), want[2], "masked_m")
    assert_bits_equal(routes.in_slabs(want[0].shape[1]), want[3], "src2dst")


@pytest.mark.parametrize("expert_start", [0, 2, 4])
def test_scatter_numbers_local_routes_only(expert_start):
    ids = routing("foreign", seed=expert_start)
    routes = number_routes(ids, 2, expert_start)
    counts = [0, 0]
    for t, row in enumerate(ids.tolist()):
        slots: dict[int, int] = {}
        for j, expert in enumerate(row):
            local = expert - expert_start
            if expert < 0 or not 0 <= local < 2:
                assert routes.expert[t, j] == -1 and not routes.owns[t, j]
                continue
            assert routes.owns[t, j] == (local not in slots)
            if local not in slots:
                slots[local] = counts[local]
                counts[local] += 1
            assert (routes.expert[t, j], routes.slot[t, j]) == (local, slots[local])
    assert routes.counts.tolist() == counts


def test_scatter_psum_of_empty_and_full_experts():
    """Expert e's rows are [align(psum[e - 1]), psum[e]); an empty expert's psum is its start."""
    ids = torch.tensor([[1], [1], [3]])
    routes = number_routes(ids, 5)
    assert routes.psum.tolist() == [0, 2, BLOCK, BLOCK + 1, 2 * BLOCK]
    labels = m_indices_from_psum(routes.psum, 3 * BLOCK).tolist()
    assert labels[:3] == [1, 1, -1] and labels[BLOCK : BLOCK + 2] == [3, -1] and set(labels[BLOCK + 1 :]) == {-1}
    full = number_routes(torch.zeros(BLOCK, 1, dtype=torch.int32), 2)
    assert full.psum.tolist() == [BLOCK, BLOCK]
    assert m_indices_from_psum(full.psum, 2 * BLOCK).tolist() == [0] * BLOCK + [-1] * BLOCK


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_scatter_slabs_and_expanded_rows_hold_the_same(distribution):
    ids = routing(distribution)
    routes = number_routes(ids, E)
    M = contiguous_rows(len(ids), 3, E)
    source = row_sources(routes.in_blocks(), M)
    x = torch.randn(len(ids), 64).bfloat16()
    slabs, masked_m = expand_to_slab(Tokens(x[source], None), routes.psum, BLOCK)
    assert masked_m.tolist() == routes.counts.tolist()
    slots = routes.in_slabs(BLOCK).flatten()
    token = torch.arange(len(ids)).repeat_interleave(3)
    for row, t in zip(slots.tolist(), token.tolist(), strict=True):
        assert row < 0 or torch.equal(slabs.x[row // BLOCK, row % BLOCK], x[t])
    back = slab_to_expand(slabs.x, routes.psum, M)
    used = m_indices_from_psum(routes.psum, M) >= 0
    assert torch.equal(back[used], x[source][used]) and not back[~used].any()


def test_scatter_weighs_in_float32_with_one_rounding():
    rows, weights = torch.randn(50, 64).bfloat16(), torch.rand(50)
    want = (rows.double() * weights.double()[:, None]).float().bfloat16()
    assert torch.equal(weigh(rows, weights), want)
