"""The prompt of a chat: editing of several lines, history and completion. Imported when a chat begins on a terminal."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import ColorDepth, Output
from prompt_toolkit.styles import Style

from slm_core.atomic_write import atomic_file
from slm_core.cli.terminal import complain, printable

HISTORY_ENTRIES = 1000
_STYLE = Style.from_dict({"": "ansigreen", "prompt": "bold ansigreen", "bottom-toolbar": "noreverse ansibrightblack"})


class Editor:
    """Reads the inputs of the user.

    Args:
        complete: returns the part of a line before the cursor that is completed, and its completions.
        status: the text of the bottom line; None for no bottom line.
        history: the file of earlier inputs; None keeps them until the end.
        plain: no colours.
        keys, screen: for tests; None for the terminal.
    """

    def __init__(
        self,
        complete: Callable[[str], tuple[str, Sequence[str]]],
        status: Callable[[], str] | None,
        history: Path | None,
        *,
        plain: bool = False,
        keys: Input | None = None,
        screen: Output | None = None,
    ) -> None:
        self._session: PromptSession[str] = PromptSession(
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_bindings(),
            completer=_Completer(complete),
            complete_while_typing=False,
            bottom_toolbar=None if status is None else lambda: [("", printable(status()))],
            history=InputHistory(history),
            style=None if plain else _STYLE,
            color_depth=ColorDepth.DEPTH_1_BIT if plain else None,
            include_default_pygments_style=False,
            reserve_space_for_menu=5,
            input=keys,
            output=screen,
        )

    def read(self, label: str = "> ", text: str = "") -> str:
        """The next input; the user edits ``text``.

        Raises:
            EOFError: Ctrl-D in an empty input.
            KeyboardInterrupt: Ctrl-C.
        """
        return self._session.prompt([("class:prompt", printable(label))], default=text)


class InputHistory(History):
    """Earlier inputs, without duplicates, in a file that only its user can read.

    Each line of the file is the JSON of one input, the oldest first. If the file cannot be written, one error says so,
    and the history lasts until the end.

    Args:
        path: the file; None for no file.
    """

    def __init__(self, path: Path | None) -> None:
        super().__init__()
        self._path = path
        self._inputs = self._read()

    def load_history_strings(self) -> Iterable[str]:
        """The inputs, the latest first."""
        return reversed(self._inputs)

    async def load(self) -> AsyncGenerator[str, None]:
        """The inputs, the latest first."""
        for text in self.load_history_strings():
            yield text

    def get_strings(self) -> list[str]:
        """The inputs, the oldest first."""
        return self._inputs

    def append_string(self, string: str) -> None:
        """Make a text the latest input."""
        self.store_string(string)

    def store_string(self, string: str) -> None:
        """Make a text the latest input; inputs of other chats that were stored meanwhile stay."""
        known = self._read() if self._path is not None else self._inputs
        self._inputs = [*(text for text in known if text != string), string][-HISTORY_ENTRIES:]
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with atomic_file(self._path, mode=0o600) as file:
                file.write("".join(f"{json.dumps(text)}\n" for text in self._inputs).encode())
        except OSError as error:
            complain(f"the history is not kept: {error} (--no-history keeps none)")
            self._path = None

    def _read(self) -> list[str]:
        if self._path is None:
            return []
        try:
            lines = self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # there is none yet
            return []
        return [text for text in map(_decoded, lines) if text]


def _decoded(line: str) -> str | None:
    """The text of a line; None for a line that another program wrote."""
    try:
        text = json.loads(line)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


class _Completer(Completer):
    def __init__(self, complete: Callable[[str], tuple[str, Sequence[str]]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Completions of a command; a message has none."""
        line = document.text_before_cursor
        if not line.startswith("/") or line.startswith("//") or "\n" in line:
            return
        completed, candidates = self._complete(line)
        for text in candidates:
            yield Completion(text, start_position=-len(completed))


def _bindings() -> KeyBindings:
    """Enter sends; Alt+Enter, and Enter after a backslash, begin a new line."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.char_before_cursor == "\\" and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
