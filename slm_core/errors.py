"""Every exception that slm-core raises on purpose.

One tree, so that ``except SlmError`` catches all of it and nothing else::

    SlmError
    ├── ModelError
    │   ├── InvalidModelFile      the file is damaged, truncated or not a model file at all
    │   ├── UnsupportedModel      the file is sound, but nothing here can run it
    │   └── ModelClosed           the model was used after close()
    ├── BackendError
    │   ├── UnknownBackend        no plugin of that name is registered
    │   ├── BackendUnavailable    the plugin is there, its runtime is not (or is broken)
    │   └── PluginError           a plugin is malformed, misnamed or registered twice
    ├── OptionError               (also a ValueError)
    │   ├── UnknownOption         no such option; the message lists those accepted
    │   └── InvalidOption         the option exists, the value does not fit
    ├── ContextError
    │   ├── InvalidToken          token id outside the vocabulary
    │   ├── InvalidEmbedding      embedding rows of the wrong shape, width or type, or that are not finite
    │   ├── InvalidPosition       not the next position of its sequence, or outside the sequence
    │   ├── InvalidSequence       no such seq_id, or not in the state the call needs
    │   ├── SequenceChanged       a sequence was changed while it was dumped in parts
    │   ├── BatchFull             more tokens than the batch, or one decode, can carry
    │   ├── ContextFull           the KV cache has no room (carries needed and free)
    │   ├── UnsupportedEdit       above the edit level that the context declares
    │   ├── UnsupportedOutput     logits of an encoder, or hidden states where they are not declared
    │   ├── UnsupportedInput      embedding rows, spans or offsets that are not declared
    │   ├── ContextBusy           a second thread called while a call was running
    │   ├── ContextClosed         the context was used after close()
    │   └── DecodeFailed          the engine itself reported a failure; nothing changed
    ├── SnapshotError
    │   ├── InvalidSnapshot       the bytes are not a whole, undamaged snapshot
    │   └── SnapshotMismatch      a sound snapshot of something else
    ├── SamplingError             no token can be chosen from these logits
    ├── ConstraintError           (also a ValueError) a grammar, schema or expression is invalid or out of bounds
    ├── VocabError                text or ids that the vocabulary cannot take
    ├── TemplateError             a chat template refused, failed or ran out of its bounds
    ├── SessionError
    │   └── InvalidMark           a mark that is stale or belongs to another session
    ├── RequestsFailed            some of several requests failed (carries the answers of the others)
    ├── EngineClosed              a request to an engine after close()
    ├── MissingExtra              (also an ImportError) a library of an optional feature is not installed
    ├── ToolError                 a tool raised, or was called wrongly (carries the call)
    └── OracleError               the oracle could not get a valid answer
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_LONGEST = 500
"""Characters of a message about a constraint."""


class SlmError(Exception):
    """Base of every exception that slm-core raises on purpose."""


class ModelError(SlmError):
    """Something about a model or its file."""


class InvalidModelFile(ModelError):
    """The file is damaged, truncated or not a model file at all."""


class UnsupportedModel(ModelError):
    """The file is sound, but nothing here can run it; the message names the key or tensor and its value."""


class ModelClosed(ModelError):
    """The model was used after ``close()``."""


class BackendError(SlmError):
    """Something about a backend or a plugin."""


class UnknownBackend(BackendError):
    """No plugin of that name is registered."""


class BackendUnavailable(BackendError):
    """The plugin is registered, but its runtime is missing or broken; the message says how to get it."""


class PluginError(BackendError):
    """A plugin is malformed, badly named or registered twice."""


class OptionError(SlmError, ValueError):
    """A wrong option."""


class UnknownOption(OptionError):
    """No such option; the message lists those accepted."""


class InvalidOption(OptionError):
    """The option exists, but the value does not fit."""


class ContextError(SlmError):
    """A call that a context refused; the context is as it was before the call.

    Attributes:
        seq_id: the sequence at fault; None where no sequence is, or not one alone. The message names it, too. Of a
            batch it is that of the first token that is refused, or has no room; of a ``fork`` without room the
            destination.
    """

    def __init__(self, message: str = "", *, seq_id: int | None = None) -> None:
        super().__init__(message)
        self.seq_id = seq_id

    def attribute_to(self, seq_id: int) -> None:
        """Name the sequence at fault, unless one is named."""
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
    """No such sequence, or it is not in the state the call needs."""


class SequenceChanged(ContextError):
    """A sequence was changed while it was dumped in parts: the parts that are left would not be those of one dump."""


class BatchFull(ContextError):
    """More tokens than the batch, or one decode, can carry."""


class ContextFull(ContextError):
    """The KV cache has no room.

    Attributes:
        needed: positions the call needs.
        free: positions that are free.
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
    """Embedding rows, spans or offsets for a context that does not declare them, or rows in an order that it lacks."""


class ContextBusy(ContextError):
    """Another thread is inside a call of this context."""


class ContextClosed(ContextError):
    """The context was used after ``close()``."""


class DecodeFailed(ContextError):
    """The engine itself reported a failure; nothing changed."""


class SnapshotError(SlmError):
    """Something about a dump."""


class InvalidSnapshot(SnapshotError):
    """The bytes are not a whole, undamaged snapshot."""


class SnapshotMismatch(SnapshotError):
    """A sound snapshot of another model or kind."""


class SamplingError(SlmError):
    """No token can be chosen from these logits."""


class ConstraintError(SlmError, ValueError):
    """A grammar, schema or expression that is invalid, unsupported, or more work than is allowed.

    Attributes:
        line: where in its text, from 1; None where no single place is to blame.
        column: likewise.
    """

    def __init__(self, message: str, *, line: int | None = None, column: int | None = None) -> None:
        if len(message) > _LONGEST:  # it may quote what was given, which may be of any length
            message = f"{message[:_LONGEST]}..."
        super().__init__(message if line is None else f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column


class VocabError(SlmError):
    """Text or ids that the vocabulary cannot take."""


class TemplateError(SlmError):
    """A chat template refused the messages, failed, or ran out of its bounds."""


class SessionError(SlmError):
    """A call that a session refused."""


class InvalidMark(SessionError):
    """A mark that is stale or belongs to another session."""


class RequestsFailed(SlmError):
    """Some of several requests failed; the others were answered all the same.

    Attributes:
        answers: the answers in the order of the prompts, None for a request that failed.
        errors: from the index of a prompt to what its request failed with.
    """

    def __init__(self, answers: Sequence[object], errors: Mapping[int, BaseException]) -> None:
        first = min(errors)
        super().__init__(
            f"{len(errors)} of {len(answers)} requests failed; the first is prompt {first}:"
            f" {type(errors[first]).__name__}: {errors[first]} (the answers of the others are in .answers)"
        )
        self.answers = tuple(answers)
        self.errors = dict(errors)


class EngineClosed(SlmError):
    """A request to an engine that is closed."""


class MissingExtra(SlmError, ImportError):
    """A library that an optional feature needs is not installed; the message names the extra that has it."""


class ToolError(SlmError):
    """A tool raised, or was called wrongly.

    Attributes:
        call: the ``ToolCall``, or the ``MalformedCall`` that came in place of one.
    """

    def __init__(self, message: str, call: object) -> None:
        super().__init__(message)
        self.call = call


class OracleError(SlmError):
    """The oracle could not get a valid answer."""
