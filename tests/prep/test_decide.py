"""One decision for load and run: every source, recipe, scale format, arch and backend."""

import re
from pathlib import Path

import pytest

from moe_ops.arch import ARCHS, READS, arch_of, runs
from moe_ops.prep import decide, table
from moe_ops.prep.decide import PATHS
from moe_ops.prep.source import SOURCES
from moe_ops.testing import FORMS


@pytest.mark.parametrize("backend", ["auto", *READS])
@pytest.mark.parametrize("arch", ARCHS)
def test_decide_gives_the_same_answer_at_load_and_at_run(arch, backend):
    for source in SOURCES:
        for recipe, scale_format in FORMS:
            able = runs(recipe, scale_format, arch, backend)
            wanted = dict(recipe=recipe, scale_format=scale_format, device=arch, backend=backend)
            if not able:
                with pytest.raises(NotImplementedError, match="decide: backend must be one that reads"):
                    decide(source, **wanted)
                continue
            path = decide(source, **wanted)
            assert (path.source, path.recipe, path.scale_format) == (source, recipe, scale_format)
    if backend in ("auto", "reference") or arch in READS[backend]:
        for source in SOURCES:
            wanted = dict(device=arch, backend=backend)
            if backend == "deep_gemm" and (source, arch) == ("mxfp8", "sm90"):
                continue  # deep_gemm has no MXFP8 on Hopper; the refusal is tested above
            path = decide(source, **wanted)
            assert runs(path.recipe, path.scale_format, arch, backend)


@pytest.mark.parametrize(
    "source, arch, recipe, scale_format, name",
    [
        ("mxfp4", "cpu", "mxfp4", "ue8m0", "mxfp4"),
        ("mxfp4", "sm90", "fp8_block", "fp32", "mxfp4_to_fp8"),
        ("mxfp4", "sm100", "mxfp4", "ue8m0", "mxfp4"),
        ("mxfp4", "sm120", "mxfp4", "ue8m0", "mxfp4"),
        ("fp8_block", "sm90", "fp8_block", "fp32", "fp8_block"),
        ("fp8_block", "sm100", "fp8_block", "ue8m0", "requantise"),
        ("fp8_tensor", "sm90", "fp8_block", "fp32", "expand"),
        ("fp8_tensor", "sm100", "fp8_block", "ue8m0", "requantise"),
        ("fp8_channel", "sm90", "fp8_block", "fp32", "requantise"),
        ("mxfp8", "sm100", "mxfp8", "ue8m0", "mxfp8"),
        ("float", "sm100", "bf16", "none", "quantise"),
    ],
)
def test_decide_defaults(source, arch, recipe, scale_format, name):
    path = decide(source, device=arch)
    assert (path.recipe, path.scale_format, path.name) == (recipe, scale_format, name)


def test_decide_table_has_every_row():
    lines = table().splitlines()
    assert len(lines) == 1 + len(PATHS) == 1 + len(SOURCES) * len(FORMS)
    assert "mxfp4        fp8_block  fp32    mxfp4_to_fp8" in table()


@pytest.mark.parametrize(
    "call, error, sentence",
    [
        (
            lambda: decide("int4"),
            ValueError,
            "decide: source must be one of float, mxfp4, fp8_block, fp8_tensor, fp8_channel, mxfp8; got 'int4'. "
            "Choose one of them.",
        ),
        (
            lambda: decide("mxfp4", recipe="mxfp4", device="sm90", backend="deep_gemm"),
            NotImplementedError,
            "decide: backend must be one that reads mxfp4 with ue8m0 scales on sm90 (reference, triton); got "
            "'deep_gemm'. Choose one of them, or another recipe or scale format.",
        ),
        (
            lambda: decide("mxfp4", scale_format="fp32"),
            ValueError,
            "decide: scale_format must be one of ue8m0; got 'fp32'. These are the formats of recipe mxfp4.",
        ),
        (
            lambda: arch_of("load", "sm70"),
            ValueError,
            "load: arch must be one of cpu, sm90, sm100, sm120; got 'sm70'. Choose one of them.",
        ),
    ],
)
def test_decide_explains_itself(call, error, sentence):
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        call()


def test_decide_table_is_the_documented_one():
    document = Path(__file__).parents[2] / "docs" / "weights.md"
    assert table() in document.read_text()
