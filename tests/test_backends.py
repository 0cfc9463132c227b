"""Which backend runs what: auto's rule, the override, refusals in words, and deep_gemm against its stand-in."""

import subprocess
import sys

import pytest
import torch

from moe_ops import backends, env
from moe_ops.csrc_stubs import deep_gemm as stub
from moe_ops.kernels import deep_gemm
from moe_ops.sizes import Layer
from moe_ops.testing import FORMS, LayerCase, poisoned_memory, relative_error

CUDA = torch.device("cuda")
GEMM = {"reference": "reference", "triton": "triton", "deep_gemm": "deep_gemm"}
STAGE = {"reference": "reference", "triton": "triton"}

# What deep_gemm multiplies on which generation of card (arch.READS).
ON_ARCH = [
    (9, "bf16", "none"),
    (9, "fp8_block", "fp32"),
    (10, "bf16", "none"),
    (10, "fp8_block", "ue8m0"),
    (10, "mxfp8", "ue8m0"),
    (10, "mxfp4", "ue8m0"),
    (12, "fp8_block", "ue8m0"),
]


def form(recipe: str, scale: torch.dtype | None, rows: int = 512, K: int = 128) -> dict:
    """Arguments of a contiguous GEMM over 4 experts, as far as the choice looks at them."""
    w_scale = None if scale is None else torch.empty(0, dtype=scale)
    return {"recipe": recipe, "x": torch.empty(rows, K), "w": torch.empty(4, 1, K), "w_scale": w_scale}


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
@pytest.mark.parametrize("major, recipe, scale_format", ON_ARCH)
def test_deep_gemm_calls_pass_the_library_checks(major, recipe, scale_format, layout):
    """The whole layer through the stand-in, which refuses what the library would refuse; K and I pack to 2 words."""
    case = LayerCase(recipe, scale_format, layout=layout, T=50, K=1024, I=640, E=6, top_k=3)
    inputs, weights = case.build()
    with deep_gemm.use(stub), stub.arch(major):
        got = case.run(inputs, weights, backend="deep_gemm")
        with poisoned_memory(0x7F):
            assert torch.equal(case.run(inputs, weights, backend="deep_gemm"), got)
    # the stand-in sums in float64, the reference in float32: another rounding now and then, and its echo in fp8
    assert relative_error(got, case.run(inputs, weights, backend="reference")) < 0.01
    assert relative_error(got, case.judge(inputs, weights)) <= case.max_diff


def test_deep_gemm_gets_the_stride_of_a_width_one_scale():
    """A packed scale of one word a row comes back from a file or another device with the stride of that axis reset."""
    case = LayerCase("fp8_block", "ue8m0", T=9, K=512, I=512)
    inputs, weights = case.build()
    reset = {
        name: t.clone().as_strided(t.shape, (t.shape[1], 1, 1)) if name.endswith("scale") else t
        for name, t in weights.tensors().items()
        if t is not None
    }
    with deep_gemm.use(stub), stub.arch(10):
        expected = case.run(inputs, weights, backend="deep_gemm")
        got = torch.ops.moe.fused_deepgemm(*inputs, **reset, recipe="fp8_block", backend="deep_gemm")
    assert torch.equal(got, expected)


def test_deep_gemm_without_tokens_calls_nothing():
    for layout in ("contiguous", "masked"):
        case = LayerCase("fp8_block", layout=layout, T=0)
        inputs, weights = case.build()
        with deep_gemm.use(stub), stub.arch(9):
            assert case.run(inputs, weights, backend="deep_gemm").shape == (0, case.K)


