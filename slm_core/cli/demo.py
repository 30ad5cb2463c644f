"""``slm demo``: shows the main features with the built-in model, on every installed engine."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from slm_core.chat import Chat
from slm_core.cli.inspect import remarks
from slm_core.cli.terminal import out, write
from slm_core.errors import BackendUnavailable, InvalidOption, SlmError
from slm_core.generation import Answer
from slm_core.loading import backends, demo_model_path, load
from slm_core.model import Model
from slm_core.sampling import Sampling
from slm_core.types import BackendStatus, EditLevel, ModelInfo

CONVERSATION = ("My dog is called Rex.", "My name is Ada.", "What is 12 + 30?", "What is my dog called?")
GREEDY = Sampling(temperature=0, max_tokens=40)
N_CTX = 1024


def demo() -> None:
    """Show the main features: one conversation on every installed engine, edited, forked and moved between engines."""
    with ExitStack() as resources:
        show = Show(out())
        statuses = backends()
        show.open_engines(statuses, resources)
        show.introduce()
        show.converse()
        show.truncate()
        show.cut()
        show.fork()
        show.move()
        show.conclude(statuses)
    if not show.agreed:
        raise typer.Exit(1)


@dataclass
class Engine:
    """An engine of the demo.

    Attributes:
        name: the backend.
        model: the demo model on it.
        load_s: seconds to load.
        chat: the conversation.
        n_decoded: tokens of streamed answers.
        decode_s: seconds of streamed answers.
    """

    name: str
    model: Model
    load_s: float
    chat: Chat
    n_decoded: int = 0
    decode_s: float = 0.0


@dataclass
class Show:
    """The steps of the demo, each printed with its effect.

    Attributes:
        console: the console.
        engines: the engines to use.
        failures: by name, the reason why an installed engine failed.
        agreed: whether all engines gave the same tokens in all answers.
    """

    console: Console
    engines: list[Engine] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    agreed: bool = True

    def open_engines(self, statuses: Sequence[BackendStatus], resources: ExitStack) -> None:
        """Load the demo model on every installed engine.

        Raises:
            BackendUnavailable: no engine can run it.
        """
        for name in (status.name for status in statuses if status.installed):
            started = time.perf_counter()
            try:
                model = resources.enter_context(_load(name))
                chat = resources.enter_context(model.chat(n_ctx=N_CTX, sampling=GREEDY))
            except SlmError as error:
                self.failures[name] = str(error)
                self.agreed = False
            else:
                self.engines.append(Engine(name, model, time.perf_counter() - started, chat))
        if not self.engines:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
            raise BackendUnavailable(f"no engine can run the demo model ({reasons or 'none is installed'})")

    def introduce(self) -> None:
        """Print the model and the engines."""
        info: ModelInfo = self.engines[0].model.info
        facts = (
            f"{info.architecture}, {info.n_params / 1e6:.1f} million parameters, {info.quantization},"
            f" {info.n_bytes / 1e6:.1f} MB"
        )
        title = Text(f"slm-core {importlib.metadata.version('slm-core')}", style="bold")
        self.console.print(title + Text(f"   demo model: {facts}", style="not bold dim"))

    def converse(self) -> None:
        """Stream the conversation on each engine in turn."""
        self._title("One conversation on every engine", "greedy: each token must be the same")
        n_tokens, same = 0, True
        for question in CONVERSATION:
            self._you(question)
            answers = [self._stream(engine, question) for engine in self.engines]
            n_tokens += len(answers[0].tokens)
            same = self._compare(answers) and same
        self._verdict(f"{n_tokens} tokens", same)

    def truncate(self) -> None:
        """Truncate everything after the first answer, then ask about a later message."""
        self._title("Truncate", "take back everything after the first answer")
        with self._forks() as chats:
            held = [_held(chat) for chat in chats]
            for chat in chats:
                for i in reversed(range(2, len(chat.messages))):
                    chat.delete(i)
            self._changed(f"KV cache {held[0]} -> {_held(chats[0])} tokens")
            self._ask("What is my name?", chats)

    def cut(self) -> None:
        """Forget the first question and its answer, in the middle of the KV cache."""
        self._title("Cut", "forget the dog, out of the middle of the KV cache")
        with self._forks() as chats:
            for chat in chats:
                chat.delete(-1)
                chat.delete(-1)  # the last question and its answer mention the dog, too
            held = _held(chats[0])
            levels = {min(chat.forget(0), chat.forget(0)) for chat in chats}
            how = "what follows moved down, its values kept" if levels == {EditLevel.CUT} else "some engines recompute"
            self._changed(f"KV cache {held} -> {_held(chats[0])} tokens; {how}")
            self._ask("What is my dog called?", chats)
            self._ask("What is my name?", chats)

    def fork(self) -> None:
        """Fork the conversation; both copies continue differently."""
        self._title("Fork", "two copies are told different things")
        with self._forks() as chats:
            free = [chat.session.context.n_free for chat in chats]
            with self._forks() as forks:
                used = free[0] - chats[0].session.context.n_free
                self._changed(f"a copy of {_held(forks[0])} tokens takes {used} new places in the KV cache")
                for city, side in (("Paris", chats), ("Oslo", forks)):
                    self._compare([chat.send(f"I live in {city}.") for chat in side])
                self._ask("Where do I live?", chats, "copy 1")
                self._ask("Where do I live?", forks, "copy 2")

    def move(self) -> None:
        """Dump on each engine, restore on the next one, and continue on both."""
        alone = len(self.engines) == 1
        self._title("Dump and restore", "on the same engine: no other is installed" if alone else "on another engine")
        question = "What is my name?"
        with ExitStack() as resources:
            for source, target in zip(self.engines, [*self.engines[1:], self.engines[0]], strict=True):
                data = source.chat.dump()
                moved = resources.enter_context(Chat.restore(target.model, data))
                self._changed(f"{len(data) / 1000:,.0f} kB from {source.name} into a new context of {target.name}")
                stayed = resources.enter_context(source.chat.fork())
                self._ask(question, [stayed, moved], both=f"{source.name} and {target.name}")

    def conclude(self, statuses: Sequence[BackendStatus]) -> None:
        """Print the table of engines, and the result."""
        self.console.print()
        table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
        for column in ("engine", "version", "device", "tokens/s", "load"):
            table.add_column(column, no_wrap=True, justify="right" if column in ("tokens/s", "load") else "left")
        table.add_column("remarks")
        for status in statuses:
            table.add_row(*self._row(status))
        self.console.print(table)
        if self.agreed:
            message = "All engines agree." if len(self.engines) > 1 else "One engine ran: install another to compare."
            self.console.print(Text(message, style="bold green"))
        else:
            self.console.print(Text("The engines do not agree, or one failed: see above.", style="bold red"))

    # Parts of the steps.

    @contextmanager
    def _forks(self) -> Iterator[list[Chat]]:
        """Fork the conversation on each engine."""
        with ExitStack() as resources:
            yield [resources.enter_context(engine.chat.fork()) for engine in self.engines]

    def _stream(self, engine: Engine, question: str) -> Answer:
        self._label(engine.name)
        stream = engine.chat.stream(question)
        for event in stream:
            write(self.console, event.text)
        self.console.print()
        engine.n_decoded += max(stream.answer.usage.completion_tokens - 1, 0)
        engine.decode_s += stream.answer.timings.decode_s
        return stream.answer

    def _ask(self, question: str, chats: Sequence[Chat], copy: str = "", both: str = "") -> None:
        """Ask each chat, and show the answer once if all agree."""
        answers = [chat.send(question) for chat in chats]
        self._you(question + (f"  ({copy})" if copy else ""))
        same = self._compare(answers)
        names = [engine.name for engine in self.engines] if not both else both.split(" and ")
        if same:
            self._label("both" if len(set(names)) == 2 else "all" if len(set(names)) > 2 else names[0])
            self._answer(answers[0])
        else:
            for name, answer in zip(names, answers, strict=True):
                self._label(name)
                self._answer(answer)
            self._verdict("the answers", same)

    def _answer(self, answer: Answer) -> None:
        """Print an answer, and the number of its cached prompt tokens."""
        write(self.console, answer.text)
        cached = f"   {answer.usage.cached_tokens} of {answer.usage.prompt_tokens} prompt tokens cached"
        self.console.print(Text(cached, style="dim"))

    def _compare(self, answers: Sequence[Answer]) -> bool:
        same = all(answer.tokens == answers[0].tokens for answer in answers)
        self.agreed = self.agreed and same
        return same

    def _title(self, title: str, remark: str) -> None:
        self.console.print()
        self.console.print(Text(title, style="bold cyan") + Text(f"   {remark}", style="not bold dim"))

    def _you(self, text: str) -> None:
        self._label("you", "bold")
        self.console.print(Text(text, style="bold"))

    def _label(self, name: str, style: str = "cyan") -> None:
        width = max(8, *(len(engine.name) for engine in self.engines))
        self.console.print(Text(f"  {name:>{width}}  ", style=style), end="")

    def _changed(self, text: str) -> None:
        self._label("")
        self.console.print(Text(text, style="yellow"))

    def _verdict(self, what: str, same: bool) -> None:
        self._label("")
        n = len(self.engines)
        if same:
            text = f"the same {what} on {n} engines" if n > 1 else f"{what}, on the one engine that is installed"
            self.console.print(Text(text, style="green"))
        else:
            self.console.print(Text(f"{what} DIFFER between the engines", style="bold red"))

    def _row(self, status: BackendStatus) -> list[Text]:
        engine = next((engine for engine in self.engines if engine.name == status.name), None)
        remark = Text(self.failures.get(status.name, remarks(status)), style="dim")
        if engine is None:
            return [Text(status.name), Text(status.version or "-"), Text("-"), Text("-"), Text("-"), remark]
        rate = f"{engine.n_decoded / engine.decode_s:.0f}" if engine.decode_s else "-"
        facts = (status.name, status.version, engine.model.info.device, rate, f"{engine.load_s:.1f} s")
        return [*map(Text, facts), remark]


def _load(name: str) -> Model:
    """The demo model on an engine; on one thread if possible, because more threads do not help such a small model."""
    try:
        return load(demo_model_path(), backend=name, n_threads=1)
    except InvalidOption:
        return load(demo_model_path(), backend=name)


def _held(chat: Chat) -> int:
    """The number of tokens of the chat in the KV cache."""
    return chat.session.context.length(chat.session.seq_id)
