"""Owns the tokenizer: its vocabulary, its chat template, and how it is saved.

Names such as ``ba`` and ``BA`` are one token each, everything else is one token per
character. White space is dropped, characters outside printable ASCII become
``<unk>``. ``encode`` is a plain Python twin of the saved tokenizer, used for
training. Called by the training and evaluation scripts.

    python -m reasoner.tokenizer DIRECTORY    writes the tokenizer files
"""

import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from reasoner.problems import CONSONANTS, NAMES, THINK_END, VOWELS

BOS, EOS, PAD, UNK = "<bos>", "<eos>", "<pad>", "<unk>"
USER, ASSISTANT, THINK = "<user>", "<assistant>", "<think>"
SPECIAL_TOKENS = (PAD, EOS, BOS, UNK, USER, ASSISTANT)
"""Never shown in generated text."""
MARK_TOKENS = (THINK, THINK_END)
"""Added tokens that do appear in generated text."""
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
BOXED = r"\boxed{"

_NAME = f"[{CONSONANTS}][{VOWELS}]|[{CONSONANTS.upper()}][{VOWELS.upper()}]"
_PIECE = rf"\\boxed\{{|{_NAME}|."
_ENCODE = re.compile(
    "|".join(map(re.escape, SPECIAL_TOKENS + MARK_TOKENS)) + "|" + _PIECE
)

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<user>{{ message['content'] | trim }}"
    "{% elif message['role'] == 'assistant' %}"
    "<assistant>{{ message['content'] | trim }}{{ eos_token }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
"""System messages are skipped: the model has never seen one."""


@lru_cache(maxsize=1)
def vocabulary() -> Mapping[str, int]:
    """Returns token -> id. Ids are dense; the order is part of the checkpoint."""
    printable = [chr(code) for code in range(33, 127)]
    tokens = [
        *SPECIAL_TOKENS,
        *MARK_TOKENS,
        BOXED,
        *printable,
        *NAMES,
        *(name.upper() for name in NAMES),
    ]
    return {token: index for index, token in enumerate(tokens)}


def encode(text: str) -> list[int]:
    """Returns the token ids of a text, as the saved tokenizer would."""
    vocab = vocabulary()
    unknown = vocab[UNK]
    pieces = _ENCODE.findall(re.sub(r"\s", "", text))
    return [vocab.get(piece, unknown) for piece in pieces]


def chat_prompt(content: str) -> str:
    """Returns what the chat template makes of a single user message."""
    return f"{BOS}{USER}{content.strip()}{ASSISTANT}{THINK}"


def build_tokenizer():
    """Returns a ``PreTrainedTokenizerFast`` with the chat template."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(dict(vocabulary()), unk_token=UNK))
    backend.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(_PIECE), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    backend.add_tokens(
        [AddedToken(token, special=False, normalized=False) for token in MARK_TOKENS]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def save_tokenizer(directory: Path) -> None:
    """Writes the tokenizer files, chat template included, to a directory.

    The class is saved under its name of transformers 4, which version 5 knows too.
    """
    build_tokenizer().save_pretrained(directory, save_jinja_files=False)
    path = directory / "tokenizer_config.json"
    config = {**json.loads(path.read_text()), "tokenizer_class": TOKENIZER_CLASS}
    path.write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    save_tokenizer(Path(sys.argv[1]))
