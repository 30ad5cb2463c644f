"""slm-core: run a small language model on whichever engine suits, behind one contract.

``load`` a model file, then chat, or use contexts and sessions directly::

    import slm_core as slm

    with slm.load(slm.demo_model_path()) as model:
        chat = model.chat(system="You are terse.")
        print(chat.send("My dog is called Rex.").text)
"""

from slm_core.chat import Chat, ChatOptions, ChatStream, Choice, Extraction, Mark, Oracle, Session
from slm_core.errors import SlmError
from slm_core.generation import Answer, BrakeAction, Draft, Event, FinishReason, Generation
from slm_core.hookspecs import Entry, hookimpl
from slm_core.loading import LoadedModel, backends, demo_model_path, load, load_vocab
from slm_core.sampling import Sampling
from slm_core.types import (
    BackendStatus,
    Capability,
    ContextOptions,
    EditLevel,
    KvType,
    Message,
    ModelInfo,
    ModelOptions,
    Pos,
    Role,
    Segment,
    ToolCall,
)

__all__ = [
    "Answer",
    "BackendStatus",
    "BrakeAction",
    "Capability",
    "Chat",
    "ChatOptions",
    "ChatStream",
    "Choice",
    "ContextOptions",
    "Draft",
    "EditLevel",
    "Entry",
    "Event",
    "Extraction",
    "FinishReason",
    "Generation",
    "KvType",
    "LoadedModel",
    "Mark",
    "Message",
    "ModelInfo",
    "ModelOptions",
    "Oracle",
    "Pos",
    "Role",
    "Sampling",
    "Segment",
    "Session",
    "SlmError",
    "ToolCall",
    "backends",
    "demo_model_path",
    "hookimpl",
    "load",
    "load_vocab",
]
