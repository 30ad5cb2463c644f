"""Regression tests of inputs found by long runs: they crashed the process, hung it, or passed a check wrongly."""

from __future__ import annotations

import importlib.util
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from constraints.walking import VOCAB
from slm_conformance.oracle.families import family_model
from slm_core import constraints
from slm_core.checkpoints.config import Config
from slm_core.constraints import Choice, JsonSchema, Lark, Spec, ToolCalls
from slm_core.container import LARGEST_NUMBER, check_numbers
from slm_core.errors import ConstraintError, InvalidModelFile, InvalidSnapshot, ModelError, VocabError
from slm_core.jsonfile import depth_of, read_json
from slm_core.tokenization.directory import directory_vocab
from slm_llamacpp.backend import LlamaCppBackend
from slm_llamacpp.logs import Complaint, reason_in
from slm_native.backend import NativeBackend
from tests.hostile import folders
from tests.hostile.gguf_form import ARRAY, FLOAT32, UINT32, GgufForm, Pair, array_value, parse

I32 = 26


def number(key: str, value: int) -> Callable[[GgufForm], None]:
    return lambda form: put(form, key, UINT32, struct.pack("<I", value))


def put(form: GgufForm, key: str, kind: int, value: bytes) -> None:
    form.pairs = [pair for pair in form.pairs if pair.key != key.encode()]
    form.pairs.append(Pair(key.encode(), kind, value))


def integer_weights(form: GgufForm) -> None:
    next(tensor for tensor in form.tensors if tensor.name == b"blk.0.attn_v.weight").kind = I32


def infinite_experts(form: GgufForm) -> None:
    put(form, "mixtral.expert_used_count", ARRAY, b"")
    items = struct.pack("<3f", 1, float("inf"), 1)
    put(form, "llama.expert_used_count", ARRAY, array_value(FLOAT32, 3, items))
    form.pairs = [pair for pair in form.pairs if pair.value]


FILES = {
    "glm4 rotates an odd part of a head": ("glm4", number("glm4.rope.dimension_count", 7), "an even number from 2"),
    "glm4 rotates nothing, which hung": ("glm4", number("glm4.rope.dimension_count", 0), "an even number from 2"),
    "glm4 rotates four billion": ("glm4", number("glm4.rope.dimension_count", 2**32 - 8), "an even number from 2"),
    "gemma3 rotates more than a head": ("gemma3", number("gemma3.rope.dimension_count", 32), "an even number from 2"),
    "gemma_embedding likewise": (
        "gemma_embedding",
        number("gemma-embedding.rope.dimension_count", 2**15),
        "an even number from 2",
    ),
    "phi2 has wider values than keys": ("phi2", number("phi2.attention.value_length", 18), "the width of a head"),
    "gpt_oss likewise": ("gpt_oss", number("gpt-oss.attention.value_length", 511), "the width of a head"),
    "mpt has heads without width": ("mpt", number("mpt.attention.head_count", 256), "head"),
    "phi2 has heads that do not add up": ("phi2", number("phi2.attention.head_count", 31), "head"),
    "falcon likewise": ("falcon", number("falcon.attention.head_count", 2), "head|shape"),
    "modern_bert likewise": ("modern_bert", number("modern-bert.attention.head_count", 8), "head|shape"),
    "gemma_embedding projects from another width": (
        "gemma_embedding",
        number("gemma-embedding.dense_2_feat_in", 7),
        "dense_2_feat_in",
    ),
    "latents and rotated parts are no keys": (
        "deepseek2",
        number("deepseek2.attention.key_length", 160),
        "attention.key_length",
    ),
    "several heads share one latent": (
        "deepseek2",
        number("deepseek2.attention.head_count_kv", 4),
        "attention.head_count_kv",
    ),
    "whole keys of deepseek2 are rotated": (
        "deepseek2",
        number("deepseek2.rope.dimension_count", 48),
        "the width of a",
    ),
    "an unknown gating function": ("deepseek2", number("deepseek2.expert_gating_func", 16), "expert_gating_func"),
    "tensors begin where none may": ("gemma3", number("general.alignment", 8), "multiples of 32"),
    "weights are integers": ("qwen2", integer_weights, "cannot multiply matrices of this type"),
    "counts of experts are infinite": ("mixtral", infinite_experts, "holds float32, not integers"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_crashed_llamacpp(tmp_path: Path, name: str) -> None:
    """Checked without llama.cpp: an accepted file would crash the test process."""
    family, change, words = FILES[name]
    form = parse(family_model(tmp_path, family).read_bytes())
    change(form)
    path = tmp_path / "broken.gguf"
    path.write_bytes(form.to_bytes())
    try:
        support = LlamaCppBackend().supports(path)
    except ModelError as error:
        reason = str(error)
    else:
        assert not support.supported
        reason = support.reason
    assert "\n" not in reason
    assert any(word in reason for word in words.split("|")), reason


@pytest.mark.parametrize("family", sorted({family for family, _, _ in FILES.values()}))
def test_the_files_are_valid_before_the_change(tmp_path: Path, family: str) -> None:
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("llama_cpp is not installed: pip install 'slm-core[llamacpp]'")
    assert LlamaCppBackend().supports(family_model(tmp_path, family)).supported


def test_errors_of_llamacpp_quote_no_long_text() -> None:
    assert len(reason_in([Complaint(40, "unknown tokenizer: " + "a" * 70_000)])) < 400


def test_a_long_array_is_shown_in_one_line(tmp_path: Path) -> None:
    form = parse(family_model(tmp_path, "llama").read_bytes())
    items = struct.pack("<30I", *range(10**9, 10**9 + 30))
    put(form, "llama.unknown", ARRAY, array_value(UINT32, 30, items))
    path = tmp_path / "broken.gguf"
    path.write_bytes(form.to_bytes())
    support = NativeBackend().supports(path)
    assert not support.supported
    assert "\n" not in support.reason


COSTLY: dict[str, Spec] = {
    "a divisor that takes minutes": JsonSchema({"type": "integer", "multipleOf": 2**31}),
    "one in a grammar": Lark('start: %json {"type": "integer", "multipleOf": 2147483648}'),
    "one in a grammar, its name in escapes": Lark('start: %json {"type": "integer", "multip\\u006ceOf": 2147483648}'),
    "two that multiply": JsonSchema({"anyOf": [{"type": "integer", "multipleOf": n} for n in (9973, 9967)]}),
    "three that multiply": JsonSchema({"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103)]}),
    "two of an object that multiply": JsonSchema(
        {"allOf": [{"properties": {"a": {"type": "integer", "multipleOf": n}}} for n in (997, 991)]}
    ),
    "many tools with one each": ToolCalls(
        [
            {
                "name": f"f{n}",
                "parameters": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": n}}},
            }
            for n in range(9000, 9020)
        ],
        {"begin": "<call>", "style": "named"},
    ),
    "a divisor of many digits": JsonSchema({"type": "number", "multipleOf": 123456.789}),
}


@pytest.mark.parametrize("name", COSTLY)
@pytest.mark.timeout(20)
def test_constraints_that_took_minutes(name: str) -> None:
    with pytest.raises(ConstraintError, match="remainders to follow"):
        constraints.compile(COSTLY[name], VOCAB)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 1000},
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 1e-9},
        {"anyOf": [{"type": "integer", "multipleOf": n} for n in (5, 10, 60, 100)]},
        {"properties": {str(n): {"type": "integer", "multipleOf": n} for n in (7, 24, 60, 365, 1000)}},
    ],
)
def test_ordinary_divisors_compile(schema: Any) -> None:
    constraints.compile(JsonSchema(schema), VOCAB)


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def test_values_nested_too_deeply() -> None:
    """They passed the check of schemas, and raised a RecursionError in the check of values."""
    for schema in ({"const": nested(400)}, json.dumps({"enum": [nested(400)]})):
        with pytest.raises(ConstraintError, match="nests deeper"):
            JsonSchema(schema)
    assert depth_of(nested(400)) == 400
    assert depth_of({"a": [1, {"b": []}], "c": 2}) == 4


