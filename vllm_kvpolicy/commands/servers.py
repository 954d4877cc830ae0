"""Asks a running server over HTTP."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any

from vllm_kvpolicy.config_keys import shown

NOT_VALID, NO_KEY, NOT_THERE = 400, 401, 404  # what a server refuses a request for


class Refused(ValueError):
    """The server answered with an error, of this HTTP status."""

    def __init__(self, told: str, status: int) -> None:
        super().__init__(told)
        self.status = status


class Client:
    """Asks one server.

    Args:
        url: its root, with or without the `/v1` that clients of OpenAI's API have.
        seconds: that an answer may take.
    """

    def __init__(self, url: str, api_key: str | None, seconds: float) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._seconds = seconds
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def fetch(self, path: str, body: Mapping[str, Any] | None = None) -> str:
        """Return what the server answers.

        Raises:
            Refused: it answers with an error.
            ValueError: it does not answer.
        """
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._seconds) as answer:
                return answer.read().decode()
        except urllib.error.HTTPError as error:
            told = error.read().decode(errors="replace")[:500]
            line = f"{self.url}{path}: HTTP {error.code}: {told}"
            raise Refused(line, error.code) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ValueError(f"{self.url}: no answer: {reason}") from None


def part(text: str, *path: str | int) -> Any:
    """Return a part of a JSON answer; ValueError where it is not there."""
    try:
        found = json.loads(text)
        for key in path:
            found = found[key]
    except (ValueError, LookupError, TypeError):
        place = ".".join(map(str, path)) or "JSON"
        raise ValueError(f"got {shown(text)}, expected vLLM's {place}") from None
    return found
