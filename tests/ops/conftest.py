"""What the op tests share, as fixtures: contracts in all modes, arenas, sentinels, nearest codes by search."""

import re
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad

from moe_ops.choice import choose
from moe_ops.planner import plan_layer
from moe_ops.rows import align
from moe_ops.sizes import Layer
from moe_ops.spec import ALIGNMENT
from moe_ops.testing import PATTERNS, assert_bits_equal, check_op, poisoned
from moe_ops.testing.decode import decode_e4m3

# Reproducible, quick, and without timing: the autouse fixtures of tests/conftest.py hold for all examples of a test.
SWEEP = dict(derandomize=True, deadline=None, database=None)
settings.register_profile("ops", max_examples=25, suppress_health_check=list(HealthCheck), **SWEEP)

AMAX_FLOOR = 1e-10  # documented by quantize: what an all-zero group is scaled by
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: torch cannot index or compare every float dtype."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def results_of(value) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else () if value is None else (value,)


def _meets_contract(op, wanted, *args, ws=None, **kwargs):
    """check_op; results as `wanted` says, a (shape, dtype, stride) each; and the same bits from a compiled graph.

    With `ws`, the op takes a workspace first, and its bytes are compared as well.
    """

    def run(function):
        copy = () if ws is None else (ws.clone(),)
        return (*results_of(function(copy + args, kwargs)), *copy)

    def call(args, kwargs):
        return op(*args, **kwargs)

    # opcheck clones its arguments, and a clone loses the padding between the columns of a scale.
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in tensors):
        check_op(op, *(() if ws is None else (ws.clone(),)), *args, **kwargs)
    eager = run(call)
    for index, ((shape, dtype, stride), result) in enumerate(zip(wanted, eager, strict=ws is None)):
        got = tuple(result.shape), result.dtype, result.stride()
        assert got == (tuple(shape), dtype, tuple(stride)), f"{op}: result {index} is {got}"
    torch._dynamo.reset()
    compiled = run(torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager"))
    for index, (got, want) in enumerate(zip(compiled, eager, strict=True)):
        assert_bits_equal(got, want, f"{op} compiled: result {index}")
        assert got.stride() == want.stride(), f"{op} compiled: result {index} has strides {got.stride()}"
    return eager


def _one_graph(function, inputs):
    """One compiled graph serves all these inputs, of two rows and more, with the bits of the eager call."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for x in inputs:
        for got, want in zip(results_of(compiled(x)), results_of(function(x)), strict=True):
            assert_bits_equal(got, want, f"compiled for {len(x)} rows")
    assert counter.frame_count == 1


def _packed_form_agrees(op, results, *args, **kwargs):
    """`<op>_ws` lays the functional form's bits at the start of ws (spec.pack), whatever ws held, and nothing else."""
    results, starts, end = results_of(results), [], 0
    for result in results:
        starts.append(end)
        end += align(result.untyped_storage().nbytes(), ALIGNMENT)

    def carve(ws):
        for result, start in zip(results, starts, strict=True):
            nbytes = result.untyped_storage().nbytes()
            yield ws[start : start + nbytes].view(result.dtype).as_strided(result.shape, result.stride())

    mark = torch.zeros(end + ALIGNMENT, dtype=torch.uint8)
    for view in carve(mark):
        as_integers(view).fill_(-1)
    for pattern in PATTERNS:
        ws = poisoned(end + ALIGNMENT, pattern)
        getattr(torch.ops.moe, f"{op}_ws")(ws, *args, **kwargs)
        for index, (view, result) in enumerate(zip(carve(ws), results, strict=True)):
            assert_bits_equal(view, result, f"{op}_ws over {pattern:#x}: result {index}")
        assert (ws[mark == 0] == pattern).all(), f"{op}_ws over {pattern:#x}: bytes outside the results were written"


class Arena:
    """The workspace of one layer, full of one byte, and its buffers by name.

    `sizes` are T, top_k, E, K, I, recipe, scale_format, layout: with the rest, what ends the schema of every stage.
    """

    def __init__(self, pattern: int = 0xFF, **sizes):
        layer = Layer(**sizes)
        self.plan = plan_layer(layer, choose("arena", layer, "auto", "cpu"))
        self.sizes = dict(backend="auto", **sizes, num_experts=-1, weight_format="natural", has_fp8=False)
        self.ws = poisoned(self.plan.workspace_bytes, pattern)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.plan.view(name, self.ws)

    def put(self, name: str, value: torch.Tensor, rows=slice(None)) -> None:
        """Copies these rows of `value` into a buffer; the others keep the arena's byte."""
        as_integers(self[name])[rows] = as_integers(value)[rows]

    @contextmanager
    def writes_only(self, **rows):
        """Within, no byte of the arena changes except in these rows of these buffers."""
        mark = torch.zeros_like(self.ws)
        for name, of_buffer in rows.items():
            as_integers(self.plan.view(name, mark))[of_buffer] = -1
        before = self.ws.clone()
        yield
        wrong = (self.ws != before) & (mark == 0)
        assert not wrong.any(), f"{int(wrong.sum())} bytes changed outside {tuple(rows)}: first at {wrong.nonzero()[0]}"


@contextmanager
def _unchanged(*tensors):
    """Within, the tensors keep their bytes, padding included, and their storage (the op must not free its inputs)."""
    tensors = [tensor for tensor in tensors if tensor is not None]

    def snapshot(tensor):
        storage = tensor.untyped_storage()
        held = torch.tensor([], dtype=torch.uint8).set_(storage)
        return (storage.data_ptr(), storage.nbytes(), tensor.shape, tensor.stride()), held.clone()

    before = [snapshot(tensor) for tensor in tensors]
    yield
    for index, (tensor, (place, held)) in enumerate(zip(tensors, before, strict=True)):
        place_after, held_after = snapshot(tensor)
        assert place_after == place, f"input {index}: its memory is {place_after} instead of {place}"
        assert torch.equal(held_after, held), f"input {index} of shape {tuple(tensor.shape)} was written"


def _nearest(values: torch.Tensor, table: torch.Tensor, sign: int) -> torch.Tensor:
    """Code of the table's value nearest to each float64 value, ties to the even code, the sign bit added."""
    distance = (values.double().abs()[..., None] - table).abs()
    ties = distance == distance.amin(-1, keepdim=True)
    even = ties & (torch.arange(len(table)) % 2 == 0)
    code = torch.where(even.any(-1), even.int().argmax(-1), ties.int().argmax(-1))
    return code + sign * torch.signbit(values)


def _exponent(amax: float, top: float) -> int:
    """The smallest UE8M0 byte whose power of two brings amax down to `top` or less."""
    byte = 0
    while 2.0 ** (byte - 127) * top < max(amax, AMAX_FLOOR):
        byte += 1
    return byte


@contextmanager
def _says(kind: type[Exception], sentence: str):
    with pytest.raises(kind, match="^" + re.escape(sentence) + "$") as caught:
        yield
    assert caught.type is kind


def _refuses_gradients(name: str, op, arguments: dict, argument: str) -> None:
    """The op refuses a gradient through this argument, backward and forward mode alike, and takes it in no_grad."""
    sentence = (
        f"moe::{name}: {argument} must not ask for a gradient; got one that does. This package is for inference: "
        "detach it, or call the op under torch.inference_mode() or torch.no_grad()."
    )
    asks = arguments[argument].clone().requires_grad_()
    with _says(RuntimeError, sentence):
        op(**{**arguments, argument: asks})
    with torch.no_grad():
        op(**{**arguments, argument: asks})
    with warnings.catch_warnings(), forward_ad.dual_level(), _says(RuntimeError, sentence):
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of the torch.jit.script that it uses here
        op(**{**arguments, argument: forward_ad.make_dual(arguments[argument], torch.ones_like(asks))})


@pytest.fixture(scope="session")
def meets_contract():
    return _meets_contract


@pytest.fixture(scope="session")
def one_graph():
    return _one_graph


@pytest.fixture(scope="session")
def packed_form_agrees():
    return _packed_form_agrees


@pytest.fixture(scope="session")
def arena():
    return Arena


@pytest.fixture(scope="session")
def unchanged():
    return _unchanged


@pytest.fixture(scope="session")
def integers():
    return as_integers


@pytest.fixture(scope="session")
def says():
    """says(kind, sentence): within, exactly this exception with exactly this text."""
    return _says


@pytest.fixture(scope="session")
def refuses_gradients():
    return _refuses_gradients


@pytest.fixture(scope="session")
def nearest():
    """Codes of float64 values by search over the code table, and exponent bytes by counting up."""
    e4m3 = decode_e4m3(torch.arange(127, dtype=torch.uint8))  # 0x7f is NaN
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    return SimpleNamespace(
        e4m3=lambda values: _nearest(values, e4m3, 0x80),
        e2m1=lambda values: _nearest(values, e2m1, 8),
        exponent=_exponent,
    )
