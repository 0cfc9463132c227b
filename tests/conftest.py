"""Every test starts from a seed and from poisoned memory; markers skip with a reason."""

import os

import pytest
import torch

from moe_ops.testing import poisoned_memory

# Interpreting and compiling kernels exclude each other in a process; test_interpreter.py starts one for tests/interp.
collect_ignore = ["aot" if os.environ.get("TRITON_INTERPRET") == "1" else "interp"]

TWINS = {
    "test_bench": "tests/test_bench.py",
    "test_decode": "tests/decode and tests/test_compile.py",
    "test_kernels": "tests/interp/test_kernels.py",
    "test_layer": "tests/interp/test_layer.py",
    "test_transformers": "tests/integrations",
    "test_w4a8": "tests/interp/test_w4a8.py",
}
"""File of tests/gpu -> what tries the same on a CPU, but for captured graphs and a card's allocator."""

torch.set_num_threads(1)  # workers share the cores; OpenMP teams that wait for one another take 20 times longer


@pytest.fixture(autouse=True)
def _seeded_and_poisoned(request):
    torch.manual_seed(0)
    if request.node.get_closest_marker("unpoisoned"):
        yield
        return
    with poisoned_memory():
        yield


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            twin = TWINS[item.path.stem]
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA card; on a CPU: {twin}"))
