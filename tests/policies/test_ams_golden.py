"""AMS in parity mode against the authors' own results, index for index."""

import numpy as np
import pytest
import torch

from support.golden import Golden, params
from vllm_kvpolicy.policies.allocators.ams import AMSConfig, AMSSelection, select

GOLDEN = "ams_parity"

SINGLES, CHAINS = 80, 20


def config(p: dict[str, float]) -> AMSConfig:
    return AMSConfig(
        segment_mass=p["delta"],
        min_segment=int(p["Lmin"]),
        max_segment=int(p["Lmax"]),
        min_quota=int(p["qmin"]),
        sinks=int(p["n_sink"]),
        recent=int(p["n_last"]),
        ema_decay=p.get("lam", 0.9),
        ema_mix=p.get("beta", 0.9),
        parity=True,
    )


def assert_same(
    got: AMSSelection, golden: Golden, prefix: str, num_tokens: int
) -> None:
    segments, quotas = golden[prefix + "seg"], golden[prefix + "quota"]
    bound = got.quotas.shape[-1]
    width = segments.shape[1]
    assert bound >= width
    pad = ((0, 0), (0, bound - width))
    np.testing.assert_array_equal(got.keep.numpy(), golden[prefix + "keep"])
    np.testing.assert_array_equal(got.quotas.numpy(), np.pad(quotas, pad))
    np.testing.assert_array_equal(
        got.segments.numpy(),
        np.pad(segments, (*pad, (0, 0)), constant_values=num_tokens),
    )
    used = (got.segments[..., 0] < num_tokens).sum(-1)
    np.testing.assert_array_equal(used.numpy(), golden[prefix + "nseg"])


def test_golden_file_is_complete(golden: Golden) -> None:
    assert len(golden["single_params"]) == SINGLES
    assert len(golden["chain_params"]) == CHAINS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", range(SINGLES))
def test_single_event(golden: Golden, case: int, dtype: torch.dtype) -> None:
    p, prefix = params(golden, "single", case), f"s{case:03d}_"
    usage = torch.from_numpy(golden[prefix + "u"]).to(dtype)
    score = torch.from_numpy(golden[prefix + "g"]).to(dtype)
    got = select(usage, score, int(p["K"]), config(p))
    assert_same(got, golden, prefix, int(p["T"]))
    assert (got.quotas.sum(-1) == int(p["K"])).all()


@pytest.mark.parametrize("case", range(CHAINS))
def test_chain_of_events_with_credit(golden: Golden, case: int) -> None:
    p = params(golden, "chain", case)
    credit = None
    for event in range(int(p["n_events"])):
        prefix = f"c{case:03d}e{event}_"
        usage = torch.from_numpy(golden[prefix + "u"])
        score = torch.from_numpy(golden[prefix + "g"])
        if credit is not None:
            before = golden[prefix + "credit_before"]
            np.testing.assert_allclose(
                credit.numpy(), before[:, : credit.shape[-1]], rtol=1e-9
            )
        got = select(usage, score, int(p["K"]), config(p), credit=credit)
        assert_same(got, golden, prefix, usage.shape[-1])
        after = golden[prefix + "credit_after"]
        np.testing.assert_allclose(got.credit.numpy(), after, rtol=1e-9)
        credit = got.credit


@pytest.mark.parametrize("case", range(CHAINS))
def test_zero_credit_is_no_credit(golden: Golden, case: int) -> None:
    p, prefix = params(golden, "chain", case), f"c{case:03d}e0_"
    usage = torch.from_numpy(golden[prefix + "u"])
    score = torch.from_numpy(golden[prefix + "g"])
    zero = torch.zeros_like(usage)
    got = select(usage, score, int(p["K"]), config(p), credit=zero)
    assert_same(got, golden, prefix, usage.shape[-1])
