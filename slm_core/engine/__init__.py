"""Many requests over one KV cache: continuous batching, a prefix cache, and errors that end one request alone."""

from slm_core.engine.batch import GenerateOptions, generate
from slm_core.engine.core import EngineCore
from slm_core.engine.engine import Engine
from slm_core.engine.metrics import Latency, Rate, RequestMetrics
from slm_core.engine.options import EngineOptions, Reuse
from slm_core.engine.prompts import Conversation, Prompt
from slm_core.engine.stats import EngineStats, Positions, RequestStatus
from slm_core.engine.streams import CompletionsStream, RequestStream

__all__ = [
    "CompletionsStream",
    "Conversation",
    "Engine",
    "EngineCore",
    "EngineOptions",
    "EngineStats",
    "GenerateOptions",
    "Latency",
    "Positions",
    "Prompt",
    "Rate",
    "RequestMetrics",
    "RequestStatus",
    "RequestStream",
    "Reuse",
    "generate",
]
