"""Models in a process of their own: a crash of an engine becomes a ``BackendCrashed``, and this process continues.

``backend.isolated`` puts any backend into a child process. ``model``, ``vocab`` and ``context`` keep the contract in
the parent. ``child`` is the program of the child, ``served_context`` its contexts. Both sides talk over sockets
(``channel``) in plain values (``values``): no pickle. The parent checks everything that the child sends, because a
hostile file may have taken it over.
"""

from slm_core.isolation.backend import IsolatedBackend, isolated, refuse_object
from slm_core.isolation.options import Isolation, isolation_of

__all__ = ["IsolatedBackend", "Isolation", "isolated", "isolation_of", "refuse_object"]
