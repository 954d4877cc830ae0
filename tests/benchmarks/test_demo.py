"""`make demo`: two servers, the same traffic, and one table."""

import pytest

from benchmarks import demo
from benchmarks.load import Completion


def test_a_minute_in_the_table() -> None:
    done = [Completion(started=1.0, arrivals=[1.0 + wait]) for wait in range(1, 21)]
    grown = demo._grown(
        {"vllm:generation_tokens_total": 100.0, "vllm:num_preemptions_total": 2.0},
        {"vllm:generation_tokens_total": 3100.0, "vllm:num_preemptions_total": 5.0},
    )
    minute = demo.Minute(60.0, done, grown, 0.75)
    assert minute.cells == ["50", "20", "20.0 s", "3", "75%", "-"]
    nothing = demo.Minute(1.0, [], grown | {"dropped": 7.0})
    assert nothing.cells[2] == "-" and nothing.cells[-1] == "7"
    assert len(demo.HEAD) == 1 + len(minute.cells)


@pytest.mark.slow
def test_a_few_seconds_of_stock_and_a_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    demo.main(["--seconds", "8", "--policy", "streaming"])
    *_, head, stock, policy = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "tokens/s"
    assert stock.split()[0] == "stock" and policy.split()[0] == "streaming"
    assert stock.split()[-1] == "-" and int(policy.split()[-1]) >= 0
    assert int(stock.split()[1]) > 0 and int(policy.split()[1]) > 0
