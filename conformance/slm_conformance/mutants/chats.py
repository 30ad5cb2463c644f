"""Toys above which chats and oracles are broken."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from slm_conformance.mutants.above import breaks
from slm_core.chat import Chat, ChatStream, Choice, Oracle, Session, oracle
from slm_core.chat.chat import _removed_span
from slm_core.chat.prompt import PromptEncoder
from slm_core.chat.schema import Schema
from slm_core.chat.stream import AnswerStream
from slm_core.constraints import JsonSchema
from slm_core.errors import OracleError
from slm_core.generation import Answer, FinishReason
from slm_core.protocols import Vocab
from slm_core.types import EditLevel, Message, Role

# ruff: noqa: N802, SLF001  (the names are those of backends; mutants change internals)


@breaks("TestChat::test_send", Session, "follow")
def FollowsFromTheStart(whole: Any, session: Session, tokens: Sequence[int]) -> None:
    """The whole conversation is decoded again after each message."""
    if session.tokens != tuple(tokens):
        session.truncate(0)
    whole(session, tokens)


@breaks("TestChat::test_stream", AnswerStream, "__next__")
def PiecesLoseTheirEnds(whole: Any, stream: AnswerStream) -> Any:
    """The text so far lacks the last character of each piece of an answer."""
    event = whole(stream)
    stream.text = stream.text[:-1]
    return event


@breaks("TestChat::test_an_answer_that_raises", Chat, "_talk")
def QuestionsStay(whole: Any, chat: Chat, *args: Any, **options: Any) -> ChatStream:
    """The question stays in the chat when its answer raised."""
    before = chat.options
    stream: ChatStream = whole(chat, *args, **options)

    def undo() -> None:
        chat._stream = chat._turn = None
        chat._n_answers -= 1
        chat.options = before

    stream._turn = replace(stream._turn, undo=undo)
    return stream


@breaks("TestChat::test_draws_after_a_failure", Chat, "_talk")
def FailuresTakeDraws(whole: Any, chat: Chat, *args: Any, **options: Any) -> ChatStream:
    """An answer that raised uses up its random stream."""
    stream: ChatStream = whole(chat, *args, **options)
    undo = stream._turn.undo

    def undo_less() -> None:
        undo()
        chat._n_answers += 1

    stream._turn = replace(stream._turn, undo=undo_less)
    return stream


@breaks("TestTools::test_tools_after_a_failure", Chat, "_talk")
def ToolsStay(whole: Any, chat: Chat, *args: Any, **options: Any) -> ChatStream:
    """Tools that came with an answer that raised stay with the chat."""
    stream: ChatStream = whole(chat, *args, **options)
    undo, options_before = stream._turn.undo, chat.options

    def undo_less() -> None:
        undo()
        chat.options = options_before

    stream._turn = replace(stream._turn, undo=undo_less)
    return stream


@breaks("TestChat::test_an_answer_that_is_cancelled", AnswerStream, "_end")
def CancelledIsUnsaid(whole: Any, stream: AnswerStream) -> Any:
    """A cancelled answer becomes an empty message."""
    finished = stream._finished
    if stream._generation.answer.finish_reason is FinishReason.CANCELLED:
        stream._finished = lambda message: finished(replace(message, content=""))
    return whole(stream)


@breaks("TestChat::test_content_is_never_control", PromptEncoder, "encode")
def ContentIsParsed(whole: Any, encoder: PromptEncoder, segments: Any) -> list[int]:
    """Control tokens that a message spells become control tokens."""
    return list(whole(encoder, [replace(segment, control=True) for segment in segments]))


@breaks("TestChat::test_the_prompt_holds_what_was_said", Chat, "_encode")
def LineBreaksCollapse(whole: Any, chat: Chat, messages: Sequence[Message], **options: Any) -> list[int]:
    """Empty lines in a message are removed from the prompt."""
    collapsed = [replace(m, content=re.sub(r"\n+", "\n", m.content)) for m in messages]
    return list(whole(chat, collapsed, **options))


@breaks("TestChat::test_edit", Chat, "edit")
def EditsKeepTheCache(whole: Any, chat: Chat, i: int, content: str) -> None:
    """An edit changes the message, but not the KV cache."""
    messages = list(chat.messages)
    messages[i] = replace(messages[i], content=content)
    chat._messages = tuple(messages)


@breaks("TestChat::test_delete", Chat, "delete")
def DeletesKeepTheCache(whole: Any, chat: Chat, i: int) -> None:
    """A deleted message stays in the KV cache until the next message."""
    messages = list(chat.messages)
    del messages[i]
    chat._messages = tuple(messages)


@breaks("TestChat::test_forget", Chat, "forget")
def ForgetsByDeleting(whole: Any, chat: Chat, i: int) -> EditLevel:
    """``forget`` decodes again, and reports a cut."""
    chat.delete(i)
    return chat.session.context.edit_level


@breaks("TestChat::test_forget", Chat, "forget")
def ForgetsInSilence(whole: Any, chat: Chat, i: int) -> EditLevel:
    """``forget`` cuts, and reports that it decoded again."""
    level: EditLevel = whole(chat, i)
    return min(level, EditLevel.TRUNCATE)


@breaks("TestChat::test_fork", Chat, "fork")
def ForksTellTheOriginal(whole: Any, chat: Chat) -> Chat:
    """Messages of a fork are also listed in its original."""
    twin: Chat = whole(chat)

    def tell() -> None:
        twin._turn = None
        chat._messages += twin._messages[-2:]

    setattr(twin, "_end_turn", tell)  # noqa: B010  (a method, for this chat alone)
    return twin


@breaks("TestChat::test_forget_what_does_not_fit", Chat, "_forget")
def ForgetsByLength(whole: Any, chat: Chat, start: int, end: int) -> EditLevel:
    """``forget`` cuts as many tokens as the prompt becomes shorter by, even if other messages change."""
    messages = (*chat.messages[:start], *chat.messages[end:])
    before, after = chat._encode(chat.messages), chat._encode(messages)
    chat.session.follow(before)
    level = chat.session.remove_span(*_removed_span(before, after))
    chat._messages = messages
    return level


@breaks("TestChat::test_a_fork_draws_on", Chat, "fork")
def ForksRepeatDraws(whole: Any, chat: Chat) -> Chat:
    """A fork has the random stream of a chat without answers."""
    twin: Chat = whole(chat)
    twin._n_answers = 0
    return twin


@breaks("TestChat::test_regenerate", Chat, "regenerate")
def RegeneratesTheSame(whole: Any, chat: Chat, **options: Any) -> Any:
    """``regenerate`` draws the same answer again."""
    chat._n_answers -= 1
    return whole(chat, **options)


@breaks("TestChat::test_fork", Chat, "fork")
def ForksAreEmpty(whole: Any, chat: Chat) -> Chat:
    """A fork has the options of the original, but not its messages."""
    return Chat(chat.session.fork(), chat.formatter, options=chat.options)


@breaks("TestChat::test_dump_and_restore", Chat, "dump")
def DumpForgetsTheStream(whole: Any, chat: Chat) -> bytes:
    """A restored chat has the random stream of a chat without answers."""
    n_answers, chat._n_answers = chat._n_answers, 0
    try:
        return bytes(whole(chat))
    finally:
        chat._n_answers = n_answers


@breaks("TestTools::test_a_call_is_run", ChatStream, "_take")
def ResultsAreNotTold(whole: Any, stream: ChatStream, result: Any) -> Any:
    """The model answers after a tool call without its result."""
    return whole(stream, replace(result, content=""))


@breaks("TestOracle::test_on_success", Oracle, "choose")
def ChoicesAreRemembered(whole: Any, asker: Oracle, question: str, options: Any) -> Choice[Any]:
    """The question of ``choose`` stays in the chat."""
    choice: Choice[Any] = whole(asker, question, options)
    asker._chat._messages += (Message(Role.USER, question),)
    return choice


@breaks("TestOracle::test_on_an_error", Oracle, "extract")
def WrongJsonIsKept(whole: Any, asker: Oracle, *args: Any, **options: Any) -> Any:
    """A question whose answer does not fit the schema stays in the chat."""
    try:
        return whole(asker, *args, **options)
    except OracleError:
        asker._chat._messages += (Message(Role.USER, "once more"),)
        raise


@breaks("TestOracle::test_on_a_raising_callback", Chat, "scratch_branch")
@contextlib.contextmanager
def RollsBackOnlyOnSuccess(whole: Any, chat: Chat, question: str, **options: Any) -> Iterator[Session]:
    """An oracle that raises leaves its question behind."""
    try:
        with whole(chat, question, **options) as session:
            yield session
    except BaseException:
        chat._messages += (Message(Role.USER, question),)
        raise


@breaks("TestOracle::test_on_cancel", Oracle, "_ask")
def CancelledIsKept(whole: Any, asker: Oracle, question: str, *args: Any, **options: Any) -> Answer:
    """A question whose answer was stopped stays in the chat."""
    answer: Answer = whole(asker, question, *args, **options)
    if answer.finish_reason is FinishReason.CANCELLED:
        asker._chat._messages += (Message(Role.USER, question),)
    return answer


@breaks("TestOracle::test_the_draws_after_it", Oracle, "_ask")
def OraclesCountAsAnswers(whole: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """An oracle's answer moves the chat to its next random stream."""
    asker._chat._n_answers += 1
    answer: Answer = whole(asker, *args, **options)
    return answer


