"""The plain values that cross the contract: no behaviour beyond what a value needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
"""Rows of logits, float32 [n_rows, V], valid until the next call on the context that returned them."""
States: TypeAlias = NDArray[np.float32]
"""Hidden states of tokens, float32 [n_rows, E], valid until the next call on the context that returned them."""

EMBEDDED = -1
"""What stands among token ids where an embedding row was given in place of a token: an id that no token has."""

LogitsSelection: TypeAlias = Literal["none", "last", "all"]
"""The tokens of a run that get a row of logits."""
Tool: TypeAlias = Mapping[str, object] | Callable[..., object] | type
"""A JSON schema; a function with annotations and a docstring; or a pydantic model. See ``toolschema``."""
Progress: TypeAlias = Callable[[float], None]
"""Called with the share that is done, 0.0 to 1.0; an exception it raises cancels the work."""
PrefillProgress: TypeAlias = Callable[[int, int], None]
"""Called with the tokens that are done and those that there are in all; an exception it raises cancels the work."""


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The k largest logits of each of some rows.

    Attributes:
        tokens: int32 [n_rows, k], those of the largest logits first; of equal ones, the lower id.
        logits: float32 [n_rows, k], theirs.
        log_totals: float32 [n_rows], logarithms of the sums of the exponentials of all V logits of a row: a logit less
            it is the natural logarithm of a probability.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    log_totals: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pos:
    """A place in a sequence; as a return value, where the next token goes."""

    seq_id: int
    index: int


class EditLevel(IntEnum):
    """What a context can undo without being fed again; each level includes those below it."""

    REPLAY = 0
    """Only ``drop`` and ``clear``: an edit is made by decoding the kept tokens again."""
    TRUNCATE = 1
    """``truncate`` forgets the tail of a sequence; a state is computed again from an earlier one."""
    CUT = 2
    """``cut`` forgets any range; later tokens move down, keys re-rotated, values kept."""


class Capability(StrEnum):
    """What a context can do beyond the core of the contract. Declared, never guessed."""

    SHARED_FORK = "shared_fork"
    """``fork`` shares storage until one side writes. It costs no positions, except those of an image it splits."""
    KV_PAYLOAD = "kv_payload"
    """``dump`` holds the KV cache itself, and ``restore`` uses it without decoding again."""
    EMBEDDINGS = "embeddings"
    """``embed`` gives the hidden states of tokens."""
    ENCODER = "encoder"
    """Attention is bidirectional: ``embed`` takes whole sequences and keeps nothing. There is no ``decode``."""
    DEVICE_SAMPLING = "device_sampling"
    """``decode_top`` computes the top-k on the device; full rows of logits are never copied to the host."""
    EMBEDDING_INPUT = "embedding_input"
    """A batch may hold embedding rows in place of tokens."""
    BIDIRECTIONAL_BLOCKS = "bidirectional_blocks"
    """A batch may hold bidirectional blocks: each token of a block attends to the whole block."""
    MROPE_POSITIONS = "mrope_positions"
    """Embedding rows may have M-RoPE positions: time, height and width."""


class Pooling(StrEnum):
    """How the hidden states of a text's tokens become one embedding of the text."""

    LAST = "last"
    """That of the last token."""
    MEAN = "mean"
    """Their mean."""
    MAX = "max"
    """The largest of each dimension."""
    CLS = "cls"
    """That of the first token."""


class KvType(StrEnum):
    """Storage type of keys and values."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q5_0 = "q5_0"
    Q4_0 = "q4_0"
    F8_E4M3 = "f8_e4m3"
    """A byte of 4 bits of exponent and 3 of fraction, up to 448 (OFP8, the variant without infinities)."""


class Role(StrEnum):
    """Who a message is from."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of prompt text.

    Attributes:
        text: the piece.
        control: True where special tokens are parsed; False for content, in which they never are.
        generated: whether the template marks the piece as what the assistant said, by ``{% generation %}``.
    """

    text: str
    control: bool
    generated: bool = False


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer while it streams.

    Attributes:
        kind: whether it belongs to the content or to the reasoning.
        text: the piece.
    """

    kind: Literal["content", "reasoning"]
    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model asks for.

    Attributes:
        name: the function.
        arguments: its arguments, as decoded from JSON.
        id: what a ``tool`` message refers to, where the template has such ids.
    """

    name: str
    arguments: Mapping[str, object]
    id: str | None = None


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """What begins like a tool call and is none.

    Attributes:
        text: as the model wrote it, markers included.
        reason: what is wrong with it, one line.
    """

    text: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a chat format writes tool calls, as far as a grammar needs to know.

    A block is ``begin``, a call or an array of calls, and ``end``. Control tokens are spelled out in all texts.

    Attributes:
        begin: opens a block; "" where the whole answer is the call.
        end: closes a block.
        style: how calls are written. "object": a JSON object with the name and the arguments. "array": a JSON array
            of such objects. "named": ``before``, the name, ``between``, and the arguments as a JSON object.
        name_key: key of the name in the object.
        arguments_key: key of the arguments in the object.
        before: what stands before a name that is in no object.
        between: what stands between it and its arguments.
        section: what stands before the first and after the last of several blocks.
        repeats: whether several blocks may follow one another.
    """

    begin: str
    end: str = ""
    style: Literal["object", "array", "named"] = "object"
    name_key: str = "name"
    arguments_key: str = "arguments"
    before: str = ""
    between: str = ""
    section: tuple[str, str] = ("", "")
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins.

    Attributes:
        index: which call of the answer, from 0, malformed ones counted.
        name: the function.
        id: the call's id; None where there is none, or where it comes later: ``CallEnd`` has it.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments: all pieces of a call, joined, are JSON text of its arguments.

    Attributes:
        index: which call.
        text: the piece.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """A tool call is over. One that turns out malformed ends as such, and may end without having begun.

    Attributes:
        index: which call.
        call: the call, or what came in its place.
    """

    index: int
    call: ToolCall | MalformedCall


