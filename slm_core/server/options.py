"""Options of the server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from slm_core.argument_checks import check_text
from slm_core.errors import InvalidOption
from slm_core.numerics import as_finite, shown
from slm_core.server.checks import check_number, check_texts
from slm_core.server.keys import ApiKey

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_READ_S = 2.0
"""Seconds that clients have, when the server stops, to read the errors that end their answers."""
_LEAST_S = 0.001
"""The least timeout and the least interval of pings, in seconds: with shorter ones, pings take all of a core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who may call the server, how it streams, and which models stay loaded.

    Attributes:
        host: the address that it listens on.
        keys: API keys, or texts as keys without limits; () for none.
        no_auth: whether another address than loopback works without keys.
        allowed_hosts: additional names in the Host header; "*" allows all.
        allowed_origins: the origins of web pages that may call it; () for none but its own.
        ping_s: seconds between the pings of a stream.
        send_timeout_s: seconds after which a client that reads nothing is lost.
        receive_timeout_s: seconds within which the body of a request has to arrive.
        max_body_bytes: the longest body of a request; all together may be eight times as long.
        grace_s: seconds for which running answers continue after SIGTERM; then they end with an error.
        hang_s: seconds of one step after which an engine counts as hanging: /health says so.
        max_requests: the largest number of requests that are answered or wait at a time; each answer counts as one.
        max_priority: the highest priority that a request may ask for, unless its key has one of its own.
        memory_bytes: the memory of all loaded models together, in bytes; None for no limit.
        keep_alive_s: seconds without requests after which a model is unloaded; None for never.
        sessions_dir: the folder that keeps /v1/sessions on the disk; None to keep them in memory only.

    Raises:
        InvalidOption: no keys for an address that other machines reach, two equal keys, or an invalid value.
    """

    host: str = "127.0.0.1"
    keys: tuple[str | ApiKey, ...] = ()
    no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ping_s: float = 15.0
    send_timeout_s: float = 60.0
    receive_timeout_s: float = 60.0
    max_body_bytes: int = 16 << 20
    grace_s: float = 30.0
    hang_s: float = 120.0
    max_requests: int = 256
    max_priority: float = 0
    memory_bytes: int | None = None
    keep_alive_s: float | None = None
    sessions_dir: Path | None = None

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_requests"):
            check_number(name, getattr(self, name), least=1, is_integer=True)
        for name in ("ping_s", "send_timeout_s", "receive_timeout_s", "hang_s"):
            check_number(name, getattr(self, name), least=_LEAST_S)
        check_number("grace_s", self.grace_s, least=0)
        if as_finite(self.max_priority) is None:
            raise InvalidOption(f"max_priority={shown(self.max_priority)} (accepted: a finite number)")
        if self.memory_bytes is not None:
            check_number("memory_bytes", self.memory_bytes, least=1, is_integer=True)
        if self.keep_alive_s is not None:
            check_number("keep_alive_s", self.keep_alive_s, least=0)
        check_text("host", self.host)
        check_texts("keys", self.keys, ApiKey)
        check_texts("allowed_hosts", self.allowed_hosts)
        check_texts("allowed_origins", self.allowed_origins)
        names = [key.name for key in self.api_keys]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidOption(f"two keys have the name {twice[0]!r}")
        first: dict[str, str] = {}
        for key in self.api_keys:
            if first.setdefault(key.key, key.name) != key.name:
                raise InvalidOption(f"{first[key.key]!r} and {key.name!r} have the same key")
        if self.keys and self.no_auth:
            raise InvalidOption("keys and no_auth contradict each other")
        if not is_loopback(self.host) and not self.keys and not self.no_auth:
            raise InvalidOption(
                f"host={self.host!r} can be reached by other machines: give a key, or no_auth to let anybody call it"
            )
        for origin in self.allowed_origins:
            if "://" not in origin or origin.endswith("/"):
                raise InvalidOption(f"allowed_origins={origin!r} (accepted: origins, such as https://example.org)")

    @property
    def cut_s(self) -> float:
        """Seconds after SIGTERM at which connections are cut: clients have read the error that ended their answer."""
        return self.grace_s + _READ_S

    @property
    def api_keys(self) -> tuple[ApiKey, ...]:
        """The keys with their limits."""
        return tuple(key if isinstance(key, ApiKey) else ApiKey(key) for key in self.keys)

    def allows_host(self, host: str) -> bool:
        """Whether a Host header is allowed. The check stops web pages whose DNS name points here (DNS rebinding)."""
        name = _without_port(host).lower()
        if "*" in self.allowed_hosts or name in (*_LOOPBACK, *self.allowed_hosts, self.host.lower()):
            return True
        return not is_loopback(self.host) and _is_address(name)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    return _is_address(host) and ipaddress.ip_address(host.strip("[]")).is_loopback


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() and not (host.startswith("[") and host.endswith("]")) else host
