"""What holds for every engine's plug-in, and for the stand-ins that their tests use."""

import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from moe_ops.csrc_stubs.engines import sglang as sglang_stub
from moe_ops.csrc_stubs.engines import standing_in
from moe_ops.csrc_stubs.engines import torchtitan as torchtitan_stub
from moe_ops.csrc_stubs.engines import vllm as vllm_stub
from moe_ops.csrc_stubs.engines.cases import installed, module
from moe_ops.integrations import sglang, vllm
from moe_ops.integrations.engines import imported

STUBS = {"vllm": vllm_stub, "sglang": sglang_stub, "torchtitan": torchtitan_stub}


@pytest.mark.parametrize("name", STUBS)
def test_engines_are_not_needed_to_import_and_are_missed_in_words(name):
    code = (
        f"import sys; sys.modules[{name!r}] = None\n"
        f"from moe_ops.integrations import {name} as plugin\n"
        "try: plugin.register()\n"
        "except ImportError as error: print(error)"
    )
    if name == "torchtitan":
        code = code.replace(
            "import sys; sys.modules",
            "import sys, importlib.util; importlib.util.find_spec = lambda *_: None; sys.modules",
        )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"moe_ops.integrations.{name}: {name} must be as {name} ") and "Install" in said


def test_engines_a_version_without_a_class_is_named():
    with standing_in(vllm_stub), pytest.raises(ImportError, match="vllm must be as vllm 0.34 is; .*'NoSuchClass'"):
        imported("op", "vllm 0.34", "vllm.model_executor.layers.fused_moe.modular_kernel", "NoSuchClass")


def test_engines_entry_points_name_the_plug_ins():
    groups = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, plugin in (("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)):
        where, _, function = groups[group]["moe_ops"].partition(":")
        assert importlib.import_module(where) is plugin and getattr(plugin, function) is plugin.register


def stubbed():
    """(module, stand-in) of everything that the stand-ins hold."""
    made = []
    for engine_name, stub in STUBS.items():
        for path, names in stub.MODULES.items():
            for name in names:
                made.append(
                    pytest.param(path, getattr(stub, name), id=f"{engine_name}-{name}", marks=installed(engine_name))
                )
    return made


@pytest.mark.parametrize("path, stand_in", stubbed())
def test_engines_stand_ins_have_the_installed_signatures(path, stand_in):
    """Arguments by name, order and default, of what the plug-ins call, are given, or override."""
    if not callable(stand_in):
        pytest.skip("a constant has no signature")
    real = getattr(module(path), stand_in.__name__)
    pairs = [(stand_in, real)]
    if isinstance(stand_in, type):
        own = {name for name, value in vars(stand_in).items() if inspect.isroutine(value) and name[:2] != "__"}
        pairs = [(getattr(stand_in, name), getattr(real, name)) for name in own]
        fields = getattr(stand_in, "_fields", None) or getattr(stand_in, "__dataclass_fields__", None)
        if fields:
            have = getattr(real, "_fields", None) or real.__dataclass_fields__
            assert [name for name in have if name in fields] == list(fields)
        elif hasattr(stand_in, "__members__"):
            assert {k: v.value for k, v in stand_in.__members__.items()}.items() <= {
                k: v.value for k, v in real.__members__.items()
            }.items()
    for mine, theirs in pairs:
        ours, want = (inspect.signature(function).parameters for function in (mine, theirs))
        assert [(p.name, p.kind, p.default is p.empty) for p in ours.values()] == [
            (p.name, p.kind, p.default is p.empty) for p in want.values()
        ], mine
