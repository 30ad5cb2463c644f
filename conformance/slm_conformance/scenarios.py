"""All scenario classes, for a module that adopts the suite: ``from slm_conformance.scenarios import *``."""

from slm_conformance.suite.scenarios import *  # noqa: F403
