"""The toy backend: the contract in its plainest form."""

from slm_conformance.toy.backend import PlainToyBackend as PlainToyBackend
from slm_conformance.toy.backend import ToyBackend as ToyBackend
