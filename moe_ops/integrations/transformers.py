"""moe_ops in Hugging Face transformers: importing this module makes "moe_ops" an experts implementation.

    import moe_ops.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="moe_ops")
    # or model.set_experts_implementation("moe_ops")

It serves every model whose experts go through transformers' experts interface (transformers 5.17 or later). Weights
that the ops can read as they are stay where they are; others are prepared once, at the first forward or by `prepare`,
and the originals are freed.
"""

import logging

import torch
from torch import Tensor, nn

from moe_ops import check
from moe_ops.arena import Workspace
from moe_ops.checkpoints.progress import track
from moe_ops.integrations.experts import CHILD, run
from moe_ops.integrations.modules import OP, ExpertsModule, is_experts
from moe_ops.integrations.preparation import prepare_experts
from moe_ops.integrations.sharing import share
from moe_ops.prep.report import PrepReport

try:
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError(
        f"{__name__}: transformers must be installed, version 5.17 or later; got: {error}. "
        "pip install 'fused-moe-ops[hf]'."
    ) from error

NAME = "moe_ops"
"""What `experts_implementation=` calls it."""

_LOG = logging.getLogger("moe_ops")

_PREPARES_WHILE_TRACED = torch.__version__ >= "2.13"
"""Whether Dynamo hands a module to a function that it takes for constant. Seen in 2.13; earlier ones are not asked."""


def experts_forward(self: ExpertsModule, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of an experts module, as transformers calls it.

    Args:
        self: the experts module. It is prepared first, if it is not yet.
        hidden_states: (T, K) bf16, fp16 or fp32.
        top_k_index, top_k_weights: (T, top_k) int and float. Under expert parallelism ids are local, and those of
            other ranks, num_experts by transformers' convention, contribute nothing.

    Returns:
        (T, K) in the dtype of hidden_states.

    Raises:
        RuntimeError: gradients are wanted, or torch before 2.13 compiles a module that is not prepared.
        ValueError, TypeError, NotImplementedError: see prepare.
    """
    if _PREPARES_WHILE_TRACED or not torch.compiler.is_compiling():
        _ready(self)
    return run(self, hidden_states, top_k_index, top_k_weights)


def prepare(
    model: nn.Module,
    recipe: str | None = None,
    *,
    scale_format: str | None = None,
    on_inexact: str = "raise",
    repack: bool = False,
    fp8_copy: bool = True,
    progress: bool = True,
) -> dict[str, PrepReport | None]:
    """Prepares the experts of every layer and makes the model use them. One layer at a time: beside the model, memory
    holds at most one prepared layer and the working copies of a few rows.

    Call it before torch.export, or to choose a recipe or see the errors that preparation adds; forward does the same
    with the defaults. From then on the model cannot be saved, trained, or switched to another implementation, unless
    its weights are used as they are.

    Args:
        model: a transformers model, on the device that it will run on, or a module that holds its experts.
        recipe, scale_format: as in moe_ops.prepare_weights. None: the checkpoint's own kind (float: bf16; fp8 blocks:
            fp8_block; MXFP4: mxfp4, but fp8_block on Hopper), in the scale format that the device's GEMMs read.
        on_inexact: for MXFP4 as fp8 blocks, raise or warn if a 128 x 128 tile cannot be held exactly.
        repack: as moe_ops.repack_weights does: MXFP4 in the order that Hopper's kernels expand. recipe is then mxfp4.
        fp8_copy: with repack, keep the same values as fp8 blocks too, for calls with many rows an expert.
        progress: show a bar, if stderr is a terminal and rich is installed.

    Returns:
        For each experts module, by name, what was done to its weights; None where they are used as they are.

    Raises:
        ValueError: the model has no experts of the interface, its weights are not in memory, or they were prepared
            otherwise and freed. TypeError: weights of a type or dtype that no recipe takes. NotImplementedError: a
            form that no kernel reads.
    """
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    fix = "Its class has no @use_experts_implementation; MXFP4 gpt-oss: load with Mxfp4Config(dequantize=True)."
    got = f"{type(model).__name__} without any"
    check.value(bool(found), f"{OP}.prepare", "model", "one with experts of transformers' interface", got, fix)
    switch = getattr(model, "set_experts_implementation", None)
    if switch is not None:
        switch(NAME)
    wanted = dict(recipe=recipe, scale_format=scale_format, on_inexact=on_inexact, repack=repack, fp8_copy=fp8_copy)
    reports = {}
    for name, module in track(found.items(), len(found), "experts", progress):
        reports[name] = _prepare(module, name, **wanted)
    return reports


def share_workspace(model: nn.Module, max_tokens: int, *, top_k: int | None = None) -> Workspace:
    """One workspace for all layers of a prepared model, in place of one for each call: the plan of its largest layer.

    Experts that run functions of the model between the stages are left as they are.

    Args:
        model: a transformers model after prepare(model).
        max_tokens: the most tokens of one forward, the whole batch's prompts together. More are refused in words;
            Workspace.grow makes room.
        top_k: routes of a token. None: as the configuration says.

    Returns:
        The workspace. Its arena is no part of a state dict and moves with the model.

    Raises:
        ValueError: the model is not prepared, lies on several devices, or does not say its top_k.
    """
    return share({name: module for name, module in model.named_modules() if is_experts(module)}, max_tokens, top_k)


def _prepare(module: ExpertsModule, name: str, **wanted) -> PrepReport | None:
    report = prepare_experts(module, name, **wanted)
    _LOG.info("%s: %s", name, report or "weights used as they are")
    return report


@torch.compiler.assume_constant_result
def _ready(module: ExpertsModule) -> bool:
    """Prepares the module at its first forward. Dynamo runs this while it traces, and records nothing of it."""
    if CHILD not in module._modules:
        name = type(module).__name__
        if torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            raise RuntimeError(
                f"{OP}: {name} must not ask for gradients; got parameters that do. moe_ops is for inference: call the "
                "model under torch.inference_mode() or torch.no_grad()."
            )
        _prepare(module, name)
    return True


ExpertsInterface.register(NAME, experts_forward)
FP8ExpertsInterface.register(NAME, experts_forward)
