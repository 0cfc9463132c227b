"""Refusals in words: function, argument, rule, value got, what to do."""

from collections.abc import Sequence

import torch

TMA_BYTES = 16  # the copy engine wants base addresses and row pitches in multiples of this


def require(
    ok: bool,
    op: str,
    argument: str,
    rule: str,
    got: object,
    fix: str,
    kind: type[Exception] = ValueError,
) -> None:
    """Raises `kind` with one sentence unless `ok`."""
    if not ok:
        raise kind(f"{op}: {argument} must be {rule}; got {got}. {fix}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sizes(values: Sequence[int]) -> str:
    return "(" + ", ".join(map(str, values)) + ")"


def dtype(
    op: str,
    argument: str,
    tensor: torch.Tensor,
    allowed: Sequence[torch.dtype],
    fix: str,
) -> None:
    """TypeError unless the tensor has one of the allowed dtypes."""
    rule = " or ".join(map(short, allowed))
    require(tensor.dtype in allowed, op, argument, rule, short(tensor.dtype), fix, TypeError)


def rank(op: str, argument: str, tensor: torch.Tensor, number: int, axes: str) -> None:
    """ValueError unless the tensor has this many dimensions; `axes` names them."""
    got = f"shape {sizes(tensor.shape)}"
    require(tensor.dim() == number, op, argument, f"{axes}, {number}-D", got, "Reshape it.")


def same_device(op: str, a: torch.Tensor, **others: torch.Tensor | None) -> None:
    """TypeError unless all tensors live where a does; `a_scale` is called a's scale."""
    rule, fix = f"on {a.device} like a", f"Move it with .to('{a.device}')."
    for name, tensor in others.items():
        if tensor is not None:
            argument = name.replace("_scale", "'s scale")
            ok = tensor.device == a.device
            require(ok, op, argument, rule, tensor.device, fix, TypeError)


def group_layout(op: str, argument: str, tensor: torch.Tensor, length: int, letter: str) -> None:
    """A row map or a count per group: int32, 1-D, contiguous, of this length."""
    dtype(op, argument, tensor, [torch.int32], "Convert it with .int().")
    require(
        tuple(tensor.shape) == (length,),
        op,
        argument,
        f"of shape ({letter},) = ({length},)",
        sizes(tensor.shape),
        "Give one entry each.",
    )
    require(
        tensor.is_contiguous(),
        op,
        argument,
        "contiguous",
        f"strides {sizes(tensor.stride())}",
        "Call .contiguous().",
    )


def output(
    op: str,
    d: torch.Tensor,
    shape: Sequence[int],
    axes: str,
    allowed: Sequence[torch.dtype],
) -> None:
    """The result buffer: shape, dtype, row-major."""
    rank(op, "d", d, len(shape), axes)
    require(
        tuple(d.shape) == tuple(shape),
        op,
        "d",
        f"of shape {axes} = {sizes(shape)}",
        sizes(d.shape),
        "Allocate it from the shapes of a and b.",
    )
    dtype(op, "d", d, allowed, "Allocate it in that dtype.")
    row_major(op, "d", d)


def row_major(op: str, argument: str, tensor: torch.Tensor) -> None:
    """Last stride 1; a third dimension lies without gaps between its matrices."""
    matrix = tensor.size(-2) * tensor.size(-1)
    ok = tensor.stride(-1) == 1 and (tensor.dim() == 2 or tensor.stride(0) == matrix)
    require(
        ok,
        op,
        argument,
        "row-major, without gaps between groups",
        f"strides {sizes(tensor.stride())} for shape {sizes(tensor.shape)}",
        "Pass a contiguous tensor.",
    )


def tma(op: str, argument: str, tensor: torch.Tensor) -> None:
    """What the copy engine asks of a matrix: base address and pitch in multiples of 16 bytes."""
    address = tensor.data_ptr() % TMA_BYTES
    require(
        address == 0,
        op,
        argument,
        f"at an address that is a multiple of {TMA_BYTES} bytes",
        f"one {address} bytes past it",
        "Do not slice in front of it; copy it.",
    )
    outer = -2 if tensor.stride(-1) == 1 else -1
    pitch = tensor.stride(outer) * tensor.element_size()
    require(
        pitch % TMA_BYTES == 0,
        op,
        argument,
        f"laid out with a pitch that is a multiple of {TMA_BYTES} bytes",
        f"{pitch} bytes",
        "Pad the contiguous dimension.",
    )
