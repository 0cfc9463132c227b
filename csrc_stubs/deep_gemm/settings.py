"""Process-wide settings. Only the block size of the contiguous layout changes results."""

from dataclasses import dataclass

from ._arch import arch_major
from ._check import require

_SMS = {9: 132, 10: 148, 12: 188}  # H200, B200, RTX PRO 6000: what a whole card reports


@dataclass
class _Settings:
    num_sms: int | None = None  # None: all of the card's
    tc_util: int = 0
    pdl: bool = False
    deterministic: bool = False
    ignore_compile_dims: bool = False
    block_size_multiple_of: tuple[int, int] = (1, 1)
    mk_alignment: int = 128


_settings = _Settings()


def set_num_sms(new_num_sms: int) -> None:
    """Limits the GEMMs to this many multiprocessors. No effect on results."""
    most = _SMS[arch_major()]
    ok = 0 < new_num_sms <= most
    rule = f"in 1..{most}, the multiprocessors of the card"
    require(ok, "set_num_sms", "new_num_sms", rule, new_num_sms, "Clamp it.")
    _settings.num_sms = new_num_sms


def get_num_sms() -> int:
    """The limit set, else all multiprocessors of the imitated card."""
    return _settings.num_sms or _SMS[arch_major()]


def set_tc_util(new_tc_util: int) -> None:
    """Approximate tensor-core utilisation in percent; 0 stands for 100."""
    ok = 0 <= new_tc_util <= 100
    require(ok, "set_tc_util", "new_tc_util", "in 0..100", new_tc_util, "Give percent.")
    _settings.tc_util = new_tc_util


def get_tc_util() -> int:
    return _settings.tc_util or 100


def set_pdl(new_enable_pdl: bool) -> None:
    """Programmatic dependent launch. No effect here."""
    _settings.pdl = bool(new_enable_pdl)


def get_pdl() -> bool:
    return _settings.pdl


def use_deterministic_algorithms(new_value: bool) -> None:
    """No effect here: the stand-in is always deterministic."""
    _settings.deterministic = bool(new_value)


def get_deterministic_algorithms() -> bool:
    return _settings.deterministic


def set_ignore_compile_dims(new_value: bool) -> None:
    """Which sizes the compiled kernels bake in. No effect here."""
    _settings.ignore_compile_dims = bool(new_value)


def set_block_size_multiple_of(value: int | tuple[int, int]) -> None:
    """Constrains the kernels' tiles along m and n. No effect here."""
    m, n = (value, value) if isinstance(value, int) else value
    _settings.block_size_multiple_of = (m, n)


def get_mk_alignment_for_contiguous_layout() -> int:
    """Rows of a block of the contiguous layout: every expert's rows start at a multiple of it."""
    return _settings.mk_alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Sets the block size. Whether it has a kernel is checked by the GEMM, as in the library."""
    op = "set_mk_alignment_for_contiguous_layout"
    require(new_value > 0, op, "new_value", "positive", new_value, "The default is 128.")
    _settings.mk_alignment = new_value


def get_theoretical_mk_alignment_for_contiguous_layout(
    expected_m: int | None = None,
    num_groups: int | None = None,
) -> int:
    """The smallest block size that still covers the rows expected per group.

    Args:
        expected_m: rows in all groups together; None: the largest block.
        num_groups: None or 0: expected_m already is per group.
    """
    major = arch_major()
    if major == 9:
        return 128
    block = 224 if major == 10 else 128
    if expected_m is not None:
        rows = -(-expected_m // num_groups) if num_groups else expected_m
        while block > 32 and block - 32 >= rows:
            block -= 32
    return 128 if major == 12 and block == 96 else block


def check_block_rows(op: str, n: int) -> int:
    """The block size, or ValueError if this generation has no kernel with it.

    Args:
        n: columns of the GEMM; sm120 has no small block for a narrow one.
    """
    block, major = _settings.mk_alignment, arch_major()
    name = "get_mk_alignment_for_contiguous_layout()"
    fix = f"Use {get_theoretical_mk_alignment_for_contiguous_layout()}."
    if major == 9:
        ok = block % 128 == 0 or (block <= 64 and block % 16 == 0)
        require(ok, op, name, "16, 32, 48, 64 or a multiple of 128 on sm90", block, fix)
    elif major == 10:
        ok = block % 16 == 0 and block <= 240
        require(ok, op, name, "a multiple of 16 up to 240 on sm100", block, fix)
    else:
        ok = block in (32, 64) or block % 128 == 0
        require(ok, op, name, "32, 64 or a multiple of 128 on sm120", block, fix)
        ok = n > 32 or block >= 64
        require(ok, op, name, f"at least 64 on sm120 for n={n} <= 32", block, fix)
    return block
