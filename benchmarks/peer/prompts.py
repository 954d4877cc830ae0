"""Makes prompts as token ids, the same that our server sees."""

from collections.abc import Sequence
from typing import Any

MARK = "#" * 10


class Prompts:
    """A tokenizer of transformers with its chat template.

    Attributes:
        start: tokens of every prompt before the user's words.

    Raises:
        ValueError: no chat template, or no token before the user's words; kvpress
            reads that part first.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.chat_template:
            raise ValueError("model: expected a chat template, got none")
        self._tokenizer = tokenizer
        before, _, _ = self._render(MARK).partition(MARK)
        self._first = self._encode(before)
        self.start = len(self._first)
        if not self.start:
            raise ValueError(
                "model: expected a chat template with a token before the user's words"
            )

    def ids(self, content: str) -> list[int]:
        """Return the token ids of a user's message as a chat.

        Raises:
            ValueError: the message changes the template's first tokens.
        """
        ids = self._encode(self._render(content))
        if ids[: self.start] != self._first:
            raise ValueError(
                f"prompt: expected it to start with tokens {self._first}, got "
                f"{ids[: self.start]}"
            )
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """Return an answer as text without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _render(self, content: str) -> str:
        return self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            tokenize=False,
            add_generation_prompt=True,
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
