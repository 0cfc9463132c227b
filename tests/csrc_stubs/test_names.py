"""The interface: the library's names and arguments, the .pyi, what is left out."""

import ast
import importlib
import inspect
from pathlib import Path

import pytest

from moe_ops.csrc_stubs import deep_gemm

# Argument lists of sgl-deep-gemm 0.2.0.
_RECIPES = "recipe=None, recipe_a=None, recipe_b=None"
_PSUM = "use_psum_layout=False, ensure_zero_padding=True"
_EXPECTED = ", expected_m_for_psum_layout=None"
_CAST_UE8M0 = "disable_ue8m0_cast=False"
_FP8_DENSE = f"a, b, d, c=None, {_RECIPES}, compiled_dims='', {_CAST_UE8M0}, alpha=None"
_FP8_NN = f"a, b, d, grouped_layout, {_RECIPES}, compiled_dims='nk', {_CAST_UE8M0}, {_PSUM}"
_FP8_NT = _FP8_NN + _EXPECTED
_FP8_MASKED = f"a, b, d, masked_m, expected_m, {_RECIPES}, compiled_dims='nk', {_CAST_UE8M0}"
_BF16_DENSE = "a, b, d, c=None, compiled_dims='', alpha=None"
_BF16_NN = f"a, b, d, grouped_layout, compiled_dims='nk', {_PSUM}"
_BF16_NT = _BF16_NN + _EXPECTED
_BF16_MASKED = "a, b, d, masked_m, expected_m, compiled_dims='nk'"
_TRANSFORM = f"sf, mn, k, recipe, num_groups=None, is_sfa=None, {_CAST_UE8M0}, psum_layout=None"
_CAST = "x, use_ue8m0, gran_k=128"
_CAST_PACKED = _CAST + ", use_packed_ue8m0=False"
LIBRARY = {
    "fp8_fp4_gemm_nt fp8_fp4_gemm_nn fp8_fp4_gemm_tn fp8_fp4_gemm_tt": _FP8_DENSE,
    "fp4_gemm_nt fp8_gemm_nt fp8_gemm_nn fp8_gemm_tn fp8_gemm_tt": _FP8_DENSE,
    "m_grouped_fp8_fp4_gemm_nt_contiguous": _FP8_NT,
    "m_grouped_fp4_gemm_nt_contiguous m_grouped_fp8_gemm_nt_contiguous": _FP8_NT,
    "m_grouped_fp8_fp4_gemm_nn_contiguous m_grouped_fp8_gemm_nn_contiguous": _FP8_NN,
    "m_grouped_fp8_fp4_gemm_nt_masked fp8_m_grouped_gemm_nt_masked": _FP8_MASKED,
    "m_grouped_fp4_gemm_nt_masked m_grouped_fp8_gemm_nt_masked": _FP8_MASKED,
    "bf16_gemm_nt bf16_gemm_nn bf16_gemm_tn bf16_gemm_tt": _BF16_DENSE,
    "m_grouped_bf16_gemm_nt_contiguous": _BF16_NT,
    "m_grouped_bf16_gemm_nn_contiguous": _BF16_NN,
    "m_grouped_bf16_gemm_nt_masked bf16_m_grouped_gemm_nt_masked": _BF16_MASKED,
    "tf32_hc_prenorm_gemm": "a, b, d, sqr_sum, num_splits=None",
    "transform_sf_into_required_layout": _TRANSFORM,
    "get_mk_alignment_for_contiguous_layout get_m_alignment_for_contiguous_layout": "",
    "get_k_alignment_for_contiguous_layout get_num_sms get_tc_util get_pdl": "",
    "get_theoretical_mk_alignment_for_contiguous_layout": "expected_m=None, num_groups=None",
    "set_mk_alignment_for_contiguous_layout": "new_value",
    "set_block_size_multiple_of": "value",
    "get_tma_aligned_size": "mn, element_size",
    "get_mn_major_tma_aligned_tensor": "sf",
    "get_mn_major_tma_aligned_packed_ue8m0_tensor": "sf, psum_layout=None",
    "ceil_div align": "x, y",
    "ceil_to_ue8m0 pack_ue8m0_to_int": "x",
    "unpack_ue8m0_from_int": "packed_sf",
    "per_token_cast_to_fp8 per_token_cast_to_fp4": _CAST_PACKED,
    "per_block_cast_to_fp8 per_channel_cast_to_fp8": _CAST,
    "per_custom_dims_cast_to_fp8": "x, dims, use_ue8m0",
    "transpose_packed_fp4": "a",
    "cast_back_from_fp4": "packed, sf, gran_k=128, use_packed_ue8m0=False",
    "cast_back_from_fp8": "x_fp8, sf, gran_k=128, use_packed_ue8m0=False",
}
NAMES = {name: text for names, text in LIBRARY.items() for name in names.split()}


def arguments(function) -> str:
    """`a, b=None`: names, order and defaults, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)


@pytest.mark.parametrize("name", NAMES)
def test_names_have_the_librarys_arguments(name):
    assert arguments(getattr(deep_gemm, name)) == NAMES[name]
    assert name in deep_gemm.__all__


def test_names_are_documented():
    obvious = {"ceil_div", "get_tc_util", "get_pdl", "get_deterministic_algorithms"}
    for name in set(deep_gemm.__all__) - obvious:
        assert getattr(deep_gemm, name).__doc__, name


def test_names_of_submodules():
    for name in ("utils.layout", "utils.math", "testing.numeric", "testing.utils"):
        module = importlib.import_module(f"moe_ops.csrc_stubs.deep_gemm.{name}")
        assert module.__doc__
    assert deep_gemm.utils.layout.get_tma_aligned_size is deep_gemm.get_tma_aligned_size
    assert deep_gemm.utils.math.align is deep_gemm.align
    assert deep_gemm.__version__ == "0.2.0"


def test_names_not_here_say_so(refuses):
    with refuses(
        "deep_gemm: the stand-in has no fp8_einsum. It has what an expert layer calls:",
        "grouped and dense GEMMs, layouts of scales, casts and settings.",
        kind=AttributeError,
    ):
        _ = deep_gemm.fp8_einsum
    assert not hasattr(deep_gemm, "fp8_einsum")


def test_stub_file_lists_the_same_functions():
    tree = ast.parse(Path(deep_gemm.__file__).with_suffix(".pyi").read_text())
    listed = {"settings", "testing", "utils", *deep_gemm.utils.__all__}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            listed.add(node.name)
            here = getattr(deep_gemm, node.name)
            parameters = inspect.signature(here).parameters
            assert [argument.arg for argument in node.args.args] == list(parameters), node.name
            defaults = [ast.literal_eval(default) for default in node.args.defaults]
            have = [p.default for p in parameters.values() if p.default is not p.empty]
            assert defaults == have, node.name
            if node.name != "arch":  # contextmanager hides its return type
                returns = inspect.signature(here).return_annotation
                assert ast.unparse(node.returns) == inspect.formatannotation(returns)
        elif isinstance(node, ast.Assign):
            alias, target = node.targets[0].id, node.value.id
            listed.add(alias)
            assert getattr(deep_gemm, alias) is getattr(deep_gemm, target)
    assert listed == set(deep_gemm.__all__)
