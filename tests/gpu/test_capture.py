"""Captures on a card: what they ask the allocator for, and first calls that are captured. CPU twin:
tests/decode/test_capture.py."""

import json
import os
import subprocess
import sys

import pytest
import torch

import moe_ops
from moe_ops.capture import capture_stream
from moe_ops.testing import assert_bits_equal
from moe_ops.testing.stacks import Stack

pytestmark = [
    pytest.mark.gpu("tests/decode/test_capture.py"),
    pytest.mark.unpoisoned("graphs need torch's own torch.empty"),
]

SIZES = dict(E=16, K=1024, I=512, top_k=4)
GENERATOR = 16
"""Bytes of the seed and the offset that torch's random generator keeps while there are graphs."""


def requested(what: str) -> int:
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()[f"requested_bytes.all.{what}"]


def activations(x: torch.Tensor) -> int:
    """Bytes that a stack with an arena asks for beside its input, at any one time: the residual stream, the layer's
    result and their sum; the router's logits, weights and ids."""
    return 3 * x.nbytes + len(x) * (2 * SIZES["E"] + 8 * SIZES["top_k"])


@pytest.fixture
def model():
    model = Stack("fp8_block", "bf16", "fp8_block", **SIZES, device="cuda")
    moe_ops.share_workspace(model, max_tokens=64)
    for T in (64, 8):
        model(model.hidden(T))
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    with torch.no_grad():
        yield model
    torch.cuda.synchronize()


def test_warm_up_takes_the_scratch_of_cublas_and_captures_take_activations(model):
    stream = capture_stream(torch.device("cuda"))
    pool, graphs, cublas = torch.cuda.graph_pool_handle(), [], []
    for T in (64, 8):
        x = model.hidden(T)
        before = requested("current")
        stream.warm_up(lambda x=x: model(x))
        cublas.append(requested("current") - before)
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        graphs.append((x, *stream.capture(lambda x=x: model(x), pool)))
        assert requested("peak") - before <= activations(x) + GENERATOR, T
        assert requested("current") - before <= x.nbytes + GENERATOR, T  # the result
    print(f"cuBLAS: {cublas[0]} bytes")
    assert cublas[0] > 0 and cublas[1] == 0
    for x, graph, out in graphs:
        graph.replay()
        assert_bits_equal(out, model(x))


