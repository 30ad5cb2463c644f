"""Speculative decoding: draft tokens, decode the draft in one batch, keep the tokens that the model accepts."""

from slm_core.generation.speculation.lookup import PromptLookup
from slm_core.generation.speculation.model import DraftModel, same_tokens
from slm_core.generation.speculation.mtp import MtpDrafter, in_sequence
from slm_core.generation.speculation.proposal import Drafter, DraftFunction, DraftProbabilities, Proposal
from slm_core.generation.speculation.rounds import DraftRounds, accept_or_draw
from slm_core.generation.speculation.settings import Speculation, drafter_of, prompt_lookup
from slm_core.generation.speculation.source import SpeculativeSource
from slm_core.generation.speculation.suffix import SuffixIndex
from slm_core.generation.speculation.translation import TranslatedDraftModel, draft_model

__all__ = [
    "DraftFunction",
    "DraftModel",
    "DraftProbabilities",
    "DraftRounds",
    "Drafter",
    "MtpDrafter",
    "PromptLookup",
    "Proposal",
    "Speculation",
    "SpeculativeSource",
    "SuffixIndex",
    "TranslatedDraftModel",
    "accept_or_draw",
    "draft_model",
    "drafter_of",
    "in_sequence",
    "prompt_lookup",
    "same_tokens",
]
