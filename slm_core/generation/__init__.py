"""Turning logits into text, one token at a time: the loop, its brakes, its stops."""

from slm_core.generation.brakes import Brake, BrakeAction, Draft
from slm_core.generation.events import Answer, Event, FinishReason, Timings, Usage
from slm_core.generation.loop import Generation, TokenSource
from slm_core.generation.text import StopMatcher, TextStream

__all__ = [
    "Answer",
    "Brake",
    "BrakeAction",
    "Draft",
    "Event",
    "FinishReason",
    "Generation",
    "StopMatcher",
    "TextStream",
    "Timings",
    "TokenSource",
    "Usage",
]
