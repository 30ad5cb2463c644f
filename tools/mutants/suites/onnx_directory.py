"""The suite on ONNX Runtime, for a directory with an exported graph."""

from conformance.test_onnx_directory import Fixtures as Directories
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(Directories):
    """An adopting module needs exactly one subclass."""


del Directories
