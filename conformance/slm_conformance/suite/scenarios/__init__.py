"""The scenarios: one class per capability. ``from slm_conformance.scenarios import *`` adopts them all."""

from slm_conformance.suite.scenarios.adapters import TestAdapterDumps, TestAdapterFiles, TestAdapters
from slm_conformance.suite.scenarios.attention_bias import TestAttentionBias
from slm_conformance.suite.scenarios.backends import TestBackend
from slm_conformance.suite.scenarios.beam import TestBeam
from slm_conformance.suite.scenarios.bidirectional_blocks import TestBidirectionalBlocks
from slm_conformance.suite.scenarios.chats import TestChat
from slm_conformance.suite.scenarios.completions import TestCompletions
from slm_conformance.suite.scenarios.constraints import TestConstraints
from slm_conformance.suite.scenarios.context_dumps import TestContextDumps
from slm_conformance.suite.scenarios.control_vectors import TestControlVectors
from slm_conformance.suite.scenarios.cut import TestCut
from slm_conformance.suite.scenarios.decode import TestDecode, TestDecodeLimits, TestDecodeRefusals
from slm_conformance.suite.scenarios.device_sampling import TestDeviceSampling
from slm_conformance.suite.scenarios.dump_parts import TestDumpParts, TestRestoreParts, TestRestoreSteps
from slm_conformance.suite.scenarios.edit_levels import TestDeclarations
from slm_conformance.suite.scenarios.embedding_input import TestEmbeddingInput
from slm_conformance.suite.scenarios.embeddings import TestEmbeddings
from slm_conformance.suite.scenarios.errors import TestErrors
from slm_conformance.suite.scenarios.failures import TestFailures
from slm_conformance.suite.scenarios.fork import TestDrop, TestFork
from slm_conformance.suite.scenarios.generation import TestGeneration
from slm_conformance.suite.scenarios.hostile import TestHostileDumps
from slm_conformance.suite.scenarios.hostile_sessions import TestHostileSessions
from slm_conformance.suite.scenarios.layer_states import TestLayerStates
from slm_conformance.suite.scenarios.lifecycle import TestClose, TestSizes, TestThreads
from slm_conformance.suite.scenarios.model_based import TestModelBased
from slm_conformance.suite.scenarios.mrope_positions import TestMropePositions
from slm_conformance.suite.scenarios.mtp import TestMtp
from slm_conformance.suite.scenarios.numbers import TestNumbers
from slm_conformance.suite.scenarios.oracles import TestMeaning, TestOracle
from slm_conformance.suite.scenarios.programs_above import TestChatPrograms, TestSessionPrograms
from slm_conformance.suite.scenarios.sampling import TestSampling
from slm_conformance.suite.scenarios.session_rows import TestSessionRows
from slm_conformance.suite.scenarios.sessions import TestSession
from slm_conformance.suite.scenarios.snapshots import TestBadDumps, TestDumpRestore
from slm_conformance.suite.scenarios.speculation import TestSpeculation
from slm_conformance.suite.scenarios.tools import TestTools
from slm_conformance.suite.scenarios.truncate import TestTruncate
from slm_conformance.suite.scenarios.vocabulary import TestVocabulary

__all__ = [
    "TestAdapterDumps",
    "TestAdapterFiles",
    "TestAdapters",
    "TestAttentionBias",
    "TestBackend",
    "TestBadDumps",
    "TestBeam",
    "TestBidirectionalBlocks",
    "TestChat",
    "TestChatPrograms",
    "TestClose",
    "TestCompletions",
    "TestConstraints",
    "TestContextDumps",
    "TestControlVectors",
    "TestCut",
    "TestDeclarations",
    "TestDecode",
    "TestDecodeLimits",
    "TestDecodeRefusals",
    "TestDeviceSampling",
    "TestDrop",
    "TestDumpParts",
    "TestDumpRestore",
    "TestEmbeddingInput",
    "TestEmbeddings",
    "TestErrors",
    "TestFailures",
    "TestFork",
    "TestGeneration",
    "TestHostileDumps",
    "TestHostileSessions",
    "TestLayerStates",
    "TestMeaning",
    "TestModelBased",
    "TestMropePositions",
    "TestMtp",
    "TestNumbers",
    "TestOracle",
    "TestRestoreParts",
    "TestRestoreSteps",
    "TestSampling",
    "TestSession",
    "TestSessionPrograms",
    "TestSessionRows",
    "TestSizes",
    "TestSpeculation",
    "TestThreads",
    "TestTools",
    "TestTruncate",
    "TestVocabulary",
]
