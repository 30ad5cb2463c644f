"""Sampling: the options, the steps, and the chain that runs the steps and draws a token."""

from slm_core.sampling.candidates import Candidates, Ids, Values
from slm_core.sampling.chain import SamplerChain
from slm_core.sampling.options import Sampling
from slm_core.sampling.order import ORDER
from slm_core.sampling.processors import LogitsProcessor, ProcessedChain, chain_for
from slm_core.sampling.state import Step, StepState

__all__ = [
    "ORDER",
    "Candidates",
    "Ids",
    "LogitsProcessor",
    "ProcessedChain",
    "SamplerChain",
    "Sampling",
    "Step",
    "StepState",
    "Values",
    "chain_for",
]
