"""Which generation of card the stand-in behaves like. The only file that looks at DG_STUB_ARCH."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ARCHS = (9, 10, 12)  # Hopper, data-centre Blackwell, workstation Blackwell
DEFAULT = 10

_forced: ContextVar[int | None] = ContextVar("deep_gemm_stub_arch", default=None)


def arch_major() -> int:
    """Major compute capability: the innermost `arch`, else DG_STUB_ARCH, else 10."""
    forced = _forced.get()
    if forced is not None:
        return forced
    text = os.environ.get("DG_STUB_ARCH", str(DEFAULT))
    if text not in map(str, ARCHS):
        raise ValueError(
            f"deep_gemm: DG_STUB_ARCH must be one of 9, 10, 12; got {text!r}. "
            "Set the major number of the compute capability to imitate."
        )
    return int(text)


@contextmanager
def arch(major: int) -> Iterator[None]:
    """Within, the stand-in behaves as on a card of this generation, whatever DG_STUB_ARCH says.

    Args:
        major: 9, 10 or 12.

    Raises:
        ValueError: another number.
    """
    if major not in ARCHS:
        raise ValueError(
            f"arch: major must be one of 9, 10, 12; got {major!r}. "
            "Give the major number of the compute capability to imitate."
        )
    token = _forced.set(major)
    try:
        yield
    finally:
        _forced.reset(token)
