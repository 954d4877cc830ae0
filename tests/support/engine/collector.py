"""Makes engines that start in one process cheap for Python's garbage collector."""

import gc


def keep_imports_frozen() -> None:
    """Take all that is imported by now out of each later garbage collection.

    vLLM asks for seven collections each time that an engine starts and ends, each over
    everything that was ever imported: most of the time of a test of a small engine.
    It would also freeze each engine and thaw everything again; from now on it does
    neither, so that engines are freed.
    """
    if gc.freeze is _nothing:
        return
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = _nothing


def _nothing() -> None:
    pass
