"""The product and the sums of squares before the hyper-connection's norm."""

import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm

OP = "tf32_hc_prenorm_gemm"
call = deep_gemm.tf32_hc_prenorm_gemm


def problem(m=5, n=24, k=320, splits=None):
    lead = () if splits is None else (splits,)
    return {
        "a": torch.randn(m, k).bfloat16(),
        "b": torch.randn(n, k),
        "d": torch.empty(*lead, m, n),
        "sqr_sum": torch.empty(*lead, m),
        "num_splits": splits,
    }


@pytest.mark.parametrize("major", [9, 10, 12])
@pytest.mark.parametrize(
    "splits, blocks",
    [(None, [5]), (1, [5]), (2, [3, 2]), (3, [2, 2, 1]), (5, [1] * 5), (7, [1] * 5 + [0] * 2)],
    ids=str,
)
def test_prenorm(major, splits, blocks, reference):
    """Ranges are whole blocks of 64 along k, the first ones one longer."""
    args = problem(splits=splits)
    with deep_gemm.arch(major):
        assert call(**args) is None
    start = 0
    for index, count in enumerate(blocks):
        columns = slice(64 * start, 64 * (start + count))
        start += count
        a, b = args["a"][:, columns].double(), args["b"][:, columns].double()
        d, sqr_sum = args["d"], args["sqr_sum"]
        if splits is not None:
            d, sqr_sum = d[index], sqr_sum[index]
        reference.close(d, reference.product(a.numpy(), b.numpy()))
        reference.close(sqr_sum, torch.tensor([sum(x * x for x in row) for row in a.tolist()]))


def test_prenorm_without_rows():
    call(**problem(m=0))


def test_prenorm_explains_itself(refuses):
    fix = "Allocate it from a's rows."
    table = [
        ({"a": problem()["a"].float()}, TypeError, "a must be bfloat16; got float32."),
        ({"b": problem()["b"].double()}, TypeError, "b must be float32; got float64."),
        ({"sqr_sum": torch.empty(5).double()}, TypeError, "sqr_sum must be float32; got float64."),
        ({"d": torch.empty(5, 24).bfloat16()}, TypeError, "d must be float32; got bfloat16."),
    ]
    fixes = [
        "Quantised values go to the fp8 functions.",
        "Convert it with .float().",
        "Allocate it in fp32.",
        "Allocate it in that dtype.",
    ]
    for (change, kind, sentence), end in zip(table, fixes, strict=True):
        with refuses(f"{OP}: {sentence} {end}", kind=kind):
            call(**{**problem(), **change})
    with refuses(f"{OP}: sqr_sum must be of shape (m) = (5); got (4). {fix}"):
        call(**{**problem(), "sqr_sum": torch.empty(4)})
    with refuses(f"{OP}: sqr_sum must be of shape (num_splits, m) = (2, 5); got (5). {fix}"):
        call(**{**problem(splits=2), "sqr_sum": torch.empty(5)})
    with refuses(f"{OP}: sqr_sum must be contiguous; got strides (2). Call .contiguous()."):
        call(**{**problem(), "sqr_sum": torch.empty(10)[::2]})
    with refuses(
        f"{OP}: d must be of shape (num_splits, m, n) = (2, 5, 24); got (2, 5, 16).",
        "Allocate it from the shapes of a and b.",
    ):
        call(**{**problem(splits=2), "d": torch.empty(2, 5, 16)})
    with refuses(f"{OP}: num_splits must be None or at least 1; got 0. None writes whole sums."):
        call(**problem(splits=0))
    with refuses(f"{OP}: n and k must be positive; got n=0, k=320. Skip the call."):
        call(**problem(n=0))
    with refuses(f"{OP}: k must be a multiple of 64; got 328. Pad a and b with zero columns."):
        call(**problem(k=328))
    with refuses(
        f"{OP}: n must be a multiple of 8 up to 128 on sm100; got 12. Pad b with zero rows.",
    ):
        call(**problem(n=12))
    with (
        deep_gemm.arch(9),
        refuses(f"{OP}: n must be a multiple of 8 up to 32 on sm90; got 40. Pad b with zero rows."),
    ):
        call(**problem(n=40))
