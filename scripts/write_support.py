"""Writes docs/support.md from the tables that the code itself uses."""

from pathlib import Path

from vllm_kvpolicy.api.guards import REFUSALS
from vllm_kvpolicy.api.request_guards import REQUEST_REFUSALS
from vllm_kvpolicy.compat import ATTENTION_BACKENDS, BLOCK_TOKENS, SUPPORTED_VLLM
from vllm_kvpolicy.config import KVPolicyConfig
from vllm_kvpolicy.config_keys import INTEGER_KEYS
from vllm_kvpolicy.policies.catalogue.admissions import ADMISSIONS
from vllm_kvpolicy.policies.catalogue.allocators import ALLOCATORS
from vllm_kvpolicy.policies.catalogue.options import default_in_words, valid_range
from vllm_kvpolicy.policies.catalogue.rows import WordRow
from vllm_kvpolicy.policies.catalogue.scorers import SCORERS
from vllm_kvpolicy.policies.catalogue.selections import SELECTIONS
from vllm_kvpolicy.policies.catalogue.testing import TEST_POLICIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "support.md"


def render() -> str:
    """Return the whole page."""
    sections = _head(), _policies(), _caching(), _options(), _numbers(), _refusals()
    return "\n".join(line for section in sections for line in section) + "\n"


def _head() -> list[str]:
    blocks = ", ".join(f"{size} on {name}" for name, size in BLOCK_TOKENS.items())
    return [
        "# What is supported",
        "",
        "Made by `make docs` from the tables that the code uses; do not edit.",
        "",
        f"vLLM {SUPPORTED_VLLM}.x; attention backends {', '.join(ATTENTION_BACKENDS)}; "
        f"block size {blocks} unless one is given.",
        "",
    ]


def _policies() -> list[str]:
    """Return the words of the grammar and which pairs of them are refused."""
    lines = [
        "## Policies",
        "",
        "A policy is an eviction, `SCORER` or `ALLOCATOR-SCORER`, or an admission, "
        "`ADMISSION` or `ADMISSION+EVICTION`. An admission alone has no budget. Behind "
        "either, or alone, may stand a selection: `EVICTION+SELECTION`, "
        "`ADMISSION+EVICTION+SELECTION` and so on; alone, it keeps everything.",
        "",
        "| scorer | keeps | queries read | prompt | source |",
        "|---|---|---|---|---|",
    ]
    for name, word in SCORERS.items():
        prompt = "protected" if word.protect_prompt else ""
        window = word.window_tokens({}) or ""
        cells = (f"`{name}`", word.summary, window, prompt, word.source)
        lines.append(_row(*cells))
    lines += ["", "| allocator | keeps | heads | source |", "|---|---|---|---|"]
    for name, word in ALLOCATORS.items():
        heads = "own lengths" if word.ragged else "equal lengths"
        label = f"`{name}`" if name else "none"
        lines.append(_row(label, word.summary, heads, word.source))
    lines += ["", "| admission | keeps | heads | source |", "|---|---|---|---|"]
    for name, word in ADMISSIONS.items():
        lines.append(_row(f"`{name}`", word.summary, "own lengths", word.source))
    lines += ["", "| selection | reads | heads | source |", "|---|---|---|---|"]
    for name, word in SELECTIONS.items():
        lines.append(_row(f"`{name}`", word.summary, "own lengths", word.source))
    lines += ["", "Pairs that make no sense are refused:", ""]
    lines += ["| pairs | because |", "|---|---|"]
    for name, word in ALLOCATORS.items():
        lines += _refused(word, f"`{name}-{{}}`")
    for name, word in ADMISSIONS.items():
        lines += _refused(word, f"`{name}+{{}}-...`")
    tests = ", ".join(f"`{name}` ({word.summary})" for name, word in _tests())
    return [*lines, "", f"Test policies, which drop nothing: {tests}.", ""]


