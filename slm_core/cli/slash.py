"""The commands of a chat: lines that begin with a slash."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slm_core.atomic_write import atomic_file, read_regular
from slm_core.cli import options as o
from slm_core.cli.constraints import read_schema
from slm_core.cli.conversation import Conversation
from slm_core.cli.files import paths
from slm_core.cli.streaming import summary
from slm_core.cli.terminal import note
from slm_core.cli.tools_file import read_tools
from slm_core.constraints import JsonSchema
from slm_core.errors import InvalidOption
from slm_core.plugins import registry
from slm_core.sampling import Sampling
from slm_core.sampling.aliases import PRESETS, canonical
from slm_core.toolschema import tool_schemas
from slm_core.types import EditLevel, Message, Role
from slm_core.user_paths import expanded

LEAVE = ("exit", "quit", "/exit", "/quit")
"""Lines that end a chat."""

_OPTIONS = tuple(sorted(field.name for field in dataclasses.fields(Sampling) if field.name != "logprobs"))
_OTHERS = ("ctx", "overflow", "preset", "thinking")
_CHOICES = {
    "overflow": ("error", "shift", "truncate_middle"),
    "preset": tuple(PRESETS),
    "thinking": ("auto", "off", "on"),
}
_THINKING = {"auto": None, "off": False, "on": True}
_KEYS = """\
All else is said to the model; // at the beginning says a slash.
Alt+Enter, or \\ before Enter, begins a new line. A paste of lines is one message.
Tab completes commands and arguments; the up arrow brings back earlier inputs."""

Complete = Callable[[str], Sequence[str]]


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        usage: its arguments.
        help: a description of the command.
        run: called with its argument.
        complete: the completions of an argument, each a whole argument.
    """

    usage: str
    help: str
    run: Callable[[str], None]
    complete: Complete


