"""Checks that explain themselves: op, argument, rule, value got, what to do.

Each runs on real tensors, on fake ones while a graph is traced, and on symbolic sizes.
"""

from collections.abc import Sequence

import torch

from moe_ops.spec import TensorSpec

_PLAN_IT = "Size it by moe_ops.plan(...).workspace_bytes for the largest T."
_ADDRESS = 64  # bytes: what torch's CPU allocator aligns to (its CUDA allocator: 512)


def sentence(op: str, argument: str, rule: str, got: object, fix: str) -> str:
    return f"{op}: {argument} must be {rule}; got {got}. {fix}"


def value(ok, op: str, argument: str, rule: str, got: object, fix: str) -> None:
    """ValueError unless `ok` (a bool, or a symbolic one while tracing)."""
    if ok is True:  # a forward makes some 150 checks: the common case costs a comparison
        return
    torch._check_value(ok, lambda: sentence(op, argument, rule, got() if callable(got) else got, fix))


def dtype(op: str, argument: str, tensor: torch.Tensor, allowed: Sequence[torch.dtype], fix: str) -> None:
    """TypeError unless the tensor has one of the allowed dtypes."""
    if tensor.dtype in allowed:
        return
    rule = " or ".join(map(_short, allowed))
    torch._check_type(False, lambda: sentence(op, argument, rule, _short(tensor.dtype), fix))


def shape(op: str, argument: str, tensor: torch.Tensor, want: Sequence, letters: str, fix: str) -> None:
    """ValueError unless the tensor has this shape; None in `want` stands for any size. `letters` names the axes."""
    sizes = tensor.shape
    same = len(sizes) == len(want)
    for size, wanted in zip(sizes, want, strict=False):
        if wanted is not None and (size == wanted) is not True:  # wrong, or symbolic
            break
    else:
        if same:
            return
    rule = f"of shape {letters} = {_sizes(want)}"
    value(same, op, argument, rule, lambda: _sizes(sizes), fix)
    for size, wanted in zip(sizes, want, strict=True):
        if wanted is not None:
            value(size == wanted, op, argument, rule, lambda: _sizes(sizes), fix)


def multiple(op: str, argument: str, size, of: int, fix: str) -> None:
    """ValueError unless `size` is a multiple of `of`."""
    value(size % of == 0, op, argument, f"a multiple of {of}", size, fix)


def one_of(op: str, argument: str, got: object, allowed: Sequence, fix: str = "Choose one of them.") -> None:
    """ValueError unless `got` is one of the allowed values."""
    if got not in allowed:
        value(False, op, argument, "one of " + ", ".join(map(str, allowed)), repr(got), fix)


def same_device(op: str, device: torch.device, **tensors: torch.Tensor | None) -> None:
    """ValueError unless every tensor that is given lives on `device`."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            value(False, op, argument, f"on {device}", tensor.device, f"Move it with .to('{device}').")


def layout(op: str, argument: str, tensor: torch.Tensor, spec: TensorSpec, kind: str, fix: str) -> None:
    """ValueError unless the strides are the spec's. Axes of size 1 have no stride worth comparing.

    Skipped while sizes are symbolic: the kernel checks again with the real ones.
    """
    if any(isinstance(size, torch.SymInt) for size in (*tensor.shape, *tensor.stride(), *spec.stride)):
        return
    if tensor.stride() == spec.stride or tensor.numel() == 0:
        return
    same = all(
        got == want for size, got, want in zip(tensor.shape, tensor.stride(), spec.stride, strict=True) if size > 1
    )
    if not same:
        value(False, op, argument, f"{kind}, strides {spec.stride}", tuple(tensor.stride()), fix)


def no_scale(op: str, argument: str, scale: torch.Tensor | None, recipe: str) -> None:
    """ValueError if a recipe without scales is given one (an empty tensor counts as none)."""
    if scale is not None:
        value(scale.numel() == 0, op, argument, f"None for recipe {recipe}", lambda: _sizes(scale.shape), "Drop it.")


def given(op: str, argument: str, tensor: torch.Tensor | None, reason: str) -> torch.Tensor:
    """The tensor, or ValueError if there is none."""
    value(tensor is not None, op, argument, f"given {reason}", None, "Pass it.")
    assert tensor is not None
    return tensor


def workspace(op: str, ws: torch.Tensor, needed, *, fix: str = _PLAN_IT, traced: bool = False) -> None:
    """A workspace is flat, contiguous uint8, long enough, and aligned (a traced one has no address to look at)."""
    dtype(op, "workspace", ws, (torch.uint8,), "Allocate torch.empty(bytes, dtype=torch.uint8).")
    flat = ws.dim() == 1 and ws.is_contiguous()
    value(flat, op, "workspace", "flat and contiguous", lambda: _sizes(ws.shape), "Use one flat tensor.")
    value(ws.numel() >= needed, op, "workspace", f"at least {needed} bytes", lambda: ws.numel(), fix)
    if not traced:
        offset = ws.data_ptr() % _ADDRESS
        rule = f"at an address divisible by {_ADDRESS}"
        value(offset == 0, op, "workspace", rule, f"remainder {offset}", "Pass a tensor of its own, not a slice.")


def apart(op: str, ws: torch.Tensor, *tensors: torch.Tensor | None) -> None:
    """ValueError if a tensor lies in the workspace: the op would overwrite its own input."""
    start, end = ws.data_ptr(), ws.data_ptr() + ws.numel()
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            continue
        first = tensor.data_ptr()
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        if first < end and start < first + span * tensor.element_size():
            fix = "Give the workspace memory of its own."
            value(False, op, "workspace", "apart from every input", "an overlap with one", fix)


def _short(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _sizes(sizes: Sequence) -> str:
    text = ", ".join("any" if size is None else str(size) for size in sizes)
    return f"({text},)" if len(sizes) == 1 else f"({text})"
