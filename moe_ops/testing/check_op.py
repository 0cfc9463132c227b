"""check_op: torch.library.opcheck, plus what it does not compare: strides on torch 2.11, devices, aliasing."""

import torch
from torch import Tensor

_TESTS = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


def check_op(op, *args, **kwargs) -> None:
    """Asserts that the op's schema, fake kernel and real kernel agree on these arguments."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    # opcheck's test_schema compares inputs with allclose, which torch does not have for one-byte floats
    one_byte_floats = any(t.is_floating_point() and t.dtype.itemsize == 1 for t in tensors)
    torch.library.opcheck(op, args, kwargs, test_utils=_TESTS if one_byte_floats else ("test_schema", *_TESTS))
    for index, (fake, real) in enumerate(zip(_fake_run(op, args, kwargs), _results(op(*args, **kwargs)), strict=True)):
        for what in ("shape", "dtype", "device"):
            got, want = getattr(fake, what), getattr(real, what)
            assert got == want, f"{op}: result {index}: fake {what} {got}, real {want}"
        assert fake.stride() == real.stride(), f"{op}: result {index}: fake {fake.stride()}, real {real.stride()}"
        for tensor in tensors:
            same = real.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            assert not same or real.numel() == 0, f"{op}: result {index} aliases an argument"


def _fake_run(op, args, kwargs) -> tuple:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:

        def fake(value):
            return mode.from_tensor(value) if isinstance(value, Tensor) else value

        return _results(op(*map(fake, args), **{name: fake(value) for name, value in kwargs.items()}))


def _results(value) -> tuple:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)
