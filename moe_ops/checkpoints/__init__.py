"""Checkpoints on disk: one small file per family of models, one loader for all. Needs safetensors."""

from moe_ops.checkpoints import deepseek_v3, deepseek_v4, gpt_oss, mixtral, qwen3
from moe_ops.checkpoints.convert import convert
from moe_ops.checkpoints.load import load_moe_weights
from moe_ops.checkpoints.router import Router, load_router

FAMILIES = (deepseek_v3.FAMILY, deepseek_v4.FAMILY, qwen3.FAMILY, mixtral.FAMILY, gpt_oss.FAMILY)

__all__ = ["FAMILIES", "Router", "convert", "load_moe_weights", "load_router"]
