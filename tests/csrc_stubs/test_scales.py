"""transform_sf_into_required_layout: what each card reads, and what it refuses."""

import pytest
import torch

from moe_ops.csrc_stubs import deep_gemm

OP = "transform_sf_into_required_layout"
transform = deep_gemm.transform_sf_into_required_layout
pack = deep_gemm.get_mn_major_tma_aligned_packed_ue8m0_tensor
FIX_RECIPE = "Check the recipe, and which dtype the scales are in."


@pytest.mark.parametrize("groups", [None, 1, 3])
@pytest.mark.parametrize("mn, k", [(128, 512), (510, 1024), (7, 1152), (130, 640)], ids=str)
def test_sm90_rows_become_mn_major_and_blocks_stay(groups, mn, k, random):
    lead = () if groups is None else (groups,)
    with deep_gemm.arch(9):
        rows = torch.randn(*lead, mn, k // 128)
        out = transform(rows, mn, k, (1, 128), groups)
        assert torch.equal(out, rows)
        assert torch.equal(transform(rows, mn, k, (1, 128, 128), groups, True), rows)
        assert out.stride(-1) == deep_gemm.get_tma_aligned_size(mn, 4)
        blocks = torch.randn(*lead, -(-mn // 128), k // 128)
        assert transform(blocks, mn, k, (128, 128), groups) is blocks
        assert transform(blocks, mn, k, (1, 128, 128), groups, is_sfa=False) is blocks


@pytest.mark.parametrize("major", [10, 12])
@pytest.mark.parametrize("groups", [None, 2])
@pytest.mark.parametrize("gran_k", [32, 128])
@pytest.mark.parametrize("mn, k", [(128, 512), (510, 1024), (7, 1152), (130, 96)], ids=str)
def test_blackwell_packs_rows_and_repeats_blocks(major, groups, gran_k, mn, k, random):
    lead, width = () if groups is None else (groups,), -(-k // gran_k)
    with deep_gemm.arch(major):
        rows = random.powers(*lead, mn, width)
        words = transform(rows, mn, k, (1, gran_k), groups)
        assert torch.equal(words, pack(rows))
        assert transform(words, mn, k, (1, gran_k), groups) is words
        blocks = random.powers(*lead, -(-mn // 128), width)
        words = transform(blocks, mn, k, (1, 128, gran_k), groups, is_sfa=False)
        assert words.shape == (*lead, mn, -(-width // 4))
        every_row = torch.stack([blocks[..., row // 128, :] for row in range(mn)], -2)
        assert torch.equal(words, pack(every_row))


def test_disable_ue8m0_cast_keeps_fp32():
    rows, blocks = torch.randn(7, 4), torch.randn(1, 4)
    assert torch.equal(transform(rows, 7, 512, (1, 128), disable_ue8m0_cast=True), rows)
    assert transform(blocks, 7, 512, (128, 128), disable_ue8m0_cast=True) is blocks


def test_psum_layout_passes_rows_between_groups_by(random):
    rows = random.powers(256, 4)
    rows[5:128] = 1.5
    words = transform(
        rows,
        256,
        512,
        (1, 128),
        psum_layout=torch.tensor([5, 256], dtype=torch.int32),
    )
    assert (words[5:128] == 0).all()


def test_scale_that_cannot_be_packed_is_named(random, refuses):
    rows = random.powers(2, 8, 4)
    rows[1, 3, 2] = 0.0137
    with refuses(
        f"{OP}: sf[1, 3, 2] must be a positive power of two; got {rows[1, 3, 2].item()!r}.",
        "Round scales up with ceil_to_ue8m0 before quantising with them;",
        "rounding only the scale changes every value of its group.",
    ):
        transform(rows, 8, 512, (1, 128), 2)


def test_recipe_explains_itself(refuses):
    sf = torch.ones(8, 4)
    fix = "Give (gran_mn_a, gran_mn_b, gran_k) with is_sfa, or (gran_mn, gran_k)."
    with refuses(f"{OP}: recipe must be of length 2 or 3; got (1,).", fix):
        transform(sf, 8, 512, (1,))
    rule = "is_sfa must be given with a recipe of three, and only then"
    with refuses(f"{OP}: {rule}; got None with recipe (1, 128, 128).", fix):
        transform(sf, 8, 512, (1, 128, 128))
    with refuses(f"{OP}: {rule}; got True with recipe (1, 128).", fix):
        transform(sf, 8, 512, (1, 128), is_sfa=True)


def test_recipes_without_a_kernel_explain_themselves(refuses):
    fix = "Choose a recipe this card has a kernel for."
    hopper = "float32 1x128 or 128x128 on sm90"
    blackwell = "float32 with 32 or 128 along k, or int32 with 1x32 or 1x128, on sm100"
    with deep_gemm.arch(9):
        with refuses(
            f"{OP}: sf must be {hopper}; got float32 with 1x32. {fix}",
            kind=NotImplementedError,
        ):
            transform(torch.ones(8, 16), 8, 512, (1, 32))
        with refuses(
            f"{OP}: sf must be {hopper}; got int32 with 1x128. {fix}",
            kind=NotImplementedError,
        ):
            transform(pack(torch.ones(8, 4)), 8, 512, (1, 128))
    with refuses(
        f"{OP}: sf must be {blackwell}; got float32 with 1x64. {fix}",
        kind=NotImplementedError,
    ):
        transform(torch.ones(8, 8), 8, 512, (1, 64))
    with refuses(
        f"{OP}: sf must be {blackwell}; got int32 with 128x128. {fix}",
        kind=NotImplementedError,
    ):
        transform(pack(torch.ones(1, 4)), 8, 512, (128, 128))
    with refuses(
        f"{OP}: disable_ue8m0_cast must be False on sm100 with this recipe; got True.",
        "Only 1x128 and 128x128 stay fp32.",
    ):
        transform(torch.ones(8, 16), 8, 512, (1, 32), disable_ue8m0_cast=True)


def test_dtype_and_shape_explain_themselves(refuses):
    with refuses(
        f"{OP}: sf must be float32 or int32; got bfloat16.",
        "UE8M0 bytes are packed four to an int32.",
        kind=TypeError,
    ):
        transform(torch.ones(8, 4).bfloat16(), 8, 512, (1, 128))
    with refuses(
        f"{OP}: sf must be of shape (8, 4) for mn=8, k=512, float32, 1x128 a scale; got (8, 1).",
        FIX_RECIPE,
    ):
        transform(torch.ones(8, 1), 8, 512, (1, 128))
    with refuses(
        f"{OP}: sf must be of shape (2, 1, 4) for mn=8, k=512, float32, 128x128 a scale;",
        f"got (1, 4). {FIX_RECIPE}",
    ):
        transform(torch.ones(1, 4), 8, 512, (128, 128), 2)
    with refuses(
        f"{OP}: sf must be of shape (8, 2) for mn=8, k=1024, int32, 1x128 a scale; got (8, 8).",
        FIX_RECIPE,
    ):
        transform(torch.ones(8, 8).int(), 8, 1024, (1, 128))


def test_strides_explain_themselves(random, refuses):
    words = pack(random.powers(6, 8))
    with refuses(
        f"{OP}: sf must be MN-major, strides (1, 8); got (2, 1).",
        "Pass what the packer returned: not sliced, not made contiguous.",
    ):
        transform(words.contiguous(), 6, 1024, (1, 128))
    words = pack(random.powers(2, 6, 4))
    with refuses(
        f"{OP}: sf must be MN-major, strides (8, 1, 8); got (6, 1, 1).",
        "Restore the stride of the width-1 dimension with as_strided.",
    ):
        transform(words.contiguous(), 6, 512, (1, 128), 2)
    words = pack(random.powers(4, 6, 8))[::2]
    with refuses(
        f"{OP}: sf must be MN-major, strides (16, 1, 8); got (32, 1, 8).",
        "Pass what the packer returned: not sliced, not made contiguous.",
    ):
        transform(words, 6, 1024, (1, 128), 2)
    one_row = pack(random.powers(1, 8))
    assert transform(one_row, 1, 1024, (1, 128)) is one_row


def test_block_strides_explain_themselves(refuses):
    blocks = torch.randn(2, 3, 4)
    with deep_gemm.arch(9):
        turned = blocks.mT.contiguous().mT
        assert transform(turned, 384, 512, (128, 128), 2) is turned
        sliced = torch.randn(2, 3, 8)[..., :4]
        with refuses(
            f"{OP}: sf must be contiguous, last strides (4, 1) or (1, 3); got (24, 8, 1).",
            "Call .contiguous().",
        ):
            transform(sliced, 384, 512, (128, 128), 2)
        with refuses(
            f"{OP}: sf must be contiguous, last strides (4, 1) or (1, 3); got (0, 4, 1).",
            "Call .contiguous().",
        ):
            transform(blocks[:1].expand(2, 3, 4), 384, 512, (128, 128), 2)
