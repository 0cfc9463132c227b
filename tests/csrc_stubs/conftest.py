"""What the stub tests share: exact sentences, a clean state, references as loops over bits."""

import re
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm


@contextmanager
def _refuses(*sentence: str, kind: type[Exception] = ValueError):
    with pytest.raises(kind, match="^" + re.escape(" ".join(sentence)) + "$") as caught:
        yield
    assert caught.type is kind


@pytest.fixture
def refuses():
    """refuses(*parts, kind=ValueError): within, this exception, its text the parts and no more."""
    return _refuses


@pytest.fixture(autouse=True)
def _clean_state(monkeypatch):
    """No variable of the caller's shell, and the settings of a fresh process."""
    monkeypatch.delenv("DG_STUB_ARCH", raising=False)
    fresh = type(deep_gemm.settings._settings)()
    monkeypatch.setattr(deep_gemm.settings, "_settings", fresh)


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def e2m1(nibble: int) -> float:
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    value = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def ue8m0(byte: int) -> float:
    return float("nan") if byte == 255 else 2.0 ** (byte - 127)


def _dequantise(values, scale, gran_mn: int, gran_k: int) -> np.ndarray:
    """(mn, k) float64, element by element. values (mn, k) e4m3 or (mn, k / 2) int8, any strides."""
    rows = values.contiguous().view(torch.uint8).tolist()
    scales = scale.tolist()
    result = []
    for i, row in enumerate(rows):
        line = []
        for j in range(len(row) * (2 if values.dtype == torch.int8 else 1)):
            if values.dtype == torch.int8:
                value = e2m1(row[j // 2] >> 4 * (j % 2) & 15)
            else:
                value = e4m3(row[j])
            group = j // gran_k
            if scale.dtype == torch.int32:
                factor = ue8m0(scales[i // gran_mn][group // 4] >> 8 * (group % 4) & 255)
            else:
                factor = scales[i // gran_mn][group]
            line.append(value * factor)
        result.append(line)
    return np.array(result, dtype=np.float64)


def _product(a: np.ndarray, b: np.ndarray) -> torch.Tensor:
    """a @ b.T, one dot product an element."""
    result = np.empty((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            result[i, j] = np.dot(a[i], b[j])
    return torch.from_numpy(result)


def _close(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal up to the last bit of got's dtype: both sums are float64, rounded once."""
    assert got.shape == want.shape
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-23
    error = (got.double() - want).abs()
    assert (error <= step * want.abs() + 1e-30).all(), f"worst {error.max()}"


@pytest.fixture(scope="session")
def reference():
    return SimpleNamespace(
        e4m3=e4m3,
        e2m1=e2m1,
        ue8m0=ue8m0,
        dequantise=_dequantise,
        product=_product,
        close=_close,
    )


def _random_e4m3(*shape: int) -> torch.Tensor:
    return torch.randn(shape).clamp(-400, 400).to(torch.float8_e4m3fn)


def _random_e2m1(*shape: int) -> torch.Tensor:
    """int8, two random codes to a byte."""
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _powers(*shape: int) -> torch.Tensor:
    """fp32 powers of two between 2^-6 and 2^6."""
    exponents = torch.randint(121, 134, shape, dtype=torch.int32)
    return (exponents << 23).view(torch.float32)


@pytest.fixture(scope="session")
def random():
    return SimpleNamespace(e4m3=_random_e4m3, e2m1=_random_e2m1, powers=_powers)


E, M, N, K = 2, 16, 24, 512


def _ones_e4m3(*shape):
    return torch.ones(shape).to(torch.float8_e4m3fn)


def _contiguous(**changes):
    args = {
        "a": (_ones_e4m3(M, K), torch.ones(M, K // 128)),
        "b": (_ones_e4m3(E, N, K), torch.ones(E, 1, K // 128)),
        "d": torch.empty(M, N, dtype=torch.bfloat16),
        "grouped_layout": torch.zeros(M, dtype=torch.int32),
    }
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_contiguous(**{**args, **changes})


def _masked(**changes):
    args = {
        "a": (_ones_e4m3(E, M, K), torch.ones(E, M, K // 128)),
        "b": (_ones_e4m3(E, N, K), torch.ones(E, 1, K // 128)),
        "d": torch.empty(E, M, N, dtype=torch.bfloat16),
        "masked_m": torch.full((E,), M, dtype=torch.int32),
        "expected_m": M,
    }
    deep_gemm.m_grouped_fp8_fp4_gemm_nt_masked(**{**args, **changes})


def _bf16(**changes):
    args = {
        "a": torch.ones(M, K).bfloat16(),
        "b": torch.ones(E, N, K).bfloat16(),
        "d": torch.empty(M, N, dtype=torch.bfloat16),
        "grouped_layout": torch.zeros(M, dtype=torch.int32),
    }
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(**{**args, **changes})


@pytest.fixture(scope="session")
def calls():
    """Grouped calls that pass as they are; each takes the arguments to replace."""
    return SimpleNamespace(
        contiguous=_contiguous,
        masked=_masked,
        bf16=_bf16,
        e4m3=_ones_e4m3,
    )
