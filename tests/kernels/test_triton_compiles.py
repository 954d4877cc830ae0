"""Every Triton kernel compiles for a GPU, which its interpreter does not show."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import sweeps

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "support" / "compile_triton_kernels.py"
STEP = 1 if sweeps.every_name else 6  # of each kernel's launches


@dataclass(frozen=True)
class Compiled:
    """What the program made.

    Attributes:
        variants: PTX files of each kernel.
        folder: where they are.
    """

    variants: dict[str, list[str]]
    folder: Path

    def ptx(self, name: str) -> list[str]:
        """Return the PTX of each variant of a kernel."""
        return [(self.folder / file).read_text() for file in self.variants[name]]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    """Compile without the interpreter; Triton keeps what it has compiled before."""
    folder = tmp_path_factory.mktemp("ptx")
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(PROGRAM), str(folder), str(STEP)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-20_000:]
    return Compiled(json.loads(done.stdout.splitlines()[-1]), folder)


@pytest.mark.timeout(1200)
def test_every_kernel_compiles(compiled: Compiled) -> None:
    """None is missing from benchmarks/gpu/kernel_inputs.py."""
    assert "compact_pages._move_in_place" in compiled.variants
    missing = [name for name, files in compiled.variants.items() if not files]
    assert not missing
    for name in compiled.variants:
        assert all(".target sm_90" in text for text in compiled.ptx(name))


def test_tokens_are_read_before_any_is_overwritten(compiled: Compiled) -> None:
    """A barrier stands between a tile's reads and its writes, in the loop."""
    variants = compiled.ptx("compact_pages._move_in_place")
    assert len(variants) > 10 // STEP
    for text in variants:
        found = re.findall(r"ld\.global|bar\.sync|st\.global", text)
        kinds = [kind for i, kind in enumerate(found) if found[i - 1 : i] != [kind]]
        assert kinds[-2:] == ["bar.sync", "st.global"], kinds
        assert kinds.count("st.global") == 1
        assert kinds[-3] == "ld.global"


def test_tokens_move_sixteen_bytes_at_a_time(compiled: Compiled) -> None:
    """Where the head size is even enough, as on real servers."""
    for name in ("_move_in_place", "_copy_changed"):
        variants = compiled.ptx(f"compact_pages.{name}")
        wide = [text for text in variants if "st.global.v4.b32" in text]
        assert len(variants) / 2 < len(wide) <= len(variants)
        assert len(wide) < len(variants) or STEP > 1  # other head sizes are left out
        assert all("ld.global.v4.b32" in text for text in wide)
