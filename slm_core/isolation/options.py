"""The options of isolated models."""

from __future__ import annotations

from dataclasses import dataclass

from slm_core.errors import InvalidOption


@dataclass(frozen=True, slots=True)
class Isolation:
    """How long the process of an isolated model may take.

    Attributes:
        load_timeout_s: seconds for the start of the process and the load; None for no limit.
        call_timeout_s: seconds for any other call; None for no limit. After a timeout the process is killed.
    """

    load_timeout_s: float | None = 600
    call_timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("load_timeout_s", "call_timeout_s"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
                raise InvalidOption(f"{name}={value!r} (accepted: a number of seconds above 0, or None)")


def isolation_of(isolated: bool | Isolation) -> Isolation | None:
    """The options of a value of ``isolated=``; None for False.

    Raises:
        InvalidOption: another value.
    """
    if isinstance(isolated, Isolation):
        return isolated
    if not isinstance(isolated, bool):
        raise InvalidOption(f"isolated={isolated!r} (accepted: True, False, an Isolation)")
    return Isolation() if isolated else None
