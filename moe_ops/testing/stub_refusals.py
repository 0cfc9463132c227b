"""Calls that deep_ep, mooncake and nixl refuse, made to their stand-ins."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_ops.csrc_stubs import deep_ep, mooncake_ep, nixl_ep


def stub_refusals(group: dist.ProcessGroup) -> list[tuple[str, str, str]]:
    """(name, what was raised, words that it should hold) of each."""
    buffer = deep_ep.Buffer(group, low_latency_mode=True)
    elastic = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=2, hidden=512, num_topk=2)
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    weights = torch.ones(3, 2)

    def low_latency(x=x, ids=ids, most=8, experts=4, **options):
        return buffer.low_latency_dispatch(x, ids, most, experts, **options)

    def combine(**change):
        handle = low_latency(use_fp8=False)[2]
        given = dict(x=torch.zeros(4, 8, 512).bfloat16(), topk_idx=ids, topk_weights=weights)
        return buffer.low_latency_combine(**{**given, **change}, handle=handle)

    def normal(x, ids=ids):
        per_rank, _, per_expert, there, _ = buffer.get_dispatch_layout(ids, 4)
        return buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=there,
            topk_idx=ids,
            topk_weights=weights,
        )

    calls: list[tuple[str, Callable, str]] = [
        ("float32 tokens", lambda: low_latency(x.float()), "x is bfloat16"),
        ("int32 ids", lambda: low_latency(ids=ids.int()), "topk_idx is int64"),
        ("more tokens than the buffer holds", lambda: low_latency(most=2), "num_tokens <= max <= 1024"),
        ("more than the counter holds", lambda: low_latency(most=1025), "num_tokens <= max <= 1024"),
        ("hidden without whole scales", lambda: low_latency(x[:, :192].contiguous()), "hidden fills whole scales"),
        ("packed scales that are not rounded", lambda: low_latency(use_ue8m0=True), "use_ue8m0 goes with round_scale"),
        ("normal buffer", lambda: deep_ep.Buffer(group).low_latency_dispatch(x, ids, 8, 4), "low-latency mode"),
        ("strided tokens", lambda: low_latency(torch.zeros(3, 1024).bfloat16()[:, ::2]), "contiguous"),
        ("slabs of another size", lambda: combine(x=torch.zeros(4, 4, 512).bfloat16()), "x is (4, 8, 512) bfloat16"),
        ("float32 slabs", lambda: combine(x=torch.zeros(4, 8, 512)), "x is (4, 8, 512) bfloat16"),
        ("scales of 32 columns", lambda: normal((x.to(torch.float8_e4m3fn), torch.ones(3, 16))), "scales are (3, 4)"),
        ("elastic capacity", lambda: elastic.dispatch(x, ids, weights, num_experts=4), "num_max_tokens_per_rank"),
        ("float32 sums", lambda: buffer.combine(x.float(), normal(x)[4]), "x is 2-D bfloat16"),
    ]
    rows = []
    for name, call, words in calls:
        try:
            call()
            rows.append((name, "nothing was raised", words))
        except AssertionError as error:
            rows.append((name, str(error), words))
    return rows


def low_latency_refusals(group: dist.ProcessGroup) -> list[tuple[str, str]]:
    """(what was raised, words that it should hold) of each."""
    nixl, mooncake = nixl_ep.Buffer(0, group), mooncake_ep.Buffer(group)
    x, ids = torch.zeros(3, 512).bfloat16(), torch.zeros(3, 2, dtype=torch.int64)
    on = torch.ones(1, dtype=torch.int32)
    calls: list[tuple[Callable, str]] = [
        (lambda: nixl.dispatch(x, ids, 8, 4), "ranks are connected before"),
        (lambda: mooncake.dispatch(x, ids, on.long(), 8, 4, -1), "active_ranks is (1,) int32"),
        (lambda: mooncake.dispatch(x, ids, on, 8, 4, 0), "timeout_us is positive or -1"),
        (lambda: mooncake.dispatch(x, ids, on, 6, 4, -1), "a multiple of 4"),
        (lambda: mooncake.dispatch(x, ids, on, 1028, 4, -1), "num_tokens <= max <= 1024"),
        (lambda: mooncake.dispatch(x, ids.repeat(1, 17), on, 8, 4, -1), "top_k <="),
    ]
    rows = []
    for call, words in calls:
        try:
            rows.append((str(call()), words))
        except AssertionError as error:
            rows.append((str(error), words))
    return rows
