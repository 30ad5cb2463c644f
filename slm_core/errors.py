"""The exceptions of slm-core.

They form one tree, so that ``except SlmError`` catches exactly these::

    SlmError
    ├── ModelError
    │   ├── InvalidModelFile      the file is damaged, truncated or not a model file at all
    │   │   └── ModelFileNotFound (also a FileNotFoundError) there is no such file or directory
    │   ├── UnsupportedModel      the file is valid, but no installed backend can run it
    │   └── ModelClosed           the model was used after close()
    ├── BackendError
    │   ├── UnknownBackend        no plugin of that name is registered
    │   ├── BackendUnavailable    the plugin is installed, but its runtime is missing or broken
    │   ├── BackendCrashed        the process of an isolated model ended, or was killed
    │   └── PluginError           a plugin is malformed, misnamed or registered twice
    ├── OptionError               (also a ValueError)
    │   ├── UnknownOption         no such option; the message lists the accepted options
    │   └── InvalidOption         the option exists, but the value is invalid
    ├── ContextError
    │   ├── InvalidToken          token id outside the vocabulary
    │   ├── InvalidEmbedding      embedding rows of the wrong shape, width or type, or that are not finite
    │   ├── InvalidPosition       not the next position of its sequence, or outside the sequence
    │   ├── InvalidSequence       no such seq_id, or the sequence is not in the state that the call needs
    │   ├── SequenceChanged       a sequence was changed while it was dumped in parts
    │   ├── BatchFull             more tokens than the batch or one decode can hold
    │   ├── ContextFull           the KV cache has no room (carries needed and free)
    │   ├── UnsupportedEdit       above the edit level that the context declares
    │   ├── UnsupportedOutput     logits of an encoder, or hidden states of a context that does not declare them
    │   ├── UnsupportedInput      embedding rows, or their blocks, offsets or bias, that are not declared
    │   ├── ContextBusy           a second thread called while a call was running, or waited for its turn too long
    │   ├── ContextClosed         the context was used after close()
    │   └── DecodeFailed          the engine failed, or computed NaN or infinity; nothing changed
    ├── SnapshotError
    │   ├── InvalidSnapshot       the bytes are not a whole, undamaged snapshot
    │   └── SnapshotMismatch      a valid snapshot of another model or kind
    ├── SamplingError             no token can be chosen from these logits
    ├── ConstraintError           (also a ValueError) a grammar, schema or expression is invalid or out of bounds
    ├── VocabError                text or ids that the vocabulary cannot process
    ├── TemplateError             a chat template refused, failed or exceeded its limits
    ├── SessionError
    │   ├── InvalidMark           a mark that is stale or belongs to another session
    │   └── ChatBusy              a chat is answering another thread or task
    ├── RequestsFailed            some of several requests failed (carries the answers of the others)
    ├── EngineClosed              a request to an engine after close()
    ├── MissingExtra              (also an ImportError) a library of an optional feature is not installed
    ├── ToolError                 a tool raised, or was called wrongly (carries the call)
    └── OracleError               the oracle could not get a valid answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST = 500
"""The largest number of characters in a message about a constraint."""


def _rebuilt(kind: type[SlmError], args: tuple[object, ...]) -> SlmError:
    return kind.__new__(kind, *args)


class SlmError(Exception):
    """The base of all exceptions of slm-core."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle message and attributes without ``__init__``: a pool of processes passes on what its workers raise."""
        return _rebuilt, (type(self), self.args), self.__dict__


class ModelError(SlmError):
    """An error of a model or its file."""


class InvalidModelFile(ModelError):
    """The file is damaged, truncated or not a model file at all."""


class ModelFileNotFound(InvalidModelFile, FileNotFoundError):
    """There is no such file or directory."""


class UnsupportedModel(ModelError):
    """The file is valid, but no backend can run it; the message names the key or tensor and its value."""


class ModelClosed(ModelError):
    """The model was used after ``close()``."""


class BackendError(SlmError):
    """An error of a backend or a plugin."""


class UnknownBackend(BackendError):
    """No plugin of that name is registered."""


class BackendUnavailable(BackendError):
    """The plugin is registered, but its runtime is missing or broken; the message says how to install it."""


class BackendCrashed(BackendError):
    """The process of an isolated model ended, or was killed; the message says how. Later calls raise it again."""


class PluginError(BackendError):
    """A plugin is malformed, badly named or registered twice."""


class OptionError(SlmError, ValueError):
    """A wrong option."""


class UnknownOption(OptionError):
    """No such option; the message lists the accepted options."""


class InvalidOption(OptionError):
    """The option exists, but the value is invalid."""


