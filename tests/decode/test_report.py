"""tracing() and report()."""

import pytest
import torch

import moe_ops
from moe_ops.report import forget
from moe_ops.testing import LayerCase

CASE = LayerCase("fp8_block", T=9)


def run(case=CASE, **more):
    inputs, weights = case.build()
    return torch.ops.moe.fused_deepgemm(*inputs, **weights.tensors(), recipe=case.recipe, **more)


def ranges(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        call()
    return [event.name for event in profiled.events() if event.name.startswith("moe_ops.")]


STAGES = ["pre_permute_ws", "gated_gemm_ws", "silu_and_quant_ws", "grouped_gemm_ws", "post_permute_ws"]


def test_tracing_is_off_and_can_be_switched_on(monkeypatch):
    assert ranges(run) == []
    with moe_ops.tracing():
        assert ranges(run) == [f"moe_ops.{stage}" for stage in STAGES]
        with moe_ops.tracing(enabled=False):
            assert ranges(run) == []
    monkeypatch.setenv("MOE_OPS_TRACING", "1")
    assert len(ranges(run)) == 5


@pytest.mark.slow
def test_tracing_leaves_the_compiled_graph_alone():
    torch._dynamo.reset()
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    inputs, weights = CASE.build()
    with moe_ops.tracing():
        compiled = torch.compile(
            lambda *tokens: torch.ops.moe.fused_deepgemm(*tokens, **weights.tensors(), recipe="fp8_block"),
            fullgraph=True,
            backend=keep,
        )
        assert len(ranges(lambda: compiled(*inputs))) >= 5
    (graph,) = graphs
    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == ["moe.fused_deepgemm"]


def test_report_says_what_was_taken_and_why(capsys):
    forget()
    assert str(moe_ops.report(show=False)) == "No call of fused_deepgemm so far."
    run()
    run(LayerCase("fp8_block", T=30))
    run(layout="masked")
    auto, masked = moe_ops.report()
    assert (auto.tokens, auto.layout, auto.backend) == ((9, 30), "contiguous", "reference")
    assert (masked.layout, masked.backend, masked.why) == ("masked", "reference", "As asked.")
    printed = capsys.readouterr().out
    assert "T=9..30 (2 counts): contiguous, GEMMs by reference. First row of the table" in printed


def test_report_counts_a_call_in_chunks_once():
    forget()
    budget = moe_ops.plan(T=20, E=4, K=256, I=128, top_k=2, recipe="fp8_block").total_bytes
    run(LayerCase("fp8_block", T=300), max_workspace_bytes=budget)
    (taken,) = moe_ops.report(show=False)
    assert taken.tokens == (300,)
