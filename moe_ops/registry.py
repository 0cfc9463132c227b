"""How ops of the namespace `moe` are registered. Nothing else in the package talks to torch.library.

`define_op` takes a schema, a contract and kernels, and derives the functional op (contract allocates, kernel writes),
its fake kernel and the guard that refuses gradients. `define_ws` registers the form that works on one flat workspace.
`Library.define / impl` rather than `custom_op`: a call costs 5 us instead of 16, and a layer makes five.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_ops import check
from moe_ops.backends import Kernels, pick
from moe_ops.capture import refuse_compilation
from moe_ops.spec import TensorSpec, pack
from moe_ops.tracing import span

NAMESPACE = "moe"
SCHEMAS: list[str] = []
"""Every schema of the namespace, in the order of definition."""

STAGES: dict[str, Callable] = {}
"""Name of a `_ws` op -> its kernel, taking arguments by name: for an op that is made of others."""

_PACKED = "It holds the results one after another, each at a multiple of 256 bytes."
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
# Scales are their strides, so the compiler must hand them over untouched.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)

Contract = Callable[..., tuple[TensorSpec, ...]]


@dataclass(frozen=True)
class Op:
    """A registered op: `overload` for callers, `into` for a stage that already owns the result's memory."""

    name: str
    contract: Contract
    kernels: Kernels
    overload: torch._ops.OpOverload
    scratch: int = 0
    """Outputs of the contract, the last ones, that kernels need and callers never see."""

    def into(self, outputs: tuple[torch.Tensor, ...], **arguments) -> None:
        """Checks the arguments, then computes into `outputs`: tensors that match the contract's specs."""
        specs = self.contract(**arguments)
        for index, (output, spec) in enumerate(zip(outputs, specs, strict=True)):
            check.shape(self.name, f"result {index}", output, spec.shape, "the contract's", "The plan is for others.")
            check.dtype(self.name, f"result {index}", output, (spec.dtype,), "The plan is for others.")
        self._run(outputs, arguments)

    def fresh(self, arguments: dict) -> tuple[torch.Tensor, ...]:
        """Results in memory of their own. Rows that no route owns are zero."""
        device = _device(arguments)
        outputs = tuple(spec.zeros(device) for spec in self.contract(**arguments))
        self._run(outputs, arguments)
        return outputs[: len(outputs) - self.scratch]

    def _run(self, outputs: tuple[torch.Tensor, ...], arguments: dict) -> None:
        rest = dict(arguments)
        device = _device(arguments)
        kernel = pick(self.name, rest.pop("backend"), device, self.kernels, arguments)
        with torch.autocast(device.type, enabled=False):  # a kernel's arithmetic is its own, whatever surrounds it
            kernel(outputs, **rest)


def define_op(name: str, schema: str, *, contract: Contract, kernels: Kernels, scratch: int = 0) -> Op:
    """Registers the functional op `moe::<name>` for CPU and CUDA."""
    bind = _define(name, schema)
    op = Op(name, contract, kernels, getattr(torch.ops.moe, name).default, scratch)

    def real(*args, **kwargs):
        arguments = bind(args, kwargs)
        with span(name, _device(arguments)):
            return _single(op.fresh(arguments))

    def fake(*args, **kwargs):
        arguments = bind(args, kwargs)
        refuse_compilation(f"moe::{name}", _device(arguments))
        specs = contract(**arguments)
        return _single(tuple(spec.empty(_device(arguments)) for spec in specs[: len(specs) - scratch]))

    _implement(name, real, fake)
    return op


