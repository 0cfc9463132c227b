"""Every op's kernel on a card against the CPU reference: results full of NaN before, twice, with the same bits.

The small cases, those of the interpreter, are few programs each and may run under a sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --target-processes all \\
        python -m pytest -m gpu -k small tests/gpu/test_kernels.py

Without the variable, memory that torch keeps hides a read behind a tensor's end. --tool racecheck finds what two
threads do to the same shared memory. Parts: -k "small and gathered", -k "small and direct".
"""

import pytest
import torch

import moe_ops
from moe_ops.testing.kernel_cases import CASES, LARGE
from moe_ops.testing.kernel_check import check_kernel, moved, run

pytestmark = pytest.mark.gpu("tests/interp/test_kernels.py")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_small_kernel_matches_reference(case):
    check_kernel(case, "cuda")


@pytest.mark.parametrize("case", LARGE, ids=str)
def test_kernel_matches_reference_at_size(case):
    check_kernel(case, "cuda")


def test_auto_means_triton_on_a_card():
    x = torch.randn(3, 256, device="cuda")
    for got, want in zip(moe_ops.quantize(x), moe_ops.quantize(x, backend="triton"), strict=True):
        assert torch.equal(got.float(), want.float())


def test_topk_masks_what_the_reference_refuses():
    logits, table = torch.randn(4, 8), torch.tensor([[7, 0], [3, 99], [-5, 1]])
    tensors = dict(logits=logits, hash_table=table, token_ids=torch.tensor([0, 1, 2, 3]))
    weights, ids = moe_ops.topk(top_k=2, num_shared=1, **{name: value.cuda() for name, value in tensors.items()})
    assert ids.tolist() == [[7, 0, 8], [3, -1, 8], [-1, 1, 8], [-1, -1, 8]]
    assert weights[1].tolist() == [1, 0, 1] and weights[2].tolist() == [0, 1, 1] and weights[3].tolist() == [0, 0, 1]


@pytest.mark.parametrize("case", [case for case in LARGE if case.op == "grouped_gemm_masked"][:4], ids=str)
def test_the_hint_changes_no_value(case):
    """expected_m picks the tile; whichever it is, a product is the same up to the order of its sum."""
    arguments = {name: moved(value, "cuda") for name, value in case.build().items()}
    live = torch.arange(arguments["x"].shape[1], device="cuda") < arguments["masked_m"][:, None]
    results = [run(case.op, arguments | dict(expected_m=hint), "triton").views[0][live] for hint in (1, 20, 50, 999)]
    for other in results[1:]:
        torch.testing.assert_close(other.float(), results[0].float(), rtol=2**-6, atol=2**-6)


@pytest.mark.unpoisoned("a wait inside the fill would be blamed on the kernel")
@pytest.mark.parametrize("case", [case for case in LARGE if "uniform" in case.name or case.op == "topk"][::3], ids=str)
def test_kernels_never_wait_for_the_card(case):
    arguments = {name: moved(value, "cuda") for name, value in case.build().items()}
    run(case.op, arguments, "triton")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case.op, arguments, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
