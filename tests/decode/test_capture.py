"""Captures without a card: who goes on which stream, in what order, and what is refused. tests/gpu/test_capture.py
captures."""

import gc
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import moe_ops
from moe_ops import capture
from moe_ops.graphs import GraphedDecode

E, K, I = 8, 256, 128


@pytest.fixture
def card(monkeypatch):
    """torch.cuda as far as a capture goes; the list of what was done with it."""
    done = []

    class Stream:
        made = 0

        def __init__(self):
            Stream.made += 1
            self.name = f"stream {Stream.made}"

        def wait_stream(self, other):
            done.append(f"{self.name} waits for {other.name}")

    @contextmanager
    def inside(what):
        done.append(f"into {what}")
        try:
            yield
        finally:
            done.append(f"out of {what}")

    outer = Stream()
    replaced = dict(
        Stream=Stream,
        MemPool=lambda: "scratch",
        CUDAGraph=object,
        current_stream=lambda _=None: outer,
        current_device=lambda: 0,
        stream=lambda stream: inside(stream.name),
        device=lambda _: inside("card"),
        use_mem_pool=inside,
        current_blas_handle=lambda: done.append("handle"),
        graph=lambda graph, pool, stream: inside(f"capture on {stream.name} in {pool}"),
        graph_pool_handle=lambda: (0, 1),
        memory_snapshot=lambda: [],
    )
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capture._of_card.cache_clear()
    yield done
    capture._of_card.cache_clear()


def test_capture_is_on_the_stream_of_its_warm_up(card):
    stream = capture.capture_stream(torch.device("cuda"))
    assert capture.capture_stream(torch.device("cuda", 0)) is stream
    card.clear()
    stream.warm_up(lambda: card.append("run"))
    _, result = stream.capture(lambda: card.append("run") or "result", "pool")
    assert result == "result"
    assert card == [
        "stream 2 waits for stream 1",
        "into stream 2",
        "into scratch",
        "handle",
        "out of scratch",
        "run",
        "run",
        "out of stream 2",
        "stream 1 waits for stream 2",
        "into stream 2",
        "into capture on stream 2 in pool",
        "run",
        "out of capture on stream 2 in pool",
        "out of stream 2",
    ]


def test_capture_that_fails_leaves_its_stream(card, monkeypatch):
    class Fails:
        """torch's, when what was captured is not allowed: its end raises, before it leaves the stream."""

        def __init__(self, graph, pool, stream):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            raise RuntimeError("operation failed due to a previous error during capture")

    stream = capture.capture_stream(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "graph", Fails)
    card.clear()
    with pytest.raises(RuntimeError, match="previous error"):
        stream.capture(lambda: None)
    assert card == ["into stream 2", "out of stream 2"]


def test_capture_scratch_is_never_destroyed(card, monkeypatch):
    """Its destructor could end the process: see CaptureStream."""

    class Pool:
        pass

    made = weakref.WeakSet()
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: made.add(pool := Pool()) or pool)
    capture.capture_stream(torch.device("cuda"))
    capture._of_card.cache_clear()
    gc.collect()
    assert len(made) == 1


def test_capture_and_warm_up_of_two_threads_follow_each_other(card):
    """What one launches may not be captured by the other; and all threads have one stream."""
    stream, inside = capture.capture_stream(torch.device("cuda")), threading.Event()
    waiting = [threading.Thread(target=stream.warm_up, args=(lambda: card.append("other"),))]
    streams = []
    waiting.append(threading.Thread(target=lambda: streams.append(capture.capture_stream(torch.device("cuda")))))

    def step():
        for thread in waiting:
            thread.start()
        inside.wait(0.1)  # time in which they could run
        card.append("captured")

    stream.capture(step)
    for thread in waiting:
        thread.join()
    assert card.index("captured") < card.index("other") and streams == [stream]


def test_capture_of_every_bucket_and_model_is_on_one_stream_each_in_its_models_pool(card):
    for pool in ((0, 1), (0, 2)):
        torch.cuda.graph_pool_handle = lambda pool=pool: pool
        decode = GraphedDecode(lambda x, num_token_non_padded: x, [torch.zeros(1, K)], buckets=(1, 4), mode="eager")
        decode._capture()
        assert [captured.tokens for captured in decode.captures] == [4, 1]
        assert card.count(f"into capture on stream 2 in {pool}") == 2
    assert sum(step.startswith("into capture") for step in card) == 4


def test_capture_finds_what_it_needs_made_when_a_layer_is_built_or_moved(monkeypatch):
    seen = []
    monkeypatch.setattr(capture, "prepare", seen.append)
    weights = moe_ops.prepare_weights(torch.randn(E, 2 * I, K) / 16, torch.randn(E, K, I) / 11, recipe="fp8_block")
    layer = moe_ops.MoELayer(torch.randn(E, K).bfloat16(), weights, top_k=2)
    assert seen == [torch.device("cpu")]
    torch.nn.Sequential(layer).to("meta")
    assert seen == [torch.device("cpu"), torch.device("meta")]


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.ops.moe.topk(x, 2),
        lambda x: torch.ops.moe.topk_ws(x.new_empty(4096, dtype=torch.uint8), x, 2),
    ],
    ids=["functional", "workspace"],
)
def test_capture_with_a_compilation_in_it_is_refused_in_words(call, monkeypatch):
    with FakeTensorMode():
        x, at_home = (torch.empty(4, K, dtype=torch.bfloat16, device=device) for device in ("cuda", "cpu"))
        call(x)
        monkeypatch.setattr(capture, "capturing", lambda: True)
        with pytest.raises(RuntimeError, match=r"moe::\w+: torch.compile must be over .*Run .* after moe_ops.warmup"):
            call(x)
        call(at_home)  # a capture is no concern of the CPU's
