"""`vllm_kvpolicy.policies.score`: every scorer of the package on plain tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support import event_inputs
from support.epikv_trace import scores_from_hidden
from vllm_kvpolicy.kernels.rope import Rope
from vllm_kvpolicy.policies import compose as factory
from vllm_kvpolicy.policies import score
from vllm_kvpolicy.policies.base import EventInputs
from vllm_kvpolicy.policies.compose import measure_usage
from vllm_kvpolicy.policies.names import SCORERS

HEADS, GROUP, SIZE = event_inputs.HEADS, event_inputs.GROUP, event_inputs.SIZE
TOKENS, WINDOW, THETA = 60, 20, 5e4
Options = Callable[..., dict[str, Any]]


def tensors(seed: int = 0) -> dict[str, Any]:
    """The positional arguments of `score` behind the name; sinks, a gap, then a run."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.where(torch.arange(TOKENS) < 6, 0, 700)
    return {
        "k": torch.randn(HEADS, TOKENS, SIZE, generator=generator),
        "v": torch.randn(HEADS, TOKENS, SIZE, generator=generator),
        "q": torch.randn(HEADS * GROUP, WINDOW, SIZE, generator=generator),
        "positions": torch.arange(TOKENS) + start,
        "rope_theta": THETA,
    }


def required(name: str, scorer_options: Options) -> dict[str, Any]:
    """Parameters without which a scorer refuses."""
    generator = torch.Generator().manual_seed(1)
    more = {
        "h2o": {"state": torch.rand(HEADS, TOKENS, generator=generator)},
        "epikv": {"hidden": torch.randn(32, 41, 16, generator=generator)},
    }
    return {**as_given(scorer_options(name, num_layers=1)), **more.get(name, {})}


def as_given(options: dict[str, Any]) -> dict[str, Any]:
    """Name a calibration file as `score` does, whichever scorer it is for."""
    return {
        "calibration" if key.endswith("_calibration") else key: value
        for key, value in options.items()
    }


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_scores(name: str, scorer_options: Options) -> None:
    params = required(name, scorer_options)
    got = score(name, **tensors(), **params)
    assert got.shape == (HEADS, TOKENS) and got.dtype == torch.float32
    assert got.is_contiguous() and torch.isfinite(got).all()
    again = {**tensors(), "positions": tensors()["positions"].int()}
    assert torch.equal(score(name, **again, **params), got)
    in_half = {
        key: value.bfloat16() if key in ("k", "v", "q") else value
        for key, value in tensors().items()
    }
    assert torch.isfinite(score(name, **in_half, **params)).all()


@pytest.mark.parametrize("name", [name for name in SCORERS if name != "epikv"])
def test_equals_the_scorer_at_an_event(name: str, scorer_options: Options) -> None:
    params, given = required(name, scorer_options), tensors()
    row = SCORERS[name]
    options = scorer_options(name, num_layers=1)
    if isinstance(row.query_window, str):
        options[row.query_window] = WINDOW
    scorer = factory.build(name, options).scorer
    rows = (1, 1, HEADS, TOKENS)
    inputs = EventInputs(
        lengths=torch.full(rows[:3], TOKENS),
        must_keep=(torch.arange(TOKENS) < 3).expand(rows),
        end=torch.tensor([760]),
        scale=SIZE**-0.5,
        keys=given["k"][None, None],
        values=given["v"][None, None],
        queries=given["q"][None, None],
        positions=given["positions"].expand(rows),
        rope=Rope.from_theta(THETA, SIZE),
        memory={"h2o": params["state"][None, None]} if name == "h2o" else {},
    )
    usage = measure_usage(scorer.needs, inputs)
    want = scorer.score(inputs, usage)[0, 0]
    assert torch.equal(score(name, **given, **params, sinks=3), want)


def test_epikv_scores_the_tokens_after_the_prompt() -> None:
    hidden = torch.randn(32, 41, 16, generator=torch.Generator().manual_seed(1))
    got = score("epikv", **tensors(), hidden=hidden)
    want = scores_from_hidden(hidden)  # of 40 tokens, the newest that are held
    assert torch.equal(got[:, -40:], want.expand(HEADS, -1))


