"""Every test starts from a seed and from poisoned memory; markers skip with a reason."""

import os

import pytest
import torch

from moe_ops.testing import poisoned_memory

# Interpreting and compiling kernels exclude each other in a process; test_interpreter.py starts one for tests/interp.
collect_ignore = ["aot" if os.environ.get("TRITON_INTERPRET") == "1" else "interp"]

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
    for item in items:
        marker = item.get_closest_marker("gpu")
        if marker is None:
            continue
        (twin,) = marker.args
        if not (item.config.rootpath / twin).exists():
            raise pytest.UsageError(f"{item.path}: mark.gpu must name what tries the same on a CPU; got {twin!r}.")
        if not torch.cuda.is_available():
            reason = f"needs a CUDA card; on a CPU, but for captured graphs and a card's allocator: {twin}"
            item.add_marker(pytest.mark.skip(reason=reason))
