"""Routing, links, times and advice on paper, against loops and against the numbers they come from."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_ops.bench.cases import SHAPES
from moe_ops.dispatch import FORMATS
from moe_ops.parallel import ParallelSizes
from moe_ops.simulate import (
    Links,
    Routes,
    Scenario,
    TimeTable,
    advice,
    draw,
    exchange,
    popularity_of,
    predict,
    predict_all,
)
from moe_ops.simulate.check import left_out
from moe_ops.simulate.memory import weight_bytes
from moe_ops.testing import LayerCase, random_routing
from moe_ops.testing.cases import DISTRIBUTIONS

RESULTS = Path(__file__).parent.parent.parent / "docs" / "results" / "layer_h200.json"


def scenario(ranks=4, tokens=16, routing="uniform", **more):
    sizes = ParallelSizes(attn_dp=ranks, ep=ranks)
    form = dict(num_experts=32, K=512, I=256, recipe="fp8_block", scale_format="fp32", max_tokens=tokens, top_k=4)
    popularity = popularity_of(routing, 32, 0)
    return Scenario.drawn(popularity, tokens, 0, **{**dict(sizes=sizes, per_node=2), **form, **more})


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_routes_count_as_a_loop_does(distribution):
    ids = [random_routing(T, 8, 3, distribution, torch.Generator().manual_seed(T))[1] for T in (9, 0, 5, 1)]
    routes = Routes.of(ids, 8, 4, 2)
    for source, own in enumerate(ids):
        chosen = [{e for e in row if 0 <= e < 8} for row in own.tolist()]
        assert routes.rows[source].tolist() == [sum(e in row for row in chosen) for e in range(8)]
        for counts, size in ((routes.visits, 2), (routes.node_visits, 4)):
            want = [sum(any(e // size == place for e in row) for row in chosen) for place in range(8 // size)]
            assert counts[source].tolist() == want


@pytest.mark.parametrize("tokens", [(40, 0, 7), (30000, 30000)], ids=["drawn", "picked"])
def test_draw_gives_distinct_experts_the_same_every_time(tokens):
    popularity = popularity_of("zipf", 16, 3)
    first, again = (draw(popularity, tokens, 4, 5) for _ in range(2))
    for T, a, b in zip(tokens, first, again, strict=True):
        assert a.shape == (T, 4) and torch.equal(a, b)
        assert all(len(set(row)) == 4 for row in a[:100].tolist())
    counts = torch.bincount(torch.cat(first).flatten(), minlength=16)
    assert sum(tokens) < 100 or counts.argmax() == popularity.argmax()
    assert not torch.equal(first[0], draw(popularity, tokens, 4, 6)[0])


def test_recorded_counts_are_drawn_as_recorded(tmp_path):
    path = tmp_path / "counts.json"
    path.write_text(json.dumps([0, 3, 1, 0]))
    ids = draw(popularity_of(str(path), 4, 0), [4000], 1, 0)[0]
    assert torch.bincount(ids.flatten(), minlength=4).div(4000).sub(torch.tensor([0, 0.75, 0.25, 0])).abs().max() < 0.03
    assert set(draw(popularity_of(str(path), 4, 0), [9], 3, 0)[0].flatten().tolist()) == {1, 2, -1}
    for wrong in ("[1, 2]", "[0, 0, 0, 0]", "[1, 2, 3, -1]", "{}", "no"):
        path.write_text(wrong)
        with pytest.raises(ValueError, match="^simulate: routing must be"):
            popularity_of(str(path), 4, 0)
    with pytest.raises(ValueError, match="^simulate: routing must be uniform, zipf or a file; got 'power'"):
        popularity_of("power", 4, 0)


def test_links_take_the_longer_of_both_kinds_and_directions():
    nbytes = torch.tensor([[9e9, 2e9, 1e9], [0, 9e9, 0], [0, 3e9, 0]], dtype=torch.float64)
    us = Links(per_node=2, intra=2.0, inter=1.0, latency_us=5.0).microseconds(nbytes)
    assert us.tolist() == [
        1e6 + 5,
        3e6 + 5,
        3e6 + 5,
    ]  # rank 0 sends 2 GB inside; rank 1 gets 3 across; rank 2 sends them
    assert Links().microseconds(torch.eye(3, dtype=torch.float64)).tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="^Links: intra must be positive; got 0"):
        Links(intra=0)


def test_table_that_ships_is_what_was_measured():
    shipped, measured = TimeTable.load(), json.loads(RESULTS.read_text())
    assert shipped.rates == measured["rates"]
    keys = ("shape", "T", "recipe", "us", "touched")
    of = {tuple(row[key] for key in keys) for row in measured["results"]}
    assert {tuple(row[key] for key in keys) for row in shipped.rows} <= of and len(shipped.rows) == 24


def test_table_gives_back_its_own_points_and_stays_between_them():
    table = TimeTable.load(RESULTS)
    for row in json.loads(RESULTS.read_text())["results"]:
        shape = next(shape for shape in SHAPES if shape.name == row["shape"])
        if row["recipe"] not in ("bf16", "fp8_block"):
            continue
        rows = row["T"] * shape.top_k
        floor = table.floor(row["recipe"], shape.K, shape.I, row["touched"], rows)
        assert math.isclose(floor, row["floor_us"], rel_tol=1e-9)
        counts = torch.zeros(shape.E, dtype=torch.int64)
        counts[: row["touched"]] = 1
        counts[0] += rows - row["touched"]
        assert math.isclose(table.microseconds(row["recipe"], shape.K, shape.I, counts), row["us"], rel_tol=1e-9)
    above = [ratio for _, ratio in table._points("fp8_block", 7168, 2048)]
    for mean in (1, 20, 100, 700, 9000):
        floor = table.floor("fp8_block", 7168, 2048, 16, mean * 16)
        us = table.microseconds("fp8_block", 7168, 2048, torch.full((16,), mean))
        assert min(above) <= us / floor * (1 + 1e-9) and us / floor <= max(above) * (1 + 1e-9)
    assert table.microseconds("fp8_block", 7168, 2048, torch.zeros(32, dtype=torch.int64)) == 0.0
    with pytest.raises(ValueError, match="^simulate: recipe must be one that the table of times holds; got mxfp8"):
        table.check("mxfp8")


def test_measured_layers_are_predicted_from_the_others():
    """The range is the one that docs/expert_parallel.md names."""
    errors = left_out(TimeTable.load())
    assert len(errors) == 16
    assert (round(100 * min(errors)), round(100 * max(errors))) == (-31, 24)


@pytest.mark.parametrize("recipe, scale_format", [("bf16", "none"), ("fp8_block", "ue8m0"), ("mxfp4", "ue8m0")])
def test_weight_bytes_are_those_of_prepared_weights(recipe, scale_format):
    _, weights = LayerCase(recipe, scale_format, E=3, K=512, I=256).build()
    stored = sum(t.untyped_storage().nbytes() for t in weights.tensors().values() if t is not None)
    assert weight_bytes(3, 512, 256, recipe, scale_format) == stored


def test_capacity_and_host_counts_are_refused_in_words():
    rows = {(row.format, row.wire): row for row in predict_all(scenario(max_tokens=10), Links(), TimeTable.load())}
    over = "6 of 16 tokens of a rank are above max_tokens=10; the call is refused."
    assert rows["deepep_ll", "torch"].refused == rows["standard", "torch"].refused == over
    assert rows["deepep_normal", "torch"].refused is None  # it has no capacity
    row = predict(scenario(captured=True), "deepep_v2", "torch", Links(), None)
    assert "reads on the host how many tokens arrive" in row.refused
    row = predict(scenario(tokens=2000, num_experts=32), "deepep_ll", "deep_ep", Links(), None)
    assert "max_tokens must be at most 1024; got 2000" in row.refused


def test_no_routing_overflows_a_slab():
    """Every token to the same experts fills their slabs, and no more."""
    ids = tuple(torch.arange(4).expand(32, 4).int() for _ in range(4))
    row = predict(replace(scenario(tokens=32), ids=ids), "deepep_ll", "torch", Links(), None)
    assert row.filled == 1.0
    assert predict(scenario(tokens=32), "deepep_ll", "torch", Links(), None).filled < 0.5


def test_deep_ep_sends_a_token_to_a_node_once():
    """Sixteen ranks in two nodes; one token of rank 3 to all experts of ranks 8 to 15: once across, to rank 11."""
    sizes = ParallelSizes(attn_dp=16, ep=16)
    ids = [torch.zeros(0, 8, dtype=torch.int32) for _ in range(16)]
    ids[3] = torch.arange(8, 16, dtype=torch.int32)[None]
    form = dict(num_experts=16, sizes=sizes, top_k=8, per_node=8, recipe="bf16", scale_format="none")
    row = predict(replace(scenario(), ids=tuple(ids), **form), "deepep_normal", "deep_ep", Links(), None)
    token = 2 * 512 + 12 * 8
    want = torch.zeros(16, 16, dtype=torch.float64)
    want[3, 11] = token
    want[11, 8:] = token
    assert torch.equal(row.dispatch, want)
    assert torch.equal(row.combine, want.T / token * 2 * 512)


def test_advice_takes_the_fastest_that_runs_and_fits():
    rows = predict_all(scenario(), Links(), TimeTable.load())
    best, why = advice(rows)
    assert best is not None and best.us == min(row.us for row in rows) and why.startswith("least time of 9")
    least = min(rows, key=lambda row: row.memory.total)
    assert advice(rows, least.memory.total)[0].memory.total == least.memory.total
    assert advice(rows, 1) == (None, "no format fits the memory")
    refused = predict_all(scenario(max_tokens=10, captured=True), Links(), TimeTable.load())
    assert advice(refused) == (None, "no format runs with these sizes")


def test_a_thousand_ranks_are_predicted_the_same_twice():
    form = dict(num_experts=1024, K=7168, I=2048, recipe="fp8_block", scale_format="fp32", max_tokens=4, top_k=8)
    form["sizes"] = ParallelSizes(attn_dp=1024, ep=1024)
    one, two = (Scenario.drawn(popularity_of("zipf", 1024, 1), 4, 1, **form) for _ in range(2))
    assert torch.equal(one.rows, two.rows) and int(one.rows.sum()) == 1024 * 4 * 8
    row = predict(one, "deepep_normal", "torch", Links(), TimeTable.load())
    assert row.us > 0 and int(row.gemm_us.argmax()) == int(one.rows.sum(1).argmax())


def test_every_exchanging_format_is_a_row():
    rows = predict_all(scenario(), Links(), None)
    assert [row.format for row in rows if row.wire == "torch"] == list(exchange.WIRES["torch"])
    assert set(exchange.WIRES["torch"]) <= set(FORMATS)
    assert all(row.gemm_us is None for row in rows)
    with pytest.raises(ValueError, match="^simulate: format must be one of deepep_ll, deepep_normal; got 'flashinfer'"):
        predict(scenario(), "flashinfer", "deep_ep", Links(), None)
