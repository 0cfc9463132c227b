"""The stand-in of csrc_stubs against the real deep_gemm, on a card: `python tests/gpu/compare_deep_gemm.py OUT.json`.

Scale layouts, packing and casts must agree bit for bit over random shapes; GEMMs within the recipe's tolerance. Every
case is written to OUT.json with the card, the date and the versions. Exits 1 if one fails. Scales given to the packer
are powers of two: anything else traps inside the library and takes the CUDA context with it.
"""

import datetime
import importlib.metadata
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import deep_gemm
import torch
from packaging.version import Version

import moe_ops
from moe_ops import arch
from moe_ops.csrc_stubs import deep_gemm as stub
from moe_ops.testing import assert_bits_equal

LIBRARY = Version(importlib.metadata.version("sgl-deep-gemm"))
GEMM_TOLERANCE = 1e-3  # calc_diff, what the library's own tests allow for fp8

Case = tuple[str, Callable[[], float]]
"""(name, check): the check returns a difference, 0.0 for equal bits, or raises."""


def equal(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.stride() == want.stride() or 1 in want.shape, f"strides {got.stride()} instead of {want.stride()}"
    assert_bits_equal(got, want)
    return 0.0


def close(got: torch.Tensor, want: torch.Tensor) -> float:
    difference = float(stub.testing.calc_diff(got, want))
    assert difference <= GEMM_TOLERANCE, f"calc_diff {difference:.2e} above {GEMM_TOLERANCE}"
    return difference


def powers_of_two(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-40, 40, shape, device="cuda").float())


