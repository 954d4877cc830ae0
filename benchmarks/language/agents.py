"""Plays agents that share instructions and collect results of tools, and asks them.

    python -m benchmarks.language.agents --out agents.json

Conversations of a round begin with the same instructions, in which lines `name: code`
are hidden. Each turn brings the result of a tool and an answer; behind the last turn
every conversation is asked for codes of the instructions. Servers are stock vLLM, and a
policy with events on call: alone, with the instructions pinned, and with hints besides,
by which all results but the newest go first. All get the same bytes, and the same
requests in turn, as those of `benchmarks.serving`. Needs the model and the texts of
`benchmarks.language`. Timings are meaningful only on an otherwise idle machine.
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import packed, pretrained, provenance
from benchmarks.columns import TURN_TTFT, printed
from benchmarks.language.tasks import Problem, problems
from benchmarks.language.texts import encoder_of, read_texts
from benchmarks.load import Completion, Played, Sample, complete, open_session, sampled
from benchmarks.printing import log, report
from benchmarks.rounds import (
    Row,
    compare,
    measure,
    ratios_to,
    recorded,
    summarise,
)
from benchmarks.scenarios import STOCK
from benchmarks.server import EngineSettings, running
from benchmarks.workload import NULL_BLOCKS, block_bytes
from vllm_kvpolicy.commands.outputs import new_file

BLOCK = 32
TASK, TEXT_TOKENS = "lookup", 2048
PINNED, HINTED = "pinned", "pinned, hints"
COLUMNS = printed(
    *("output_tok_s", "right", "hit_tokens", *TURN_TTFT, "itl_p99_ms"),
    *("preemptions", "events", "least_held_ratio", "mean_running"),
)
RATIOS = ("output_tok_s", "ttft_first_ms", "ttft_later_ms")


@dataclass
class Agents:
    """The requests of a round.

    Args:
        instructions: by round, a text and what is asked of it.
        words: tokens of which results of tools are cut.
        is_hinted: older results are to go first.
        contexts: by conversation of the last round, its tokens and the hints.
    """

    instructions: Sequence[Problem]
    words: Sequence[int]
    conversations: int = 4
    turns: int = 12
    result_tokens: tuple[int, int] = (150, 350)
    answer_tokens: int = 64
    questions: int = 3
    newest: int = 2
    is_hinted: bool = False
    contexts: dict[int, tuple[list[int], dict[str, Any] | None]] = field(
        default_factory=dict
    )

    @property
    def longest(self) -> int:
        """Tokens that a conversation may have at most, its last question included."""
        turn = self.result_tokens[1] + self.answer_tokens
        return len(self.instructions[0].text_ids) + self.turns * turn + 64

    @property
    def usual(self) -> int:
        """Tokens of a conversation, on average."""
        return self.longest - self.turns * (
            (self.result_tokens[1] - self.result_tokens[0]) // 2
        )

    async def play(self, url: str, round_number: int, sample: Sample) -> Played:
        """Hold the conversations of a round."""
        problem = self.instructions[round_number]
        async with open_session(url) as session:

            async def hold(number: int) -> list[Completion]:
                rng = random.Random(f"agents/{round_number}/{number}")
                prompt, results, found = list(problem.text_ids), list[int](), []
                for turn in range(1, self.turns + 1):
                    size = rng.randint(*self.result_tokens)
                    first = rng.randrange(len(self.words) - size)
                    results += [len(prompt), len(prompt) + size]
                    prompt += self.words[first : first + size]
                    hints = self._hints(results)
                    answer = await complete(session, prompt, self.answer_tokens, hints)
                    answer.turn = turn
                    prompt += answer.token_ids
                    found.append(answer)
                self.contexts[number] = prompt, self._hints(results)
                return found

            work = asyncio.gather(*map(hold, range(self.conversations)))
            held, samples = await sampled(work, sample)
        return [completion for each in held for completion in each], samples

    async def ask(self, url: str, round_number: int) -> float:
        """Return the share of right answers behind the last turns; none is timed."""
        asked = self.instructions[round_number].asked
        asked = random.Random(round_number).sample(asked, self.questions)
        right = []
        async with open_session(url) as session:
            for prompt, hints in self.contexts.values():
                for question, answer in asked:
                    ask = [*prompt, *question]
                    said = await complete(session, ask, len(answer), hints)
                    right.append(tuple(said.token_ids) == answer)
        return sum(right) / len(right)

    def _hints(self, results: Sequence[int]) -> dict[str, Any] | None:
        old = list(results[: -2 * self.newest])
        return {"kv_drop_first": old} if self.is_hinted and old else None


def servers(args: argparse.Namespace, agents: Agents) -> dict[str, list[str]]:
    """Return server name -> arguments of `vllm serve`."""
    needed = agents.conversations * -(-agents.usual // BLOCK)
    blocks = int(needed * args.share)
    one = block_bytes(args.model, BLOCK, "float32")
    settings = EngineSettings(
        model=str(args.model),
        max_model_len=agents.longest,
        max_num_seqs=agents.conversations,
        kv_cache_bytes=(blocks + NULL_BLOCKS) * one,
        block_size=BLOCK,
    ).arguments()
    policy = ["--kv-policy", args.policy, "--kv-budget", str(args.budget)]
    policy += ["--kv-interval", str(args.interval)]
    pin = ["--kv-pin", str(len(agents.instructions[0].text_ids))]
    hints = ["--kv-policy-config", json.dumps({"hints": True})]
    kinds = {args.policy: policy, PINNED: policy + pin, HINTED: policy + pin + hints}
    return {name: settings + words for name, words in {STOCK: [], **kinds}.items()}


def play_round(server: Any, agents: Agents, number: int) -> Row:
    """Return a round's figures, and the share of right answers."""
    own = replace(agents, is_hinted=server.name == HINTED, contexts={})
    row = measure(server, own, number)
    row["right"] = asyncio.run(own.ask(server.url, number))
    return row


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, play the rounds; return a JSON-able record of everything."""
    encode, first = encoder_of(args.model)
    texts = read_texts(encode, first, TEXT_TOKENS, pretrained.default_folder().parent)
    words = [token for text in texts for token in text.token_ids[1:]]
    made = problems(TASK, args.instructions, args.pairs + 1, 2, encode, texts)
    agents = Agents(made, words, args.conversations, args.turns)
    arguments = servers(args, agents)
    logs = Path(tempfile.mkdtemp(prefix="kvpolicy-agents-"))
    log(f"starting {', '.join(arguments)}; logs in {logs}")
    with running(arguments, logs) as started:
        pools = {name: server.pool() for name, server in started.items()}
        rows = compare(started, agents, args.pairs, play_round)
    pairs = [(name, STOCK) for name in rows if name != STOCK]
    ratios = ratios_to(rows, pairs, RATIOS, seed=0)
    medians = {name: summarise(of_server) for name, of_server in rows.items()}
    print(report(medians, ratios, COLUMNS))
    return {
        "provenance": provenance.collect("benchmarks.language.agents"),
        "agents": {
            **vars(agents),
            "instructions": args.instructions,
            "words": None,
            "contexts": None,
        },
        **recorded(arguments, pools, rows, ratios),
    }


def main(argv: list[str] | None = None) -> None:
    """Read the command line, play, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="folder; SmolLM2 135M by default")
    parser.add_argument("--out", type=new_file, help="JSON file to write")
    parser.add_argument("--policy", default="ams-tova")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--share", type=float, default=0.4, help="of what all need")
    parser.add_argument("--pairs", type=int, default=3, help="timed rounds")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--conversations", type=int, default=4)
    parser.add_argument("--instructions", type=int, default=1472, help="tokens")
    args = parser.parse_args(argv)
    args.model = args.model or pretrained.make(pretrained.default_folder())
    record = run(args)
    if args.out:
        packed.write_text(args.out, json.dumps(record, indent=2) + "\n")
        log(f"wrote {args.out}")


if __name__ == "__main__":
    main()
