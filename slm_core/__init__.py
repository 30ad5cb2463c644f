"""slm-core: run a small language model on whichever engine suits, behind one contract.

``load`` a model file, then chat, or use contexts and sessions directly::

    import slm_core as slm

    with slm.load(slm.demo_model_path()) as model:
        chat = model.chat(system="You are terse.")
        print(chat.send("My dog is called Rex.").text)
"""

from slm_core.chat import Chat, ChatOptions, ChatStream, Choice, Extraction, Mark, Oracle, Session
from slm_core.chat.contrastive import ContrastiveSampler
from slm_core.chat.healing import heal
from slm_core.chat.overflow import Summarize
from slm_core.embedding import Embeddings
from slm_core.engine import Engine, EngineStats, RequestStream
from slm_core.errors import RequestsFailed, SlmError, ToolError
from slm_core.formatting import formatter
from slm_core.generation import (
    Answer,
    BeamAnswer,
    Beams,
    Completion,
    CompletionEvent,
    Completions,
    Draft,
    Event,
    FinishReason,
    Generation,
    Hypothesis,
    Logprobs,
    Overflowed,
    Score,
    StoppingAction,
    ToolResult,
)
from slm_core.generation.coloured import ColouredText
from slm_core.generation.shifting import TokenShift
from slm_core.generation.speculation import DraftFunction, PromptLookup, Speculation, SuffixIndex
from slm_core.hookspecs import Entry, hookimpl
from slm_core.isolation import Isolation
from slm_core.loading import LoadedModel, backends, demo_model_path, load, load_vocab
from slm_core.plugins import add_plugin
from slm_core.sampling import SamplerChain, Sampling
from slm_core.types import (
    AnswerDelta,
    BackendStatus,
    CallArguments,
    CallEnd,
    CallStart,
    Capability,
    ContextOptions,
    Delta,
    EditLevel,
    KvType,
    MalformedCall,
    Message,
    ModelInfo,
    ModelOptions,
    Pooling,
    Pos,
    Role,
    Segment,
    ToolCall,
)

__all__ = [
    "Answer",
    "AnswerDelta",
    "BackendStatus",
    "BeamAnswer",
    "Beams",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Capability",
    "Chat",
    "ChatOptions",
    "ChatStream",
    "Choice",
    "ColouredText",
    "Completion",
    "CompletionEvent",
    "Completions",
    "ContextOptions",
    "ContrastiveSampler",
    "Delta",
    "Draft",
    "DraftFunction",
    "EditLevel",
    "Embeddings",
    "Engine",
    "EngineStats",
    "Entry",
    "Event",
    "Extraction",
    "FinishReason",
    "Generation",
    "Hypothesis",
    "Isolation",
    "KvType",
    "LoadedModel",
    "Logprobs",
    "MalformedCall",
    "Mark",
    "Message",
    "ModelInfo",
    "ModelOptions",
    "Oracle",
    "Overflowed",
    "Pooling",
    "Pos",
    "PromptLookup",
    "RequestStream",
    "RequestsFailed",
    "Role",
    "SamplerChain",
    "Sampling",
    "Score",
    "Segment",
    "Session",
    "SlmError",
    "Speculation",
    "StoppingAction",
    "SuffixIndex",
    "Summarize",
    "TokenShift",
    "ToolCall",
    "ToolError",
    "ToolResult",
    "add_plugin",
    "backends",
    "demo_model_path",
    "formatter",
    "heal",
    "hookimpl",
    "load",
    "load_vocab",
]
