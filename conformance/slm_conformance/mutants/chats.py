"""Mutants that break chats or oracles."""

from __future__ import annotations

import contextlib
import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from slm_conformance.mutants.above import breaks
from slm_core.chat import Chat, Choice, Oracle, Session, oracle, tools
from slm_core.chat import chat as chat_module
from slm_core.chat.chat import _removed_range
from slm_core.chat.prompt import PromptEncoder
from slm_core.chat.schema import Schema
from slm_core.chat.steering import Steering
from slm_core.chat.stream import AnswerStream
from slm_core.chat.tools import RunningTurn
from slm_core.constraints import JsonSchema
from slm_core.errors import OracleError
from slm_core.generation import Answer, FinishReason
from slm_core.protocols import Vocab
from slm_core.sampling import Sampling
from slm_core.types import EditLevel, Message, Role

# ruff: noqa: N802, SLF001  (functions become backends and are named like classes; mutants change internals)


@breaks("TestChat::test_send", Session, "follow")
def FollowsFromTheStart(original: Any, session: Session, tokens: Sequence[int]) -> None:
    """The whole conversation is decoded again after each message."""
    if session.tokens != tuple(tokens):
        session.truncate(0)
    original(session, tokens)


@breaks("TestChat::test_stream", AnswerStream, "__next__")
def PiecesLoseTheirEnds(original: Any, stream: AnswerStream) -> Any:
    """A stream's ``text`` loses its last character after each piece of an answer."""
    event = original(stream)
    stream.text = stream.text[:-1]
    return event


@breaks("TestChat::test_an_answer_that_raises", Chat, "_talk")
def QuestionsStay(original: Any, chat: Chat, *args: Any, **options: Any) -> RunningTurn:
    """The question stays in the chat if its answer raises."""
    before = chat.options
    stream: RunningTurn = original(chat, *args, **options)

    def undo() -> None:
        chat._stream = chat._turn = None
        chat._n_answers -= 1
        chat.options = before

    stream._turn = replace(stream._turn, undo=undo)
    return stream


@breaks("TestChat::test_draws_after_a_failure", Chat, "_talk")
def FailuresTakeDraws(original: Any, chat: Chat, *args: Any, **options: Any) -> RunningTurn:
    """An answer that raises uses up its random stream."""
    stream: RunningTurn = original(chat, *args, **options)
    undo = stream._turn.undo

    def undo_less() -> None:
        undo()
        chat._n_answers += 1

    stream._turn = replace(stream._turn, undo=undo_less)
    return stream


@breaks("TestTools::test_tools_after_a_failure", Chat, "_talk")
def ToolsStay(original: Any, chat: Chat, *args: Any, **options: Any) -> RunningTurn:
    """Tools that are passed with an answer that raises stay with the chat."""
    stream: RunningTurn = original(chat, *args, **options)
    undo, options_before = stream._turn.undo, chat.options

    def undo_less() -> None:
        undo()
        chat.options = options_before

    stream._turn = replace(stream._turn, undo=undo_less)
    return stream


@breaks("TestChat::test_an_answer_that_is_cancelled", AnswerStream, "_end")
def CancelledIsUnsaid(original: Any, stream: AnswerStream) -> Any:
    """A cancelled answer is stored as an empty message."""
    finished = stream._finished
    if stream._generation.answer.finish_reason is FinishReason.CANCELLED:
        stream._finished = lambda message: finished(replace(message, content=""))
    return original(stream)


@breaks("TestChat::test_content_is_never_control", PromptEncoder, "encode")
def ContentIsParsed(original: Any, encoder: PromptEncoder, segments: Any) -> list[int]:
    """Control tokens that a message spells become control tokens."""
    return list(original(encoder, [replace(segment, control=True) for segment in segments]))


@breaks("TestChat::test_the_prompt_holds_what_was_said", Chat, "_encode")
def LineBreaksCollapse(original: Any, chat: Chat, messages: Sequence[Message], **options: Any) -> list[int]:
    """Empty lines in a message are removed from the prompt."""
    collapsed = [replace(m, content=re.sub(r"\n+", "\n", m.content)) for m in messages]
    return list(original(chat, collapsed, **options))


@breaks("TestChat::test_edit", Chat, "edit")
def EditsKeepTheCache(original: Any, chat: Chat, i: int, content: str) -> None:
    """An edit changes the message, but not the KV cache."""
    messages = list(chat.messages)
    messages[i] = replace(messages[i], content=content)
    chat._messages = tuple(messages)


@breaks("TestChat::test_delete", Chat, "delete")
def DeletesKeepTheCache(original: Any, chat: Chat, i: int) -> None:
    """A deleted message stays in the KV cache until the next message."""
    messages = list(chat.messages)
    del messages[i]
    chat._messages = tuple(messages)


