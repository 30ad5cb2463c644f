"""The module that ``run`` passes to pytest: all scenarios, on the backend of the command line."""

from slm_conformance.fixtures import BackendFixtures
from slm_conformance.scenarios import *  # noqa: F403


class Fixtures(BackendFixtures):
    """All fixtures come from the command line."""