def test_auto_prefers_by_its_rule(monkeypatch):
    works = deep_gemm.Probe(True, "0.2.0", "")
    monkeypatch.setattr(deep_gemm, "probe", lambda: works)
    monkeypatch.setattr(backends, "_check_triton", lambda op, device: None)
    for capability, recipe, scale, expected in (
        ((9, 0), "bf16", None, "deep_gemm"),
        ((9, 0), "fp8_block", torch.float32, "deep_gemm"),
        ((9, 0), "fp8_block", torch.int32, "triton"),
        ((9, 0), "mxfp8", torch.int32, "triton"),
        ((10, 0), "fp8_block", torch.int32, "deep_gemm"),
        ((10, 3), "mxfp4", torch.int32, "deep_gemm"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert backends.pick("gemm", "auto", CUDA, GEMM, form(recipe, scale)) == expected
        assert backends.pick("topk", "auto", CUDA, STAGE, {}) == "triton"
        assert backends.pick("topk", "deep_gemm", CUDA, STAGE, {}) == "triton"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    block = form("fp8_block", torch.int32)
    assert backends.pick("grouped_gemm_masked", "auto", CUDA, GEMM, block) == "triton"
    assert backends.pick("grouped_gemm_contiguous", "auto", CUDA, GEMM, block) == "deep_gemm"
    assert backends.pick("gemm", "auto", torch.device("cpu"), GEMM, form("bf16", None)) == "reference"


def test_auto_takes_triton_for_few_rows_and_odd_sizes(monkeypatch):
    monkeypatch.setattr(deep_gemm, "probe", lambda: deep_gemm.Probe(True, "0.2.0", ""))
    monkeypatch.setattr(backends, "_check_triton", lambda op, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    few, many = form("bf16", None, rows=384), form("bf16", None, rows=512)
    assert backends.pick("gemm", "auto", CUDA, GEMM, few) == "triton"
    assert backends.pick("gemm", "deep_gemm", CUDA, GEMM, few) == "deep_gemm"
    assert backends.pick("gemm", "auto", CUDA, GEMM, many) == "deep_gemm"
    for expected_m, backend in ((backends.FEW_ROWS, "triton"), (backends.FEW_ROWS + 1, "deep_gemm")):
        assert backends.pick("gemm", "auto", CUDA, GEMM, {**many, "expected_m": expected_m}) == backend
    assert backends.pick("gemm", "auto", CUDA, GEMM, form("bf16", None, K=80)) == "triton"


def test_deep_gemm_refused_in_words(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for device, reason in (
        (CUDA, "deep_gemm does not read mxfp4 with ue8m0 scales on sm90."),
        (torch.device("cpu"), "deep_gemm needs a CUDA card, and the tensors are on cpu."),
    ):
        with pytest.raises(NotImplementedError) as caught:
            backends.pick("grouped_gemm_masked", "deep_gemm", device, GEMM, form("mxfp4", torch.int32))
        assert str(caught.value) == (
            f"grouped_gemm_masked: backend must be one that runs here; got 'deep_gemm'. {reason} "
            "Pass backend='auto' for what runs here."
        )


@pytest.mark.parametrize("layout", ["gathered", "direct"])
def test_deep_gemm_is_refused_where_it_has_no_kernels(layout):
    case = LayerCase("fp8_block", T=3, layout=layout)
    inputs, weights = case.build()
    with pytest.raises(NotImplementedError) as caught:
        case.run(inputs, weights, backend="deep_gemm")
    assert str(caught.value) == (
        f"gated_gemm_{layout}: backend must be one that runs here; got 'deep_gemm'. "
        "deep_gemm has no kernels for the gathered and direct layouts. Pass backend='auto' for what runs here."
    )


def test_triton_on_a_cpu_refused_in_words():
    pytest.importorskip("triton", reason="the extra `triton`")
    with pytest.raises(NotImplementedError) as caught:
        backends.pick("topk", "triton", torch.device("cpu"), STAGE, {})
    assert str(caught.value) == (
        "topk: backend 'triton' must have its tensors on a CUDA device; got cpu. Pass backend='auto' or 'reference' "
        "there, or start Python with TRITON_INTERPRET=1 to run the kernels in Triton's interpreter."
    )


def test_override_by_environment(monkeypatch):
    monkeypatch.setattr(backends, "_check_triton", lambda op, device: None)
    monkeypatch.setenv("MOE_OPS_BACKEND", "triton")
    assert backends.pick("topk", "auto", torch.device("cpu"), STAGE, {}) == "triton"
    assert backends.pick("topk", "reference", torch.device("cpu"), STAGE, {}) == "reference"
    monkeypatch.setenv("MOE_OPS_BACKEND", "cutlass")
    with pytest.raises(ValueError) as caught:
        backends.pick("topk", "auto", torch.device("cpu"), STAGE, {})
    assert str(caught.value) == (
        "topk: MOE_OPS_BACKEND must be one of auto, reference, triton, deep_gemm; got 'cutlass'. "
        "Unset it, or choose one of them."
    )


@pytest.mark.parametrize(
    "body, said",
    [
        ("import os; os.abort()", "the process ended with code -6"),
        ("raise RuntimeError('dim == 2 or dim == 3')", "RuntimeError: dim == 2 or dim == 3"),
    ],
    ids=["dies", "raises"],
)
def test_probe_survives_a_library_built_for_another_torch(tmp_path, monkeypatch, body, said):
    """The small call runs in a process of its own: a library that kills it is a sentence here."""
    (tmp_path / "deep_gemm.py").write_text(body)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = f"import deep_gemm\n{deep_gemm._SMALL_CALL}"
    monkeypatch.setattr(deep_gemm, "_SMALL_CALL", script)
    probe = deep_gemm.try_out("0.2.2")
    assert not probe.works
    start = f"deep_gemm 0.2.2 fails its first call under torch {torch.__version__}: {said}."
    assert probe.reason.startswith(start) and "backend='triton'" in probe.reason


def test_probe_result_is_kept_and_a_broken_one_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_OPS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(deep_gemm, "_installed_version", lambda: "0.2.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    made = []

    def try_out(version):
        made.append(version)
        return deep_gemm.Probe(True, version, "fine")

    monkeypatch.setattr(deep_gemm, "try_out", try_out)
    for _ in range(2):
        deep_gemm.probe.cache_clear()
        assert deep_gemm.probe().works
    assert made == ["0.2.0"]
    (kept,) = (tmp_path / "cache").iterdir()
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    kept.write_text('{"works": tr')
    deep_gemm.probe.cache_clear()
    assert deep_gemm.probe().works and made == ["0.2.0"] * 2
    deep_gemm.probe.cache_clear()


def test_import_needs_neither_triton_nor_deep_gemm():
    script = """
import sys
sys.modules["triton"] = sys.modules["deep_gemm"] = None
import torch, moe_ops
w = moe_ops.prepare_weights(torch.randn(4, 256, 128), torch.randn(4, 128, 128), recipe="fp8_block")
print(tuple(moe_ops.MoELayer(torch.randn(4, 128), w, top_k=2)(torch.randn(5, 128)).shape))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "(5, 128)", done.stderr


def test_every_form_has_kernels_on_every_card_and_deep_gemm_those_that_it_reads():
    from moe_ops.arch import ARCHS, runs

    for name in ARCHS:
        assert all(runs(*form, name, "reference") for form in FORMS)
        assert all(runs(*form, name, "triton") == (name != "cpu") for form in FORMS)
    read = {
        (major, *form)
        for major, name in ((9, "sm90"), (10, "sm100"))
        for form in FORMS
        if runs(*form, name, "deep_gemm")
    }
    assert read == {form for form in ON_ARCH if form[0] != 12}
    assert not any(runs(*form, "cpu", "deep_gemm") for form in FORMS)


def test_an_empty_override_is_none(monkeypatch):
    monkeypatch.setenv("MOE_OPS_BACKEND", "")
    assert env.backend() is None


def test_what_auto_gives_the_gemms_of_a_layer(monkeypatch):
    """By the rows of the whole call, as pick() does for each GEMM."""
    monkeypatch.setattr(deep_gemm, "probe", lambda: deep_gemm.Probe(True, "0.2.0", ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))

    def taken(T, layout, recipe="fp8_block", scale_format="fp32"):
        return backends.of_layer(Layer(T, 2, 4, 256, 128, recipe, scale_format, layout), CUDA)

    assert [taken(T, "masked") for T in (16, 17)] == ["triton", "deep_gemm"]
    assert [taken(T, "contiguous") for T in (1, 2, 200)] == ["triton", "deep_gemm", "deep_gemm"]
    assert {taken(200, "gathered"), taken(200, "contiguous", "mxfp4", "ue8m0")} == {"triton"}
    assert backends.of_layer(Layer(2, 2, 4, 256, 128, "bf16", "none", "direct"), torch.device("cpu")) == "reference"