@breaks("TestChat::test_forget", Chat, "forget")
def ForgetsByDeleting(original: Any, chat: Chat, i: int) -> EditLevel:
    """``forget`` decodes later tokens again, but reports a cut."""
    chat.delete(i)
    return chat.session.context.edit_level


@breaks("TestChat::test_forget", Chat, "forget")
def ForgetsInSilence(original: Any, chat: Chat, i: int) -> EditLevel:
    """``forget`` cuts, but reports that it decoded later tokens again."""
    level: EditLevel = original(chat, i)
    return min(level, EditLevel.TRUNCATE)


@breaks("TestChat::test_overflow", chat_module, "fit")
def DropsMoreThanItMust(original: Any, messages: Any, policy: Any, count: Any, n_free: int, reserve: int) -> Any:
    """If messages do not fit, a policy drops a further turn."""
    fitted = original(messages, policy, count, n_free, reserve)
    return original(messages, policy, count, n_free, reserve + 30) if fitted.dropped else fitted


@breaks("TestChat::test_options_of_one_answer", Steering, "sampling_over")
def SeedsOfAnswersAreIgnored(original: Any, steering: Steering, base: Sampling) -> Sampling:
    """The seed of one answer is ignored."""
    sampling: Sampling = original(replace(steering, seed=None), base)
    return sampling


@breaks("TestChat::test_fork", Chat, "fork")
def ForksTellTheOriginal(original: Any, chat: Chat) -> Chat:
    """Messages of a fork are also added to its original."""
    copied: Chat = original(chat)

    def tell() -> None:
        copied._turn = None
        chat._messages += copied._messages[-2:]

    setattr(copied, "_end_turn", tell)  # noqa: B010  (overrides the method of this chat only)
    return copied


@breaks("TestChat::test_forget_what_does_not_fit", Chat, "_forget")
def ForgetsByLength(original: Any, chat: Chat, start: int, end: int) -> EditLevel:
    """``forget`` cuts one range of tokens, even if other parts of the prompt change, too."""
    messages = (*chat.messages[:start], *chat.messages[end:])
    before, after = chat._encode(chat.messages), chat._encode(messages)
    chat.session.follow(before)
    level = chat.session.remove_span(*_removed_range(before, after))
    chat._messages = messages
    return level


@breaks("TestChat::test_a_fork_draws_on", Chat, "fork")
def ForksRepeatDraws(original: Any, chat: Chat) -> Chat:
    """A fork has the random stream of a chat without answers."""
    copied: Chat = original(chat)
    copied._n_answers = 0
    return copied


@breaks("TestChat::test_regenerate", Chat, "regenerate")
def RegeneratesTheSame(original: Any, chat: Chat, **options: Any) -> Any:
    """``regenerate`` draws the same answer again."""
    chat._n_answers -= 1
    return original(chat, **options)


@breaks("TestChat::test_fork", Chat, "fork")
def ForksAreEmpty(original: Any, chat: Chat) -> Chat:
    """A fork has the options of the original, but not its messages."""
    return Chat(chat.session.fork(), chat.formatter, options=chat.options)


@breaks("TestChat::test_dump_and_restore", Chat, "dump")
def DumpForgetsTheStream(original: Any, chat: Chat) -> bytes:
    """A restored chat has the random stream of a chat without answers."""
    n_answers, chat._n_answers = chat._n_answers, 0
    try:
        return bytes(original(chat))
    finally:
        chat._n_answers = n_answers


@breaks("TestTools::test_a_call_is_run", RunningTurn, "_take")
def ResultsAreNotTold(original: Any, stream: RunningTurn, result: Any) -> Any:
    """The result of a tool call is replaced by an empty text."""
    return original(stream, replace(result, content=""))


@breaks("TestTools::test_several_rounds", tools, "_complaint")
def BrokenCallsAreIgnored(original: Any, malformed: Any) -> str:
    """The model is not told that a call could not be read."""
    return ""


@breaks("TestOracle::test_on_success", Oracle, "choose")
def ChoicesAreRemembered(original: Any, asker: Oracle, question: str, options: Any) -> Choice[Any]:
    """The question of ``choose`` stays in the chat."""
    choice: Choice[Any] = original(asker, question, options)
    asker._chat._messages += (Message(Role.USER, question),)
    return choice


@breaks("TestOracle::test_on_an_error", Oracle, "extract")
def WrongJsonIsKept(original: Any, asker: Oracle, *args: Any, **options: Any) -> Any:
    """If an answer does not fit the schema, a message stays in the chat."""
    try:
        return original(asker, *args, **options)
    except OracleError:
        asker._chat._messages += (Message(Role.USER, "once more"),)
        raise


