"""What ranks tell each other, without a group: shapes, order, failures, digests."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.policies.fingerprint import fingerprint
from vllm_kvpolicy.policies.ranks import HeadShard
from vllm_kvpolicy.worker import tensor_parallel
from vllm_kvpolicy.worker.tensor_parallel import (
    TensorParallelRanks,
    check_hosts,
    ends_its_rank,
    head_shard,
)


@pytest.mark.parametrize("rank", range(4))
def test_copies_get_the_queries_of_their_head_in_order(rank: int, monkeypatch) -> None:
    """Eight query heads, two KV heads, four ranks with two query heads each."""
    whole = torch.randn(3, 2, 8, 5, 4)  # [E, L, Hq, W, D]
    parts = whole.split(2, dim=2)

    def gather(out: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        assert torch.equal(own, parts[rank]) and own.is_contiguous()
        out.copy_(torch.cat(parts))

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    ranks = TensorParallelRanks(HeadShard(8, 2, rank, 4), group=None)
    got = ranks.queries_of_copies(parts[rank])
    assert torch.equal(got, whole[:, :, 4 * (rank // 2) :][:, :, :4])


def test_heads_without_copies_need_nobody() -> None:
    queries = torch.randn(1, 1, 2, 3, 4)
    ranks = TensorParallelRanks(HeadShard(4, 2, 1, 2), group=None)
    assert ranks.queries_of_copies(queries) is queries


def test_means_and_maxima_leave_what_they_are_given(monkeypatch) -> None:
    def reduce(values: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None):
        other = values + 2
        values.copy_(torch.maximum(values, other) if op == dist.ReduceOp.MAX else 6)

    monkeypatch.setattr(dist, "all_reduce", reduce)
    ranks = TensorParallelRanks(HeadShard(4, 2, 0, 2), group=None)
    given = torch.ones(3)[:, None].expand(3, 2)  # several places, one memory
    assert ranks.mean(given).tolist() == [[3, 3]] * 3
    counts = torch.tensor([1, 5])
    assert ranks.most(counts).tolist() == [3, 7]
    assert given.unique().tolist() == [1] and counts.tolist() == [1, 5]


@pytest.mark.parametrize(("rank", "error"), [(0, RuntimeError), (1, SystemExit)])
def test_a_rank_that_vllm_does_not_hear_ends(rank: int, error: type) -> None:
    shard = HeadShard(4, 2, rank, 2)
    with pytest.raises(error), ends_its_rank(shard):
        raise RuntimeError("no memory")
    with ends_its_rank(shard):
        pass


@pytest.mark.parametrize("heads", [(4, 2), (8, 1), (2, 1)])
def test_a_model_with_other_heads_is_refused(heads, monkeypatch) -> None:
    group = SimpleNamespace(rank_in_group=1)
    monkeypatch.setattr(tensor_parallel, "get_tp_group", lambda: group)
    model = SimpleNamespace(
        hf_text_config=None,
        use_mla=False,
        model_arch_config=SimpleNamespace(
            total_num_attention_heads=8, total_num_kv_heads=4
        ),
    )
    ranks = SimpleNamespace(tensor_parallel_size=2)
    config = SimpleNamespace(model_config=model, parallel_config=ranks)
    layer = SimpleNamespace()
    layer.num_heads, layer.num_kv_heads = heads
    if heads == (4, 2):
        assert head_shard(config, layer) == HeadShard(8, 4, 1, 2)
    else:
        with pytest.raises(ValueError, match="on rank 1 of 2, expected 4 and 2 of"):
            head_shard(config, layer)


def test_the_fingerprint_is_of_contents_and_not_of_places(tmp_path) -> None:
    def of(name: str, content: str = "a", **values: Any) -> str:
        path = tmp_path / name
        path.write_text(content)
        options = {"wgkv_gates": str(path)}
        config = {"policy": "wgkv", "policy_config": options, **values}
        return fingerprint(KVPolicyConfig.from_dict(config))

    assert of("one") == of("two")
    assert of("one") == of("one", trace_dir=str(tmp_path))
    assert of("one") != of("two", content="b")
    assert of("one") != of("one", interval=96)
    assert of("one") != of("one", allow=["snapkv"])


def test_folders_count_by_the_files_in_them(tmp_path) -> None:
    config = {"policy": "duo", "policy_config": {"duo_pattern": str(tmp_path)}}
    found = []
    for text in ("", "a", "ab"):
        (tmp_path / "full_attention_heads.tsv").write_text(text)
        found.append(fingerprint(KVPolicyConfig.from_dict(config)))
    assert len(set(found)) == 3


def meet(monkeypatch, nodes: int, fault: str = "") -> None:
    """Let three ranks meet, of which one is missing or has another policy."""
    group = SimpleNamespace(cpu_group=None, world_size=3)
    monkeypatch.setattr(tensor_parallel, "get_tp_group", lambda: group)

    def barrier(*args: Any) -> None:
        if fault == "absent":
            raise RuntimeError("Rank 1 failed to pass monitoredBarrier")

    def gather(found: list[str], own: str, group: Any) -> None:
        found[:] = [own, own, "x" if fault == "other" else own]

    monkeypatch.setattr(dist, "monitored_barrier", barrier)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    hosts = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=nodes))
    check_hosts(hosts, KVPolicyConfig.from_dict({"policy": "tova"}))


@pytest.mark.parametrize(
    ("fault", "said"),
    [("other", r"ranks \[2\] have other policies"), ("absent", "have no policy, or")],
)
def test_hosts_must_agree(fault: str, said: str, monkeypatch) -> None:
    with pytest.raises(ValueError, match=said):
        meet(monkeypatch, 2, fault)


def test_hosts_that_agree_and_ranks_of_one_host_pass(monkeypatch) -> None:
    meet(monkeypatch, 2)
    meet(monkeypatch, 1, "absent")
