"""The toy backend: the contract in plain code."""

from slm_conformance.toy.backend import PlainToyBackend as PlainToyBackend
from slm_conformance.toy.backend import ToyBackend as ToyBackend