@breaks("TestOracle::test_on_a_raising_callback", Chat, "scratch_branch")
@contextlib.contextmanager
def RollsBackOnlyOnSuccess(original: Any, chat: Chat, question: str, **options: Any) -> Iterator[Session]:
    """If an oracle raises, its question stays in the chat."""
    try:
        with original(chat, question, **options) as session:
            yield session
    except BaseException:
        chat._messages += (Message(Role.USER, question),)
        raise


@breaks("TestOracle::test_on_cancel", Oracle, "_ask")
def CancelledIsKept(original: Any, asker: Oracle, question: str, *args: Any, **options: Any) -> Answer:
    """A question whose answer was cancelled stays in the chat."""
    answer: Answer = original(asker, question, *args, **options)
    if answer.finish_reason is FinishReason.CANCELLED:
        asker._chat._messages += (Message(Role.USER, question),)
    return answer


@breaks("TestOracle::test_the_draws_after_it", Oracle, "_ask")
def OraclesCountAsAnswers(original: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """An oracle's answer moves the chat to its next random stream."""
    asker._chat._n_answers += 1
    answer: Answer = original(asker, *args, **options)
    return answer


class _Parsing:
    """A vocabulary that parses control tokens in any text."""

    def __init__(self, vocab: Vocab) -> None:
        self.eog_ids, self._vocab = vocab.eog_ids, vocab

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Encode with ``parse_special`` set to True."""
        return self._vocab.encode(text, add_special=add_special, parse_special=True)


@breaks("TestOracle::test_options_are_content", oracle, "_score")
def OptionsAreParsed(original: Any, session: Session, texts: Sequence[str]) -> list[float]:
    """Control tokens that an option spells become control tokens."""
    plain, session.vocab = session.vocab, cast("Vocab", _Parsing(session.vocab))
    try:
        return list(original(session, texts))
    finally:
        session.vocab = plain


@breaks("TestOracle::test_choose", oracle, "_end_log_probability")
def BeginningsCount(original: Any, row: Any, eog_ids: Any) -> float:
    """``choose`` scores an option without the EOG token after it."""
    return 0.0


@breaks("TestOracle::test_choose", Oracle, "choose")
def ChoosesTheFirst(original: Any, asker: Oracle, question: str, options: Any) -> Choice[Any]:
    """``choose`` always returns the first option."""
    choice: Choice[Any] = original(asker, question, options)
    return replace(choice, value=next(iter(options)))


@breaks("TestMeaning::test_a_transcript", Chat, "_encode")
def SystemIsUser(original: Any, chat: Chat, messages: Sequence[Message], **options: Any) -> list[int]:
    """A system message is rendered as a user message."""
    as_user = [replace(m, role=Role.USER if m.role is Role.SYSTEM else m.role) for m in messages]
    return list(original(chat, as_user, **options))


@breaks("TestMeaning::test_what_was_told_is_known", Chat, "send")
def SecondQuestionAlone(original: Any, chat: Chat, content: str, **options: Any) -> Answer:
    """The question after a chat's first answer is rendered without the earlier messages."""
    if len(chat.messages) == 2 and chat._n_answers == 1 and chat.session.n_pending == 1:
        chat._messages = ()
    answer: Answer = original(chat, content, **options)
    return answer


_FORMER: weakref.WeakKeyDictionary[Chat, tuple[Message, ...]] = weakref.WeakKeyDictionary()


@breaks("TestMeaning::test_what_was_deleted_is_not_known", Chat, "_reply")
def EditsAreForgotten(
    original: Any, chat: Chat, asked: tuple[Message, ...], *args: Any, **options: Any
) -> AnswerStream:
    """After an edit, prompts contain the messages from before the edit."""
    former = _FORMER.get(chat, ())
    if asked[: len(former)] != former:
        asked = (*former, asked[-1])
    _FORMER[chat] = asked
    stream: AnswerStream = original(chat, asked, *args, **options)
    return stream


@breaks("TestMeaning::test_think", Oracle, "_ask")
def ThoughtsLeak(original: Any, asker: Oracle, *args: Any, **options: Any) -> Answer:
    """The text of the answer also contains the reasoning."""
    answer: Answer = original(asker, *args, **options)
    return replace(answer, text=f"{answer.reasoning or ''}{answer.text}")


@breaks("TestMeaning::test_extract", Schema, "__init__")
def ExtractsAnyObject(original: Any, schema: Schema, wanted: object) -> None:
    """``extract`` accepts any object for a schema of objects."""
    original(schema, wanted)
    if '"object"' in schema.spec.schema:
        schema.spec = JsonSchema(schema={"type": "object"})
