"""Renders conversations with a tokenizer's chat template, and finds their answers.

Source: the template's own generation tags, as transformers reads them. Deviations: for
templates without such tags, prefixes of the conversation are rendered and compared.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError

Message = dict[str, Any]
"""One turn: `role`, `content`, and what else the template reads."""

TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")  # around answers, in a template


def is_chat(messages: Any) -> bool:
    """Return whether it is a list of messages with a role and a content, not empty."""
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(item, dict)
            and isinstance(item.get("role"), str)
            and isinstance(item.get("content"), str)
            for item in messages
        )
    )


def render(messages: Sequence[Message], tokenizer: Any, prompt: bool) -> torch.Tensor:
    """Return the ids [T] int64 of a conversation.

    Args:
        messages: its turns.
        tokenizer: from transformers, with a chat template.
        prompt: end with the start of an answer.

    Raises:
        ValueError: the template refuses the conversation.
    """
    return torch.tensor(_applied(messages, tokenizer, prompt)["input_ids"])


def answers(messages: Sequence[Message], tokenizer: Any) -> torch.Tensor:
    """Return which tokens of `render(messages, tokenizer, False)` are the assistant's.

    An answer ends with its turn: the tokens that close it are the assistant's too.

    Args:
        messages: the turns of a conversation.
        tokenizer: from transformers, with a chat template.

    Returns:
        [T] bool.

    Raises:
        ValueError: the template refuses the conversation, or it has no generation tags
            and renders a turn differently when later ones follow, or without the
            start of answers that it gives as a prompt.
    """
    if TAG.search(tokenizer.get_chat_template()):
        found = _applied(messages, tokenizer, False, return_assistant_tokens_mask=True)
        return torch.tensor(found["assistant_masks"], dtype=torch.bool)
    whole = render(messages, tokenizer, prompt=False)
    mask = torch.zeros(len(whole), dtype=torch.bool)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index], tokenizer, prompt=True)
        after = render(messages[: index + 1], tokenizer, prompt=False)
        if not (_starts(whole, after) and _starts(after, before)):
            raise ValueError(
                f"message {index + 1}: what the chat template renders up to it is no "
                "beginning of the whole, so its tokens are unknown; expected a "
                "template with generation tags"
            )
        mask[len(before) : len(after)] = True
    return mask


def _starts(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether ids begin with other ids."""
    return torch.equal(whole[: len(part)], part)


def _applied(
    messages: Sequence[Message], tokenizer: Any, prompt: bool, **how: Any
) -> Any:
    """Apply the chat template and return what transformers returns, by name."""
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=prompt, return_dict=True, **how
        )
    except (TemplateError, TypeError) as error:
        raise ValueError(
            f"the chat template refuses the conversation: {error}"
        ) from None