class _Parsing:
    """A vocabulary that parses special tokens in any text."""

    def __init__(self, vocab: Vocab) -> None:
        self.eog_ids, self._vocab = vocab.eog_ids, vocab

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Parse them."""
        return self._vocab.encode(text, add_special=add_special, parse_special=True)


@breaks("TestOracle::test_options_are_content", oracle, "_score")
def OptionsAreParsed(whole: Any, session: Session, texts: Sequence[str]) -> list[float]:
    """Control tokens that an option spells become control tokens."""
    plain, session.vocab = session.vocab, cast("Vocab", _Parsing(session.vocab))
    try:
        return list(whole(session, texts))
    finally:
        session.vocab = plain


@breaks("TestOracle::test_choose", oracle, "_end_log_probability")
def BeginningsCount(whole: Any, row: Any, eog_ids: Any) -> float:
    """``choose`` scores an option without the end of the answer after it."""
    return 0.0


@breaks("TestOracle::test_choose", Oracle, "choose")
def ChoosesTheFirst(whole: Any, asker: Oracle, question: str, options: Any) -> Choice[Any]:
    """``choose`` returns the first option for any probabilities."""
    choice: Choice[Any] = whole(asker, question, options)
    return replace(choice, value=next(iter(options)))


@breaks("TestMeaning::test_a_transcript", Chat, "_encode")
def SystemIsUser(whole: Any, chat: Chat, messages: Sequence[Message], **options: Any) -> list[int]:
    """A system message is rendered as a user message."""
    as_user = [replace(m, role=Role.USER if m.role is Role.SYSTEM else m.role) for m in messages]
    return list(whole(chat, as_user, **options))


@breaks("TestMeaning::test_what_was_told_is_known", Chat, "send")
def SecondQuestionAlone(whole: Any, chat: Chat, content: str, **options: Any) -> Answer:
    """The question after a chat's first answer is rendered without the earlier messages."""
    if len(chat.messages) == 2 and chat._n_answers == 1 and chat.session.n_pending == 1:
        chat._messages = ()
    answer: Answer = whole(chat, content, **options)
    return answer


