"""warmup(): compiles what a run will need before it is needed, once for all processes of a machine."""

from moe_ops.warmup.run import WarmupReport, warmup

__all__ = ["WarmupReport", "warmup"]
