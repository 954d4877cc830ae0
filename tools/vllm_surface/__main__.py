"""Judges a release of vLLM without installing it: what we rely on, same or not.

    pip download vllm==0.33.0 --no-deps -d /tmp/wheels
    python -m tools.vllm_surface /tmp/wheels/vllm-0.33.0-*.whl

Prints a line for each row of `rows`: "same", "changed" or "gone" beside
the tested release, and "known" where `compat.RELEASES` says so. The wheel's modules are
parsed and never run. Status 1 if something is changed or gone and not
known. `installed` in place of a wheel means this environment's vLLM.

`--record` also writes what the release has into the folder `releases`: signatures
with the kinds of their parameters and how a function is bound, without defaults and
types. The tests run the command on these records, and other releases are compared with
that of the tested one, so that functions that we call are compared, too. After a change
of what we rely on, record every supported release again.
"""

import argparse
import ast
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from tools.vllm_surface import rows
from tools.vllm_surface.rows import SAME, Finding, Look, Row
from tools.vllm_surface.source import VllmSource
from vllm_kvpolicy import compat
from vllm_kvpolicy.api.patch_table import files_of, read_module

RECORDS = Path(__file__).resolve().parent / "releases"
TESTED = RECORDS / f"{compat.TESTED_VLLM}.json"
VERSION = re.compile(r"^vllm(?:_cpu)?-([^/-]+)\.dist-info/METADATA$")


def scan(version: str, look: Look) -> list[Finding]:
    """Return what a release has for each thing that we rely on."""
    every = [*rows.rows(), *rows.imports()]
    if compat.minor_release(version) != compat.TESTED_VLLM:
        _, tested = _open_record(TESTED)
        every = [replace(row, wanted=tested(row)) for row in every]
    return [rows.judge(row, look(row), version) for row in every]


# -- where a release is read from ----------------------------------------------


def open_release(place: str) -> tuple[str, Look]:
    """Return the version of a release, and what looks rows up in it.

    Args:
        place: a wheel, a record, or "installed".

    Raises:
        ValueError: it is none of these.
    """
    if place == "installed":
        version = metadata.version("vllm").partition("+")[0]
        return version, rows.look_into(VllmSource(read_module))
    try:
        if place.endswith(".json"):
            return _open_record(Path(place))
        return _open_wheel(Path(place))
    except (OSError, BadZipFile, ValueError, KeyError) as error:
        raise ValueError(
            f"got {place!r} ({error}), expected a wheel of vLLM, a file that --record "
            "wrote, or `installed`"
        ) from None


def _open_wheel(path: Path) -> tuple[str, Look]:
    wheel = ZipFile(path)
    names = set(wheel.namelist())
    versions = [found[1] for found in map(VERSION.match, names) if found]
    if not versions:
        raise ValueError("no METADATA of vLLM in it")

    def load(module: str) -> ast.Module | None:
        for name in names.intersection(files_of(module)):
            return ast.parse(wheel.read(name), name)
        return None

    return versions[0], rows.look_into(VllmSource(load))


# -- records -------------------------------------------------------------------


def record(version: str, findings: Iterable[Finding]) -> str:
    """Return what a release has as JSON: kind -> class or module -> name -> found."""
    found: dict[str, dict[str, dict[str, str | None]]] = {}
    for finding in findings:
        owner, name = _split(finding.row)
        owners = found.setdefault(finding.row.kind, {})
        owners.setdefault(owner, {})[name] = finding.found
    return json.dumps({"vllm": version, "found": found}, indent=1) + "\n"


def _open_record(path: Path) -> tuple[str, Look]:
    content = json.loads(path.read_text())
    found = content["found"]

    def look(row: Row) -> str | None:
        owner, name = _split(row)
        try:
            return found[row.kind][owner][name]
        except KeyError:
            raise ValueError(
                f"{path.name} has nothing about {row.target} ({row.kind}); record "
                f"vLLM {content['vllm']} again: `python -m tools.vllm_surface WHEEL "
                "--record`"
            ) from None

    return content["vllm"], look


def _split(row: Row) -> tuple[str, str]:
    """Return the class or module of a row's target, and the name in it."""
    *_, separator = re.findall("[:.]", row.target)
    owner, _, name = row.target.rpartition(separator)
    return owner, name


# -- the command ---------------------------------------------------------------


def lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line per finding, what is not known last, with what was found."""
    texts = []
    for finding in sorted(findings, key=lambda each: not each.is_known):
        row, known = finding.row, finding.is_known and finding.state != SAME
        texts.append(f"{finding.state:8}{'known' if known else '':6}{row.kind:11}")
        texts[-1] += row.target
        if finding.state != SAME:
            texts[-1] += f"\n{'':14}was {row.wanted}\n{'':14}is  {finding.found}"
    return texts


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 1 if something is changed or gone and not known, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.vllm_surface",
        description="Judge a release of vLLM without installing it.",
    )
    parser.add_argument("release", help="a wheel, a record, or `installed`")
    parser.add_argument("--record", action="store_true", help=f"write into {RECORDS}")
    args = parser.parse_args(arguments)
    try:
        version, look = open_release(args.release)
        findings = scan(version, look)
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(lines(findings)))
    if args.record:
        target = RECORDS / f"{compat.minor_release(version)}.json"
        target.write_text(record(version, findings))
    counts = Counter(finding.state for finding in findings)
    unknown = sum(not finding.is_known for finding in findings)
    states = ", ".join(f"{counts[state]} {state}" for state in rows.STATES)
    verb = "has" if compat.supports(version) else "has no"
    print(
        f"vLLM {version}, which {verb} row in compat.RELEASES: {states}, "
        f"{unknown} of them not known"
    )
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
