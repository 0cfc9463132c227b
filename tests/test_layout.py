"""The shape of the source tree: every op's five homes, who imports whom, sizes, packaging, generated files."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import moe_ops
from moe_ops.registry import SCHEMAS
from moe_ops.schemas import header

ROOT = Path(__file__).parent.parent
PACKAGES = {"moe_ops": ROOT / "moe_ops", "moe_ops.meta": ROOT / "meta", "moe_ops.csrc_stubs": ROOT / "csrc_stubs"}
NAMES = [re.match(r"\w+", schema).group() for schema in SCHEMAS]
LAYOUT_SUFFIX = re.compile(r"(_contiguous|_masked|_gathered|_direct|_ws)+$")
VERBS = sorted({LAYOUT_SUFFIX.sub("", name) for name in NAMES} - {"fused_deepgemm"})
SOURCES = sorted(
    path
    for folder in ("moe_ops", "meta", "csrc_stubs", "tests", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if "build" not in path.parts
)

PICTURE = re.search(r"## Who may import whom\n\n```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
LAYERS = [re.split(r"[\s,|]+", layer.strip()) for layer in PICTURE.split("->")]
ORDER = {name: index for index, layer in enumerate(LAYERS) for name in layer}
APART = next(set(re.split(r"[\s|]+", layer.strip())) for layer in PICTURE.split("->") if "|" in layer)


def imports(source: str, package: str) -> set[tuple[int, str]]:
    """(line, full name) of all that a module of this package imports, at its top or in a function, or names in a text
    as importlib and our lazy kernels do ("module" or "module:function")."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {(node.lineno, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            found |= {(node.lineno, f"{home}.{alias.name}") for alias in node.names}
        elif isinstance(node, ast.Constant) and re.fullmatch(r"moe_ops(\.\w+)+(:\w+)?", str(node.value)):
            if re.split("[.:]", node.value)[1] in ORDER:  # else a name in a file format
                found.add((node.lineno, node.value))
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_layout_every_op_has_its_homes(verb):
    homes = {
        "contract": f"meta/{verb}.py",
        "registration": f"moe_ops/ops/{verb}.py",
        "reference": f"moe_ops/reference/{verb}.py",
        "kernel": f"moe_ops/kernels/{verb}.py",
        "test": f"tests/ops/test_{verb}.py",
    }
    missing = [
        f"moe::{verb} is registered but its {what}, {home}, is missing"
        for what, home in homes.items()
        if not (ROOT / home).is_file()
    ]
    assert not missing, "\n".join(missing)