_FORMER: weakref.WeakKeyDictionary[Chat, tuple[Message, ...]] = weakref.WeakKeyDictionary()


@breaks("TestMeaning::test_what_was_deleted_is_not_known", Chat, "_reply")
def EditsAreForgotten(whole: Any, chat: Chat, asked: tuple[Message, ...], *args: Any, **options: Any) -> AnswerStream:
    """Messages after an edit are rendered as if there had been no edit."""
    former = _FORMER.get(chat, ())
    if asked[: len(former)] != former:
        asked = (*former, asked[-1])
    _FORMER[chat] = asked
    stream: AnswerStream = whole(chat, asked, *args, **options)
    return stream


@breaks("TestMeaning::test_think", Oracle, "_ask")
def ThoughtsLeak(whole: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """The reasoning is in the text of the answer, too."""
    answer: Answer = whole(asker, *args, **options)
    return replace(answer, text=f"{answer.reasoning or ''}{answer.text}")


@breaks("TestMeaning::test_extract", Schema, "__init__")
def ExtractsAnyObject(whole: Any, schema: Schema, wanted: object) -> None:
    """``extract`` accepts any object for a schema of objects."""
    whole(schema, wanted)
    if '"object"' in schema.spec.schema:
        schema.spec = JsonSchema(schema={"type": "object"})
