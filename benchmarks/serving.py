"""Compares the speed of policies and stock vLLM through the OpenAI API.

    python -m benchmarks.serving pressure --out pressure.json
    python -m benchmarks.serving neutral --pairs 15 --out neutral.json
    python -m benchmarks.serving turns --model FOLDER --dtype bfloat16
    python -m benchmarks.serving scarce --model FOLDER --shares 0.4 --out scarce.json
    python -m benchmarks.serving long --shares 0.4 --out long.json
    python -m benchmarks.serving speculation --pairs 6 --out speculation.json

All servers of a comparison run from start to end and get the same requests in turn
(A B C, B C A, C A B), so a ratio compares neighbours in time and no server always comes
first. They are verified, warmed up with one round that does not count, and then timed.
Timings are meaningful only on an otherwise idle machine.
"""

import argparse
import json
import runpy
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import packed, provenance
from benchmarks.caching_scenarios import CACHING_SCENARIOS, Prefixes, Turns
from benchmarks.printing import log, report
from benchmarks.rounds import compare, ratios_to, recorded, summarise
from benchmarks.scarce_scenario import SCARCE_SCENARIOS, Scarce
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.server import running
from benchmarks.speculation_scenario import SPECULATION_SCENARIOS, Speculation
from benchmarks.verify import verify, verify_caching
from benchmarks.workload import VALUE_BYTES
from vllm_kvpolicy.commands.outputs import new_file, new_folder

PACKAGED_MODEL = Path("reasoner/checkpoint")
AnyScenario = Scenario | Prefixes | Turns | Scarce | Speculation
ALL_SCENARIOS: dict[str, AnyScenario] = {
    **SCENARIOS,
    **CACHING_SCENARIOS,
    **SCARCE_SCENARIOS,
    **SPECULATION_SCENARIOS,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "pairs": {"type": int, "help": "timed rounds"},
    "requests": {"type": int, "help": "in a round"},
    "at_once": {"type": int, "help": "requests in flight, of prefixes"},
    "prompt_tokens": {"type": int, "help": "length of each prompt"},
    "unit_tokens": {"type": int, "help": "that each prompt of speculation repeats"},
    "drafts": {"type": int, "help": "tokens that speculation drafts at most"},
    "output_tokens": {"type": int, "help": "forced length of each output"},
    "budget": {"type": int, "help": "tokens per KV head"},
    "interval": {"type": int, "help": "tokens between events"},
    "block_size": {"type": int, "help": "tokens"},
    "max_model_len": {"type": int, "help": "tokens"},
    "max_num_seqs": {"type": int, "help": "most requests in a step"},
    "seed": {"type": int, "help": "of lengths and contents"},
    "prefixes": {"type": int, "help": "different ones in a round"},
    "prefix_tokens": {"type": int, "help": "length of each"},
    "suffix_tokens": {"type": int, "help": "of a prompt, behind its prefix"},
    "conversations": {"type": int, "help": "held at once"},
    "turns": {"type": int, "help": "of each conversation"},
    "first_tokens": {"type": int, "help": "of a conversation's first prompt"},
    "message_tokens": {"type": int, "help": "of each later message"},
    "thinking_tokens": {"type": int, "help": "of each output, left out later"},
    "shares": {
        "type": float,
        "nargs": "+",
        "help": "pools / what stock holds; not of pressure, ragged and neutral",
    },
    "dtype": {
        "choices": tuple(VALUE_BYTES),
        "help": "of scarce, and of prefixes and turns, where float32 compares tokens",
    },
    "policy_config": {"metavar": "JSON", "help": "of prefixes, turns, scarce"},
    "uncached": {
        "action": "store_true",
        "help": "also stock without prefix caching, in prefixes, turns and scarce",
    },
}
"""Field of a scenario -> its option on the command line."""


def run(scenario: AnyScenario, model: Path, log_folder: Path) -> dict[str, Any]:
    """Start the servers, verify them, time them.

    Returns:
        A JSON-able record of everything.
    """
    record: dict[str, Any] = {"provenance": provenance.collect("benchmarks.serving")}
    workload: Any = scenario.workload(model)
    arguments = scenario.servers(model, workload)
    extra = scenario.checked_servers(model, workload)
    check: Any = verify if isinstance(scenario, Scenario) else verify_caching
    may_fail = not isinstance(scenario, Scenario) and scenario.may_fail
    failures: dict[str, str] | None = {} if may_fail else None
    log(f"starting {', '.join(arguments)}; logs in {log_folder}")
    with running(arguments | extra, log_folder, failures) as servers:
        for sentence in (failures or {}).values():
            log(f"did not start: {sentence}")
        passed = check(scenario, workload, servers)
        for sentence in passed:
            log(f"verified: {sentence}")
        for name in extra:
            servers.pop(name).stop()
        pools = {name: server.pool() for name, server in servers.items()}
        rows = compare(servers, workload, scenario.pairs)
    ratios = ratios_to(
        rows,
        [pair for pair in scenario.comparisons if {*pair} <= {*rows}],
        scenario.ratio_columns,
        scenario.seed,
    )
    with_pools = {name: summarise(some) | pools[name] for name, some in rows.items()}
    print(report(with_pools, ratios, scenario.columns, failures))
    return record | {
        "scenario": asdict(scenario),
        "prompt_tokens": workload.prompt_tokens,
        "verified": passed,
        **recorded(arguments, pools, rows, ratios),
        "did_not_start": {
            name: {
                "arguments": [*map(provenance.redacted, arguments[name])],
                "why": why,
            }
            for name, why in (failures or {}).items()
        },
    }


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("scenario", choices=ALL_SCENARIOS)
    parser.add_argument("--model", type=Path, default=PACKAGED_MODEL, help="a folder")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    parser.add_argument("--logs", type=new_folder, help="folder for the servers' logs")
    parser.add_argument("--policies", nargs="+", metavar="NAME")
    for name, settings in OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    return parser.parse_args(argv)


def choose_scenario(args: argparse.Namespace) -> AnyScenario:
    """Return the scenario with the changes of the command line.

    Raises:
        ValueError: an option that the scenario does not have.
    """
    scenario = ALL_SCENARIOS[args.scenario]
    known = asdict(scenario)
    changes: dict[str, Any] = {}
    for name in ("policies", *OPTIONS):
        value = getattr(args, name)
        if value is None or value is False:
            continue
        if name not in known:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(
                f"{option}: the scenario {args.scenario} has no such value"
            )
        changes[name] = tuple(value) if isinstance(value, list) else value
    return replace(scenario, **changes)


def find_model(asked: Path, folder: Path) -> Path:
    """Return the model's folder; a random tiny model if the packaged one is missing.

    Args:
        folder: where a tiny model may be written.
    """
    if asked != PACKAGED_MODEL or (asked / "config.json").is_file():
        return asked
    log("no packaged model: using a random tiny one")
    script = provenance.ROOT / "tests" / "support" / "tiny_model.py"
    return runpy.run_path(str(script))["make_tiny_model"](folder / "tiny_model")


def main(argv: list[str] | None = None) -> None:
    """Run one scenario and write its record."""
    args = parse_args(argv)
    folder = args.logs or Path(tempfile.mkdtemp(prefix="kvpolicy-serving-"))
    folder.mkdir(parents=True, exist_ok=True)
    model = find_model(args.model, folder)
    record = run(choose_scenario(args), model, folder)
    if args.out:
        packed.write_text(args.out, json.dumps(record, indent=2) + "\n")
        log(f"wrote {args.out}")


if __name__ == "__main__":
    main()
