"""The scenarios: one class per capability. ``from slm_conformance.scenarios import *`` adopts them all."""

from slm_conformance.scenarios.backends import TestBackend
from slm_conformance.scenarios.beam import TestBeam
from slm_conformance.scenarios.bidirectional_blocks import TestBidirectionalBlocks
from slm_conformance.scenarios.chats import TestChat, TestMeaning, TestOracle
from slm_conformance.scenarios.completions import TestCompletions
from slm_conformance.scenarios.constraints import TestConstraints
from slm_conformance.scenarios.cut import TestCut
from slm_conformance.scenarios.decode import TestDecode, TestDecodeLimits, TestDecodeRefusals
from slm_conformance.scenarios.device_sampling import TestDeviceSampling
from slm_conformance.scenarios.edit_levels import TestDeclarations
from slm_conformance.scenarios.embedding_input import TestEmbeddingInput
from slm_conformance.scenarios.embeddings import TestEmbeddings
from slm_conformance.scenarios.failures import TestFailures
from slm_conformance.scenarios.fork import TestDrop, TestFork
from slm_conformance.scenarios.generation import TestGeneration
from slm_conformance.scenarios.hostile import TestHostileDumps
from slm_conformance.scenarios.hostile_sessions import TestHostileSessions
from slm_conformance.scenarios.lifecycle import TestClose, TestSizes, TestThreads
from slm_conformance.scenarios.model_based import TestModelBased
from slm_conformance.scenarios.mrope_positions import TestMropePositions
from slm_conformance.scenarios.numbers import TestNumbers
from slm_conformance.scenarios.programs_above import TestChatPrograms, TestSessionPrograms
from slm_conformance.scenarios.sampling import TestSampling
from slm_conformance.scenarios.sessions import TestSession
from slm_conformance.scenarios.snapshots import TestBadDumps, TestDumpRestore
from slm_conformance.scenarios.speculation import TestSpeculation
from slm_conformance.scenarios.tools import TestTools
from slm_conformance.scenarios.truncate import TestTruncate
from slm_conformance.scenarios.vocabulary import TestVocabulary

__all__ = [
    "TestBackend",
    "TestBadDumps",
    "TestBeam",
    "TestBidirectionalBlocks",
    "TestChat",
    "TestChatPrograms",
    "TestClose",
    "TestCompletions",
    "TestConstraints",
    "TestCut",
    "TestDeclarations",
    "TestDecode",
    "TestDecodeLimits",
    "TestDecodeRefusals",
    "TestDeviceSampling",
    "TestDrop",
    "TestDumpRestore",
    "TestEmbeddingInput",
    "TestEmbeddings",
    "TestFailures",
    "TestFork",
    "TestGeneration",
    "TestHostileDumps",
    "TestHostileSessions",
    "TestMeaning",
    "TestModelBased",
    "TestMropePositions",
    "TestNumbers",
    "TestOracle",
    "TestSampling",
    "TestSession",
    "TestSessionPrograms",
    "TestSizes",
    "TestSpeculation",
    "TestThreads",
    "TestTools",
    "TestTruncate",
    "TestVocabulary",
]