def define_ws(name: str, schema: str, run: Callable, *, contract: Contract | None = None) -> None:
    """Registers `moe::<name>`, a stage on a workspace: `run(**arguments)` carves its views and calls `Op.into`.

    Only a stage whose result leaves the workspace has a contract: of that one fresh tensor.
    """
    bind = _define(name, schema)

    def traced(**arguments):
        with span(name, _device(arguments)):
            return run(**arguments)

    STAGES[name] = traced

    def real(*args, **kwargs):
        return traced(**bind(args, kwargs))

    def fake(*args, **kwargs):
        arguments = bind(args, kwargs)
        refuse_compilation(f"moe::{name}", _device(arguments))
        if contract is None:
            return None
        return _single(tuple(spec.empty(_device(arguments)) for spec in contract(**arguments)))

    _implement(name, real, fake)


def define_packed_ws(op: Op, schema: str) -> None:
    """Registers `moe::<op>_ws`: the op's results laid one after another at the start of `ws` (spec.pack)."""
    name = f"{op.name}_ws"

    def run(*, ws, **arguments):
        specs = op.contract(**arguments)
        offsets, needed = pack(specs)
        check.workspace(name, ws, needed, fix=_PACKED)
        tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
        check.same_device(name, ws.device, **tensors)
        check.apart(name, ws, *tensors.values())
        op.into(tuple(spec.carve(ws, offset) for spec, offset in zip(specs, offsets, strict=True)), **arguments)

    define_ws(name, schema, run)


def define_composite(name: str, schema: str, body: Callable) -> None:
    """Registers an op that is one node to Dynamo and export, and its body's ops to AOTAutograd and Inductor."""
    SCHEMAS.append(name + schema)
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    bind = _binder(name)

    def composite(*args, **kwargs):
        arguments = bind(args, kwargs)
        _refuse_gradients(name, arguments)
        return body(**arguments)

    _LIBRARY.impl(name, composite, "CompositeImplicitAutograd")


def tag_compile_caches(version: str) -> None:
    """Keys torch.compile's on-disk caches by this version and these schemas.

    A cached graph is looked up by what Dynamo saw, the composite op, but holds calls of the stages: after an upgrade
    that changes a stage it would call what is no longer there.
    """
    digest = hashlib.sha256("".join(SCHEMAS).encode()).hexdigest()[:12]
    torch.compiler.config.cache_key_tag += f"moe_ops-{version}-{digest};"


def _define(name: str, schema: str) -> Callable:
    SCHEMAS.append(name + schema)
    _LIBRARY.define(name + schema, tags=_TAGS)
    return _binder(name)


def _binder(name: str) -> Callable:
    """Positional and keyword arguments -> all of them by name. The dispatcher drops arguments equal to defaults."""
    schema = getattr(torch.ops.moe, name).default._schema
    names = [argument.name for argument in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return lambda args, kwargs: {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def _implement(name: str, real: Callable, fake: Callable) -> None:
    overload = getattr(torch.ops.moe, name).default

    names = [argument.name for argument in overload._schema.arguments]

    def guarded(keys, *args, **kwargs):
        _refuse_gradients(name, {**dict(zip(names, args, strict=False)), **kwargs})
        return overload.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    _LIBRARY.impl(name, real, "CPU")
    _LIBRARY.impl(name, real, "CUDA")
    _LIBRARY.impl(name, guarded, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)


def _refuse_gradients(name: str, arguments: dict) -> None:
    """A kernel that autograd does not know would return results without history, or zero tangents."""
    dual = torch.autograd.forward_ad._current_level >= 0
    if not dual and not torch.is_grad_enabled():
        return
    for argument, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            continue
        backward = value.requires_grad and torch.is_grad_enabled()
        if backward or (dual and torch.autograd.forward_ad.unpack_dual(value).tangent is not None):
            raise RuntimeError(
                f"moe::{name}: {argument} must not ask for a gradient; got one that does. This package is for "
                "inference: detach it, or call the op under torch.inference_mode() or torch.no_grad()."
            )


def _device(arguments: dict) -> torch.device:
    return next(value.device for value in arguments.values() if isinstance(value, torch.Tensor))


def _single(results: tuple[torch.Tensor, ...]):
    return results[0] if len(results) == 1 else results
