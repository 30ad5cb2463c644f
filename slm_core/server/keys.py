"""API keys with limits, and the requests that count for them."""

from __future__ import annotations

import hashlib
import math
import re
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter

from slm_core.atomic_write import check_regular
from slm_core.errors import InvalidOption
from slm_core.numerics import as_finite, shown
from slm_core.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key, its name, and its limits; None is no limit.

    Attributes:
        key: the key, printable ASCII without spaces: it has to fit into a header.
        name: its name in logs and for fair shares; "" for a hash of the key.
        rate: the largest number of requests in a minute.
        requests: the largest number of requests that are answered or wait at a time; each answer counts as one.
        cells: the largest number of cells of the KV cache for them: tokens of prompts, and ``max_tokens`` of answers.
        priority: the highest priority that its requests may ask for; None for that of the server's options.

    Raises:
        InvalidOption: an invalid value.
    """

    key: str
    name: str = ""
    rate: int | None = None
    requests: int | None = None
    cells: int | None = None
    priority: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.key, str) or not re.fullmatch("[!-~]+", self.key):
            raise InvalidOption("a key is empty, has spaces, or is not printable ASCII (it has to fit into a header)")
        if not isinstance(self.name, str) or not self.name.isprintable():
            raise InvalidOption(f"name={self.name!r:.80} of a key (accepted: printable characters)")
        if not self.name:
            digest = hashlib.sha256(b"slm-core key " + self.key.encode()).hexdigest()
            object.__setattr__(self, "name", digest[:12])
        for limit in ("rate", "requests", "cells"):
            value = getattr(self, limit)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidOption(f"{limit}={value!r:.80} of the key {self.name!r} (accepted: an integer from 1 on)")
        if self.priority is not None and as_finite(self.priority) is None:
            value = shown(self.priority)
            raise InvalidOption(f"priority={value} of the key {self.name!r} (accepted: a finite number)")


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a TOML file: a table ``[[key]]`` for each, with the attributes of ``ApiKey``.

    Raises:
        InvalidOption: the file cannot be read, is invalid, or has no keys.
    """
    try:
        check_regular(path, or_pipe=True)
        content = tomllib.loads(path.read_text("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise InvalidOption(f"{path}: {error}") from error
    tables = content.pop("key", [])
    known = {field.name for field in fields(ApiKey)}
    if content or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise InvalidOption(f"{path}: {next(iter(content), 'key')!r} (accepted: tables [[key]])")
    if not tables:
        raise InvalidOption(f"{path}: the file has no keys (accepted: tables [[key]])")
    for table in tables:
        unknown = next((name for name in table if name not in known), None)
        if unknown is not None or "key" not in table:
            what = "a table without key" if unknown is None else repr(unknown)
            raise InvalidOption(f"{path}: {what} (accepted: {', '.join(sorted(known))})")
    return [ApiKey(**table) for table in tables]


class Limits:
    """Counts requests, and refuses requests beyond a limit with status 429.

    Args:
        keys: the keys.
        most_requests: the largest number of requests of all clients that are answered or wait at a time; each answer
            counts as one.
        max_priority: the highest priority that a request may ask for, unless its key has one of its own.
    """

    def __init__(self, keys: Sequence[ApiKey], most_requests: int, max_priority: float = 0) -> None:
        self._keys = {key.name: key for key in keys}
        self._most_requests = most_requests
        self._max_priority = max_priority
        self._rates = MovingWindowRateLimiter(MemoryStorage())
        self._n_requests: Counter[str] = Counter()
        self._n_cells: Counter[str] = Counter()

    def count(self, name: str) -> None:
        """Count a request for the rate of a key.

        Raises:
            ApiError: it is beyond the rate.
        """
        key = self._keys.get(name)
        if key is None or key.rate is None:
            return
        rate = RateLimitItemPerMinute(key.rate)
        if not self._rates.hit(rate, name):
            wait_s = self._rates.get_window_stats(rate, name).reset_time - time.time()
            raise _refused(f"the key may send {key.rate} requests in a minute", wait_s)

    def priority(self, name: str, asked: float | None) -> float:
        """The priority of a request: what it asks for, or without that 0, or less if the key may not ask for 0.

        Raises:
            ApiError: it asks for more than it may.
        """
        key = self._keys.get(name)
        highest = self._max_priority if key is None or key.priority is None else key.priority
        if asked is None:
            return min(0, highest)
        if asked > highest:
            owner = "requests" if key is None else "requests of the key"
            message = f"priority is {asked:g}, but {owner} may ask for at most {highest:g}"
            raise ApiError(400, message, param="priority")
        return asked

    def check_answers(self, name: str, n: int, param: str) -> None:
        """Refuse a request for more answers than can ever be generated at a time.

        Args:
            name: the name of the key.
            n: the number of answers, to all prompts of the request together.
            param: the parameter that asks for them.

        Raises:
            ApiError: there are too many.
        """
        key = self._keys.get(name)
        if key is not None and key.requests is not None and n > key.requests:
            limit = f"the key may have {key.requests} requests at a time"
        elif n > self._most_requests:
            limit = f"the server answers {self._most_requests} requests at a time"
        else:
            return
        raise ApiError(400, f"the request counts as {n} requests, one for each answer, but {limit}", param=param)

    @contextmanager
    def place(self, name: str, n: int = 1) -> Iterator[None]:
        """Places for ``n`` answers.

        Raises:
            ApiError: there are too few.
        """
        key = self._keys.get(name)
        if self._n_requests.total() + n > self._most_requests:
            raise _refused(f"the server answers {self._most_requests} requests at a time")
        if key is not None and key.requests is not None and self._n_requests[name] + n > key.requests:
            raise _refused(f"the key may have {key.requests} requests at a time")
        self._n_requests[name] += n
        try:
            yield
        finally:
            self._n_requests[name] -= n

    @contextmanager
    def cells(self, name: str, n_prompt: int, n: int, max_tokens: int | None, *, n_begun: int = 0) -> Iterator[None]:
        """Cells for ``n`` answers to a prompt.

        Args:
            name: the name of the key.
            n_prompt: tokens of the prompt.
            n: the number of answers.
            max_tokens: the longest answer, in tokens; None if the request does not say it.
            n_begun: cells for earlier prompts of the same request.

        Raises:
            ApiError: there are too few now, or the request needs more than the key has; then the status is 400.
        """
        key = self._keys.get(name)
        if key is None or key.cells is None:
            yield
            return
        if max_tokens is None:
            raise ApiError(400, f"max_tokens is missing: the key may use {key.cells} cells", param="max_tokens")
        needed = n_prompt + n * max_tokens
        if n_begun + needed > key.cells:
            limit = f"the key may use {key.cells}"
            message = f"the request needs {n_begun + needed} cells (prompt and max_tokens), but {limit}"
            raise ApiError(400, message, param="max_tokens")
        if self._n_cells[name] + needed > key.cells:
            raise _refused(f"the key may use {key.cells} cells, and {self._n_cells[name]} of them are in use")
        self._n_cells[name] += needed
        try:
            yield
        finally:
            self._n_cells[name] -= needed


def _refused(limit: str, wait_s: float = 1.0) -> ApiError:
    headers = {"retry-after": str(max(1, math.ceil(wait_s)))}
    return ApiError(429, f"{limit}: try again later", "rate_limit_exceeded", headers=headers)
