"""What `vllm-kvpolicy plan` says, and what it refuses."""

import json
import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from support import made_hybrids
from vllm_kvpolicy import __main__ as command
from vllm_kvpolicy import compat
from vllm_kvpolicy.commands import plan, trials
from vllm_kvpolicy.commands.capacity import Life, most_at_once
from vllm_kvpolicy.commands.inputs import memory_bytes
from vllm_kvpolicy.commands.reads import weight_bytes
from vllm_kvpolicy.config import KVPolicyConfig

N, GROUP = 32, 2  # of the tiny model: 4 query heads, 2 KV heads
# Keys and values of 2 layers, 2 heads and 32 numbers of 4 bytes, and 32 tokens.
SUPERBLOCK = 2 * 2 * 2 * 32 * 4 * N
LENGTHS = ("--prompt-tokens", "100", "--output-tokens", "900")
NEIGHBOURS = plan.NEIGHBOURS
POLICY = ("--kv-policy", "streaming", "--kv-budget", "256", "--kv-interval", "128")
POLICY += ("--kv-events", "always")


@pytest.fixture(autouse=True)
def without_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the given budget and interval is planned; others take as long."""
    monkeypatch.setattr(plan, "NEIGHBOURS", ())


def words(model: Path, *more: str, memory: int | str = 200 * SUPERBLOCK) -> list[str]:
    size = ("--kv-cache-memory", str(memory), "--block-size", str(N))
    size += ("--dtype", "float32")
    return ["plan", str(model), *size, *POLICY, *LENGTHS, *more]


def planned(capsys, model: Path, *more: str, **given: int | str) -> dict[tuple, list]:
    """Return the lines of the table, as (name, budget, interval) -> other columns."""
    assert command.main(words(model, *more, **given)) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = plan.HEAD
    starts = [lines[1].index(head) for head in heads]
    cells = [
        [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines[2 : 4 + 1 + len(plan.NEIGHBOURS)]
    ]
    return {tuple(line[:3]): line[3:] for line in cells}


def test_the_table_by_hand_and_as_the_forecast_says(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr(plan, "NEIGHBOURS", NEIGHBOURS)
    lines = planned(capsys, tiny_model)
    # 999 tokens are computed, 32 blocks of 32; one of 200 is vLLM's null block.
    pool, peak, mean, *rest = lines["stock", "", ""]
    assert (pool, peak, rest) == ("199", "32", ["-", "0", "6"])
    assert 4 < float(mean) < 32
    assert lines["stock, FP8", "", ""][::5] == ["799", str(799 // 32)]
    # After an event 8 blocks for 256 tokens and one for rounding; 128 tokens more fill
    # 4.
    pool, peak, mean, *rest = lines["streaming", "256", "128"]
    assert (pool, peak, rest[:2]) == ("199", "13", ["9", "0"])
    assert 8 < float(mean) < 13 and 199 // 13 <= int(rest[2]) < 199 // 8
    assert set(list(lines)[2:]) == {
        ("streaming", str(64 * budget), str(32 * interval))
        for budget, interval in ((4, 4), *NEIGHBOURS)
    }
    for (_, budget, interval), line in list(lines.items())[2:]:
        config = KVPolicyConfig("streaming", int(budget), int(interval))
        life = Life(config.footprint(100, N, GROUP), 999)
        assert line[2] == f"{life.mean:.1f}"
        assert int(line[5]) == most_at_once([life], int(line[0]))


def test_requests_that_are_cut_when_the_pool_runs_short(tiny_model, capsys):
    fixed = planned(capsys, tiny_model)["streaming", "256", "128"]
    assert command.main(words(tiny_model, "--kv-events", "pressure")) == 0
    out = capsys.readouterr().out
    assert "at most 6 run at once nobody is cut" in out  # of 32 blocks each
    called = planned(capsys, tiny_model, "--kv-events", "pressure")
    line = called["streaming", "256", "128"]
    # Cut again after 32 tokens, a quarter of the interval: 1 block and not 4.
    assert (line[:2], line[3:5]) == (["199", "10"], fixed[3:5])
    config = KVPolicyConfig("streaming", 256, 32)
    life = Life(config.footprint(100, N, GROUP), 999)
    assert int(line[5]) == most_at_once([life], 199) > int(fixed[5])


def test_the_pools_share_is_planned_with_its_number(tiny_model, capsys):
    lines = planned(
        capsys,
        tiny_model,
        *("--kv-events", "pressure", "--kv-budget", "auto", "--max-num-seqs", "8"),
        *("--max-model-len", "2048"),
    )
    # 199 blocks for 8 are 24, less 1 for rounding: 736 tokens, less 128.
    assert ("streaming", "576", "128") in lines


def test_a_share_of_each_request_is_planned(tiny_model, capsys):
    more = ("--kv-budget", "32%", "--prompt-tokens", "100", "--output-tokens", "700")
    line = planned(capsys, tiny_model, *more)["streaming", "32%", "128"]
    assert (
        line[:4]
        == planned(capsys, tiny_model, *more, "--kv-budget", "256")[
            "streaming", "256", "128"
        ][:4]
    )


def test_a_policy_over_an_fp8_cache(tiny_model, capsys):
    """A float32 model: four times the superblocks; a query takes four times as many."""
    plain = planned(capsys, tiny_model, "--kv-policy", "snapkv")
    lines = planned(
        capsys, tiny_model, "--kv-policy", "snapkv", "--kv-cache-dtype", "fp8_e5m2"
    )
    for name in ("stock", "stock, FP8"):
        assert lines[name, "", ""] == plain[name, "", ""]
    before, after = plain["snapkv", "256", "128"], lines["snapkv, FP8", "256", "128"]
    assert (before[0], after[0]) == ("199", "799")
    window = 32 * GROUP / (2 * N)
    assert (before[-2], after[-2]) == (f"{window:.0f}", f"{4 * window:.0f}")
    assert int(after[-1]) > 3 * int(before[-1])


def test_what_policies_keep_per_token_comes_off_the_pool(tiny_model, capsys):
    # `h2o` remembers a float32 of each token of 4 heads, and of 256 requests.
    lines = planned(capsys, tiny_model, "--kv-policy", "h2o")
    used = 256 * (32 + N - 1) * 4 * 4
    expected = (200 * SUPERBLOCK - used) // (SUPERBLOCK + 4 * 4 * N) - 1
    assert lines["h2o", "256", "128"][0] == str(expected)


def test_requests_of_several_lengths(tiny_model, capsys):
    more = ("--prompt-tokens", "100", "1000", "--output-tokens", "100")
    lines = planned(capsys, tiny_model, *more)
    # 7 and 35 blocks, in turns: 42 * 4 + 7 of 199.
    assert lines["stock", "", ""][5] == "9"


def test_notes_say_what_a_server_wants_besides(tiny_model, capsys):
    more = ("--max-num-seqs", "5")
    assert command.main(words(tiny_model, *more, memory=60 * SUPERBLOCK)) == 0
    text = capsys.readouterr().out
    assert f"tokens, also for stock, of {SUPERBLOCK:,} bytes, in FP8 8,192" in text
    assert "would not start: a request of --max-model-len 4096" in text
    assert command.main(words(tiny_model, *more)) == 0
    assert "More than 5 at once need a higher --max-num-seqs" in capsys.readouterr().out


def test_a_plan_without_a_policy_asks_for_one(tiny_model, capsys):
    given = words(tiny_model)
    place = given.index("--kv-policy")
    assert command.main(given[:place] + given[place + 2 :]) == 2
    assert "--kv-policy: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--kv-budget", "50"), "budget: got 50, expected at least 68 tokens"),
        (("--kv-policy", "local"), "local has no budget"),
        (
            ("--kv-cache-memory", "300KiB"),
            "one request of these lengths holds up to 13",
        ),
        (("--output-tokens", "4000"), "a request of 4100 tokens is longer than"),
        (("--output-tokens", "9", "8", "--prompt-tokens", "1", "2", "3"), "got 2"),
    ],
)
def test_what_cannot_be_planned(more, message, tiny_model, capsys, monkeypatch):
    # vLLM's log may go to the captured output of an earlier test, which is closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)
    assert command.main(words(tiny_model, *more)) == 2
    printed = capsys.readouterr()
    assert f"error: {message}" in printed.err or message in printed.err
    assert not printed.out and "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("is_emulated", "given", "dtype"),
    [
        *[(True, "auto", "float32"), (True, "bfloat16", "bfloat16")],
        (False, "auto", "bfloat16"),
    ],
)
def test_a_cpu_that_emulates_bfloat16_is_planned_in_float32(
    is_emulated, given, dtype, tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(compat, "multiplies_bfloat16", lambda: not is_emulated)
    values = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"dtype": "bfloat16"}))
    assert command.main(words(tmp_path, "--dtype", given)) == 0
    text = capsys.readouterr().out
    assert f"2 KV heads of 32, {dtype}; " in text
    assert f"of {SUPERBLOCK // (1 + (dtype == 'bfloat16')):,} bytes, in FP8" in text
    assert ("In float32, because this CPU emulates" in text) == (dtype == "float32")


def test_models_that_cannot_be_planned(tiny_model, tmp_path, capsys):
    for model in (tmp_path / "nowhere", tmp_path):
        assert command.main(words(model)) == 2
        assert "cannot read the configuration of '/" in capsys.readouterr().err
    values = json.loads((tiny_model / "config.json").read_text())
    windows = {"layer_types": ["sliding_attention", "sliding_attention"]}
    windows |= {"use_sliding_window": True, "sliding_window": 64}
    narrow = {"model_type": "mimo_v2_flash", "v_head_dim": 16}
    for changes in (windows, {**narrow, "layer_types": ["full_attention"] * 2}):
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        assert command.main(words(tmp_path)) == 2
        assert "what its layers hold is not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "beside"),
    [
        (trials.make_gemma3, 9),
        (trials.make_lfm2, 4),
        (partial(made_hybrids.make, "gemma4_e2b"), 4),
    ],
)
def test_layers_that_no_policy_bounds_are_counted(make, beside, tmp_path, capsys):
    """Three groups with a window of 48 tokens, two that keep a state or save one.

    Or two with windows in superblocks of 64 tokens, beside layers without a cache.
    """
    lines = planned(capsys, make(tmp_path))
    pool, peak, _, *rest = lines["stock", "", ""]
    assert (pool, peak) == ("199", str(32 + beside))
    assert int(rest[2]) == 199 // (32 + beside)
    if make is trials.make_lfm2:
        assert command.main(words(tmp_path, "--kv-cache-dtype", "fp8")) == 2
        assert "--kv-cache-dtype: leave it out" in capsys.readouterr().err
    _, peak, mean, after, *_, at_once = lines["streaming", "256", "128"]
    assert (peak, after) == (str(13 + beside), str(9 + beside))
    assert 8 < float(mean) < 13 + beside and int(at_once) >= 199 // (13 + beside)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *[("24GiB", 24 * 2**30), ("24G", 24 * 2**30), ("24GB", 24 * 10**9)],
        *[("1.5 MiB", 3 * 2**19), ("1000", 1000), ("1000B", 1000)],
    ],
)
def test_bytes_with_units(text, nbytes):
    assert memory_bytes(text) == nbytes


@pytest.mark.parametrize(
    "bad", [("--kv-cache-memory", "lots"), ("--prompt-tokens", "0")]
)
def test_wrong_words_are_refused_while_parsing(bad, tiny_model, capsys):
    with pytest.raises(SystemExit):
        command.main(words(tiny_model, *bad))
    assert f"got '{bad[1]}', expected" in capsys.readouterr().err


def test_what_a_step_reads_of_other_models_is_not_known():
    text = SimpleNamespace(model_type="gpt_neox")
    model = SimpleNamespace(hf_text_config=text, quantization=None)
    assert weight_bytes(model) is None
    model.quantization, text.model_type = "awq", "llama"
    assert weight_bytes(model) is None


def test_a_step_of_the_policy_reads_less(tiny_model, capsys):
    lines = planned(capsys, tiny_model)
    assert command.main(words(tiny_model)) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "reads" in line]
    config = json.loads((tiny_model / "config.json").read_text())
    per_layer = 3 * 64 * config["intermediate_size"] + 2 * 64 * (4 + 2) * 32
    weights = 4 * (2 * per_layer + 64 * config["vocab_size"])
    stock, policy = (
        6 * float(lines[key][2]) * SUPERBLOCK
        for key in (("stock", "", ""), ("streaming", "256", "128"))
    )
    assert told.startswith(f"A step of 6 reads {weights / 1e9:.2f} GB of weights and ")
    assert f"({stock / (weights + stock):.0%} of all)" in told
    faster = (weights + stock) / (weights + policy)
    assert f"counts, {faster:.2f} times as fast" in told
    # Where nobody is cut at that number, nothing is said.
    assert command.main(words(tiny_model, "--kv-events", "pressure")) == 0
    assert "A step of" not in capsys.readouterr().out
    assert command.main(words(tiny_model, "--max-num-seqs", "4")) == 0
    assert "A step of 4 reads" in capsys.readouterr().out
