"""Scales of the GEMMs: shapes, strides and dtypes per recipe and generation of card.

A recipe is (gran_mn_a, gran_mn_b, gran_k), or one (gran_mn, gran_k) an operand: how many rows and
how many values along k share a scale.
"""

from dataclasses import replace

import torch

from ._arch import arch_major
from ._check import require, short, sizes
from ._matrix import Matrix
from ._pack import pack_ue8m0, tma_aligned_size, to_mn_major

Recipe = tuple[int, int, int]
RecipePair = tuple[int, int]
Quantised = tuple[torch.Tensor, torch.Tensor]  # values and their scales
# Both operands' scales, recipe, recipe_a, recipe_b, disable_ue8m0_cast: what a call says of them.
Scaling = tuple[
    torch.Tensor,
    torch.Tensor,
    Recipe | None,
    RecipePair | None,
    RecipePair | None,
    bool,
]


def split_pair(op: str, name: str, operand: Quantised) -> Quantised:
    """(values, scale). The library pairs a lone tensor with a scale no recipe accepts."""
    ok = isinstance(operand, (tuple, list)) and len(operand) == 2
    got = type(operand).__name__
    fix = "bf16 values without scales go to the bf16 functions."
    require(ok, op, name, "a pair (values, scale)", got, fix, TypeError)
    return operand[0], operand[1]


def default_recipe(op: str, sfa: torch.Tensor, sfb: torch.Tensor) -> Recipe:
    """Without one: 128 along k, and 128x128 blocks if the weights have fp32 scales."""
    kinds = f"{short(sfa.dtype)} for a, {short(sfb.dtype)} for b"
    if arch_major() == 9:
        ok = sfa.dtype == sfb.dtype == torch.float32
        fix = "Unpacked scales go in on sm90."
        require(ok, op, "scales", "float32 for a and b on sm90", kinds, fix, TypeError)
        return 1, 128, 128
    ok = sfb.dtype in (torch.float32, torch.int32)
    fix = "Pack powers of two, or pass fp32."
    require(ok, op, "b's scale", "float32 or int32", kinds, fix, TypeError)
    return (1, 128, 128) if sfb.dtype == torch.float32 else (1, 1, 128)


