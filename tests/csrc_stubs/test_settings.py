"""The imitated card and the process-wide settings."""

import threading

import pytest

from moe_ops.csrc_stubs import deep_gemm


def test_arch_comes_from_the_environment(monkeypatch):
    assert deep_gemm.testing.get_arch_major() == 10
    monkeypatch.setenv("DG_STUB_ARCH", "12")
    assert deep_gemm.testing.get_arch_major() == 12


def test_arch_scope_wins_nests_and_ends(monkeypatch):
    monkeypatch.setenv("DG_STUB_ARCH", "12")
    with deep_gemm.arch(9):
        with deep_gemm.arch(10):
            assert deep_gemm.testing.get_arch_major() == 10
        assert deep_gemm.testing.get_arch_major() == 9
    assert deep_gemm.testing.get_arch_major() == 12
    with pytest.raises(KeyError), deep_gemm.arch(9):
        raise KeyError
    assert deep_gemm.testing.get_arch_major() == 12


def test_arch_scope_belongs_to_its_thread():
    seen = []
    with deep_gemm.arch(9):
        thread = threading.Thread(target=lambda: seen.append(deep_gemm.testing.get_arch_major()))
        thread.start()
        thread.join()
    assert seen == [10]


def test_arch_explains_itself(monkeypatch, refuses):
    with (
        refuses(
            "arch: major must be one of 9, 10, 12; got 8.",
            "Give the major number of the compute capability to imitate.",
        ),
        deep_gemm.arch(8),
    ):
        pass
    monkeypatch.setenv("DG_STUB_ARCH", "90")
    with refuses(
        "deep_gemm: DG_STUB_ARCH must be one of 9, 10, 12; got '90'.",
        "Set the major number of the compute capability to imitate.",
    ):
        deep_gemm.get_num_sms()


def test_settings_keep_what_was_set():
    deep_gemm.set_pdl(True)
    deep_gemm.set_tc_util(80)
    deep_gemm.set_num_sms(100)
    deep_gemm.use_deterministic_algorithms(True)
    deep_gemm.set_mk_alignment_for_contiguous_layout(64)
    deep_gemm.set_ignore_compile_dims(True)
    deep_gemm.set_block_size_multiple_of(16)
    assert deep_gemm.settings._settings.block_size_multiple_of == (16, 16)
    deep_gemm.set_block_size_multiple_of((16, 32))
    assert deep_gemm.settings._settings.block_size_multiple_of == (16, 32)
    assert deep_gemm.settings._settings.ignore_compile_dims
    assert deep_gemm.get_pdl() and deep_gemm.get_deterministic_algorithms()
    assert (deep_gemm.get_tc_util(), deep_gemm.get_num_sms()) == (80, 100)
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == 64
    assert deep_gemm.get_k_alignment_for_contiguous_layout() == 64


def test_settings_defaults():
    assert not deep_gemm.get_pdl() and not deep_gemm.get_deterministic_algorithms()
    assert deep_gemm.get_tc_util() == 100
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 128
    for major, num_sms in {9: 132, 10: 148, 12: 188}.items():
        with deep_gemm.arch(major):
            assert deep_gemm.get_num_sms() == num_sms


def test_settings_explain_themselves(refuses):
    with refuses(
        "set_num_sms: new_num_sms must be in 1..148, the multiprocessors of the card; got 149.",
        "Clamp it.",
    ):
        deep_gemm.set_num_sms(149)
    with refuses("set_tc_util: new_tc_util must be in 0..100; got 101. Give percent."):
        deep_gemm.set_tc_util(101)
    with refuses(
        "set_mk_alignment_for_contiguous_layout: new_value must be positive; got 0.",
        "The default is 128.",
    ):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


@pytest.mark.parametrize(
    "major, expected_m, num_groups, block",
    [
        (9, None, None, 128),
        (9, 1, 8, 128),
        (10, None, None, 224),
        (10, 225, None, 224),
        (10, 192, None, 192),
        (10, 193, None, 224),
        (10, 1, None, 32),
        (10, 512, 8, 64),
        (10, 513, 8, 96),
        (10, 64, 0, 64),
        (12, None, None, 128),
        (12, 65, None, 128),
        (12, 64, None, 64),
        (12, 32, 4, 32),
    ],
)
def test_theoretical_alignment(major, expected_m, num_groups, block):
    with deep_gemm.arch(major):
        theoretical = deep_gemm.get_theoretical_mk_alignment_for_contiguous_layout
        assert theoretical(expected_m, num_groups) == block
