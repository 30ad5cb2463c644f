"""Places in a session to come back to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slm_core.chat.session import Session


class Mark:
    """A place in a session to come back to. Opaque; made by ``Session.mark``."""

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def belongs_to(self, session: Session) -> bool:
        """Whether ``session`` made it."""
        return self._session() is session
