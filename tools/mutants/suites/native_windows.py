"""The suite on the native engine, for a model whose sliding-window layers keep only their window."""

from conformance.test_native_windows import Fixtures as Windows
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(Windows):
    """An adopting module needs exactly one subclass."""


del Windows