def test_a_message_quotes_no_long_text() -> None:
    with pytest.raises(ConstraintError) as caught:
        Choice(["a" * 10_000, ""])
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("value", [10**39, 10**400, -(10**400), 1e39, float("inf"), float("nan"), True])
def test_numbers_outside_the_range_of_float(value: Any) -> None:
    for read in (lambda c: c.number("a"), lambda c: c.items("b", float, 2)):
        with pytest.raises(InvalidModelFile):
            read(Config(Path("config.json"), {"a": value, "b": [1.0, value]}))


def test_integers_outside_the_range_of_arrays() -> None:
    config = Config(Path("config.json"), {"a": [1, 2**63]})
    for read in (lambda: config.items("a", int, 2), lambda: config.integers("a")):
        with pytest.raises(InvalidModelFile):
            read()


def test_a_file_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"rope_theta": nested(300)}))
    with pytest.raises(InvalidModelFile, match="nests 301 levels"):
        read_json(path)


def test_a_tokenizer_that_panics(tmp_path: Path) -> None:
    """Its post-processor names an undefined token, and the library panics when it encodes."""
    sound = dict(folders.transformers_folders(tmp_path)[0])
    stated = json.loads(sound["tokenizer.json"])
    special = stated["post_processor"]["special_tokens"]
    special["other"] = special.pop(next(iter(special)))
    folder = folders.write({**sound, "tokenizer.json": json.dumps(stated).encode()}, tmp_path / "broken")
    with pytest.raises(InvalidModelFile, match="not a tokenizer"):
        directory_vocab(folder)


def test_a_panic_while_encoding_is_an_error_of_the_vocabulary(tmp_path: Path) -> None:
    vocab = directory_vocab(folders.write(folders.transformers_folders(tmp_path)[0], tmp_path / "sound"))

    class PanicException(BaseException):
        pass

    class Tokenizer:
        def __init__(self, error: BaseException) -> None:
            self.error = error

        def encode(self, text: str, **_: object) -> None:
            raise self.error

    vocab._content = Tokenizer(PanicException("no entry\nfound"))
    with pytest.raises(VocabError, match="cannot encode this text: no entry found"):
        vocab.encode("a", add_special=False, parse_special=False)
    for error in (KeyboardInterrupt(), MemoryError()):
        vocab._content = Tokenizer(error)
        with pytest.raises(type(error)):
            vocab.encode("a", add_special=False, parse_special=False)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numbers_of_dumps(dtype: type[np.floating[Any]]) -> None:
    """NumPy rounded the bound of float16 values to infinity, so that infinite values passed."""
    for value in (np.inf, -np.inf, np.nan, *((1.1e12, -3e38) if dtype is not np.float16 else ())):
        with pytest.raises(InvalidSnapshot, match="no model computes"):
            check_numbers(np.array([0, value], dtype), "it")
    check_numbers(np.array([0, 65504, -65504], dtype), "it")
    check_numbers(np.array([], dtype), "it")


def test_the_bound_on_numbers_of_dumps_keeps_squares_finite() -> None:
    """Its derivation: 2**14 squares of the bound times the L1 norm of a row of weights are finite."""
    row = float(LARGEST_NUMBER) * 1e5
    assert 2**14 * row**2 < float(np.finfo(np.float32).max) < 2**14 * (2 * row) ** 2
