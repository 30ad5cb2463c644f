"""The scenarios: one class per capability. ``from slm_conformance.scenarios import *`` adopts them all."""

from slm_conformance.scenarios.cut import TestCut
from slm_conformance.scenarios.decode import TestDecode, TestDecodeLimits, TestDecodeRefusals
from slm_conformance.scenarios.fork import TestDrop, TestFork
from slm_conformance.scenarios.snapshots import TestBadDumps, TestDumpRestore
from slm_conformance.scenarios.truncate import TestTruncate

__all__ = [
    "TestBadDumps",
    "TestCut",
    "TestDecode",
    "TestDecodeLimits",
    "TestDecodeRefusals",
    "TestDrop",
    "TestDumpRestore",
    "TestFork",
    "TestTruncate",
]
