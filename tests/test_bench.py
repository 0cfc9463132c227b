"""The benchmark: checks before it times, writes what it printed, and lets nobody else's failure stop it."""

import json

import pytest
import torch

from moe_ops.bench import compare, layer, peers, table
from moe_ops.bench.__main__ import main
from moe_ops.bench.cases import RECIPE_NAMES, SHAPES, Case, Shape, layer_weights
from moe_ops.bench.layer import Row, WrongLayer, compare_work, time_layer
from moe_ops.bench.routing import ROUTINGS, routing
from moe_ops.bench.run import bench
from moe_ops.bench.timing import Effort, Rates, Times
from moe_ops.csrc_stubs import deep_gemm as stand_in
from moe_ops.kernels import deep_gemm
from moe_ops.testing import decode_weight, relative_error
from moe_ops.testing.cases import moe

TINY = Shape("tiny", 4, 256, 128, 2)
ONCE = Effort(warm_up=0, least=3)
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="times the card's shapes there: make bench")


def case(recipe="fp8_block", T=5, **more) -> Case:
    return Case(TINY, T, recipe, layer_weights(TINY, recipe, CPU), **more)


@on_cpu
def test_bench_writes_what_it_measured(tmp_path, capsys):
    path = tmp_path / "out.json"
    assert main(["--recipe", "fp8_block", "--tokens", "1", "3", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert [row["T"] for row in report["results"]] == [1, 3] and report["torch"] == torch.__version__
    for row in report["results"]:
        assert row["us"] > 0 and row["error"] == 0 and row["p20"] <= row["us"] <= row["p80"]
    assert "fp8_block" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_bench_times_every_recipe(recipe):
    row = time_layer(case(recipe), "auto", "auto", Rates(1e12, 1e14, 2e14, 8), ONCE)
    assert row.error == 0 and row.recipe == recipe and row.floor_us is not None


@pytest.mark.parametrize("factor", [1.2, float("nan")])
def test_bench_refuses_to_time_a_wrong_layer(monkeypatch, factor):
    right = Case.run
    monkeypatch.setattr(Case, "run", lambda self, *a: right(self, *a) * factor)
    with pytest.raises(WrongLayer, match=r"bench: tiny T=5 bf16 auto: error (0.200|nan) above 0.01"):
        time_layer(case("bf16"), "auto", "auto", None, ONCE)


@on_cpu
@pytest.mark.parametrize("more", [0, 1])
def test_bench_fails_a_layer_that_takes_more_memory_than_planned(monkeypatch, more):
    monkeypatch.setattr(layer, "peak_bytes", lambda one, *a: one.plan("auto").total_bytes + one.inputs[0].nbytes + more)
    report = bench(recipe=["bf16"], tokens=[1], say=lambda text: None)
    assert len(report.results) == 1 and len(report.failures) == more


def test_bench_compares_long_batches_on_a_part_of_their_tokens(monkeypatch):
    from moe_ops.bench import cases

    whole = case("bf16", T=40).expected
    monkeypatch.setattr(cases, "CHECKED_TOKENS", 7)
    part = case("bf16", T=40)
    assert part.checked is not None and len(part.checked.unique()) == 7
    assert relative_error(part.expected, part.of_checked(whole)) < 1e-3


def test_bench_expects_what_the_judge_computes():
    one = case("fp8_block")
    weights = one.weights
    pairs = ((weights.w13, weights.w13_scale), (weights.w2, weights.w2_scale))
    want = moe(*one.inputs, *(decode_weight(*pair, one.format) for pair in pairs))
    assert relative_error(one.expected, want) < one.format.max_diff


@on_cpu
def test_bench_goes_on_after_a_failing_row_and_says_so(monkeypatch, tmp_path):
    right = time_layer

    def fails_at_two(case, *a, **k):
        if case.T == 2:
            raise RuntimeError("boom\nand more")
        return right(case, *a, **k)

    monkeypatch.setattr("moe_ops.bench.run.time_layer", fails_at_two)
    path = tmp_path / "out.json"
    assert main(["--recipe", "bf16", "--tokens", "1", "2", "3", "--json", str(path)]) == 1
    report = json.loads(path.read_text())
    assert [row["T"] for row in report["results"]] == [1, 3]
    assert report["failures"] == ["tiny T=2 bf16 uniform auto auto: RuntimeError: boom"]


@on_cpu
def test_bench_stops_in_time():
    report = bench(recipe=["bf16"], tokens=[1], time_limit=0, say=lambda text: None)
    assert not report.results and "out of time, 1 cases from tiny T=1" in report.notes[0]


@pytest.mark.parametrize("kind", ROUTINGS)
def test_routing_has_its_property(kind):
    weights, ids = routing(kind, 4096, 16, 2, seed=0)
    assert weights.shape == ids.shape == (4096, 2) and ids.dtype == torch.int32 and ids.max() < 16
    valid = ids[ids >= 0]
    counts = valid.bincount(minlength=16).sort(descending=True).values
    if kind == "one_expert":
        assert counts[0] == 4096 == counts.sum()
        return
    assert (ids[:, 0] != ids[:, 1]).all() and len(valid) == 8192
    assert (counts == 0).sum() == (2 if kind == "empty8" else 0)
    assert (counts[0] > 4 * counts[8]) == (kind == "zipf")


def test_equal_work_scales_by_the_floors_what_routes_add():
    row = time_layer(case("bf16"), "auto", "auto", Rates(1e12, 1e14, 2e14, 8), ONCE)
    uniform, skewed = _row(row, us=110.0, floor_us=50.0), _row(row, us=60.0, floor_us=25.0)
    assert compare_work(skewed, uniform, 10.0).equal_work == 1.0  # 10 + 100 / 2


def _row(row: Row, **changes) -> Row:
    return Row(**(vars(row) | changes))


def test_times_are_median_and_middle():
    assert Times.of([5, 1, 2, 3, 4, 6]) == Times(3.5, 2, 5)


# What the other libraries do is computed here by the stand-in of deep_gemm and by torch on a CPU.
NO_CPU = {"deep_gemm mega"}


@pytest.mark.parametrize("kind", [kind for kind in peers.PEERS if kind.name not in NO_CPU], ids=lambda kind: kind.name)
def test_peer_computes_the_layer(kind, monkeypatch):
    if kind.name.startswith("transformers"):
        integration = pytest.importorskip("transformers.integrations.deepgemm", reason="needs transformers")
        monkeypatch.setattr(integration, "is_sm100", lambda: False)  # it asks the card
        monkeypatch.setattr(integration, "_DEEPGEMM", None)
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        monkeypatch.setattr(kind, "_last", None)
    with deep_gemm.use(stand_in), stand_in.arch(9):
        row = compare.time_peer(kind, case(kind.recipe), ONCE)
    assert row.reason is None and row.us > 0
    assert row.error < case(kind.recipe).format.max_diff


def test_peer_that_fails_is_a_row_with_its_reason(monkeypatch):
    monkeypatch.setattr(peers.torch_grouped_mm.TorchGroupedMM, "run", lambda self: 1 / 0)
    row = compare.time_peer(peers.torch_grouped_mm.TorchGroupedMM, case("bf16"), ONCE)
    assert row.us is None and row.reason == "ZeroDivisionError: division by zero"


@on_cpu
@pytest.mark.parametrize("kind", [kind for kind in peers.PEERS if kind.recipe == "fp8_block"], ids=lambda k: k.name)
def test_peer_says_why_it_cannot_run(kind):
    assert "deep_gemm needs a CUDA card" in compare.time_peer(kind, case(), ONCE).reason


REPORT = dict(
    card="Card",
    date="2026-01-02",
    torch="2.11",
    triton=None,
    rates=dict(copy=4e12, bf16=7e14, fp8=1.4e15, replay_us=8.0),
    results=[
        dict(
            shape=shape, T=T, recipe=recipe, routing="uniform", layout="masked", backend="auto", us=100.0 + T, p20=1.0,
            p80=2.0, burst_us=95.0, cold_us=150.0, triton_us=None, floor_us=50.0, error=0.01, operations=6e6 * T,
            weight_bytes=1e8, equal_work=None,
        )
        for shape in ("one", "two") for recipe in ("fp8_block", "bf16") for T in (1, 8)
    ],
    peers=[
        dict(peer="slow", shape="one", T=1, recipe="fp8_block", whole=True, us=300.0),
        dict(peer="fast", shape="one", T=1, recipe="fp8_block", whole=True, us=200.0, burst_us=190.0),
        dict(peer="pair", shape="one", T=1, recipe="fp8_block", whole=False, us=90.0),
        dict(peer="gone", shape="one", T=1, recipe="fp8_block", whole=True, us=None),
        dict(peer="other", shape="two", T=1, recipe="bf16", whole=True, us=7.0),
    ],
)  # fmt: skip


def test_table_puts_the_best_peer_beside_ours(tmp_path, capsys):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(REPORT))
    table.main([str(path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Card, date 2026-01-02, torch 2.11. Microseconds."
    assert "| 1 | 101 | 95.0 | - | 150 | 200 / 190 (fast) | 90.0 (pair) | 50.0 | 50% | 0.0100 |" in lines
    # The other shape: bf16 is no peer of fp8.
    assert "| 1 | 101 | 95.0 | - | 150 | - | - | 50.0 | 50% | 0.0100 |" in lines


def test_plot_draws_an_earlier_run(tmp_path):
    pytest.importorskip("matplotlib", reason="the chart is the extra `plot`")
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    assert main(["--from-json", str(tmp_path / "report.json"), "--plot", str(tmp_path / "roofline.svg")]) == 0
    assert "<svg" in (tmp_path / "roofline.svg").read_text()
    with pytest.raises(SystemExit, match="--plot"):
        main(["--from-json", str(tmp_path / "report.json")])


def test_bench_names_its_largest_shapes_first():
    assert [shape.name for shape in SHAPES][-1] == "tiny"
