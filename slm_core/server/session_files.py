"""Sessions on the disk: a folder with a file for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slm_core.atomic_write import atomic_file
from slm_core.errors import InvalidOption
from slm_core.server.errors import ApiError
from slm_core.user_paths import option_path

_SUFFIX = ".json"
_READABLE_BY_OWNER = 0o600


class SessionFiles:
    """The files of a server's sessions. A folder belongs to one server.

    Args:
        folder: the folder, which is created if it is missing.

    Raises:
        InvalidOption: the folder cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = option_path("sessions_dir", folder)
        with _one_line(self._folder):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def read(self) -> Iterator[tuple[Path, bytes]]:
        """The path and content of each file.

        Raises:
            InvalidOption: a file cannot be read.
        """
        with _one_line(self._folder):
            paths = sorted(path for path in self._folder.iterdir() if path.suffix == _SUFFIX)
        for path in paths:
            with _one_line(path):
                content = path.read_bytes()
            yield path, content

    def write(self, session_id: str, content: bytes) -> None:
        """Write a session's file, whole or not at all. It is on the disk afterwards.

        Raises:
            ApiError: it cannot be written; the file is unchanged.
        """
        try:
            with atomic_file(self._path(session_id), _READABLE_BY_OWNER) as file:
                file.write(content)
        except OSError as error:
            raise _not_saved(error) from error

    def remove(self, session_id: str) -> None:
        """Remove a session's file.

        Raises:
            ApiError: it cannot be removed.
        """
        try:
            self._path(session_id).unlink(missing_ok=True)
        except OSError as error:
            raise _not_saved(error) from error

    def _path(self, session_id: str) -> Path:
        return self._folder / f"{session_id}{_SUFFIX}"


def _not_saved(error: OSError) -> ApiError:
    message = f"the session is unchanged: its file cannot be written ({error.strerror})"
    return ApiError(503, message, "session_not_saved")


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidOption(f"{path}: {error.strerror}") from error
