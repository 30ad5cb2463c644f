"""Options of the server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from slm_core.errors import InvalidOption

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Who may call the server, how it streams, and which models stay loaded.

    Attributes:
        host: the address that it listens on.
        keys: API keys; () for none.
        no_auth: whether another address than loopback works without keys.
        allowed_hosts: additional names in the Host header; "*" allows all.
        allowed_origins: the origins of web pages that may call it; () for none but its own.
        ping_s: seconds between the pings of a stream.
        send_timeout_s: seconds after which a client that reads nothing is lost.
        grace_s: seconds for which running answers continue after SIGTERM.
        hang_s: seconds of one step after which an engine counts as hanging: /health says so.
        memory_bytes: the memory of all loaded models together, in bytes; None for no limit.
        keep_alive_s: seconds without requests after which a model is unloaded; None for never.

    Raises:
        InvalidOption: no keys for an address that other machines reach, or an invalid value.
    """

    host: str = "127.0.0.1"
    keys: tuple[str, ...] = ()
    no_auth: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ping_s: float = 15.0
    send_timeout_s: float = 60.0
    grace_s: float = 30.0
    hang_s: float = 120.0
    memory_bytes: int | None = None
    keep_alive_s: float | None = None

    def __post_init__(self) -> None:
        if any(not key or not key.isascii() or not key.isprintable() for key in self.keys):
            raise InvalidOption("a key is empty or not printable ASCII (it has to fit into a header)")
        if self.keys and self.no_auth:
            raise InvalidOption("keys and no_auth contradict each other")
        if not is_loopback(self.host) and not self.keys and not self.no_auth:
            raise InvalidOption(
                f"host={self.host!r} can be reached by other machines: give a key, or no_auth to let anybody call it"
            )
        for origin in self.allowed_origins:
            if "://" not in origin or origin.endswith("/"):
                raise InvalidOption(f"allowed_origins={origin!r} (accepted: origins, such as https://example.org)")

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