def check_layout(
    op: str,
    name: str,
    sf: torch.Tensor,
    mn: int,
    k: int,
    gran_mn: int,
    gran_k: int,
    num_groups: int | None,
) -> None:
    """dtype and shape ([G,] ceil(mn / gran_mn), ceil(k / gran_k)), four times narrower if int32."""
    fix = "UE8M0 bytes are packed four to an int32."
    ok = sf.dtype in (torch.float32, torch.int32)
    require(ok, op, name, "float32 or int32", short(sf.dtype), fix, TypeError)
    width = gran_k if sf.dtype == torch.float32 else 4 * gran_k
    want = (-(-mn // gran_mn), -(-k // width))
    if num_groups is not None:
        want = (num_groups, *want)
    per = f"{short(sf.dtype)}, {gran_mn}x{gran_k} a scale"
    rule = f"of shape {sizes(want)} for mn={mn}, k={k}, {per}"
    fix = "Check the recipe, and which dtype the scales are in."
    require(tuple(sf.shape) == want, op, name, rule, sizes(sf.shape), fix)


def check_packed_strides(op: str, name: str, sf: torch.Tensor, mn: int) -> None:
    """MN-major words, mn padded to 4; a width of 1 is checked like any other."""
    padded = tma_aligned_size(mn, 4)
    want = (1, padded) if sf.dim() == 2 else (padded * sf.size(-1), 1, padded)
    ok = (sf.stride(-2) == 1 or mn == 1) and sf.stride(-1) == padded
    ok = ok and (sf.dim() == 2 or sf.stride(0) == want[0])
    fix = "Pass what the packer returned: not sliced, not made contiguous."
    if sf.size(-1) == 1:
        fix = "Restore the stride of the width-1 dimension with as_strided."
    rule = f"MN-major, strides {sizes(want)}"
    require(ok, op, name, rule, sizes(sf.stride()), fix)


def check_block_strides(op: str, name: str, sf: torch.Tensor) -> None:
    """fp32 block scales of sm90 weights: contiguous, or contiguous once transposed."""
    rows, columns = sf.shape[-2:]
    last = sf.stride()[-2:]
    ok = last == (columns, 1) or last == (1, rows)
    ok = ok and (sf.dim() == 2 or sf.stride(0) == rows * columns)
    rule = f"contiguous, last strides {sizes((columns, 1))} or {sizes((1, rows))}"
    require(ok, op, name, rule, sizes(sf.stride()), "Call .contiguous().")


def _transform(
    op: str,
    name: str,
    sf: torch.Tensor,
    mn: int,
    k: int,
    gran_mn: int,
    gran_k: int,
    num_groups: int | None,
    disable_ue8m0_cast: bool,
    psum_layout: torch.Tensor | None,
) -> torch.Tensor:
    check_layout(op, name, sf, mn, k, gran_mn, gran_k, num_groups)
    major = arch_major()
    plain = sf.dtype == torch.float32
    if plain and gran_k == 128 and gran_mn in (1, 128) and (major == 9 or disable_ue8m0_cast):
        if gran_mn == 1:
            return to_mn_major(op, name, sf)
        check_block_strides(op, name, sf)
        return sf
    if plain and gran_k in (32, 128) and major != 9:
        rule, fix = f"False on sm{major}0 with this recipe", "Only 1x128 and 128x128 stay fp32."
        require(not disable_ue8m0_cast, op, "disable_ue8m0_cast", rule, True, fix)
        if gran_mn != 1:
            sf = sf.index_select(-2, torch.arange(mn, device=sf.device) // gran_mn)
        return pack_ue8m0(op, name, sf, psum_layout)
    if sf.dtype == torch.int32 and gran_mn == 1 and gran_k in (32, 128) and major != 9:
        check_packed_strides(op, name, sf, mn)
        return sf
    known = "float32 1x128 or 128x128 on sm90"
    if major != 9:
        known = f"float32 with 32 or 128 along k, or int32 with 1x32 or 1x128, on sm{major}0"
    got = f"{short(sf.dtype)} with {gran_mn}x{gran_k}"
    fix = "Choose a recipe this card has a kernel for."
    require(False, op, name, known, got, fix, NotImplementedError)
    return sf


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Recipe | RecipePair,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
) -> torch.Tensor:
    """The scales as the GEMMs of this card read them.

    Args:
        sf: ([G,] ceil(mn / gran_mn), ceil(k / gran_k)) fp32, or packed int32.
        mn: rows of the operand.
        k: its values along k; packed e2m1 counts two to a byte.
        recipe: (gran_mn_a, gran_mn_b, gran_k) with is_sfa, or (gran_mn, gran_k) without.
        num_groups: G, None for a 2-D sf.
        is_sfa: whether sf belongs to a; only with a recipe of three.
        disable_ue8m0_cast: keep fp32 on any card (no GEMM of sm100 or sm120 takes the result).
        psum_layout: ends of the groups' rows; rows outside are not inspected.

    Returns:
        sm90: fp32, 1x128 MN-major, 128x128 as it was.
        sm100, sm120: ([G,] mn, ceil(k / gran_k / 4)) int32, MN-major, one row a row of the operand.
        Scales already in that form come back as they are.

    Raises:
        ValueError: shape, strides, or a scale that is no power of two where it must be packed.
        TypeError: dtype.
        NotImplementedError: a recipe that this card has no kernel for.
    """
    op = "transform_sf_into_required_layout"
    fix = "Give (gran_mn_a, gran_mn_b, gran_k) with is_sfa, or (gran_mn, gran_k)."
    require(len(recipe) in (2, 3), op, "recipe", "of length 2 or 3", recipe, fix)
    ok = (is_sfa is not None) == (len(recipe) == 3)
    rule = "given with a recipe of three, and only then"
    require(ok, op, "is_sfa", rule, f"{is_sfa} with recipe {recipe}", fix)
    gran_mn = recipe[0] if len(recipe) == 2 or is_sfa else recipe[1]
    return _transform(
        op,
        "sf",
        sf,
        mn,
        k,
        gran_mn,
        recipe[-1],
        num_groups,
        disable_ue8m0_cast,
        psum_layout,
    )


def with_scales(
    op: str,
    a: Matrix,
    b: Matrix,
    scaling: Scaling,
    psum_layout: torch.Tensor | None = None,
    dense: bool = False,
) -> tuple[Matrix, Matrix]:
    """The operands with their scales in the card's layout, after all checks of them."""
    sfa, sfb, recipe, recipe_a, recipe_b, disable_ue8m0_cast = scaling
    if recipe is None and recipe_a is None:
        recipe = default_recipe(op, sfa, sfb)
    got = f"recipe={recipe}, recipe_a={recipe_a}, recipe_b={recipe_b}"
    ok = (recipe_a is None) == (recipe_b is None) != (recipe is None)
    fix = "Give one recipe of three, or both pairs, or none."
    require(ok, op, "recipe", "alone, or recipe_a with recipe_b", got, fix)
    for name, given, length in (
        ("recipe", recipe, 3),
        ("recipe_a", recipe_a, 2),
        ("recipe_b", recipe_b, 2),
    ):
        ok = given is None or len(given) == length
        require(ok, op, name, f"of {length} numbers", given, "See scales.py for their meaning.")
    if recipe is not None:
        recipe_a, recipe_b = (recipe[0], recipe[2]), (recipe[1], recipe[2])
    assert recipe_a is not None and recipe_b is not None  # checked above

    scaled, kinds = [], []
    for name, operand, sf, (gran_mn, gran_k) in (("a", a, sfa, recipe_a), ("b", b, sfb, recipe_b)):
        sf = _transform(
            op,
            f"{name}'s scale",
            sf,
            operand.mn,
            operand.k,
            gran_mn,
            gran_k,
            operand.num_groups if operand.values.dim() == 3 else None,
            disable_ue8m0_cast,
            psum_layout if name == "a" else None,
        )
        kinds.append(sf.dtype)
        kept = gran_mn if sf.dtype == torch.float32 else 1
        scaled.append(replace(operand, scale=sf, gran_mn=kept, gran_k=gran_k))
    a, b = scaled
    if arch_major() != 9:
        got = f"{short(kinds[0])} for a, {short(kinds[1])} for b"
        rule = f"UE8M0 in the end on sm{arch_major()}0"
        ok, fix = kinds == [torch.int32] * 2, "Leave disable_ue8m0_cast False."
        require(ok, op, "scales", rule, got, fix, NotImplementedError)
    else:
        # The library would read scales of other granularities as if they were these.
        ok = a.gran_mn == 1 and (b.gran_mn == 128 or dense)
        rule = "(1, 128) for a and (128, 128) for b on sm90"
        got = f"{(a.gran_mn, a.gran_k)} and {(b.gran_mn, b.gran_k)}"
        require(ok, op, "recipe", rule, got, "Quantise weights in 128x128 blocks.")
    return a, b