def test_layout_every_stage_has_a_workspace_form():
    for verb in VERBS:
        assert f"{verb}_ws" in NAMES
        assert hasattr(torch.ops.moe, f"{verb}_ws")


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_ws")])
def test_layout_public_function_matches_its_schema(name):
    """Same arguments, order, defaults and keyword-only marks: the function is the op's documentation."""
    schema = getattr(torch.ops.moe, name).default._schema
    function = getattr(moe_ops, name)
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters] == [a.name for a in schema.arguments]
    for parameter, argument in zip(parameters, schema.arguments, strict=True):
        assert (parameter.kind is parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert parameter.default == default, argument.name
    assert function.__doc__ and "Returns:" in function.__doc__


@pytest.mark.parametrize(
    "source, found",
    [
        ("import moe_ops.cli as cli", "moe_ops.cli"),
        ("from moe_ops import check, ops", "moe_ops.check moe_ops.ops"),
        ("def f():\n    from moe_ops.ops.topk import topk", "moe_ops.ops.topk.topk"),
        ("from . import pipelined", "moe_ops.kernels.pipelined"),
        ("from ..ops import topk", "moe_ops.ops.topk"),
        ("from .. import ops", "moe_ops.ops"),
        ("importlib.import_module('moe_ops.ops.topk')", "moe_ops.ops.topk"),
        ("lazy('moe_ops.kernels.topk:topk')", "moe_ops.kernels.topk:topk"),
        ("raise ValueError('moe_ops: see moe_ops.ops.')", ""),
    ],
)
def test_layout_sees_every_form_of_import(source, found):
    assert {name for _, name in imports(source, "moe_ops.kernels")} == set(found.split())


def test_layout_imports_go_one_way():
    modules, wrong = set(), []
    for path in SOURCES:
        relative = path.relative_to(ROOT)
        parts = relative.parts if relative.parts[0] == "moe_ops" else ("moe_ops", *relative.parts)
        here = parts[1].removesuffix(".py")
        if relative.parts[0] in ("tests", "examples") or here == "__init__":
            continue
        modules.add(here)
        for line, name in imports(path.read_text(), ".".join(parts[:-1])):
            names = name.split(":")[0].split(".")
            if names[0] != "moe_ops" or names[1:2] == ["__version__"]:
                continue
            if len(names) == 1 or names[1] not in ORDER:  # a public name: all of the package is imported for it
                names = ["moe_ops", "warmup"]
            if ORDER[names[1]] > ORDER[here] or (here != names[1] and {here, names[1]} <= APART):
                wrong.append(f"{relative}:{line} imports {names[1]}")
    assert not wrong, "\n".join(sorted(wrong))
    assert modules == set(ORDER), "the picture in CONTRIBUTING.md and the modules differ"


def test_layout_contracts_and_references_never_meet():
    for path in (ROOT / "meta").glob("*.py"):
        assert "moe_ops.reference" not in path.read_text(), path
    for path in (ROOT / "moe_ops" / "reference").glob("*.py"):
        assert "moe_ops.meta" not in path.read_text(), path


def test_layout_the_judge_shares_no_code_with_the_ops():
    text = (ROOT / "moe_ops" / "reference" / "moe.py").read_text()
    assert "moe_ops" not in text


def test_layout_files_stay_readable():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {path: n for path, n in lengths.items() if n > 400} == {}
    package = sorted(n for path, n in lengths.items() if path.startswith(("moe_ops", "meta")))
    assert package[len(package) // 2] <= 120


@pytest.mark.parametrize(
    "pattern, allowed, reason",
    [
        (
            r"custom_op\(",
            "examples/",
            "ops are registered through moe_ops/registry.py: custom_op costs three times the call",
        ),
        (r"os\.environ", "moe_ops/env.py", "environment variables have one home"),
        (r"get_device_capability", "moe_ops/arch.py", "arch.py alone looks at the card"),
        (r"cuda\.graph\(|CUDAGraph\(", "moe_ops/capture.py", "one stream warms up and captures"),
        (r"recipe == |recipe\.name == ", "-", "a recipe is a row; nothing branches on its name"),
        (r"^import meta|^from meta", "-", "meta is moe_ops.meta: a second import makes a second module"),
    ],
)
def test_layout_rules(pattern, allowed, reason):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES
        if path.parts[len(ROOT.parts)] not in ("tests", "examples")
        and "csrc_stubs" not in path.parts
        and not str(path.relative_to(ROOT)).startswith(allowed)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, reason + "\n" + "\n".join(found)


def test_layout_hot_path_never_syncs():
    """No host read of device data in what runs between the reference kernels: contracts, ops, forward, planner."""
    for folder in ("meta", "moe_ops/ops"):
        for path in (ROOT / folder).glob("*.py"):
            assert not re.search(r"\.(item|tolist|cpu|nonzero)\(", path.read_text()), path
    for name in ("forward", "buffers", "planner", "registry", "workspace"):
        assert not re.search(r"\.(item|tolist|cpu|nonzero)\(", (ROOT / f"moe_ops/{name}.py").read_text()), name


def test_packages_are_all_listed():
    """The list in pyproject.toml is by hand; a forgotten sub-package would be missing from the wheel."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for name, folder in PACKAGES.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(folder).parts]))
    assert listed == found


def test_schemas_header_is_up_to_date():
    assert (ROOT / "csrc_stubs" / "schemas.h").read_text() == header(), "run `make stubs`"


def test_checkout_imports_without_installation(tmp_path):
    """From a bare checkout: meta and csrc_stubs lie beside moe_ops and are its sub-packages all the same."""
    script = "import moe_ops, moe_ops.meta.topk, moe_ops.csrc_stubs; print(moe_ops.meta.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {[str(ROOT), *sys.path]!r}; {script}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout.strip() == str(ROOT / "meta" / "__init__.py"), done.stderr


def test_import_beside_the_other_moe_ops_is_refused(tmp_path):
    info = tmp_path / "moe_ops-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moe-ops\nVersion: 0.1.0\n")
    code = f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(tmp_path)!r}]; import moe_ops"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert "ImportError: moe_ops: the distribution moe-ops is installed;" in done.stderr


@pytest.mark.slow
def test_wheel_holds_everything_and_runs(tmp_path):
    """Build the wheel, unpack it far from the checkout, run a layer from it."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run(
        [
            *pip,
            "install",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--target",
            str(tmp_path / "site"),
            str(ROOT),
        ],
        check=True,
        capture_output=True,
    )
    script = """
import torch, moe_ops, moe_ops.csrc_stubs, pathlib
assert pathlib.Path(moe_ops.__file__).is_relative_to(SITE), moe_ops.__file__
assert pathlib.Path(moe_ops.meta.__file__).is_relative_to(SITE)
assert (pathlib.Path(moe_ops.csrc_stubs.__file__).parent / "schemas.h").is_file()
assert (pathlib.Path(moe_ops.__file__).parent / "py.typed").is_file()
w = moe_ops.prepare_weights(torch.randn(4, 256, 128), torch.randn(4, 128, 128), recipe="mxfp4")
layer = moe_ops.MoELayer(torch.randn(4, 128), w, top_k=2)
print(tuple(layer(torch.randn(5, 128)).shape))
"""
    site = str(tmp_path / "site")
    code = f"import sys; SITE = {site!r}; sys.path.insert(0, SITE)\n{script}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "(5, 128)", done.stderr
