"""The contract: one noun per file, without behaviour. The conformance suite tests the docstring of each method."""

from slm_core.protocols.adapters import Adapters
from slm_core.protocols.backend import Backend
from slm_core.protocols.batch import Batch
from slm_core.protocols.context import Context
from slm_core.protocols.converter import Converter
from slm_core.protocols.formatter import AnswerFormat, Formatter, StreamParser
from slm_core.protocols.model import BackendModel
from slm_core.protocols.sampler import Advance, Constraint, FastForward, Forward, Sampler, Stop
from slm_core.protocols.vocab import Vocab

__all__ = [
    "Adapters",
    "Advance",
    "AnswerFormat",
    "Backend",
    "BackendModel",
    "Batch",
    "Constraint",
    "Context",
    "Converter",
    "FastForward",
    "Formatter",
    "Forward",
    "Sampler",
    "Stop",
    "StreamParser",
    "Vocab",
]
