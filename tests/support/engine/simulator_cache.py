"""The prefix cache of the simulation: what requests may share, and who may write.

Owns prompts that begin like earlier requests, codes that say what a token's keys and
values depend on, and a copy of what every cached superblock has to hold.
"""

import random
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)

from support.engine.simulator_engine import Scenario
from support.engine.simulator_pages import NUM_HEADS, Asked, check, own_pages, slots_of

FIRST_WORD, NUM_WORDS = 100, 1000
SALTS = (None, None, None, "a", "b")
REMEMBERED = 12  # earlier requests that a prompt may begin like
Snapshot = Mapping[int, tuple[Any, list[str]]]


class CacheCheck:
    """Draws prompts that share prefixes and checks every use of vLLM's prefix cache."""

    def __init__(self, pool: Any, scenario: Scenario) -> None:
        init_none_hash(sha256)
        self.pool, self.block_size = pool, scenario.block_size
        self.num_drafts = scenario.drafts
        # Superblocks that a window reaches back, and groups that have one.
        self.reach = -(-(scenario.window_tokens - 1) // scenario.block_size)
        self.states = scenario.states
        if self.states:  # one that ends there
            self.reach = 1
        self.windows = range(1, 1 + scenario.windows)
        self.hasher = get_request_block_hasher(scenario.block_size, sha256)
        self._earlier: list[tuple[list[int], str | None]] = []
        self._tree: dict[tuple[int, Any], int] = {}
        # By superblock: the hash under which it is cached and what it has to hold.
        self._expected: dict[int, tuple[Any, np.ndarray]] = {}

    # -- prompts ------------------------------------------------------------------

    def draw_prompt(
        self, length: int, rng: random.Random
    ) -> tuple[list[int], str | None]:
        """Return tokens and a salt; most prompts begin like an earlier one."""
        prompt: list[int] = []
        salt = rng.choice(SALTS)
        if self._earlier and rng.random() < 0.7:
            earlier, old_salt = rng.choice(self._earlier)
            prompt = earlier[: rng.randint(1, len(earlier))][:length]
            salt = old_salt if rng.random() < 0.8 else salt
        while len(prompt) < length:
            prompt.append(rng.randrange(FIRST_WORD, FIRST_WORD + NUM_WORDS))
        return prompt, salt

    def codes(
        self, prompt: Sequence[int], salt: str | None, length: int, answer: int
    ) -> np.ndarray:
        """Return a code of each position, equal where salt and all tokens are equal.

        Args:
            prompt: tokens.
            salt: of the request.
            length: positions; those after the prompt hold generated tokens.
            answer: the token that is always generated.
        """
        tokens = [*prompt, *[answer] * (length - len(prompt))]
        self._earlier = [*self._earlier[1 - REMEMBERED :], (tokens, salt)]
        code, codes = self._code(0, salt), []
        for token in tokens:
            code = self._code(code, token)
            codes.append(code)
        return np.array(codes, np.int64)

    def _code(self, before: int, token: Any) -> int:
        return self._tree.setdefault((before, token), len(self._tree) + 1)

    # -- blocks -------------------------------------------------------------------

    def may_share(self, block_id: int) -> bool:
        """Return whether several requests may hold a superblock."""
        return self.pool.blocks[block_id].block_hash is not None

    def snapshot(self, scheduler: Any) -> Snapshot:
        """Return hash and holders of each superblock that is cached and in use."""
        held: dict[int, tuple[Any, list[str]]] = {}
        for manager in managers_of(scheduler):
            for name, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    if block.block_hash is not None:
                        known = held.setdefault(block.block_id, (block.block_hash, []))
                        known[1].append(name)
        return held

    def check(self, output: Any, scheduler: Any, before: Snapshot) -> np.ndarray:
        """Check what a step writes; return the ids of cached superblocks."""
        for event in output.kv_policy_commands.events:
            for block_id in event.dest_blocks:
                block = self.pool.blocks[block_id]
                is_own = block.ref_cnt == 1 and block.block_hash is None
                check(is_own, event.request_id, "moves into a shared block", block)
        own, *others = managers_of(scheduler)
        self._check_written(output, scheduler, own.req_to_blocks, before)
        for manager in others:
            lists = manager.req_to_blocks
            if self.states:  # of whose superblocks the last one is written
                lists = {name: blocks[-1:] for name, blocks in lists.items()}
            self._check_written(output, scheduler, lists, before)
        return self.cached_ids()

    def _check_written(
        self, output: Any, scheduler: Any, lists: Any, before: Snapshot
    ) -> None:
        for request_id, count in output.num_scheduled_tokens.items():
            end = scheduler.requests[request_id].num_computed_tokens
            blocks, first = lists[request_id], (end - count) // self.block_size
            first = min(first, len(blocks) - 1)
            for block in blocks[first : -(-end // self.block_size)]:
                known, holders = before.get(block.block_id, (None, ()))
                # Others may have let it go in this very step.
                stays = any(block in lists.get(name, ()) for name in holders)
                is_cached = known is not None and known == block.block_hash and stays
                check(not is_cached, request_id, "writes into a cached block", block)
                is_own = block.ref_cnt == 1 or block.block_hash is not None
                check(is_own, request_id, "writes into a shared block", block)

    def cached_ids(self) -> np.ndarray:
        blocks = [block for block in self.pool.blocks if block.block_hash is not None]
        return np.array([block.block_id for block in blocks], np.int64)

    def watch(self, scheduler: Any, asked: Mapping[str, Asked]) -> None:
        """Check from now on what is offered to the cache and what is taken from it."""
        look_up = scheduler._get_local_prefix_cache_hit
        for manager in managers_of(scheduler):
            self._watch_offers(manager, asked, scheduler.kv_policy_planner.states)

        def checked(request: Any, *limits: Any) -> Any:
            found = look_up(request, *limits)
            name = request.request_id
            state = scheduler.kv_policy_planner.states.get(name)
            first = asked[name].plan and asked[name].plan.next_event(1)
            if state is not None and state.plan.is_called and state.inside is None:
                first = None
            expected = self._hit(asked[name], request.num_tokens, first)
            check(found[1] == expected, name, "hits", found[1], "instead of", expected)
            lengths = {len(blocks) * self.block_size for blocks in found[0].blocks}
            check(lengths == {found[1]}, "blocks of hit")
            return found

        scheduler._get_local_prefix_cache_hit = checked

    def _watch_offers(
        self, manager: Any, asked: Mapping[str, Asked], states: Mapping[str, Any]
    ) -> None:
        stock = manager.cache_blocks

        def noting(request: Any, *args: Any, **options: Any) -> None:
            stock(request, *args, **options)
            name = request.request_id
            last = None
            if asked[name].is_called:
                last = states[name].first_event
            elif asked[name].plan is not None:
                last = asked[name].plan.next_event(1)
            self._note(name, manager.req_to_blocks[name], asked[name], last)

        manager.cache_blocks = noting

    def _hit(self, asked: Asked, num_tokens: int, first: int | None) -> int:
        """Return how many tokens a request should take from the cache.

        Its last token is always computed; under a policy, the queries that the first
        event reads and the token before them, too. Groups with a window need the
        superblocks that it reaches back to.

        Args:
            first: position of its first event; None if it is called for later.
        """
        size, limit = self.block_size, num_tokens - 1
        if first is not None:
            before = max(asked.window, self.num_drafts)
            limit = min(limit, first - before - 1)
        cached = {
            (get_group_id(known), int(codes[-1]))
            for block_id, (known, codes) in self._expected.items()
            if self.pool.blocks[block_id].block_hash == known
        }
        ends = asked.codes[size - 1 : max(limit, 0) // size * size : size].tolist()
        full = sum(1 for _ in takewhile(lambda end: (0, end) in cached, ends))
        for length in range(full, 0, -1):
            window = ends[max(length - self.reach, 0) : length]
            if all((group, end) in cached for group in self.windows for end in window):
                return size * length
        return 0

    def _note(
        self, request_id: str, blocks: Sequence[Any], asked: Asked, last: int | None
    ) -> None:
        """Remember what the cached superblocks of a request have to hold.

        Args:
            last: position of its first event; None for none.
        """
        size = self.block_size
        for index, block in enumerate(blocks):
            known = self._expected.get(block.block_id, (None,))[0]
            if block.block_hash is None or block.block_hash == known:
                continue
            end = (index + 1) * size
            is_whole = last is None or end <= last
            check(is_whole, request_id, "caches past its event", end, last)
            codes = asked.codes[end - size : end]
            if self.states and get_group_id(block.block_hash):
                codes = codes[-1:]
            self._expected[block.block_id] = block.block_hash, codes

    def compare(self, tokens: np.ndarray) -> int:
        """Check what cached superblocks hold; return how many there are.

        Args:
            tokens: the storage, when all that was scheduled has been computed.
        """
        found = 0
        for block in self.pool.blocks:
            if block.block_hash is None:
                continue
            found += 1
            known, codes = self._expected.get(block.block_id, (None, None))
            check(known == block.block_hash, "cached unseen", block)
            held = tokens[slots_of(own_pages([block.block_id]), self.block_size)]
            held = held[:, : len(codes)]
            is_right = np.array_equal(held, np.tile(codes, (NUM_HEADS, 1)))
            check(is_right, "cached block", block.block_id, "holds", held, codes)
        return found


def managers_of(scheduler: Any) -> Sequence[Any]:
    """Return vLLM's managers of all groups, the policy's first."""
    return scheduler.kv_cache_manager.coordinator.single_type_managers
