"""An application behind a socket, in a thread, as ``slm serve`` runs it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slm_core.server.run import Server


@contextmanager
def serving(app: Any, send_buffer: int | None = None) -> Iterator[str]:
    """The address of a server; ``send_buffer`` limits what the system buffers for clients, in bytes."""
    server = Server(app, app.state.options)
    server.config.port = 0
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            thread.join(0.01)
        (listener,) = server.servers[0].sockets
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections inherit it
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