def layout_cases() -> Iterator[Case]:
    for shape in [(1, 4), (4, 1), (13, 6), (510, 30), (129, 33), (4096, 56), (3, 130, 5), (2, 510, 30), (8, 4, 1)]:
        sf = powers_of_two(*shape)
        name = "get_mn_major_tma_aligned_tensor"
        yield f"{name} {shape}", lambda sf=sf, f=name: equal(getattr(stub, f)(sf), getattr(deep_gemm, f)(sf))
        name = "get_mn_major_tma_aligned_packed_ue8m0_tensor"
        yield f"{name} {shape}", lambda sf=sf, f=name: equal(getattr(stub, f)(sf), getattr(deep_gemm, f)(sf))
        yield (
            f"moe::pack_scale {shape}",
            lambda sf=sf, f=name: equal(
                moe_ops.pack_scale(sf, sf.shape[-2], backend="reference"), getattr(deep_gemm, f)(sf)
            ),
        )
    for mn, k, groups in [(128, 512, None), (200, 1024, None), (256, 7168, 4), (130, 640, 3)]:
        for is_sfa, rows in ((True, mn), (False, -(-mn // 128))):
            lead = () if groups is None else (groups,)
            sf = powers_of_two(*lead, rows, -(-k // 128))
            arguments = dict(mn=mn, k=k, recipe=(1, 128, 128), num_groups=groups, is_sfa=is_sfa)
            yield (
                f"transform_sf_into_required_layout mn={mn} k={k} groups={groups} is_sfa={is_sfa}",
                lambda sf=sf, a=arguments: equal(
                    stub.transform_sf_into_required_layout(sf, **a),
                    deep_gemm.transform_sf_into_required_layout(sf, **a),
                ),
            )


def cast_cases() -> Iterator[Case]:
    for M, K in [(1, 512), (13, 1024), (129, 640), (512, 7168), (384, 2880)]:
        x = (torch.randn(M, K, device="cuda") * torch.rand(M, 1, device="cuda") * 8).bfloat16()
        for name in (
            "per_token_cast_to_fp8",
            "per_block_cast_to_fp8",
            "per_channel_cast_to_fp8",
            "per_token_cast_to_fp4",
        ):
            if name == "per_channel_cast_to_fp8" and M % 128:
                continue  # the library asserts whole groups
            if name == "per_token_cast_to_fp4" and LIBRARY < Version("0.2.0"):
                continue  # halfway values go to zero there, to even from 0.2.0 on; the stand-in has 0.2.0's interface
            for ue8m0 in (False, True):

                def check(x=x, f=name, ue8m0=ue8m0):
                    for got, want in zip(
                        getattr(stub.utils, f)(x, ue8m0), getattr(deep_gemm.utils, f)(x, ue8m0), strict=True
                    ):
                        equal(got, want)
                    return 0.0

                yield f"{name} M={M} K={K} ue8m0={ue8m0}", check
        yield (
            f"ceil_to_ue8m0 M={M} K={K}",
            lambda x=x: equal(
                stub.utils.math.ceil_to_ue8m0(x.float().abs()), deep_gemm.utils.math.ceil_to_ue8m0(x.float().abs())
            ),
        )


def fp8_rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(*shape, device="cuda").bfloat16().flatten(0, -2)
    q, sf = stub.utils.per_token_cast_to_fp8(x, False)
    return q.view(shape), stub.get_mn_major_tma_aligned_tensor(sf.view(*shape[:-1], -1))


def fp8_blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    *batch, N, K = shape
    w = torch.randn(*shape, device="cuda").bfloat16().view(-1, N, K)
    parts = [stub.utils.per_block_cast_to_fp8(one, False) for one in w]
    q, sf = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    return q.view(shape), sf.view(*batch, *sf.shape[1:])


def gemm_cases() -> Iterator[Case]:
    def run(name: str, d: torch.Tensor, *args, valid=None, **kwargs) -> float:
        got, want = torch.zeros_like(d), torch.zeros_like(d)
        getattr(stub, name)(*args[:2], got, *args[2:], **kwargs)
        getattr(deep_gemm, name)(*args[:2], want, *args[2:], **kwargs)
        torch.cuda.synchronize()
        return close(got, want) if valid is None else close(got[valid], want[valid])

    for E, N, K in [(4, 256, 512), (3, 512, 1024)]:
        labels = torch.tensor([0, 0, E - 1, 1], dtype=torch.int32, device="cuda").repeat_interleave(128)
        labels[200:256] = -1
        x, w = fp8_rows(512, K), fp8_blocks(E, N, K)
        d = torch.empty(512, N, dtype=torch.bfloat16, device="cuda")
        rows = labels >= 0
        yield (
            f"m_grouped_fp8_fp4_gemm_nt_contiguous E={E} N={N} K={K}",
            lambda x=x, w=w, d=d, m=labels, r=rows: run("m_grouped_fp8_fp4_gemm_nt_contiguous", d, x, w, m, valid=r),
        )
        bx, bw = torch.randn(512, K, device="cuda").bfloat16(), torch.randn(E, N, K, device="cuda").bfloat16()
        yield (
            f"m_grouped_bf16_gemm_nt_contiguous E={E} N={N} K={K}",
            lambda x=bx, w=bw, d=d, m=labels, r=rows: run("m_grouped_bf16_gemm_nt_contiguous", d, x, w, m, valid=r),
        )
        masked_m = torch.tensor([0, 1, 77, 128][:E], dtype=torch.int32, device="cuda")
        slots = torch.arange(128, device="cuda") < masked_m[:, None]
        slab = torch.empty(E, 128, N, dtype=torch.bfloat16, device="cuda")
        xm = fp8_rows(E, 128, K)
        yield (
            f"m_grouped_fp8_fp4_gemm_nt_masked E={E} N={N} K={K}",
            lambda x=xm, w=w, d=slab, m=masked_m, s=slots: run(
                "m_grouped_fp8_fp4_gemm_nt_masked", d, x, w, m, 64, valid=s
            ),
        )
        bm = torch.randn(E, 128, K, device="cuda").bfloat16()
        yield (
            f"m_grouped_bf16_gemm_nt_masked E={E} N={N} K={K}",
            lambda x=bm, w=bw, d=slab, m=masked_m, s=slots: run(
                "m_grouped_bf16_gemm_nt_masked", d, x, w, m, 64, valid=s
            ),
        )
        dense = torch.empty(200, N, dtype=torch.bfloat16, device="cuda")
        yield f"fp8_gemm_nt N={N} K={K}", partial(run, "fp8_gemm_nt", dense, fp8_rows(200, K), fp8_blocks(N, K))
        yield (
            f"bf16_gemm_nt N={N} K={K}",
            partial(run, "bf16_gemm_nt", dense, bx[:200].contiguous(), bw[0].contiguous()),
        )


def main(path: str) -> int:
    torch.manual_seed(0)
    results, failed = [], 0
    major, minor = arch.capability()
    with stub.arch(major):
        for cases in (layout_cases, cast_cases, gemm_cases):
            for name, check in cases():
                try:
                    row = {"case": name, "difference": check()}
                except Exception as error:
                    row = {"case": name, "error": "".join(traceback.format_exception_only(error)).strip()}
                    failed += 1
                results.append(row)
                print(row, flush=True)
    report = {
        "what": "csrc_stubs.deep_gemm against deep_gemm",
        "card": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "sgl-deep-gemm": str(LIBRARY),
        "cases": len(results),
        "failed": failed,
        "results": results,
    }
    with open(path, "w") as file:
        json.dump(report, file, indent=1)
    print(f"{len(results) - failed} of {len(results)} cases agree")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
