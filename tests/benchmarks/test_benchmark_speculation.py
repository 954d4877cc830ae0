"""Tests of the scenario in which servers speculate: requests, servers, figures.

The whole way with real servers takes minutes on two busy cores and is not run here:

    python -m benchmarks.serving speculation --pairs 1 --requests 4 --output-tokens 300
"""

import json

from benchmarks import rounds, serving
from benchmarks.load import Completion
from benchmarks.speculation_scenario import SPECULATION_SCENARIOS

SPECULATION = SPECULATION_SCENARIOS["speculation"]


def test_prompts_repeat_a_unit_each(tiny_model):
    workload = SPECULATION.workload(tiny_model)
    prompts = workload.prompts(1)
    assert [len(prompt) for prompt in prompts] == [200] * 8
    for prompt in prompts:
        assert prompt[24:] == prompt[:-24]
        assert len(set(prompt[:24])) > 12
    assert len({tuple(prompt) for prompt in prompts}) == 8
    assert prompts == workload.prompts(1) != workload.prompts(2)
    first, second = workload.few().prompts(0)
    assert first == second  # for the second, a prefix cache has the first


def test_all_servers_draft_alike(tiny_model):
    args = serving.parse_args(
        ["speculation", "--policies", "snapkv", "--drafts", "3", "--shares", "2", "0.5"]
    )
    scenario = serving.choose_scenario(args)
    servers = scenario.servers(tiny_model, scenario.workload(tiny_model))
    assert list(servers) == ["snapkv@2", "snapkv@0.5", "stock@2", "stock@0.5"]
    for name, words in servers.items():
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert (config["method"], config["num_speculative_tokens"]) == ("ngram", 3)
        assert ("--kv-policy" in words) == name.startswith("snapkv")
        blocks = int(words[words.index("--num-gpu-blocks-override") + 1])
        # 799 tokens of a request have a place in the cache: 25 blocks of 32.
        assert blocks == int(8 * 25 * float(name.partition("@")[2])) + 1
    assert scenario.comparisons == [
        ("snapkv@2", "stock@2"),
        ("snapkv@0.5", "stock@0.5"),
        ("snapkv@0.5", "stock@2"),
    ]


def test_the_share_of_right_drafts_is_a_figure():
    completions = [Completion(0.0, [1, 2], [0.5, 1.0])]
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    before, after = {drafted: 10.0, accepted: 4.0}, {drafted: 50.0, accepted: 14.0}
    row = rounds.figures(completions, [], before, after)
    assert (row["drafted"], row["accepted_ratio"]) == (40.0, 0.25)
    assert rounds.figures(completions, [], {}, {})["accepted_ratio"] is None
    assert {*SPECULATION.columns, *SPECULATION.ratio_columns} <= {*row, "blocks"}
