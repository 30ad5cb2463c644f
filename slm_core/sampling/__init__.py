"""Choosing the next token: the options, and the chain that follows them."""

from slm_core.sampling.chain import SamplerChain
from slm_core.sampling.options import Sampling

__all__ = ["SamplerChain", "Sampling"]