def _refused(word: WordRow, pair: str) -> list[str]:
    """Return a row per reason for which a word is not combined with others.

    Args:
        word: the first of the pairs.
        pair: how one is written, with `{}` for the other word.
    """
    rows = []
    for reason in dict.fromkeys(word.refuses.values()):
        others = [key for key, why in word.refuses.items() if why == reason]
        rows.append(_row(", ".join(map(pair.format, others)), reason))
    return rows


def _tests() -> list[tuple[str, WordRow]]:
    return list(TEST_POLICIES.items())


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _caching() -> list[str]:
    """Return what each word takes from the prefix cache."""
    words = {**SCORERS, **ADMISSIONS}
    alone = [f"`{name}`" for name, word in words.items() if word.measures_tokens]
    later = [f"`{name}`" for name, word in words.items() if word.decides_later]
    return [
        "## Prefix caching",
        "",
        "vLLM's prefix cache works with every policy and is on by default, as in vLLM. "
        "A request offers it the blocks that it fills before its first event; until "
        "there its keys and values are those of full attention, so that requests with "
        "different policies and budgets share them. It takes cached blocks up to its "
        "own first event, less the queries that the event reads.",
        "",
        "| policy | takes from the cache | shares with |",
        "|---|---|---|",
        _row("all but those below", "blocks before the first event", "all requests"),
        _row(", ".join(later), "one block less: the next token must be known", "same"),
        _row(
            ", ".join(alone),
            "nothing: it measures each token when it is computed",
            "fills the cache for all requests",
        ),
        _row(
            "admissions with `exact`",
            "blocks before the first event",
            "requests with `exact`: masked tokens change keys and values",
        ),
        _row("`kv_policy` `none`", "as in vLLM", "all requests"),
        "",
    ]


def _options() -> list[str]:
    """Return the options of each word, with the values of each preset."""
    lines = [
        "## Options",
        "",
        "Keys of `--kv-policy-config`; each policy reads those of its words. The query "
        "window of a policy may not be longer than the interval. Two keys are about "
        "the server: `allow`, a list of further policies that requests may choose by "
        "`kv_policy` in `vllm_xargs`, and `trace`, a folder in which workers record "
        "what events keep.",
        "",
        "| key | default | words | valid | meaning |",
        "|---|---|---|---|---|",
    ]
    words = {**SCORERS, **ALLOCATORS, **ADMISSIONS, **SELECTIONS}
    words |= TEST_POLICIES
    fields = {k: f for w in words.values() for k, f in w.options.model_fields.items()}
    for key, field in fields.items():
        users = [n for n, word in words.items() if key in word.options.model_fields]
        shown = ", ".join(f"`{name}`" for name in users)
        cells = default_in_words(field), shown, valid_range(field), field.description
        lines.append(_row(f"`{key}`", *cells))
    presets = {n: values for w in words.values() for n, values in w.presets.items()}
    for name, values in presets.items():
        changed = ", ".join(f"{key} {value}" for key, value in values.items())
        lines += ["", f"Preset `{name}`: {changed or 'the defaults'}."]
    return [*lines, ""]


def _numbers() -> list[str]:
    lines = [
        "## Numbers",
        "",
        "Tokens per KV head. Keys without a flag go into `--additional-config "
        "'{\"kv_policy\": {...}}'`.",
        "",
        "| flag or key | default | smallest | meaning |",
        "|---|---|---|---|",
    ]
    for key in INTEGER_KEYS:
        name = f"--kv-{key.key}" if key.is_flag else key.key
        default = getattr(KVPolicyConfig, key.field)
        shown = "auto" if default is None else default
        lines.append(f"| `{name}` | {shown} | {key.minimum} | {key.summary} |")
    return [*lines, ""]


def _refusals() -> list[str]:
    lines = [
        "## Refused beside a policy",
        "",
        "What is not tested is refused at start-up, all reasons at once.",
        "",
        "| feature | what to change |",
        "|---|---|",
        *(f"| {row.name} | {row.change} |" for row in REFUSALS),
        "",
        "Refused for one request, as an HTTP 400:",
        "",
        "| request | what to change |",
        "|---|---|",
        *(f"| {name} | {change} |" for name, change in REQUEST_REFUSALS.items()),
    ]
    return lines


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(render())
