"""Drafting: guess what follows, decode the guess in one batch, keep what would have been said anyway."""

from slm_core.generation.speculation.lookup import PromptLookup
from slm_core.generation.speculation.model import DraftModel, same_tokens
from slm_core.generation.speculation.proposal import Drafter, DraftFunction, DraftProbabilities, Proposal
from slm_core.generation.speculation.settings import Speculation, drafter_of
from slm_core.generation.speculation.source import SpeculativeSource, accept_or_draw
from slm_core.generation.speculation.suffix import SuffixIndex
from slm_core.generation.speculation.translation import TranslatedDraftModel, draft_model

__all__ = [
    "DraftFunction",
    "DraftModel",
    "DraftProbabilities",
    "Drafter",
    "PromptLookup",
    "Proposal",
    "Speculation",
    "SpeculativeSource",
    "SuffixIndex",
    "TranslatedDraftModel",
    "accept_or_draw",
    "draft_model",
    "drafter_of",
    "same_tokens",
]
