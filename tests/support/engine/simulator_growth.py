"""Counts what a scheduler holds on to, to find what grows with its age."""

import gc
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

# What they lead to belongs to the process.
SHARED = type, ModuleType, FunctionType, BuiltinFunctionType, MethodType
GROWING = dict, list, set, frozenset


def num_entries(root: Any) -> int:
    """Return the entries of all dicts, lists and sets that an object leads to.

    Deques do not count: those of a scheduler have a length that they do not exceed.
    """
    seen, waiting, found = {id(root)}, [root], 0
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, GROWING):
            found += len(holder)
        for each in gc.get_referents(holder):
            if id(each) not in seen and not isinstance(each, SHARED):
                seen.add(id(each))
                waiting.append(each)
    return found
