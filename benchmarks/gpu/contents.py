"""Owns the list of parts."""

from benchmarks.gpu import serving
from benchmarks.gpu.decode import Decode
from benchmarks.gpu.events import Events
from benchmarks.gpu.kernels import Kernels
from benchmarks.gpu.parts import Part

DEFAULT_MODEL = "llama-3.1-8b"
PARTS: dict[str, Part] = {
    **serving.PARTS,
    "decode": Decode(),
    "events": Events(),
    "kernels": Kernels(),
}
