"""What tests of the library ask about the card."""

from .._arch import arch_major


def get_arch_major() -> int:
    """The imitated compute capability's major number."""
    return arch_major()
