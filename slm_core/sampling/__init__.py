"""Sampling: the options, the steps, and the chain that runs the steps and draws a token."""

from slm_core.sampling.candidates import Candidates, Ids, Values
from slm_core.sampling.chain import SamplerChain
from slm_core.sampling.options import Sampling
from slm_core.sampling.order import ORDER
from slm_core.sampling.state import Step, StepState

__all__ = ["ORDER", "Candidates", "Ids", "SamplerChain", "Sampling", "Step", "StepState", "Values"]