@pytest.mark.parametrize("name", ["snapkv", "h2o", "expected", "rkv", "rpc"])
def test_window_is_what_is_given_or_less(name: str, scorer_options: Options) -> None:
    params, given = required(name, scorer_options), tensors()
    got = score(name, **given, **params, window=8)
    assert not torch.equal(got, score(name, **given, **params))
    given["q"] = given["q"][:, -8:]
    assert torch.equal(score(name, **given, **params), got)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("snapkv", {"kernel": 3}),
        ("rpc", {"kernel": 3}),
        ("rpc", {"sinks": 10}),
        ("rkv", {"kernel": 3}),
        ("rkv", {"rkv_lambda": 0.4}),
        ("rkv", {"rkv_threshold": 0.1}),
        ("lagkv", {"lag": 8}),
        ("lagkv", {"lag": 8, "cross": True}),
        ("lagkv", {"lag": 8, "sinks": 0}),
        ("expected", {"sinks": 0}),
        ("expected", {"n_future": 3}),
        ("expected", {"covariance": False}),
        ("expected", {"value_norm": False}),
        ("expected", {"epsilon": 0}),
        ("random", {"seed": 1}),
    ],
)
def test_parameters_arrive(name: str, params: dict[str, Any]) -> None:
    plain = {key: value for key, value in params.items() if key == "lag"}
    if plain == params:
        plain = {}
    got = score(name, **tensors(), **params)
    assert not torch.equal(got, score(name, **tensors(), **plain))


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("ams-tova", {}, "name: got 'ams-tova', expected one of epikv, expected"),
        (None, {}, "name: got None"),
        ("snapkv", {"lag": 3}, "'snapkv', expected one of window, kernel, sinks"),
        ("tova", {"window": 4}, "window: not a parameter of 'tova'"),
        ("keydiff", {"state": None}, "state: not a parameter of 'keydiff'"),
        ("h2o", {}, "state: got None, but 'h2o' needs it"),
        ("epikv", {}, "hidden: got None, but 'epikv' needs it"),
        ("triattention", {}, "calibration: got None"),
        ("snapkv", {"window": 21}, "q: got 20 queries, expected the window of 21"),
        ("expected", {"window": 0}, "window: got 0"),
        ("lagkv", {"lag": 1}, "lag: got 1, expected an integer in [2, 16777216]"),
        ("lagkv", {"sinks": -1}, "sinks: got -1, expected an integer >= 0"),
    ],
)  # fmt: skip
def test_refusals(name: Any, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        score(name, **tensors(), **params)
    assert text in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": torch.zeros(HEADS, TOKENS)},
        {"v": torch.zeros(HEADS, TOKENS - 1, SIZE)},
        {"q": torch.zeros(HEADS + 1, WINDOW, SIZE)},
        {"k": torch.zeros(HEADS, 0, SIZE), "v": torch.zeros(HEADS, 0, SIZE)},
    ],
)
def test_shapes_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="k, v, q and positions: expected"):
        score("keydiff", **{**tensors(), **wrong})


def test_state_and_hidden_of_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="state: expected"):
        score("h2o", **tensors(), state=torch.zeros(HEADS, TOKENS - 1))
    with pytest.raises(ValueError, match="hidden: expected"):
        score("epikv", **tensors(), hidden=torch.zeros(32, 761, 4))


def test_a_calibration_of_another_model_is_refused(scorer_options: Options) -> None:
    for name in ("triattention", "qfilter"):
        with pytest.raises(ValueError, match="num_layers"):
            score(name, **tensors(), **as_given(scorer_options(name, num_layers=2)))


def test_queries_with_gaps_are_refused_where_they_are_turned() -> None:
    given = tensors()
    given["positions"] = 2 * given["positions"]
    with pytest.raises(ValueError, match="positions: expected the newest"):
        score("expected", **given)
    assert torch.isfinite(score("snapkv", **given)).all()
