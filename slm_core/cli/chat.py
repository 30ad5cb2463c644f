"""``slm chat``: talk to a model."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slm_core.atomic_write import read_regular
from slm_core.chat import Chat
from slm_core.cli import options as o
from slm_core.cli.adapters import AdapterOptions
from slm_core.cli.constraints import ConstraintOptions, check_tools
from slm_core.cli.conversation import Conversation
from slm_core.cli.drafts import DraftOptions
from slm_core.cli.slash import LEAVE, Commands, write_private
from slm_core.cli.streaming import MarkdownView, PlainView, View
from slm_core.cli.terminal import colours, complain, note, out
from slm_core.cli.tools_file import read_tools
from slm_core.errors import ContextFull, InvalidOption, SlmError
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import Message, Role, Tool

if TYPE_CHECKING:
    from slm_core.cli.editor import Editor


@o.expand_groups
def chat(
    *,
    context: typer.Context,
    model: o.ModelPath = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    constraint: ConstraintOptions,
    tools: o.ToolsFile = None,
    engine: o.EngineOptions,
    adapter_options: AdapterOptions,
    chat_format: o.ChatFormatOptions,
    drafts: DraftOptions,
    ctx: o.ContextSize = None,
    kv_type: o.KvTypeFlag = None,
    sampling: o.SamplingOptions,
    session: o.SessionFile = None,
    overflow: o.OverflowPolicy = None,
    stats: o.Stats = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="No colours, no bottom line, and Markdown as the model writes it.")
    ] = False,
    no_history: Annotated[
        bool, typer.Option("--no-history", help="Keep nothing that you type for later chats.")
    ] = False,
) -> None:
    """Chat with a model. /help lists the commands. Ctrl-C ends an answer; twice at the prompt, it ends the program."""
    rule = constraint.spec()
    check_tools(rule, has_tools=tools is not None)
    offered = () if tools is None else tuple(read_tools(tools))
    conversation = ConversationOptions(session, system, ctx, o.read_kv_types(kv_type), overflow, thinking, offered)
    changed = sampling.sampling() if sampling.set_flags() else None

    def load_on(backend: str) -> Model:
        options = engine.option if backend == engine.backend else None  # another backend has other options
        moved = dataclasses.replace(engine, backend=backend, option=options).load(model, chat_format)
        try:
            adapter_options.load(moved)
        except BaseException:
            moved.close()
            raise
        return moved

    with colours(off=plain):
        screen = Screen(plain=plain)
        with contextlib.ExitStack() as opened:
            loaded = opened.enter_context(engine.load(model, chat_format))
            drafting = opened.enter_context(drafts.load(engine))
            begun = conversation.begin(loaded, changed, adapter_options.load(loaded))
            opened.pop_all()
        with Conversation(load_on, loaded, begun, screen.view, drafts=drafting, shows_stats=stats) as talk:
            talk.set_constraint(rule)
            screen.talk = talk
            history = None if no_history else history_file()
            Repl(talk, screen, history, file=session, debug=bool(context.find_root().params.get("debug"))).run()


def history_file() -> Path:
    """The file of earlier inputs, in the user's state directory."""
    import platformdirs

    return platformdirs.user_state_path("slm-core") / "chat-history.jsonl"


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationOptions:
    """The options of the conversation on the command line."""

    file: Path | None
    system: str | None
    ctx: int | None
    kv_types: o.KvTypes
    overflow: str | None
    thinking: bool | None
    tools: tuple[Tool, ...] = ()

    def begin(self, loaded: Model, sampling: Sampling | None, adapters: Mapping[str, float]) -> Chat:
        """Continue the conversation of the file, or begin one.

        Options of the command line (sampling, reasoning, tools, context, overflow, adapters) override the file's.
        """
        if self.file is None or not self.file.exists():
            return loaded.chat(
                system=self.system,
                n_ctx=o.context_size(loaded, self.ctx),
                sampling=sampling,
                tools=self.tools,
                thinking=self.thinking,
                overflow=self.overflow or "error",
                adapters=adapters,
                **self.kv_types,
            )
        data = read_regular(self.file)
        talk = Chat.restore(
            loaded, data, n_ctx=self.ctx, overflow=self.overflow, tools=self.tools or None, **self.kv_types
        )
        if self.system is not None and talk.messages[:1] != (Message(Role.SYSTEM, self.system),):
            talk.close()
            raise InvalidOption(f"{self.file} holds a conversation with another system message (/system changes it)")
        if adapters:
            talk.session.set_adapters(adapters)
        talk.options = dataclasses.replace(
            talk.options,
            sampling=talk.options.sampling if sampling is None else sampling,
            thinking=talk.options.thinking if self.thinking is None else self.thinking,
        )
        return talk


class Screen:
    """The terminal of a chat, and how answers look on it.

    Args:
        plain: no colours and no rendering, as for pipes, dumb terminals and with NO_COLOR.

    Attributes:
        interactive: whether a user types on a terminal.
        plain: whether there are neither colours nor rendering.
        talk: the conversation, whose status is shown.
    """

    def __init__(self, *, plain: bool) -> None:
        self._console = out()
        dumb = not self._console.is_terminal or self._console.is_dumb_terminal
        self.interactive = sys.stdin.isatty() and not dumb
        self.plain = plain or dumb or bool(os.environ.get("NO_COLOR"))
        self.talk: Conversation | None = None

    def view(self) -> View:
        """The view of the next answer."""
        if self.plain:
            return PlainView(self._console)
        began = time.perf_counter()

        def status(n_tokens: int) -> str:
            assert self.talk is not None, "an answer belongs to a conversation"
            seconds = time.perf_counter() - began
            return self.talk.status(n_tokens, n_tokens / seconds if seconds else 0.0)

        return MarkdownView(self._console, status)


class Repl:
    """Reads lines, and answers them.

    Args:
        talk: the conversation.
        screen: the terminal.
        history: the file of earlier inputs; None for no file.
        file: the file of the conversation, written after each line that changed it, and at the end.
        debug: unexpected errors end the program with their traceback.
    """

    def __init__(
        self, talk: Conversation, screen: Screen, history: Path | None, *, file: Path | None = None, debug: bool = False
    ) -> None:
        self._talk = talk
        self._file = file
        self._debug = debug
        self._saved: tuple[Message, ...] | None = None
        self._editor: Editor | None = None
        self._commands = Commands(talk, self._edited if screen.interactive else None)
        if screen.interactive:
            from slm_core.cli.editor import Editor

            status = None if screen.plain else talk.status
            self._editor = Editor(self._commands.completions, status, history, plain=screen.plain)

    def run(self) -> None:
        """Read lines until the end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice at the prompt.
        """
        if self._editor is not None:
            info = self._talk.loaded.info
            note(f"{info.path.name} on {info.backend}. /help lists the commands, exit leaves.")
        if self._file is not None and self._talk.messages:
            note(f"(going on with {len(self._talk.messages)} messages of {self._file})")
        try:
            while (line := self._read()) is not None and line.strip() not in LEAVE:
                if line.strip():
                    self._handle(line)
                    self._keep()
        finally:
            self._keep()

    def _read(self) -> str | None:
        """The next line, or text of several lines; None at the end of input."""
        pressed = False
        while True:
            try:
                return input() if self._editor is None else self._editor.read(self._label())
            except EOFError:
                return None
            except KeyboardInterrupt:
                if pressed or self._editor is None:
                    raise
                pressed = True
                note("(Ctrl-C again leaves)")

    def _label(self) -> str:
        call = self._talk.waiting_call
        return "> " if call is None else f"result of {call.name}> "

    def _edited(self, text: str) -> str:
        assert self._editor is not None, "there is a terminal"
        return self._editor.read("edit> ", text)

    def _handle(self, line: str) -> None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._commands.run(line)
            else:
                self._talk.say(line.removeprefix("/") if line.startswith("//") else line)
        except KeyboardInterrupt:
            note("\n(interrupted: the conversation is as it was before)")
        except EOFError:
            note("(not changed)")
        except ContextFull as error:
            complain(o.full_context(error, self._talk.remedies))
        except (SlmError, OSError) as error:
            complain(str(error))
        except Exception as error:  # one turn must not end the chat
            if self._debug:
                raise
            complain(f"{type(error).__name__}: {error} (--debug shows where)")

    def _keep(self) -> None:
        """Write the conversation to its file if it changed."""
        if self._file is None or self._saved == self._talk.messages:
            return
        try:
            write_private(self._file, self._talk.chat.dump())
        except (SlmError, OSError) as error:
            complain(f"the conversation is not kept in {self._file}: {error}")
        else:
            self._saved = self._talk.messages
