"""The plain values of the contract."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from slm_core.display import changed_fields, number_of_bytes, preview, table
from slm_core.display.html import card
from slm_core.display.text import rounded
from slm_core.embedding_rows import EmbeddingRows, check_marks, joined_parts
from slm_core.errors import InvalidOption
from slm_core.hints import did_you_mean
from slm_core.openai_shapes import call_shape
from slm_core.tensor_source import TensorSource

Logits: TypeAlias = NDArray[np.float32]
"""Rows of logits, float32 [n_rows, V], valid until the next call on the context that returned them."""
States: TypeAlias = NDArray[np.float32]
"""Hidden states of tokens, float32 [n_rows, E], valid until the next call on the context that returned them."""

EMBEDDED = -1
"""The value in arrays of token ids for an embedding row; no token has this id."""

LogitsSelection: TypeAlias = Literal["none", "last", "all"]
"""The added tokens that get a row of logits."""
Tool: TypeAlias = Mapping[str, object] | Callable[..., object] | type
"""A JSON schema; a function with annotations and a docstring; or a pydantic model. See ``toolschema``."""
Progress: TypeAlias = Callable[[float], None]
"""Called with the share that is done, 0.0 to 1.0; its exceptions cancel the work."""
PrefillProgress: TypeAlias = Callable[[int, int], None]
"""Called with the number of processed tokens, and the total number; its exceptions cancel the work."""


@dataclass(frozen=True, slots=True, eq=False)
class TopLogits:
    """The k largest logits of each row.

    Attributes:
        tokens: int32 [n_rows, k], by descending logits; ties: lower id first.
        logits: float32 [n_rows, k], the logits of the tokens.
        log_totals: float32 [n_rows], the log-sum-exp of all V logits of each row: a logit minus this is the natural
            logarithm of a probability.
    """

    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    log_totals: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Pos:
    """A position in a sequence; as a return value, the position of the next token."""

    seq_id: int
    index: int


class EditLevel(IntEnum):
    """The edits of a context that need no replay; each level includes the lower levels."""

    REPLAY = 0
    """Only ``drop`` and ``clear``: other edits decode the remaining tokens again."""
    TRUNCATE = 1
    """``truncate`` removes the end of a sequence; a recurrent state is computed again from an earlier one."""
    CUT = 2
    """``cut`` removes any range; later tokens move down, their keys are rotated again, their values stay."""


class Capability(StrEnum):
    """Optional features of a context. They are declared, never guessed."""

    SHARED_FORK = "shared_fork"
    """``fork`` shares storage until one side writes. It takes no positions, except for an image that it splits."""
    KV_PAYLOAD = "kv_payload"
    """``dump`` contains the KV cache, and ``restore`` loads it without decoding again."""
    EMBEDDINGS = "embeddings"
    """``embed`` returns the hidden states of tokens."""
    ENCODER = "encoder"
    """Attention is bidirectional: ``embed`` takes whole sequences and stores nothing, and ``decode`` raises."""
    DEVICE_SAMPLING = "device_sampling"
    """``decode_top`` computes the top-k on the device; full rows of logits are never copied to the host."""
    EMBEDDING_INPUT = "embedding_input"
    """A batch may contain embedding rows instead of tokens."""
    BIDIRECTIONAL_BLOCKS = "bidirectional_blocks"
    """A batch may contain bidirectional blocks: each token of a block attends to the whole block."""
    MROPE_POSITIONS = "mrope_positions"
    """Embedding rows may have M-RoPE positions: time, height and width."""
    ATTENTION_BIAS = "attention_bias"
    """Embedding rows may have an attention bias: a number added to the scores of other tokens; -inf masks a row."""
    ADAPTERS = "adapters"
    """Each sequence may have adapters of its own: low-rank changes (LoRA) of the model's matrices, control vectors."""
    MTP = "mtp"
    """``draft`` predicts next tokens with the model's layers for multi-token prediction."""
    LAYER_STATES = "layer_states"
    """``layer_states`` returns the hidden states of tokens after any layers."""


