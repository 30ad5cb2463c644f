"""The scenarios: one class per capability. ``from slm_conformance.scenarios import *`` adopts them all."""

from slm_conformance.scenarios.truncate import TestTruncate

__all__ = ["TestTruncate"]
