"""Plays programs of chat calls. Expected chats are lists of messages; the float64 reference decodes their tokens.

See ``session_programs``. The chat format renders prompts, which are encoded as a whole, and parses answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from slm_conformance.suite.bench import Bench
from slm_conformance.suite.programs.answer_model import AnswerModel, CriterionError, letter_bias, spelled
from slm_conformance.suite.programs.chat_steps import (
    Ask,
    ChatStep,
    Choose,
    Delete,
    DumpChat,
    Edit,
    Forget,
    ForkChat,
    LookAt,
    RestoreChat,
    Resume,
    Say,
)
from slm_conformance.suite.programs.draws import Choice, may_be_chosen, uniform
from slm_conformance.suite.programs.histories import History
from slm_conformance.suite.programs.scripts import Errors, Script
from slm_conformance.suite.programs.session_programs import PLAIN, TIGHT
from slm_conformance.suite.workshop import Rows
from slm_core.chat import Chat, Session, encode_segments
from slm_core.errors import ContextFull, InvalidSequence, SessionError
from slm_core.formatting import formatter
from slm_core.generation import Answer, FinishReason, StoppingAction
from slm_core.protocols import BackendModel, Context, Formatter, Vocab
from slm_core.sampling import Sampling
from slm_core.types import Capability, ContextOptions, EditLevel, KvType, Message, Role

N_CTX, N_BATCH, N_SLOTS = 128, 16, 3
_LOOKAHEAD, _FIRST_DUMP = 99, 100  # as in session_programs


@dataclass(slots=True)
class ChatSlot:
    """A chat in plain Python.

    Attributes:
        history: the session's tokens.
        messages: the conversation, without the streaming answer.
        n_answers: number of earlier answers; the number of the next answer's stream is one more.
        answer: the streaming answer.
        before: messages, tokens and ``n_answers`` before the streaming answer, while it may still raise.
    """

    history: History
    messages: tuple[Message, ...]
    n_answers: int = 0
    answer: AnswerModel | None = None
    before: tuple[tuple[Message, ...], tuple[int, ...], int] = ((), (), 0)

    def copied(self, seq_id: int) -> ChatSlot:
        """The same chat in another sequence of the reference."""
        return replace(self, history=self.history.copy(seq_id), answer=copy.deepcopy(self.answer))


class PlainModel:
    """The part of a model that ``Chat.restore`` needs.

    Args:
        model: the model; its own chat format is used.
        kv_type: KV type of contexts.
    """

    def __init__(self, model: BackendModel, kv_type: KvType) -> None:
        self._model, self._kv_type = model, kv_type
        self.info, self.vocab, self.formatter = model.info, model.vocab, formatter(model=model)

    def new_context(
        self,
        *,
        n_ctx: int,
        n_seq_max: int,
        n_batch: int,
        kv_type_k: KvType | str | None = None,
        kv_type_v: KvType | str | None = None,
    ) -> Context:
        """A new context."""
        kv_types = (self._kv_type if kind is None else KvType(kind) for kind in (kv_type_k, kv_type_v))
        return self._model.new_context(ContextOptions(n_ctx, n_seq_max, n_batch, *kv_types))


def chat_options(vocab: Vocab) -> list[Sampling]:
    """Options for the chats of a program, and for questions."""
    letters = letter_bias(vocab, "abé", 8.0)
    return [
        Sampling(**PLAIN, temperature=1.0, seed=5, max_tokens=5, repeat_penalty=1.3, logit_bias=letters),
        Sampling(**PLAIN, temperature=0, max_tokens=4),
        Sampling(**PLAIN, temperature=1.3, seed=7, max_tokens=6, logit_bias=letters, stop=("ab", "éa")),
    ]


class ChatPlayer:
    """Plays a program on chats of one context, on the models in plain Python, and on the reference.

    Args:
        bench: makes the context; the chat format is the model's own.
        opening: the lines of Python that load the same model.
        n_seq_max: sequences of the context.
        options: index of the chats' options.
    """

    def __init__(self, bench: Bench, opening: str, n_seq_max: int, options: int) -> None:
        self._bench, self._vocab = bench, bench.vocab
        self._script = Script(bench, opening, _IMPORTS)
        self._context = self._script.context(N_CTX, n_seq_max, N_BATCH)
        self._options = chat_options(bench.vocab)
        self._own = self._options[options]
        self._reference = bench.reference()
        self._slots: list[ChatSlot | None] = [None] * N_SLOTS
        self._dumps: dict[int, ChatSlot] = {}
        self._script.run(f"loaded = PlainModel(model, KvType({bench.kv_type.value!r}))")
        self._formatter: Formatter = self._script.names["loaded"].formatter
        self._script.run("options = chat_options(model.vocab)")
        self._script.run("said = [Message('user', 'hi'), Message('assistant', 'hello you')]")
        messages = tuple(self._script.names["said"])
        for slot in range(2):
            line = f"chat_in(context, loaded, options[{options}], said)"
            self._script.run(f"c{slot} = {line}")
            history = History(self._reference, slot, self._context.edit_level)
            history.extend(self._encoded(messages))
            self._slots[slot] = ChatSlot(history, messages)

    def play(self, program: Sequence[ChatStep]) -> None:
        """Play all steps.

        Raises:
            Mismatch: with the script.
        """
        with self._context:
            for step in program:
                if self._applies(step):
                    self._play(step)
                    self._compare()
            for slot, model in enumerate(self._slots):
                if model is not None:
                    self._script.run(f"c{slot}.close()")

    def _applies(self, step: ChatStep) -> bool:
        model = self._slots[step.slot]
        match step:
            case RestoreChat(_, name):
                return model is None and name in self._dumps
            case ForkChat(_, dst):
                return model is not None and self._slots[dst] is None
            case Resume():
                return model is not None and model.answer is not None
        return model is not None

    def _play(self, step: ChatStep) -> None:
        match step:
            case Say():
                self._say(step)
            case Resume():
                self._resume(step)
            case Edit() | Delete() | Forget():
                self._change(step)
            case Ask():
                self._ask(step)
            case Choose():
                self._choose(step)
            case LookAt(slot):
                self._look(slot)
            case _:
                self._play_copy(step)

    # Chats.

    def _slot(self, slot: int) -> ChatSlot:
        model = self._slots[slot]
        assert model is not None, "steps of closed slots are not played"
        return model

    def _chat(self, slot: int) -> Chat:
        chat: Chat = self._script.names[f"c{slot}"]
        return chat

    def _context_of(self, slot: int) -> Context:
        return self._chat(slot).session.context

    def _encoded(self, messages: Sequence[Message], *, asks: bool = False) -> list[int]:
        """The tokens of messages, encoded as a whole."""
        if not messages:
            return []
        return encode_segments(self._vocab, self._formatter.render(messages, add_generation_prompt=asks))

    def _is_tight(self, slot: int, n_tokens: int) -> bool:
        """Whether this number of tokens might not fit in place of the chat's tokens."""
        context, session = self._context_of(slot), self._chat(slot).session
        return n_tokens + TIGHT > context.n_free + context.length(session.seq_id) or context.n_free < TIGHT

    def _full(self, slot: int, messages: Sequence[Message]) -> Errors:
        return {ContextFull} if self._is_tight(slot, len(self._encoded(messages, asks=True))) else set()

    def _settle(self, slot: int) -> None:
        """End a stream, as the next call does."""
        model = self._slot(slot)
        if model.answer is not None:
            model.answer.reason = FinishReason.CANCELLED
            self._finish(model, model.answer)

    def _finish(self, model: ChatSlot, answer: AnswerModel) -> None:
        message = self._formatter.parse(answer.shown(self._vocab))
        model.messages, model.answer = (*model.messages, message), None

    # Talking.

    def _say(self, step: Say) -> None:
        self._settle(step.slot)
        slot, model = step.slot, self._slot(step.slot)
        messages = (*model.messages, Message(Role.USER, step.text)) if step.text else _without_answers(model.messages)
        errors, must = self._full(slot, messages), False
        if not messages or messages[-1].role is not Role.USER:
            errors, must = {SessionError}, True
        call = f"stream({step.text!r}" if step.text else "regenerate("
        stopping_criteria = (
            ""
            if step.criterion is None
            else f"{', ' if step.text else ''}stopping_criteria=[{step.criterion.spelled()}]"
        )
        before = model.messages, tuple(model.history.tokens), model.n_answers
        n_decoded = self._n_decoded(slot)
        if not self._script.run(f"t{slot} = c{slot}.{call}{stopping_criteria})", errors, must=must):
            return
        n_common = _n_common(model.history.tokens, prompt := self._encoded(messages, asks=True))
        model.history.follow(prompt)
        can_truncate = n_common >= n_decoded or model.history.level >= EditLevel.TRUNCATE
        n_cached = min(n_common, n_decoded) if can_truncate else 0
        model.messages, model.before, model.n_answers = messages, before, model.n_answers + 1
        model.answer = AnswerModel(
            self._own,
            len(prompt),
            n_cached,
            (*self._own.stop, *self._formatter.stops),
            special=True,
            criterion=step.criterion,
        )
        self._read(slot, step.n_read)

    def _resume(self, step: Resume) -> None:
        answer = self._slot(step.slot).answer
        assert answer is not None, "it streams"
        if step.cancel:
            self._script.run(f"t{step.slot}.cancel()")
        if answer.paused:
            self._script.run(f"t{step.slot}.resume()")
            answer.paused = False
        if step.cancel:
            answer.reason = FinishReason.CANCELLED
        self._read(step.slot, step.n_read)

    def _read(self, slot: int, n_read: int) -> None:
        """Continue to read a stream."""
        model = self._slot(slot)
        answer = model.answer
        assert answer is not None, "it streams"
        fails = answer.criterion is not None and answer.criterion.action is None
        errors: Errors = {CriterionError} if fails else set()
        errors |= {ContextFull} if not answer.tokens and self._is_tight(slot, len(model.history.tokens)) else set()
        n_before = len(model.history.tokens)
        if not self._script.run(f"read(t{slot}, {n_read}, [])", errors):
            model.messages, tokens, model.n_answers = model.before
            model.history.follow(tokens)
            model.answer = None
            return
        stream = self._script.names[f"t{slot}"]
        if stream.over:
            new_tokens = stream.answer.tokens[len(answer.tokens) :]
        else:
            new_tokens = self._chat(slot).session.tokens[n_before:]
        self._take(slot, answer, new_tokens)
        if stream.over:
            self._over(slot, answer, stream.answer)

    def _take(self, slot: int, answer: AnswerModel, tokens: Sequence[int]) -> None:
        model, name = self._slot(slot), f"c{slot}.session.tokens"
        for token in tokens:
            over = answer.reason is not None or answer.paused or answer.at_limit
            self._script.check(not over, f"len({name}) == {len(model.history.tokens)}", "it continues after its end")
            self._check_choice(model.history, answer, token, model.n_answers, f"{name}[{len(model.history.tokens)}]")
            raised = answer.take(token, self._vocab)
            self._script.check(not raised, f"{name} is None", "a stopping criterion raised, and that is not told")

    def _check_choice(self, history: History, answer: AnswerModel, token: int, stream: int, name: str) -> None:
        sampling, row = answer.sampling, history.next_row()
        number = uniform(sampling.seed or 0, stream, answer.n_drawn)
        choice = Choice(tuple(history.tokens), len(answer.tokens), number, self._vocab.eog_ids)
        right = may_be_chosen(token, row, self._error(row), sampling, choice)
        self._script.check(
            right, f"{name} != {token}", f"it is not what {spelled(sampling)} draws from stream {stream}"
        )
        history.extend([token])

    def _over(self, slot: int, answer: AnswerModel, actual: Answer) -> None:
        model, name = self._slot(slot), f"t{slot}.answer"
        if answer.reason is None:
            full = self._context_of(slot).n_free == 0
            self._script.check(answer.at_limit or full, f"not t{slot}.over", "the answer stops before its end")
            answer.reason = FinishReason.LENGTH
        self._finish(model, answer)
        counts = (answer.n_prompt, answer.n_cached, len(answer.tokens))
        usage = (actual.usage.prompt_tokens, actual.usage.cached_tokens, actual.usage.completion_tokens)
        ended = f"it ended with {actual.finish_reason.value}"
        text = model.messages[-1].content
        self._script.check(actual.text == text, f"{name}.text == {text!r}", f"it is {actual.text!r}")
        self._script.check(
            actual.finish_reason is answer.reason, f"{name}.finish_reason == {answer.reason.value!r}", ended
        )
        self._script.check(usage == counts, f"{name}.usage == Usage{counts}", f"it is {usage}")

    # Changes.

    def _change(self, step: Edit | Delete | Forget) -> None:
        self._settle(step.slot)
        slot, model = step.slot, self._slot(step.slot)
        n, i = len(model.messages), step.i
        errors: Errors = {SessionError} if not -n <= i < n else set()
        must = bool(errors)
        if not errors:
            errors = self._full(slot, model.messages)
        at = i % max(1, n)
        match step:
            case Edit(_, _, text):
                line = f"edit({i}, {text!r})"
                messages = tuple(replace(m, content=text) if k == at else m for k, m in enumerate(model.messages))
            case _:
                line = f"{'delete' if isinstance(step, Delete) else 'forget'}({i})"
                messages = (*model.messages[:at], *model.messages[at + 1 :])
        if not self._script.run(f"level = c{slot}.{line}", errors, must=must):
            before = self._encoded(model.messages)
            if isinstance(step, Forget) and list(self._chat(slot).session.tokens) == before:
                model.history.follow(before)  # the cache may be updated at any time
            return
        if isinstance(step, Forget):
            self._forget(model, messages)
        else:
            model.history.follow(self._encoded(messages))
        model.messages = messages

    def _forget(self, model: ChatSlot, messages: tuple[Message, ...]) -> None:
        before, after = self._encoded(model.messages), self._encoded(messages)
        model.history.follow(before)
        start, end = (k := _n_common(before, after)), k + len(before) - len(after)
        if end >= start and before[:start] + before[end:] == after:
            level = model.history.remove(start, end, exact=False)
        else:
            level = min(model.history.level, EditLevel.TRUNCATE)
            model.history.follow(after)
        actual = self._script.names["level"]
        self._script.check(actual is level, f"level is EditLevel.{level.name}", f"it says that it was {actual}")

    def _play_copy(self, step: ChatStep) -> None:
        slot = step.slot
        match step:
            case ForkChat(_, dst):
                self._settle(slot)
                self._fork(slot, dst)
            case DumpChat(_, name):
                self._settle(slot)
                self._script.run(f"dump_{name} = c{slot}.dump()")
                self._dumps[name] = self._slot(slot).copied(_FIRST_DUMP + name)
            case RestoreChat(_, name):
                self._script.run(f"c{slot} = Chat.restore(loaded, dump_{name})")
                model = self._slots[slot] = self._dumps[name].copied(slot)
                model.history.follow(self._encoded(model.messages))
            case _:
                self._script.run(f"c{slot}.close()")
                self._slot(slot).history.drop()
                self._slots[slot] = None

    def _fork(self, slot: int, dst: int) -> None:
        context, model, n_free_sequences = self._context_of(slot), self._slot(slot), self._n_free_sequences(slot)
        n_needed = 0 if Capability.SHARED_FORK in context.capabilities else len(model.history.tokens)
        errors: Errors = {ContextFull} if context.n_free < n_needed + TIGHT else set()
        if self._script.run(
            f"c{dst} = c{slot}.fork()", errors if n_free_sequences else {InvalidSequence}, must=n_free_sequences == 0
        ):
            forked = self._slots[dst] = model.copied(dst)
            forked.history.follow(self._encoded(model.messages))

    def _n_free_sequences(self, slot: int) -> int:
        context = self._context_of(slot)
        others = [i for i, model in enumerate(self._slots) if model is not None and self._context_of(i) is context]
        return context.n_seq_max - len(others)

    # Oracles.

    def _ask(self, step: Ask) -> None:
        self._settle(step.slot)
        slot, model = step.slot, self._slot(step.slot)
        messages = (*model.messages, Message(Role.USER, step.text))
        sampling = self._options[step.options]
        stopping_criteria = "" if step.criterion is None else f", stopping_criteria=[{step.criterion.spelled()}]"
        line = f"asked = c{slot}.oracle().ask({step.text!r}, sampling=options[{step.options}]{stopping_criteria})"
        fails = step.criterion is not None and step.criterion.action is None
        errors: Errors = ({CriterionError} if fails else set()) | self._full(slot, messages)
        if step.criterion is not None and step.criterion.action is StoppingAction.PAUSE:
            errors.add(SessionError)  # there is no answer to continue
        if not self._script.run(line, errors):
            return
        ahead = model.history.copy(_LOOKAHEAD)
        ahead.follow(self._encoded(messages, asks=True))
        stops = (*sampling.stop, *self._formatter.stops)
        answer = AnswerModel(sampling, len(ahead.tokens), 0, stops, special=True, criterion=step.criterion)
        actual: Answer = self._script.names["asked"]
        for i, token in enumerate(actual.tokens):
            over = answer.reason is not None or answer.at_limit
            self._script.check(not over, f"len(asked.tokens) == {i}", "it continues after its end")
            self._check_choice(ahead, answer, token, 0, f"asked.tokens[{i}]")
            self._script.check(not answer.take(token, self._vocab), "asked is None", "a stopping criterion raised")
        answer.reason = answer.reason or FinishReason.LENGTH
        text = self._formatter.parse(answer.shown(self._vocab)).content
        self._script.check(actual.text == text, f"asked.text == {text!r}", f"it is {actual.text!r}")

    def _choose(self, step: Choose) -> None:
        self._settle(step.slot)
        slot, model = step.slot, self._slot(step.slot)
        messages = (*model.messages, Message(Role.USER, step.text))
        line = f"choice = c{slot}.oracle().choose({step.text!r}, {list(step.options)})"
        if not self._script.run(line, self._full(slot, messages)):
            return
        scores, slack = [], []
        for option in step.options:
            ahead = model.history.copy(_LOOKAHEAD)
            ahead.follow(self._encoded(messages, asks=True))
            row, score, error = ahead.next_row(), 0.0, 0.0
            for token in self._vocab.encode(option, add_special=False, parse_special=False):
                score, error = score + float(row[token] - np.logaddexp.reduce(row)), error + 2 * self._error(row)
                ahead.extend([token])
                row = ahead.next_row()
            ends = np.logaddexp.reduce(row[sorted(self._vocab.eog_ids)]) - np.logaddexp.reduce(row)
            scores.append(score + float(ends))
            slack.append(error + 2 * self._error(row) + 1e-5)
        probabilities = self._script.names["choice"].probabilities
        for i in range(1, len(scores)):
            expected, bound = scores[i] - scores[0], slack[i] + slack[0]
            actual = float(np.log(probabilities[i] / probabilities[0])) if min(probabilities) > 0 else expected
            line = f"abs(log(choice.probabilities[{i}] / choice.probabilities[0]) - {expected:.5g}) <= {bound:.2g}"
            self._script.check(
                abs(actual - expected) <= bound, line, f"it is {actual:.5g}, by the reference {expected:.5g}"
            )

    # Logits.

    def _n_decoded(self, slot: int) -> int:
        return len(self._slot(slot).history.tokens) - self._chat(slot).session.n_pending

    def _error(self, row: Rows) -> float:
        return float(self._bench.tolerance.row * np.linalg.norm(row))

    def _look(self, slot: int) -> None:
        model = self._slot(slot)
        if model.answer is not None or not model.history.tokens:
            return
        errors: Errors = {ContextFull} if self._context_of(slot).n_free < TIGHT else set()
        if self._script.run(f"row = c{slot}.session.next_logits()", errors):
            self._script.check_row("row", model.history.next_row())

    # After each step.

    def _compare(self) -> None:
        for slot, model in enumerate(self._slots):
            if model is None:
                continue
            chat, name, messages, expected = self._chat(slot), f"c{slot}", model.messages, tuple(model.history.tokens)
            if model.answer is not None:
                messages = (*messages, Message(Role.ASSISTANT, self._script.names[f"t{slot}"].text))
            line = f"[(m.role, m.content) for m in {name}.messages] == {[(str(m.role), m.content) for m in messages]}"
            self._script.check(chat.messages == messages, line, f"they are {chat.messages}")
            tokens = chat.session.tokens
            self._script.check(tokens == expected, f"{name}.session.tokens == {expected}", f"they are {tokens}")
            model.history.decode_to(self._n_decoded(slot))
        n_used = sum(self._context.length(seq_id) > 0 for seq_id in range(self._context.n_seq_max))
        n_open = sum(model is not None for model in self._slots)
        line = f"sum(context.length(s) > 0 for s in range({self._context.n_seq_max})) <= {n_open}"
        self._script.check(n_used <= n_open, line, "a sequence holds tokens of no chat")


def chat_in(context: Context, loaded: PlainModel, sampling: Sampling, messages: Sequence[Message]) -> Chat:
    """A chat in a shared context."""
    return Chat(Session(context, loaded.vocab, sampling=sampling), loaded.formatter, messages=messages)


def _without_answers(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    while messages and messages[-1].role is Role.ASSISTANT:
        messages = messages[:-1]
    return messages


def _n_common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


_IMPORTS = (
    "from math import log",
    "from slm_conformance.suite.programs.answer_model import Every, CriterionError",
    "from slm_conformance.suite.programs.chat_programs import PlainModel, chat_in, chat_options",
    "from slm_conformance.suite.programs.session_programs import read",
    "from slm_core.chat import Chat",
    "from slm_core.generation import StoppingAction, Usage",
    "from slm_core.types import EditLevel, KvType, Message",
)