ModelSource: TypeAlias = Path | bytes
"""Where a model is: a file, a directory, or the content of a file in memory."""

AnswerDelta: TypeAlias = Delta | CallStart | CallArguments | CallEnd
"""What a stream parser yields."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: who speaks.
        content: the text, without reasoning and tool calls.
        reasoning: what the model thought before it answered, if anything.
        tool_calls: the calls an assistant message asks for.
        name: the tool that a ``tool`` message answers for.
        tool_call_id: the call that a ``tool`` message answers.
        malformed_calls: what an assistant message has in place of further calls; no part of ``content``.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    name: str | None = None
    tool_call_id: str | None = None
    malformed_calls: Sequence[MalformedCall] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", Role(self.role))
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        object.__setattr__(self, "malformed_calls", tuple(self.malformed_calls))


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device that a backend could use, and why not where it cannot.

    Attributes:
        name: what ``device=`` takes.
        available: whether it can be used here.
        detail: what it is, or why it cannot be used.
        untried: the backend's authors have never passed the conformance suite on it: its numbers may be wrong.
    """

    name: str
    available: bool
    detail: str = ""
    untried: bool = False


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What ``Backend.status()`` reports.

    Attributes:
        name: the backend.
        installed: whether it can run here.
        version: of the engine, "" where it is not installed.
        devices: devices it could use, best first.
        reason: what was chosen, or why it cannot run.
        hint: the command that would make it available, "" where nothing is missing.
    """

    name: str
    installed: bool
    version: str = ""
    devices: Sequence[DeviceStatus] = ()
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a backend can run a source.

    Attributes:
        supported: yes or no.
        reason: why not, or what speaks for it.
        rank: preference among the backends that can; 0 for a slow definition, 50 for an ordinary
            optimised engine, 100 for kernels tuned to this machine.
    """

    supported: bool
    reason: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to load a model.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", ...; a device that is missing is an error.
        n_threads: CPU threads, None for one per physical core that this process may use.
        progress: called while the model loads.
        backend_options: further options by name; each backend lists those it accepts.
    """

    device: str = "auto"
    n_threads: int | None = None
    progress: Progress | None = None
    backend_options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The size and storage of a context.

    Attributes:
        n_ctx: positions that all sequences together may hold.
        n_seq_max: sequences.
        n_batch: tokens that one ``decode`` may carry.
        kv_type_k: storage type of keys, None for the backend's default (f16 or better).
        kv_type_v: storage type of values, likewise.
    """

    n_ctx: int = 4096
    n_seq_max: int = 1
    n_batch: int = 512
    kv_type_k: KvType | None = None
    kv_type_v: KvType | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is known about a loaded model.

    Attributes:
        path: the file (the first shard).
        backend: the backend that runs it, with the tier or build it chose.
        architecture: as the file names it ("llama", "qwen3", ...).
        name: the file's own name for the model, or "".
        n_params: parameters.
        n_layers: transformer blocks.
        n_embd: embedding width E.
        n_vocab: vocabulary size V.
        n_ctx_train: longest context seen in training.
        quantization: the main weight type ("Q8_0", ...).
        n_bytes: bytes of weights.
        fingerprint: identity from content, never from path or time.
        chat_template: the file's own template, or None.
        device: where it runs.
        reason: why this backend was chosen.
        formatter: where the chat format came from.
        chat_templates: further templates of the file by name ("tool_use").
        state_bytes_per_token: what a context holds for each token, with the KV type that it has where none is asked
            for; None where it is not known.
        state_bytes_per_sequence: what it holds for each sequence besides, however long; None likewise.
        pooling: how the file wants the embedding of a text made, None where it does not say.
    """

    path: Path
    backend: str
    architecture: str
    name: str
    n_params: int
    n_layers: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    quantization: str
    n_bytes: int
    fingerprint: str
    chat_template: str | None
    device: str
    reason: str = ""
    formatter: str = ""
    chat_templates: Mapping[str, str] = field(default_factory=dict, hash=False)
    state_bytes_per_token: int | None = None
    state_bytes_per_sequence: int | None = None
    pooling: Pooling | None = None