def test_graphs_write_to_nobodys_memory_after_torch_has_forgotten_the_scratch(model):
    """As any capture of mode="reduce-overhead" has it do."""
    stream, x = capture_stream(torch.device("cuda")), model.hidden(64)
    square = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    step = lambda: (model(x), square[:64] @ square)  # noqa: E731  a product that may want scratch
    want = step()
    before = requested("current")
    stream.warm_up(step)
    cublas = requested("current") - before
    graph, got = stream.capture(step)
    torch._C._cuda_clearCublasWorkspaces()
    with torch.cuda.stream(stream.stream):  # where torch.empty would find what was freed
        fillers = [torch.full((cublas,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    graph.replay()
    torch.cuda.synchronize()
    assert all((filler == 0xFF).all() for filler in fillers)
    for one, other in zip(got, want, strict=True):
        assert_bits_equal(one, other)
    before, reserved = requested("current"), torch.cuda.memory_reserved()
    stream.warm_up(lambda: None)
    assert requested("current") - before == cublas and torch.cuda.memory_reserved() == reserved  # the same again


def test_a_capture_that_fails_leaves_the_stream(model):
    stream, x = capture_stream(torch.device("cuda")), model.hidden(8)
    stream.warm_up(lambda: model(x))
    around = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        stream.capture(lambda: model(x).sum().item())
    assert torch.cuda.current_stream() == around
    graph, out = stream.capture(lambda: model(x))  # and the next one works
    graph.replay()
    assert_bits_equal(out, model(x))


_FAILS = """
import torch
import moe_ops.capture
from moe_ops.capture import capture_stream

x = torch.ones(64, 64, device="cuda")
stream = capture_stream(torch.device("cuda"))
stream.warm_up(lambda: x @ x)
try:
    stream.capture(lambda: (x @ x).sum().item())
except RuntimeError:
    print(float((x @ x)[0, 0]))
del stream
moe_ops.capture._of_card.cache_clear()  # as the end of the interpreter may
"""


def test_a_process_whose_capture_failed_ends_well():
    done = subprocess.run([sys.executable, "-c", _FAILS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "64.0\n", done.stderr


def test_bucket_after_bucket_asks_for_activations_alone(model):
    x = model.hidden(64)
    capture_stream(torch.device("cuda")).warm_up(lambda: model(x))
    example = [model.hidden(1)]
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    graphed = moe_ops.GraphedDecode(model, example, buckets=(1, 8, 16, 64))
    held = x.nbytes + 4 + sum(graphed.buckets) * example[0].nbytes + GENERATOR  # static inputs, results
    assert requested("current") - before <= held
    assert requested("peak") - before <= held + activations(x)


_COLD = """
import json, sys, torch, moe_ops
from moe_ops.env import compile_caches
from moe_ops.testing import relative_error
from moe_ops.testing.stacks import Stack

T, how, recipes = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
K = 1024


def entries():
    return sum(1 for folder in compile_caches().values() for _ in folder.rglob("*.cubin"))


def hidden(seed):
    return torch.randn(T, K, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


if __name__ == "__main__":
    model = Stack(*recipes, E=16, K=K, I=512, top_k=4, device="cpu" if how == "moved" else "cuda").to("cuda")
    call = torch.compile(model, fullgraph=True) if how == "compiled" else model
    if how == "warmed":
        moe_ops.warmup(model, tokens=[T], workers=1)
    x, said, compiled = hidden(0), None, entries()
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out = call(x)
        except RuntimeError as error:
            said = str(error)
        torch.cuda.synchronize()
        compiled = entries() - compiled
        errors = []
        for seed in (0, 1):
            x.copy_(hidden(seed))
            if said is None:
                graph.replay()
            else:
                out = call(x)  # what was refused works now
            errors.append(relative_error(out, model(x)))
        moe_ops.report()
    print(json.dumps(dict(said=said, errors=errors, compiled=compiled)))
"""


@pytest.fixture
def cold(tmp_path):
    """A process whose first call of a model is captured."""

    def run(T: int, how: str, *recipes: str, empty_caches: bool) -> dict:
        script = tmp_path / "cold.py"
        script.write_text(_COLD)
        names = ("MOE_OPS_CACHE_DIR", "TRITON_CACHE_DIR", "DG_JIT_CACHE_DIR") if empty_caches else ()
        environment = os.environ | {name: str(tmp_path / name.lower()) for name in names}
        command = [sys.executable, str(script), str(T), how, *recipes]
        done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=environment)
        assert done.returncode == 0, done.stderr
        print(done.stdout)
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.parametrize("T", [8, 256], ids=["triton", "deep_gemm"])
def test_first_call_ever_is_captured(T, cold):
    """Everything is compiled inside of the capture, and replays are right: the same kernels, so the same bits."""
    answer = cold(T, "cold", "fp8_block", "bf16", empty_caches=True)
    assert answer["said"] is None and answer["errors"] == [0, 0]
    assert answer["compiled"] > 0


def test_first_call_ever_of_a_model_that_was_moved_is_captured(cold):
    answer = cold(8, "moved", "bf16", empty_caches=False)
    assert answer["said"] is None and answer["errors"] == [0, 0]


def test_first_call_in_a_capture_after_a_warm_up_compiles_nothing_of_deep_gemm(cold):
    """test_decode.py counts what Triton compiles."""
    assert cold(256, "warmed", "fp8_block", empty_caches=True) == dict(said=None, errors=[0, 0], compiled=0)


def test_a_model_is_not_compiled_inside_a_capture(cold):
    """The process, and the compiled model, go on."""
    answer = cold(8, "compiled", "fp8_block", empty_caches=False)
    assert "torch.compile must be over before a CUDA graph capture begins" in answer["said"]
    assert max(answer["errors"]) <= 1e-2
