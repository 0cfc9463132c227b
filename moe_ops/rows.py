"""How many rows a grouped GEMM sees, and which layout holds them.

Every function takes plain ints and traced sizes alike: `//`, `+`, `*` and `torch.sym_max / sym_min` only, so a
compiled graph serves every token count.
"""

import torch

BLOCK = 128
"""Rows of one GEMM block. Each expert's rows start on a multiple of it, in both layouts."""

LAYOUTS = ("auto", "contiguous", "masked", "gathered", "direct")
"""contiguous: one list of rows, each expert's padded to whole blocks. masked: a slab of rows an expert. gathered: the
tokens themselves, read by number in the order of experts. direct: routes as they come, one by one."""

MASKED_ROWS = 16384
"""Rows of all slabs together up to which `auto` takes the masked layout: beyond, more memory than it saves time."""

ROUTE_CHUNK = 512
"""Routes that one program counts and places where there are many: few, so that there are programs for every
multiprocessor."""

FUSED = ("gathered", "direct")
"""Layouts whose GEMM1 ends with the activation. K and I must be multiples of BLOCK."""


def ceil_div(a, b):
    return (a + b - 1) // b


def align(a, b):
    return ceil_div(a, b) * b


def contiguous_rows(T, top_k: int, E: int):
    """Rows of the contiguous layout in the worst case over all routings of T tokens: exact, not a guess.

    The worst routing touches as many experts as it can with one
    row each (one block apiece) and fills further blocks with the rest, until every expert has all T tokens.
    """
    routes = T * top_k
    touched = torch.sym_min(routes, E)
    return torch.sym_min(touched + (routes - touched) // BLOCK, E * ceil_div(T, BLOCK)) * BLOCK


def masked_rows(T):
    """Rows of one expert's slab: every token may choose the same expert, and chooses it once."""
    return align(T, BLOCK)


def masked_tokens(E: int) -> int:
    """The largest T whose slabs stay within MASKED_ROWS."""
    return MASKED_ROWS // (E * BLOCK) * BLOCK


def gathered_block(T, top_k: int, experts: int) -> int:
    """Rows of a tile in the gathered layout: what holds the mean rows of an expert with room to spare.

    A traced T gets the smallest, which has the most tiles.
    """
    if not isinstance(T, int):
        return 16
    return next((block for block, mean in ((16, 8), (32, 32), (64, 127)) if T * top_k <= mean * experts), 128)


def gathered_tiles(routes, E: int, block_m: int):
    """Row tiles of the gathered layout in the worst case: each expert touched ends with a tile that is not full."""
    touched = torch.sym_min(routes, E)
    return touched + (routes - touched) // block_m


def route_chunks(T, top_k: int):
    """Pieces of at most ROUTE_CHUNK routes in which long lists are counted: whole tokens, top_k rounded up to a power
    of 2."""
    return ceil_div(T, max(1, ROUTE_CHUNK // (1 << (top_k - 1).bit_length())))