class Pooling(StrEnum):
    """How the hidden states of a text's tokens become one embedding of the text."""

    LAST = "last"
    """The state of the last token."""
    MEAN = "mean"
    """The mean of the states."""
    MAX = "max"
    """The maximum of each dimension."""
    CLS = "cls"
    """The state of the first token."""


class KvType(StrEnum):
    """Storage type of keys and values."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q6_0 = "q6_0"
    """Blocks of 32 codes from -32 to 31 with a float16 scale, as in ik_llama.cpp; ggml has no such type."""
    Q5_0 = "q5_0"
    Q4_0 = "q4_0"
    F8_E4M3 = "f8_e4m3"
    """An 8-bit float with 4 exponent bits and 3 fraction bits, up to 448 (OFP8 E4M3, without infinities)."""


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The control tokens of a vocabulary for text with a gap (fill-in-the-middle, Bavarian et al., arXiv:2207.14255).

    Attributes:
        prefix: begins the text before the gap.
        suffix: begins the text after the gap.
        middle: begins the text of the gap.
        file: begins the name and the text of a file; None if there is none.
        repository: begins the name of a repository; None if there is none.
    """

    prefix: int
    suffix: int
    middle: int
    file: int | None = None
    repository: int | None = None


class Role(StrEnum):
    """The author of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


RoleName: TypeAlias = Literal["system", "user", "assistant", "tool"]
"""The name of a ``Role``."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of prompt text.

    Attributes:
        text: the piece.
        control: True if special tokens are parsed; False for content, in which they are never parsed.
        generated: whether the template marks the piece as the assistant's, by ``{% generation %}``.
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


@dataclass(frozen=True, slots=True, repr=False)
class ToolCall:
    """A tool call of a model.

    Attributes:
        name: the function.
        arguments: its arguments, decoded from JSON.
        id: the id for ``tool`` messages, if the template has ids.
    """

    name: str
    arguments: Mapping[str, object]
    id: str | None = None

    def __repr__(self) -> str:
        return changed_fields(self, "name", "arguments")

    def to_openai(self) -> dict[str, Any]:
        """The call in the shape of OpenAI's chat messages, arguments as JSON text; "id" is absent if it is None."""
        return call_shape(self.name, json.dumps(dict(self.arguments), ensure_ascii=False), self.id)


@dataclass(frozen=True, slots=True, repr=False)
class MalformedCall:
    """A text that begins like a tool call, but is invalid.

    Attributes:
        text: the model's text, including markers.
        reason: the error, one line.
    """

    text: str
    reason: str

    def __repr__(self) -> str:
        return changed_fields(self, "text")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The format of tool calls in a chat format, for grammars.

    A block is ``begin``, a call or an array of calls, and ``end``. All texts have control tokens as text.

    Attributes:
        begin: opens a block; "" if the whole answer is the call.
        end: closes a block.
        style: how calls are written. "object": a JSON object with the name and the arguments. "array": a JSON array
            of these objects. "named": ``before``, the name, ``between``, and the arguments as a JSON object.
        name_key: key of the name in the object.
        arguments_key: key of the arguments in the object.
        before: the text before the name, for "named".
        between: the text between the name and the arguments, for "named".
        section: the texts before the first and after the last block.
        repeats: whether an answer may have several blocks.
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
    """The start of a tool call.

    Attributes:
        index: the number of the call in the answer, from 0, including malformed calls.
        name: the function.
        id: the call's id; None if it has none, or if the id comes later, in ``CallEnd``.
    """

    index: int
    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments; the joined pieces are the JSON text of the arguments.

    Attributes:
        index: the number of the call.
        text: the piece.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of a tool call. A malformed call ends with a ``MalformedCall``, possibly without a ``CallStart``.

    Attributes:
        index: the number of the call.
        call: the call, or the malformed call.
    """

    index: int
    call: ToolCall | MalformedCall


ModelSource: TypeAlias = Path | bytes | TensorSource
"""The source of a model: a file, a directory, the content of a file, or a tensor source."""


class SourceKind(StrEnum):
    """The kinds of sources that a backend reads. They are declared, never guessed."""

    FILE = "file"
    """The path of a file."""
    DIRECTORY = "directory"
    """The path of a directory."""
    BYTES = "bytes"
    """The content of a GGUF file."""
    TENSORS = "tensors"
    """A ``TensorSource``: an object with the metadata and the tensors."""


AnswerDelta: TypeAlias = Delta | CallStart | CallArguments | CallEnd
"""An item of a stream parser's result."""