class Commands:
    """The commands, on a conversation.

    Args:
        talk: the conversation.
        edit: lets the user edit a text; None if there is no terminal.
    """

    def __init__(self, talk: Conversation, edit: Callable[[str], str] | None = None) -> None:
        self._talk = talk
        self._edit_text = edit
        self._commands = {
            "regen": Command("", "answer the last question again", self._regen, _nothing),
            "edit": Command(
                "[N] [TEXT]",
                "change your last question and answer it; or change message N",
                self._edit,
                self._ids,
            ),
            "undo": Command("", "take back the last question and what followed it", self._undo, _nothing),
            "forget": Command(
                "[N]", "cut message N out of the KV cache; without N, list messages", self._forget, self._ids
            ),
            "fork": Command(
                "[NAME|off]",
                "keep a copy of the conversation as it is now; off: drop the copies",
                self._fork,
                lambda argument: ("off", *self._copies(argument)),
            ),
            "back": Command(
                "[NAME]", "go back to a copy, which stays; without NAME, list the copies", self._back, self._copies
            ),
            "clear": Command("", "begin anew; the system message stays", self._clear, _nothing),
            "system": Command("[TEXT]", "set the system message; without TEXT, show it", self._system, _nothing),
            "set": Command("[NAME VALUE]", f"set an option of sampling, or {', '.join(_OTHERS)}", self._set, _settings),
            "schema": Command(
                "[JSON|FILE|off]", "let answers follow a JSON schema", self._schema, _one_of_or_path("off")
            ),
            "tools": Command(
                "[FILE|off]",
                "functions of FILE.py that the model may call; or tools of FILE.json",
                self._tools,
                _one_of_or_path("off"),
            ),
            "backend": Command(
                "[NAME]", "continue with another backend; without NAME, show it", self._backend, _backends
            ),
            "stats": Command("[on|off]", "show tokens, speed and context; on: after each answer", self._stats, _on_off),
            "save": Command("FILE", "write the conversation, KV cache included, to a file", self._save, paths),
            "load": Command("FILE", "continue a saved conversation", self._load, paths),
            "help": Command("", "this list", self._help, _nothing),
        }

    @property
    def names(self) -> tuple[str, ...]:
        """The commands, with their slashes."""
        return (*(f"/{name}" for name in self._commands), "/exit")

    def run(self, line: str) -> None:
        """Run a command.

        Raises:
            SlmError, OSError: it failed; the conversation is as it was.
        """
        name, _, argument = line.removeprefix("/").strip().partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise InvalidOption(f"unknown command /{name} (accepted: {', '.join(self.names)})")
        command.run(argument.strip())

    def completions(self, line: str) -> tuple[str, Sequence[str]]:
        """The part of a line before the cursor that is completed, and its completions."""
        name, space, argument = line.partition(" ")
        if not space:
            return line, [each for each in self.names if each.startswith(line)]
        command = self._commands.get(name.removeprefix("/"))
        if command is None:
            return argument, []
        return argument, [each for each in command.complete(argument) if each.startswith(argument)]

    def _ids(self, argument: str) -> Sequence[str]:
        return [str(i) for i in range(len(self._talk.messages))]

    # Talking.

    def _regen(self, argument: str) -> None:
        self._talk.regenerate()

    def _edit(self, argument: str) -> None:
        number, _, text = argument.partition(" ")
        if argument and not number.isdecimal():
            number, text = "", argument
        i = self._message(number) if number else self._talk.last_question()
        if not text.strip():
            if self._edit_text is None:
                raise InvalidOption("/edit needs the new text, because there is no terminal to edit the old one")
            text = self._edit_text(self._talk.messages[i].content)
        if self._talk.messages[i].role is Role.USER and i == self._talk.last_question():
            self._talk.say_instead(text)
        else:
            self._talk.chat.edit(i, text)
            note(f"(changed: {short(self._talk.messages[i])})")

    def _undo(self, argument: str) -> None:
        question = self._talk.last_question()
        taken_back = self._talk.messages[question]
        self._talk.drop_from(question)
        note(f"(taken back: {short(taken_back)})")

    def _forget(self, argument: str) -> None:
        messages = self._talk.messages
        if not argument:
            listed = "\n".join(f"{i:>3} {short(message)}" for i, message in enumerate(messages))
            note(listed or "(no messages yet)")
            return
        i = self._message(argument)
        level = self._talk.chat.forget(i)
        how = "cut out of the KV cache" if level is EditLevel.CUT else "removed; what follows is computed again"
        note(f"({how}: {short(messages[i])})")

    def _fork(self, argument: str) -> None:
        if argument == "off":
            note(f"({len(self._talk.copies)} copies dropped)")
            self._talk.copies.clear()
        else:
            note(f"(copy {self._copy_line(self._talk.fork(argument))})")

    def _back(self, argument: str) -> None:
        if not argument:
            note("\n".join(map(self._copy_line, self._talk.copies.names)) or "(no copies yet: /fork keeps one)")
            return
        self._talk.go_back(argument)
        note(f"(going on with {len(self._talk.messages)} messages of copy {argument})")

    def _copy_line(self, name: str) -> str:
        copy = self._talk.copies[name]
        last = f", the last one {short(copy.messages[-1])}" if copy.messages else ""
        again = "" if copy.chat is not None else f"; to be computed again: {copy.reason}"
        return f"{name}: {len(copy.messages)} messages{last}{again}"

    def _copies(self, argument: str) -> Sequence[str]:
        return self._talk.copies.names

    def _clear(self, argument: str) -> None:
        messages = self._talk.messages
        first = 1 if messages and messages[0].role is Role.SYSTEM else 0
        self._talk.drop_from(first)
        note(f"({len(messages) - first} messages removed)")

    def _message(self, number: str) -> int:
        if not number.isdecimal() or int(number) >= len(self._talk.messages):
            raise InvalidOption(f"there is no message {number} (/forget lists them)")
        return int(number)

    # Options.

    def _system(self, argument: str) -> None:
        messages = self._talk.messages
        has_system = bool(messages) and messages[0].role is Role.SYSTEM
        if not argument:
            note(messages[0].content if has_system else "(no system message)")
        elif has_system:
            self._talk.chat.edit(0, argument)
        else:
            self._talk.replace_messages((Message(Role.SYSTEM, argument), *messages))

    def _set(self, argument: str) -> None:
        name, value = _name_and_value(argument)
        if not name:
            note("\n".join(f"{name} = {self._value(name)}" for name in self._shown()))
            return
        if name == "logprobs" or value is None:
            note(f"{name} = {self._value(name)}")
        elif name in _CHOICES and value not in _CHOICES[name]:
            raise InvalidOption(f"{name}={value!r} (accepted: {', '.join(_CHOICES[name])})")
        elif name == "ctx":
            if not value.isdecimal() or not int(value):
                raise InvalidOption(f"ctx={value!r} (accepted: a number of tokens from 1 on)")
            self._talk.restore(self._talk.chat.dump(), int(value))
        elif name == "overflow":
            self._talk.set_options(overflow=value)
        elif name == "thinking":
            self._talk.set_options(thinking=_THINKING[value])
        else:
            self._talk.set_options(sampling=self._changed_sampling(name, value))

    def _changed_sampling(self, name: str, value: str) -> Sampling:
        if name == "preset":
            return Sampling.preset(value)
        read = None if value == "none" else o.read_option(f"{name}={value}")[1]
        return dataclasses.replace(self._talk.chat.options.sampling, **canonical({name: read}, _OPTIONS))  # type: ignore[arg-type]  # checked there

    def _shown(self) -> Sequence[str]:
        """The options that differ from the defaults, and the options outside of sampling."""
        default, sampling = Sampling(), self._talk.chat.options.sampling
        changed = [name for name in _OPTIONS if getattr(sampling, name) != getattr(default, name)]
        return ["ctx", "overflow", "thinking", *dict.fromkeys(("temperature", "top_k", "top_p", "min_p", *changed))]

    def _value(self, name: str) -> str:
        options = self._talk.chat.options
        if name == "ctx":
            return str(self._talk.n_ctx)
        if name == "overflow":
            return str(options.overflow)
        if name == "thinking":
            return next(word for word, value in _THINKING.items() if value is options.thinking)
        known = canonical({name: getattr(options.sampling, name, None)}, _OPTIONS)
        value = next(iter(known.values()), None)
        return "none" if value is None else json.dumps(value, default=str)

    def _schema(self, argument: str) -> None:
        if not argument:
            constraint = self._talk.constraint
            shown = constraint.schema if isinstance(constraint, JsonSchema) else str(constraint)
            note("(answers are free)" if constraint is None else shown)
        else:
            self._talk.set_constraint(None if argument == "off" else read_schema(argument))

    def _tools(self, argument: str) -> None:
        if argument:
            tools = [] if argument == "off" else read_tools(expanded(argument))
            self._talk.set_options(tools=tuple(tools))
        functions = [schema["function"] for schema in tool_schemas(self._talk.chat.options.tools)]
        listed = [f"{f['name']}: {f.get('description', '')}".rstrip(": ") for f in functions if isinstance(f, dict)]
        note("\n".join(listed) or "(no tools)")

    def _backend(self, argument: str) -> None:
        if argument:
            self._talk.move(argument)
            note(f"(going on with {self._talk.loaded.info.backend})")
        else:
            info = self._talk.loaded.info
            note(f"({info.backend}, {info.device}: {info.reason})")

    def _stats(self, argument: str) -> None:
        if argument not in ("", "on", "off"):
            raise InvalidOption(f"/stats {argument} (accepted: on, off)")
        if argument:
            self._talk.shows_stats = argument == "on"
            return
        note(f"{len(self._talk.messages)} messages, {self._talk.status()}")
        if self._talk.last is not None:
            note(f"the last answer: {summary(self._talk.last)}")

    # Files.

    def _save(self, argument: str) -> None:
        path, data = _file("save", argument), self._talk.chat.dump()
        write_private(path, data)
        note(f"(saved {len(self._talk.messages)} messages, {len(data):,} bytes, to {path})")

    def _load(self, argument: str) -> None:
        self._talk.restore(read_regular(_file("load", argument)))
        note(f"(going on with {len(self._talk.messages)} messages)")

    def _help(self, argument: str) -> None:
        rows = [(f"/{name} {command.usage}".rstrip(), command.help) for name, command in self._commands.items()]
        rows.append(("/exit", "leave; so do exit, quit, Ctrl-D, and Ctrl-C twice"))
        width = max(len(usage) for usage, _ in rows)
        note("\n".join(f"{usage:<{width}}  {text}" for usage, text in rows) + "\n" + _KEYS)


def short(message: Message, width: int = 60) -> str:
    """A message on one line."""
    text = " ".join(message.content.split())
    return f"{message.role}: {text if len(text) <= width else text[: width - 1] + '…'}"


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its user can read."""
    with atomic_file(path, mode=0o600) as file:
        file.write(data)


def _file(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidOption(f"/{command} needs the name of a file")
    return expanded(argument)


def _name_and_value(argument: str) -> tuple[str, str | None]:
    """``NAME VALUE`` or ``NAME=VALUE``; None without a value."""
    name, equals, value = argument.partition("=" if "=" in argument.partition(" ")[0] else " ")
    return name.strip(), value.strip() if equals else None


def _nothing(argument: str) -> Sequence[str]:
    return ()


def _on_off(argument: str) -> Sequence[str]:
    return ("on", "off")


def _backends(argument: str) -> Sequence[str]:
    return sorted(registry().backends)


def _settings(argument: str) -> Sequence[str]:
    name, space, _ = argument.partition(" ")
    if not space:
        return sorted((*_OPTIONS, *_OTHERS))
    return [f"{name} {choice}" for choice in _CHOICES.get(name, ())]


def _one_of_or_path(*words: str) -> Complete:
    return lambda argument: [*words, *paths(argument)]
