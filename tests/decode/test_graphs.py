"""GraphedDecode without graphs: padding, buckets, refusals. tests/gpu/test_decode.py replays."""

import pytest
import torch

import moe_ops
from moe_ops.graphs import GraphedDecode
from moe_ops.testing import assert_bits_equal

E, K, I = 8, 256, 128


@pytest.fixture
def layer():
    weights = moe_ops.prepare_weights(torch.randn(E, 2 * I, K) / 16, torch.randn(E, K, I) / 11, recipe="fp8_block")
    return moe_ops.MoELayer(torch.randn(E, K).bfloat16(), weights, top_k=2)


def hidden(T):
    return torch.randn(T, K).bfloat16()


def test_graphs_padded_outputs_equal_unpadded_ones(layer):
    decode = GraphedDecode(layer, [hidden(1)], buckets=(4, 1, 16), mode="eager")
    for T in (1, 3, 4, 5, 16, 2):
        x = hidden(T)
        assert_bits_equal(decode(x), layer(x), f"T={T}")


def test_graphs_padding_reaches_no_expert_and_holds_nothing_of_earlier_calls():
    seen = []

    def step(x, slots, *, num_token_non_padded):
        seen.append((x.clone(), slots.clone(), int(num_token_non_padded)))
        return {"out": x * 2, "slots": slots}

    examples = [hidden(1), torch.zeros(1, dtype=torch.int64)]
    decode = GraphedDecode(step, examples, buckets=(8,), mode="eager", pad_values=(0, -7))
    decode(hidden(8), torch.arange(8))
    out = decode(x := hidden(3), torch.arange(3))
    assert_bits_equal(out["out"], x * 2)
    padded, slots, real = seen[-1]
    assert real == 3 and (padded[3:] == 0).all() and slots.tolist() == [0, 1, 2, -7, -7, -7, -7, -7]


def test_graphs_real_tokens_alone_are_routed(layer):
    """Padding has -1 before rows are counted: an expert that only padding would choose gets no row."""
    real = torch.tensor(3, dtype=torch.int32)
    weights, ids = torch.ops.moe.topk(torch.randn(8, E), 2, num_token_non_padded=real)
    assert (ids[3:] == -1).all() and (weights[3:] == 0).all() and (ids[:3] >= 0).all()
    x = hidden(8)
    assert (layer(x, num_token_non_padded=real)[3:] == 0).all()


def test_graphs_refusals(layer):
    decode = GraphedDecode(layer, [hidden(1)], buckets=(1, 4), mode="eager")
    with pytest.raises(ValueError, match="tokens must be between 1 and the largest bucket, 4; got 5"):
        decode(hidden(5))
    with pytest.raises(ValueError, match="tokens must be between 1"):
        decode(hidden(0))
    with pytest.raises(ValueError, match=r"tensor 0 must be of shape \(tokens, ...\) = \(0, 256\); got \(\)"):
        decode(torch.tensor(1.0))
    with pytest.raises(ValueError, match="tensor 0 must be of shape"):
        decode(hidden(2)[:, :-1])
    with pytest.raises(ValueError, match="mode must be eager off a CUDA card; got 'graph'"):
        GraphedDecode(layer, [hidden(1)])
    with pytest.raises(ValueError, match="buckets must be"):
        GraphedDecode(layer, [hidden(1)], buckets=(), mode="eager")