@dataclass(frozen=True, slots=True, repr=False)
class Message:
    """A message of a conversation.

    Attributes:
        role: the author.
        content: the text, without reasoning and tool calls; ``ROWS_MARK`` stands for each of ``rows``. It may be
            passed as a list of texts and ``EmbeddingRows``.
        reasoning: the reasoning before the answer; None without reasoning.
        tool_calls: the tool calls of an assistant message.
        name: the tool of a ``tool`` message.
        tool_call_id: the call that a ``tool`` message answers.
        malformed_calls: the malformed calls of an assistant message, which are not in ``content``.
        rows: the embedding rows in ``content``, in order, such as encoded images.

    Raises:
        InvalidOption: an unknown role, content that is neither text nor a list of texts and ``EmbeddingRows``, or
            ``content`` has another number of ``ROWS_MARK`` than there are rows.
    """

    role: Role
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    name: str | None = None
    tool_call_id: str | None = None
    malformed_calls: Sequence[MalformedCall] = ()
    rows: Sequence[EmbeddingRows] = ()

    if TYPE_CHECKING:  # the role may be its name, the content a list of parts

        def __init__(
            self,
            role: Role | RoleName,
            content: str | Sequence[str | EmbeddingRows],
            reasoning: str | None = None,
            tool_calls: Sequence[ToolCall] = (),
            name: str | None = None,
            tool_call_id: str | None = None,
            malformed_calls: Sequence[MalformedCall] = (),
            rows: Sequence[EmbeddingRows] = (),
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "role", _role(self.role))
        if not isinstance(self.content, str):
            content, rows = joined_parts(self.content)
            object.__setattr__(self, "content", content)
            object.__setattr__(self, "rows", (*rows, *self.rows))
        object.__setattr__(self, "rows", tuple(self.rows))
        check_marks(self.content, self.rows)
        object.__setattr__(self, "tool_calls", tuple(self.tool_calls))
        object.__setattr__(self, "malformed_calls", tuple(self.malformed_calls))

    def __repr__(self) -> str:
        return changed_fields(self, "role", "content")

    def to_openai(self) -> dict[str, Any]:
        """The message in the shape of OpenAI's chat messages; chats accept it, and read the same message.

        Attributes that are None are absent; reasoning is "reasoning_content". OpenAI's shape has no malformed calls, so
        their texts follow the content.

        Raises:
            InvalidOption: the message contains embedding rows, which OpenAI's shape does not have.
        """
        if self.rows:
            raise InvalidOption("a message with embedding rows has no form in OpenAI's API")
        content = "".join((self.content, *(call.text for call in self.malformed_calls)))
        calls = [call.to_openai() for call in self.tool_calls]
        optional = {"reasoning_content": self.reasoning, "name": self.name, "tool_call_id": self.tool_call_id}
        return {
            "role": self.role.value,
            "content": content or None if calls else content,
            **{key: text for key, text in optional.items() if text is not None},
            **({"tool_calls": calls} if calls else {}),
        }


