"""The module that ``run`` hands to pytest: all scenarios, on the backend that the command line names."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    """All from the command line."""
