"""What Triton calls a kernel in its cache: the same in every process, whatever was compiled there before."""

import json
import subprocess
import sys

_KEYS = """
import importlib, json, pkgutil, sys
import moe_ops.kernels as kernels
from triton import JITFunction

modules = [importlib.import_module(f"moe_ops.kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]
functions = [one for module in modules for one in vars(module).values() if isinstance(one, JITFunction)]
keys = {}
for one in functions if sys.argv[1] == "callees" else reversed(functions):
    keys[f"{one.__module__}.{one.fn.__name__} {type(one).__name__}"] = one.cache_key
print(json.dumps(keys))
"""


def keys(first: str) -> dict[str, str]:
    """Of all functions of moe_ops.kernels; callers or callees are asked first."""
    command = [sys.executable, "-c", _KEYS, first]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)


def test_keys_do_not_depend_on_what_was_compiled_before():
    callees, callers = keys("callees"), keys("callers")
    assert len(callees) > 50
    assert callees == callers