def _role(name: str) -> Role:
    try:
        return Role(name)
    except ValueError:
        accepted = ", ".join(Role)
        raise InvalidOption(f"unknown role {name!r} (accepted: {accepted}{did_you_mean(name, Role)})") from None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """A device of a backend, with the reason if it is unavailable.

    Attributes:
        name: the value for ``device=``.
        available: whether it can be used here.
        detail: a description, or why it cannot be used.
        untried: the backend's authors have never passed the conformance suite on it: its numbers may be wrong.
    """

    name: str
    available: bool
    detail: str = ""
    untried: bool = False


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The result of ``Backend.status()``.

    Attributes:
        name: the backend.
        installed: whether it can run here.
        version: the version of the engine; "" if it is not installed.
        devices: the devices, best first.
        reason: the chosen tier or build, or why the backend cannot run.
        hint: the command that installs it; "" if nothing is missing.
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
        reason: why the backend cannot run the source, or why it is a good choice.
        rank: preference among the backends that can run it: 0 for a slow reference, 50 for an optimised engine, 100 for
            kernels tuned to this machine.
    """

    supported: bool
    reason: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How to load a model.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", ...; a missing device is an error.
        n_threads: CPU threads; None for one per physical core that this process may use.
        progress: called while the model loads.
        backend_options: additional options by name; each backend lists its options.
    """

    device: str = "auto"
    n_threads: int | None = None
    progress: Progress | None = None
    backend_options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContextOptions:
    """The size and storage of a context.

    Attributes:
        n_ctx: the number of positions for all sequences together, 1 to 2^31 - 1.
        n_seq_max: the number of sequences, 1 to 65536.
        n_batch: the largest number of tokens in one ``decode``, 1 to 2^31 - 1.
        kv_type_k: storage type of keys; None for the backend's default (f16 or better).
        kv_type_v: storage type of values; None for the backend's default.
    """

    n_ctx: int = 4096
    n_seq_max: int = 1
    n_batch: int = 512
    kv_type_k: KvType | None = None
    kv_type_v: KvType | None = None


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """The properties of a loaded adapter: LoRA, or a control vector.

    Attributes:
        name: its name in this model.
        path: the GGUF file, or the directory of PEFT.
        fingerprint: a hash of its numbers, independent of name, path and file format.
        rank: the largest rank of its changes; 0 for a control vector.
        n_params: its parameters.
        tensors: the tensors that it changes, by GGUF's names, sorted; none for a control vector.
        layers: the layers after which a control vector adds its directions, counted from 0, sorted; none for LoRA.
    """

    name: str
    path: Path
    fingerprint: str
    rank: int
    n_params: int
    tensors: tuple[str, ...]
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class ModelInfo:
    """The properties of a loaded model.

    Attributes:
        path: the file (the first shard).
        backend: the backend that runs it, with its tier or build.
        architecture: the architecture in the file ("llama", "qwen3", ...).
        name: the name of the model in the file, or "".
        n_params: parameters.
        n_layers: transformer blocks.
        n_embd: embedding width E.
        n_vocab: vocabulary size V.
        n_ctx_train: the longest context in training, in tokens.
        quantization: the main weight type ("Q8_0", ...).
        n_bytes: bytes of weights.
        fingerprint: a hash of the content, independent of path and time.
        chat_template: the template in the file, or None.
        device: the device that runs it.
        reason: why this backend was chosen.
        formatter: the origin of the chat format.
        chat_templates: additional templates of the file by name ("tool_use").
        state_bytes_per_token: bytes of a context per token, with the default KV type; None if unknown.
        state_bytes_per_sequence: additional bytes of a context per sequence of any length; None if unknown.
        pooling: the file's pooling of embeddings; None if the file has none.
        ranks: whether it is a reranker, which scores a pair of texts.
        settings: the backend's settings in effect, by name ("threads", ...): defaults, options and profiles.
        backend_name: the name of the backend for ``load(backend=)``; "" if ``load`` did not load the model.
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
    ranks: bool = False
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)
    backend_name: str = ""

    def __repr__(self) -> str:
        return f"ModelInfo({self.summary})"

    def _repr_html_(self) -> str:
        rows = [
            ("file", str(self.path)),
            ("architecture", f"{self.architecture}, {self.n_layers} layers, width {self.n_embd:,}"),
            ("parameters", f"{self.n_params:,}, {self.quantization}, {number_of_bytes(self.n_bytes)}"),
            ("context in training", f"{self.n_ctx_train:,} tokens"),
            ("vocabulary", f"{self.n_vocab:,} tokens"),
            ("chat format", self.formatter),
            ("backend", self.backend),
            ("chosen because", self.reason),
        ]
        return card(self.name or self.path.name, table([(name, value) for name, value in rows if value]))

    @property
    def summary(self) -> str:
        """The properties that tell models apart, in one line."""
        return (
            f"{preview(self.name or self.path.name)}, {self.architecture}, {rounded(self.n_params)} parameters,"
            f" {self.quantization}, {number_of_bytes(self.n_bytes)}, {self.backend}"
        )
