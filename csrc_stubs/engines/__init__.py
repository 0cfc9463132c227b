"""Stand-ins for the classes of inference and training engines that moe_ops.integrations builds on: their names and the
signatures of what is called, nothing of what they compute. tests/integrations compares them with installed engines."""

import sys
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def standing_in(engine: ModuleType):
    """While it lasts, importing the engine's modules finds the names of `engine.MODULES` (module -> names)."""
    top = next(iter(engine.MODULES)).partition(".")[0]
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == top}
    for path, names in engine.MODULES.items():
        parts = path.split(".")
        for last in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:last]), ModuleType(".".join(parts[:last])))
        vars(sys.modules[path]).update({name: getattr(engine, name) for name in names})
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == top]:
            del sys.modules[name]
        sys.modules.update(before)
