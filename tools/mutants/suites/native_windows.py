"""The suite on the native engine, where layers with a window keep only that."""

from conformance.test_native_windows import Fixtures as Windows
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(Windows):
    """One subclass of its own is what an adopting module needs."""


del Windows
