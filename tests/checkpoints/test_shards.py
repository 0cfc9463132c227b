"""EP and TP shards of one checkpoint, joined or summed, are the unsharded layer."""

import pytest
import torch

from moe_ops import fused_deepgemm, load_moe_weights
from moe_ops.recipes import get_recipe
from moe_ops.reference.moe import moe
from moe_ops.testing import assert_bits_equal, random_routing, relative_error
from moe_ops.testing.checkpoints import FORMATS, meaning, write_checkpoint

CASES = [(name, 256, 192) for name in FORMATS] + [
    (name, 64, 2880) for name in ("gpt_oss_mxfp4", "gpt_oss_bf16", "deepseek_v3_fp8", "qwen3_mxfp8", "qwen3_fp8_tensor")
]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", FORMATS)
def test_ep_shards_joined_are_the_unsharded_layer(tmp_path, name, world):
    write_checkpoint(tmp_path, name)
    whole = load_moe_weights(tmp_path, layer=0)
    shards = [load_moe_weights(tmp_path, layer=0, rank=rank, world=world) for rank in range(world)]
    for field, tensor in whole.tensors().items():
        for rank, shard in enumerate(shards):
            part = shard.tensors()[field]
            assert (part is None) == (tensor is None)
            if part is not None and tensor is not None:
                assert_bits_equal(part, tensor[rank * shard.E : (rank + 1) * shard.E], field)

    x = torch.randn(16, 256).bfloat16()
    weights, ids = random_routing(16, 4, 2, "uniform", torch.Generator().manual_seed(0))
    want = fused_deepgemm(x.float(), weights, ids, **whole.tensors(), recipe=whole.recipe)
    total = torch.zeros_like(want)
    for rank, shard in enumerate(shards):
        local = dict(expert_start=rank * shard.E, num_experts=4)
        total += fused_deepgemm(x.float(), weights, ids, **shard.tensors(), recipe=shard.recipe, **local)
    torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ["cpu", "sm90", "sm100"])
@pytest.mark.parametrize("name, K, I", CASES)
def test_tp_shards_summed_are_the_unsharded_layer(tmp_path, name, K, I, arch):
    """Weight for weight: the shards' dequantised columns side by side are the whole layer's, bit for bit."""
    E = 2
    write_checkpoint(tmp_path, name, E=E, K=K, I=I)
    whole = load_moe_weights(tmp_path, layer=0, arch=arch)
    shards = [load_moe_weights(tmp_path, layer=0, rank=r, world=2, parallel="tp", arch=arch) for r in range(2)]
    assert len({(shard.K, shard.I) for shard in shards}) == 1
    assert sum(shard.I - shard.padding.I for shard in shards) == I
    means, want = [meaning(shard) for shard in shards], meaning(whole)
    joined = torch.cat([mean.w13.unflatten(1, (2, -1)) for mean in means], 2).flatten(1, 2)
    assert_bits_equal(joined, want.w13)
    assert_bits_equal(torch.cat([mean.w2 for mean in means], 2), want.w2)
    assert means[1].w2_bias is None

    x = torch.randn(32, K).bfloat16()
    routing = random_routing(32, E, 2, "uniform", torch.Generator().manual_seed(0))
    formula = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0} if "gpt_oss" in name else {}
    total = torch.zeros(32, K, dtype=torch.float64)
    for shard in shards:
        out = fused_deepgemm(shard.pad_hidden(x), *routing, **shard.tensors(), recipe=shard.recipe, **formula)
        total += shard.cut_hidden(out)
    biases = dict(w13_bias=want.w13_bias, w2_bias=want.w2_bias)
    judged = moe(x, *routing, want.w13, want.w2, **biases, **formula)
    assert relative_error(total, judged) <= get_recipe("test", whole.recipe).max_diff


def test_tp_of_more_ranks_than_blocks_gives_the_rest_nothing(tmp_path):
    write_checkpoint(tmp_path, "deepseek_v3_fp8", I=192)
    shards = [load_moe_weights(tmp_path, layer=0, rank=r, world=4, parallel="tp") for r in range(4)]
    assert [shard.I - shard.padding.I for shard in shards] == [128, 64, 0, 0]
    assert [shard.I for shard in shards] == [128] * 4
