"""Turning logits into text, one token at a time: the loop, its stopping criteria, its stops."""

from slm_core.generation.aio import EventStream
from slm_core.generation.beam_options import BeamAnswer, Beams, Hypothesis
from slm_core.generation.completions import Completion, CompletionEvent, Completions
from slm_core.generation.control import Control
from slm_core.generation.events import (
    Answer,
    Event,
    FinishReason,
    Logprobs,
    Overflowed,
    Timings,
    TokenLogprob,
    ToolResult,
    Usage,
)
from slm_core.generation.infill import Infill
from slm_core.generation.loop import Generation, TokenSource
from slm_core.generation.scoring import Score
from slm_core.generation.stopping import Draft, StoppingAction, StoppingCriterion
from slm_core.generation.text import StopMatcher, TextStream

__all__ = [
    "Answer",
    "BeamAnswer",
    "Beams",
    "Completion",
    "CompletionEvent",
    "Completions",
    "Control",
    "Draft",
    "Event",
    "EventStream",
    "FinishReason",
    "Generation",
    "Hypothesis",
    "Infill",
    "Logprobs",
    "Overflowed",
    "Score",
    "StopMatcher",
    "StoppingAction",
    "StoppingCriterion",
    "TextStream",
    "Timings",
    "TokenLogprob",
    "TokenSource",
    "ToolResult",
    "Usage",
]
