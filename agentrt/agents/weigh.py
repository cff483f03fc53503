"""How much memory the objects of a run take, found by walking them: slow, and only done when memory has run out."""

import gc
import sys
from types import BuiltinFunctionType, ModuleType
from typing import Any, Final

OBJECTS_MAX: Final = 300_000


def weigh(root: Any, shared: set[int], objects_max: int = OBJECTS_MAX) -> int:
    """Bytes of what is reachable from ``root`` without passing an object in ``shared`` (ids), a class, or a module that
    is imported for all. A lower bound where there are more than ``objects_max`` objects."""
    seen = {id(root)}
    stack = [root]
    total = 0
    while stack and len(seen) < objects_max:
        value = stack.pop()
        try:
            total += sys.getsizeof(value)
        except Exception:  # a class of the agent's may say anything
            continue
        for each in gc.get_referents(value):
            mark = id(each)
            if mark in seen or mark in shared or isinstance(each, type | BuiltinFunctionType):
                continue
            if isinstance(each, ModuleType) and sys.modules.get(each.__name__) is each:
                continue
            seen.add(mark)
            stack.append(each)
    return total