class ContextError(SlmError):
    """A context refused a call; the context is unchanged.

    Attributes:
        seq_id: the sequence that caused the error; None if it is not one sequence. The message names it, too. For a
            batch it is the sequence of the first token that is refused or has no room; for a ``fork`` without room, the
            destination.
    """

    def __init__(self, message: str = "", *, seq_id: int | None = None) -> None:
        super().__init__(message)
        self.seq_id = seq_id

    def attribute_to(self, seq_id: int) -> None:
        """Set the sequence that caused the error, unless it is set."""
        if self.seq_id is None:
            self.seq_id = seq_id
            self.args = (f"sequence {seq_id}: {self}",)


class InvalidToken(ContextError):
    """A token id outside the vocabulary."""


class InvalidEmbedding(ContextError):
    """Embedding rows of the wrong shape, width or type, or that are not finite."""


class InvalidPosition(ContextError):
    """Not the next position of its sequence, or outside the sequence."""


class InvalidSequence(ContextError):
    """No such sequence, or the sequence is not in the state that the call needs."""


class SequenceChanged(ContextError):
    """A sequence changed while it was dumped in parts or restored in steps: the rest would belong to another state."""


class BatchFull(ContextError):
    """More tokens than the batch or one decode can hold."""


class ContextFull(ContextError):
    """The KV cache has no room.

    Attributes:
        needed: positions that the call needs.
        free: free positions.
        seq_id: the sequence that has no room, or None.
    """

    def __init__(self, needed: int, free: int, *, seq_id: int | None = None) -> None:
        whose = "" if seq_id is None else f" for sequence {seq_id}"
        super().__init__(
            f"the context is full{whose}: {needed} positions needed, {free} free"
            " (truncate or drop a sequence, or create the context with a larger n_ctx)",
            seq_id=seq_id,
        )
        self.needed = needed
        self.free = free


class UnsupportedEdit(ContextError):
    """Above the edit level that the context declares; the message says what works instead."""


class UnsupportedOutput(ContextError):
    """Logits of an encoder, or hidden states of a context that does not declare them."""


class UnsupportedInput(ContextError):
    """Embedding rows, blocks, offsets or an attention bias that a context does not declare, or an unsupported order."""


class ContextBusy(ContextError):
    """Another thread is inside a call of this context; sessions and chats wait, and raise it after a deadline."""


class ContextClosed(ContextError):
    """The context was used after ``close()``."""


class DecodeFailed(ContextError):
    """The engine reported a failure, or computed NaN or infinity; nothing changed."""


class SnapshotError(SlmError):
    """An error of a dump."""


class InvalidSnapshot(SnapshotError):
    """The bytes are not a whole, undamaged snapshot."""


class SnapshotMismatch(SnapshotError):
    """A valid snapshot of another model or kind."""


class SamplingError(SlmError):
    """No token can be chosen from these logits."""


class ConstraintError(SlmError, ValueError):
    """A grammar, schema or expression that is invalid, unsupported, or more work than is allowed.

    Attributes:
        line: the line of the error, from 1; None if it has no single position.
        column: the column of the error, from 1; or None.
    """

    def __init__(self, message: str, *, line: int | None = None, column: int | None = None) -> None:
        if len(message) > _LONGEST:  # it may quote an input of any length
            message = f"{message[:_LONGEST]}..."
        super().__init__(message if line is None else f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class VocabError(SlmError):
    """Text or ids that the vocabulary cannot process."""


class TemplateError(SlmError):
    """A chat template refused the messages, failed, or exceeded its limits."""


class SessionError(SlmError):
    """A session refused a call."""


class InvalidMark(SessionError):
    """A mark that is stale or belongs to another session."""


class ChatBusy(SessionError):
    """A chat is answering another thread or task: wait until the answer is over, or give each caller a fork."""


class RequestsFailed(SlmError):
    """Some of several requests failed; the others were answered.

    Attributes:
        answers: an ``Answer`` or None, if the request failed, in the order of the prompts.
        errors: from the index of a prompt to the error of its request.
    """

    def __init__(self, answers: Sequence[object], errors: Mapping[int, BaseException]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(answers)} requests failed; the first is prompt {first}:"
            f" {type(errors[first]).__name__}: {errors[first]} (the answers of the others are in .answers)"
        )
        self.answers: tuple[Any, ...] = tuple(answers)
        self.errors = dict(errors)


class EngineClosed(SlmError):
    """A request to an engine that is closed."""


class MissingExtra(SlmError, ImportError):
    """A library of an optional feature is not installed; the message names the extra to install."""


class ToolError(SlmError):
    """A tool raised, or was called wrongly.

    Attributes:
        call: the ``ToolCall`` or ``MalformedCall``.
    """

    def __init__(self, message: str, call: object) -> None:
        super().__init__(message)
        self.call = call


class OracleError(SlmError):
    """The oracle could not get a valid answer."""
