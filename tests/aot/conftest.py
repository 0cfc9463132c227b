"""Compiles every shipped kernel for cards that are not there. The interpreter's process cannot: it has no compiler."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    raise pytest.UsageError("tests/aot must run without TRITON_INTERPRET=1, which makes kernels impossible to compile.")


@pytest.fixture(autouse=True, scope="session")
def _fresh_cache(tmp_path_factory):
    """What ptxas says is only heard when it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield
