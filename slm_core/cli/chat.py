"""``slm chat``: talk to a model, line by line."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.text import Text

from slm_core.atomic_write import atomic_file
from slm_core.chat import Chat
from slm_core.cli import options as o
from slm_core.cli.streaming import stream_answer, summary
from slm_core.cli.terminal import PrefillBar, complain, err, note, out
from slm_core.errors import InvalidOption, SlmError
from slm_core.generation import FinishReason
from slm_core.loading import LoadedModel
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, Message, Role

HELP = """\
/undo            take back the last question and what followed it
/forget [N]      cut message N out of the KV cache; without N, list the messages
/system [TEXT]   set the system message; without TEXT, show it
/backend [NAME]  go on with another engine; without NAME, tell which one runs
/save FILE       write the conversation, KV cache included, to a file
/load FILE       go on with a saved conversation
/help            this list
/exit            leave (so does the end of input, or Ctrl-C twice)
Anything else is said to the model; a line that begins with // is said without its first slash."""


@o.expand_groups
def chat(
    *,
    model: o.ModelPath = None,
    system: o.System = None,
    thinking: o.Thinking = None,
    engine: o.EngineOptions,
    format: o.Format = None,  # noqa: A002  # the name of the option
    ctx: o.ContextSize = None,
    sampling: o.SamplingOptions,
    session: o.SessionFile = None,
    overflow: o.OverflowPolicy = None,
    stats: o.Stats = False,
) -> None:
    """Chat with a model. /help lists the commands. Ctrl-C ends an answer; twice at the prompt, it ends the program."""
    conversation = ConversationOptions(session, system, ctx, overflow, thinking)
    changed = sampling.sampling() if sampling.set_flags() else None
    loaded = engine.load(model, format)
    try:
        talk = conversation.begin(loaded, changed)
    except BaseException:
        loaded.close()
        raise

    def load_on(backend: str) -> LoadedModel:
        return o.EngineOptions(backend=backend, isolated=engine.isolated).load(model, format)

    with Repl(load_on, loaded, talk, file=session, stats=stats) as repl:
        repl.run()


@dataclasses.dataclass(frozen=True, slots=True)
class ConversationOptions:
    """The options of the conversation on the command line."""

    file: Path | None
    system: str | None
    ctx: int | None
    overflow: str | None
    thinking: bool | None

    def begin(self, loaded: LoadedModel, sampling: Sampling | None) -> Chat:
        """Continue the conversation of the file, or begin one.

        Options of the command line (sampling, reasoning, context, overflow) override the options of the file.
        """
        if self.file is None or not self.file.exists():
            return loaded.chat(
                system=self.system,
                n_ctx=o.context_size(loaded, self.ctx),
                sampling=sampling,
                thinking=self.thinking,
                overflow=self.overflow or "error",
            )
        talk = Chat.restore(loaded, self.file.read_bytes(), n_ctx=self.ctx, overflow=self.overflow)
        if self.system is not None and talk.messages[:1] != (Message(Role.SYSTEM, self.system),):
            talk.close()
            raise InvalidOption(f"{self.file} holds a conversation with another system message (/system changes it)")
        talk.options = dataclasses.replace(
            talk.options,
            sampling=talk.options.sampling if sampling is None else sampling,
            thinking=talk.options.thinking if self.thinking is None else self.thinking,
        )
        return talk


class Repl:
    """An interactive conversation with commands. It owns the model and the chat.

    Args:
        load_on: loads the same model on another backend, by name.
        loaded: the model.
        talk: the conversation.
        file: the file of the conversation, written after each line that changed it, and at the end.
        stats: print tokens and seconds of each answer.
    """

    def __init__(
        self,
        load_on: Callable[[str], LoadedModel],
        loaded: LoadedModel,
        talk: Chat,
        *,
        file: Path | None = None,
        stats: bool = False,
    ) -> None:
        self._load_on = load_on
        self._file = file
        self._stats = stats
        self._saved: tuple[Message, ...] | None = None
        self._loaded = loaded
        self._chat = talk
        self._console: Console = out()
        self._interactive = sys.stdin.isatty()
        self._commands: dict[str, Callable[[str], None]] = {
            "undo": self._undo,
            "forget": self._forget,
            "system": self._system,
            "backend": self._backend,
            "save": self._save,
            "load": self._load,
            "help": lambda argument: self._say(HELP),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._chat.close()
        self._loaded.close()

    def run(self) -> None:
        """Read lines until the end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice at the prompt.
        """
        if self._interactive:
            if importlib.util.find_spec("readline") is not None:
                importlib.import_module("readline")  # adds history and editing keys to input()
            self._say(f"{self._loaded.info.path.name} on {self._loaded.info.backend}. /help lists the commands.")
        if self._file is not None and self._chat.messages:
            self._say(f"(going on with {len(self._chat.messages)} messages of {self._file})")
        try:
            while (line := self._read()) is not None and line.strip() != "/exit":
                if line.strip():
                    self._handle(line)
                    self._keep()
        finally:
            self._keep()

    def _read(self) -> str | None:
        """The next line; None at the end of input."""
        pressed = False
        while True:
            try:
                return input("> " if self._interactive else "")
            except EOFError:
                return None
            except KeyboardInterrupt:
                if pressed or not self._interactive:
                    raise
                pressed = True
                self._say("\n(Ctrl-C again leaves)")

    def _handle(self, line: str) -> None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(*line[1:].strip().partition(" ")[::2])
            else:
                self._talk(line.removeprefix("/") if line.startswith("//") else line)
        except (SlmError, OSError) as error:
            complain(str(error))
        except KeyboardInterrupt:
            self._say("\n(interrupted: the conversation is as it was before)")

    def _keep(self) -> None:
        """Write the conversation to its file if it changed."""
        if self._file is None or self._saved == self._chat.messages:
            return
        try:
            _write(self._file, self._chat.dump())
        except (SlmError, OSError) as error:
            complain(f"the conversation is not kept in {self._file}: {error}")
        else:
            self._saved = self._chat.messages

    def _talk(self, text: str) -> None:
        with PrefillBar() as bar:
            stream = self._chat.stream(text, progress=bar)
            if stream.overflowed is not None:
                self._say(f"(to make room, the {len(stream.overflowed.messages)} oldest messages were dropped)")
            answer = stream_answer(stream, self._console)
        if self._stats:
            note(summary(answer))
        if answer.finish_reason is FinishReason.CANCELLED:
            self._say("(stopped)")
        elif answer.finish_reason is FinishReason.LENGTH:
            self._say("(cut off: --max-tokens was reached, or the context is full; /forget or /undo make room)")

    def _command(self, name: str, argument: str) -> None:
        command = self._commands.get(name)
        if command is None:
            complain(f"unknown command /{name} (accepted: {', '.join('/' + key for key in (*self._commands, 'exit'))})")
        else:
            command(argument.strip())

    def _undo(self, argument: str) -> None:
        messages = self._chat.messages
        questions = [i for i, message in enumerate(messages) if message.role is Role.USER]
        if not questions:
            complain("there is nothing to take back")
            return
        for i in reversed(range(questions[-1], len(messages))):
            self._chat.delete(i)
        self._say(f"(taken back: {_short(messages[questions[-1]])})")

    def _forget(self, argument: str) -> None:
        messages = self._chat.messages
        if not argument:
            self._say(
                "\n".join(f"{i:>3} {_short(message)}" for i, message in enumerate(messages)) or "(no messages yet)"
            )
            return
        if not argument.isdecimal() or int(argument) >= len(messages):
            complain(f"there is no message {argument} (/forget lists them)")
            return
        level = self._chat.forget(int(argument))
        how = "cut out of the KV cache" if level is EditLevel.CUT else "removed; what follows is computed again"
        self._say(f"({how}: {_short(messages[int(argument)])})")

    def _system(self, argument: str) -> None:
        messages = self._chat.messages
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        if not argument:
            self._say(messages[0].content if has_system else "(no system message)")
        elif has_system:
            self._chat.edit(0, argument)
        else:
            self._replace_messages((Message(Role.SYSTEM, argument), *messages))

    def _backend(self, argument: str) -> None:
        if not argument:
            info = self._loaded.info
            self._say(f"({info.backend}, {info.device}: {info.reason})")
            return
        loaded = self._load_on(argument)
        try:
            talk = Chat.restore(loaded, self._chat.dump(), n_ctx=self._chat.session.context.n_ctx)
        except BaseException:
            loaded.close()
            raise
        self._chat.close()
        self._loaded.close()
        self._chat, self._loaded = talk, loaded
        self._say(f"(going on with {loaded.info.backend})")

    def _save(self, argument: str) -> None:
        if not argument:
            complain("/save needs the name of a file")
            return
        path = Path(argument).expanduser()
        data = self._chat.dump()
        _write(path, data)
        self._say(f"(saved {len(self._chat.messages)} messages, {len(data):,} bytes, to {path})")

    def _load(self, argument: str) -> None:
        if not argument:
            complain("/load needs the name of a file")
            return
        talk = Chat.restore(
            self._loaded, Path(argument).expanduser().read_bytes(), n_ctx=self._chat.session.context.n_ctx
        )
        self._chat.close()
        self._chat = talk
        self._say(f"(going on with {len(talk.messages)} messages)")

    def _replace_messages(self, messages: tuple[Message, ...]) -> None:
        """Continue with other messages, in a context of the same size."""
        old, context = self._chat, self._chat.session.context
        options = old.options
        talk = self._loaded.chat(
            messages=messages,
            n_ctx=context.n_ctx,
            n_seq_max=context.n_seq_max,
            n_batch=context.n_batch,
            sampling=options.sampling,
            tools=options.tools,
            thinking=options.thinking,
            overflow=options.overflow,
        )
        self._chat = talk
        old.close()

    def _say(self, text: str) -> None:
        """Print text of the program, in another style than the model's text."""
        err().print(Text(text, style="dim"), soft_wrap=True)


def _short(message: Message, width: int = 60) -> str:
    """A message on one line."""
    text = " ".join(message.content.split())
    return f"{message.role}: {text if len(text) <= width else text[: width - 1] + '…'}"


def _write(path: Path, dump: bytes) -> None:
    """Write a conversation to a file that only its user can read."""
    with atomic_file(path, mode=0o600) as file:
        file.write(dump)
