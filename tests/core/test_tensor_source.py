"""Models of objects that have the tensors: what ``slm.load`` takes, and what it refuses in one line."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slm_core as slm
from slm_conformance.oracle.factories import make_tiny_model
from slm_conformance.oracle.tensor_source import FileTensors
from slm_core.gguf import GgmlType, GgufFile, GgufWriter, NewTensor, stored_uint32
from slm_core.types import Pos, SourceKind
from slm_llamacpp.backend import LlamaCppBackend

BACKENDS = ["native", "llamacpp", "onnx"]


class Source:
    """A source; a test may change any of its members."""

    def __init__(self, **members: Any) -> None:
        self.metadata: Any = {"general.architecture": "llama", "a.list": ["x", "yz"], "a.flag": True, "a.number": 0.5}
        self.tensors: Any = {"one": ((2, 32), GgmlType.Q8_0), "two": ((3,), GgmlType.F32)}
        self.data: dict[str, Any] = {"one": bytes(range(68)), "two": np.arange(3, dtype=np.float32).tobytes()}
        self.print: Any = "0123456789abcdef" * 4
        for name, value in members.items():
            setattr(self, name, value)

    def tensor_data(self, name: str) -> Any:
        return self.data[name]

    def fingerprint(self) -> Any:
        return self.print


@pytest.fixture(autouse=True)
def no_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLM_BACKEND", raising=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model("llama", "q8_0").write(tmp_path_factory.mktemp("model") / "m.gguf")


def logits_of(model: slm.Model, n: int = 9) -> np.ndarray:
    with model.new_context(n_ctx=32) as context:
        batch = context.new_batch()
        batch.extend(range(n), Pos(0, 0), logits="all")
        return context.decode(batch).copy()


def test_an_object_is_presented_as_the_file_with_its_tensors(path: Path) -> None:
    with GgufFile.open(path) as file, GgufFile.open(FileTensors(path)) as opened:
        assert list(opened.metadata) == list(file.metadata)
        for key in file.metadata:
            assert opened.metadata.stored(key) == file.metadata.stored(key), key
        assert list(opened.tensors) == list(file.tensors)
        for name, tensor in file.tensors.items():
            like = opened.tensors[name]
            assert (like.shape, like.ggml_type, like.n_bytes) == (tensor.shape, tensor.ggml_type, tensor.n_bytes)
            np.testing.assert_array_equal(opened.tensor_data(name), file.tensor_data(name))
        assert opened.fingerprint() == file.fingerprint()
    with pytest.raises(slm.ModelClosed):
        opened.tensor_data("token_embd.weight")


def test_plain_values_are_stored_as_declared() -> None:
    with GgufFile.open(Source()) as file:
        assert {key: file.metadata.type_name(key) for key in file.metadata} == {
            "general.architecture": "string",
            "a.list": "array of 2 string",
            "a.flag": "bool",
            "a.number": "float32",
        }
        assert file.require("a.list", list[str]) == ["x", "yz"]
        assert bytes(file.tensor_data("one")) == bytes(range(68))
        with pytest.raises(slm.UnsupportedModel, match="'three' is missing"):
            file.tensor_data("three")


def test_a_file_that_llama_cpp_reads_is_written_of_an_object() -> None:
    """The pieces are a GGUF file that the strict reader takes."""
    with GgufFile.open(Source()) as source, GgufFile.open(b"".join(source.pieces())) as file:
        assert (dict(file.tensors), source.size_bytes) == (dict(source.tensors), file.size_bytes)
        assert bytes(file.tensor_data("one")) == bytes(range(68))
        assert file.tensor_data("two").view(np.float32).tolist() == [0, 1, 2]


def test_the_layout_of_another_file_has_no_effect(tmp_path: Path) -> None:
    """Keys of shards and alignment describe the file that they are from."""
    metadata = {"general.alignment": stored_uint32(64), "split.count": stored_uint32(1)}
    path = tmp_path / "m.gguf"
    with GgufWriter(metadata, [NewTensor("one", (5,), GgmlType.F32, 20)], 64).open(path) as sink:
        sink.write(np.arange(20, dtype=np.uint8))
    with GgufFile.open(FileTensors(path)) as file:
        assert list(file.metadata) == []
        assert bytes(file.tensor_data("one")) == bytes(range(20))


@pytest.mark.parametrize("name", BACKENDS)
def test_supports_reads_no_tensor_and_load_needs_no_path(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FileTensors(path)
    assert slm.supports(source)[name].supported
    assert not source.reads
    monkeypatch.setenv("SLM_BACKEND", name)
    with slm.load(source) as model, slm.load(path) as expected:
        assert model.info.backend == expected.info.backend
        assert model.info.reason == "named by SLM_BACKEND"
        assert str(model.info.path) == "<FileTensors>"
        np.testing.assert_array_equal(logits_of(model), logits_of(expected))
    with slm.load(source) as again:  # the source is the caller's: no model closes it
        assert again.info.fingerprint == model.info.fingerprint


@pytest.mark.parametrize("name", BACKENDS)
def test_a_closed_model_holds_no_source(path: Path, name: str) -> None:
    source = FileTensors(path)
    model = slm.load(source, backend=name)
    alive = weakref.ref(source)
    del source
    assert alive() is not None or name == "llamacpp", "llama.cpp has a copy; other engines may read again"
    model.close()
    gc.collect()
    assert alive() is None
    assert model.info.backend.startswith(name)


def test_the_native_engine_reads_each_tensor_once(path: Path) -> None:
    source = FileTensors(path)
    with slm.load(source, backend="native") as model:
        logits_of(model)
    assert source.reads == dict.fromkeys(source.tensors, 1)


@pytest.mark.parametrize("name", BACKENDS)
def test_dumps_go_from_an_object_to_the_file_and_back(path: Path, name: str) -> None:
    with slm.load(FileTensors(path), backend=name) as model, slm.load(path, backend=name) as other:
        for a, b in ((model, other), (other, model)):
            with a.new_context(n_ctx=32) as one, b.new_context(n_ctx=32) as two:
                batch = one.new_batch()
                batch.extend(range(9), Pos(0, 0), logits="none")
                one.decode(batch)
                two.restore(0, one.dump(0))
                rows = []
                for context in (one, two):
                    batch = context.new_batch()
                    batch.extend([5], Pos(0, 9), logits="all")
                    rows.append(context.decode(batch).copy())
                np.testing.assert_array_equal(rows[0], rows[1])


def test_a_vocabulary_apart_and_of_an_object(path: Path) -> None:
    source, text = FileTensors(path), "the sun"
    expected = slm.load_vocab(path).encode(text, add_special=True, parse_special=False)
    assert slm.load_vocab(source).encode(text, add_special=True, parse_special=False) == expected
    source.metadata = {key: value for key, value in whole(source).items() if not key.startswith("tokenizer.")}  # type: ignore[assignment]
    source.metadata |= {"tokenizer.ggml.model": "none", "llama.vocab_size": source.tensors["token_embd.weight"][0][0]}  # type: ignore[operator]
    with slm.load(source, backend="native", tokenizer=path) as model:
        assert model.vocab.encode(text, add_special=True, parse_special=False) == expected


def whole(source: FileTensors) -> dict[str, object]:
    """The metadata as a mapping of stored bytes."""
    return {key: source.metadata.stored(key) for key in source.metadata}


def test_an_isolated_model_refuses_an_object_in_one_line(path: Path) -> None:
    message = r"^a FileTensors cannot be passed to the process of an isolated model \(accepted: a path, bytes\)$"
    with pytest.raises(slm.InvalidOption, match=message):
        slm.load(FileTensors(path), isolated=True)


def test_a_backend_that_does_not_declare_objects_is_never_called_with_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaCppBackend, "source_kinds", frozenset({SourceKind.FILE}))
    for call in ("supports", "load"):
        monkeypatch.setattr(LlamaCppBackend, call, lambda *_: pytest.fail("called"))
    source, message = FileTensors(path), "this FileTensors: an object with tensors, but llamacpp reads a file"
    assert slm.supports(source)["llamacpp"] == slm.types.Support(False, message)
    with pytest.raises(slm.UnsupportedModel, match=f"^{message}$"):
        slm.load(source, backend="llamacpp")
    with slm.load(source, backend=["llamacpp", "native"]) as model:
        assert message in model.info.reason
    with pytest.raises(slm.UnsupportedModel, match=r"^these 7 bytes: bytes, but llamacpp reads a file$"):
        slm.load(b"content", backend="llamacpp")


def test_a_directory_that_a_backend_does_not_read_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(
        slm.UnsupportedModel, match=r": a directory, but llamacpp reads a file, bytes, an object with tensors$"
    ):
        slm.load(tmp_path, backend="llamacpp")
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).touch()
    with pytest.raises(slm.UnsupportedModel, match=r"tensors \(slm convert .* model.gguf --to gguf writes a file\)$"):
        slm.load(tmp_path, backend="llamacpp")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "int is not a source of a model: it has no metadata, tensors, tensor_data, fingerprint"),
        (None, "NoneType is not a source of a model"),
        (bytearray(b"GGUF"), "bytearray is not a source of a model"),
        (
            type("Half", (), {"metadata": {}, "tensors": {}})(),
            "Half is not a source of a model: it has no tensor_data, f",
        ),
    ],
)
def test_what_is_no_source_is_refused_by_the_members_that_it_lacks(value: Any, message: str) -> None:
    for call in (slm.load, slm.supports, slm.load_vocab):
        with pytest.raises(slm.InvalidOption, match=message) as caught:
            call(value)
        assert "\n" not in str(caught.value)


class Hostile(Mapping[str, Any]):
    """A mapping that raises while it is read."""

    def __getitem__(self, key: str) -> Any:
        raise RecursionError("no\nend")

    def __iter__(self) -> Iterator[str]:
        return iter(["key"])

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"metadata": 5}, "<Source>: metadata cannot be read: TypeError: int is not a mapping"),
        ({"metadata": Hostile()}, "<Source>: metadata cannot be read: RecursionError: no end"),
        ({"metadata": {5: "five"}}, "a metadata key is int"),
        ({"metadata": {"key": None}}, "metadata 'key' is None, which cannot be stored"),
        ({"metadata": {"key": -1}}, "metadata 'key' is int, which cannot be stored"),
        ({"metadata": {"key": 1 << 32}}, "metadata 'key' is int, which cannot be stored"),
        ({"metadata": {"key": []}}, "metadata 'key' is list, which cannot be stored"),
        ({"metadata": {"key": [1, "two"]}}, "<Source>: "),
        ({"metadata": {"key": "\ud800"}}, "metadata 'key' is str, which cannot be stored"),
        ({"metadata": {"\ud800": "text"}}, "a metadata key is not text"),
        ({"metadata": {"key": np.zeros(2, np.complex64)}}, "metadata 'key' is ndarray, which cannot be stored"),
        ({"metadata": {"key": b""}}, "<Source>: "),
        ({"metadata": {"key": stored_uint32(1)[:-1]}}, "damaged"),
        ({"metadata": {"key": stored_uint32(1) + b"\0"}}, "damaged"),
        ({"metadata": {"key": b"\x08\0\0\0" + (2**62).to_bytes(8, "little")}}, "truncated"),
        ({"tensors": []}, "<Source>: tensors cannot be read: TypeError: list is not a mapping"),
        ({"tensors": Hostile()}, "<Source>: tensors cannot be read: RecursionError: no end"),
        ({"tensors": {5: ((1,), 0)}}, "the name of a tensor is int"),
        ({"tensors": {"\ud800": ((1,), 0)}}, "tensor "),
        ({"tensors": {"x" * 70_000: ((1,), 0)}}, "tensor name of 70000 bytes"),
        ({"tensors": {"one": None}}, "tensor 'one': "),
        ({"tensors": {"one": ((), 0)}}, "not a list of 1 to 4 sizes"),
        ({"tensors": {"one": ((1,) * 5, 0)}}, "not a list of 1 to 4 sizes"),
        ({"tensors": {"one": (iter([1]), 0)}}, "not a list of 1 to 4 sizes"),
        ({"tensors": {"one": ((1.5,), 0)}}, "tensor 'one': "),
        ({"tensors": {"one": ((0,), 0)}}, "impossible shape"),
        ({"tensors": {"one": ((-3, -3), 0)}}, "impossible shape"),
        ({"tensors": {"one": ((10**5000,), 0)}}, "impossible shape"),
        ({"tensors": dict.fromkeys("abcde", ((2**61,), 28))}, "the tensors take"),
        ({"tensors": {"one": ((33,), GgmlType.Q8_0)}}, "rows of 33, not a whole number of blocks of 32"),
        ({"tensors": {"one": ((32,), 4)}}, "tensor 'one': 4 is not a valid GgmlType"),
        ({"tensors": {"one": ((32,), "Q8_0")}}, "not a valid GgmlType"),
    ],
)
def test_a_source_that_no_file_could_be_is_refused_in_one_line(members: dict[str, Any], message: str) -> None:
    with pytest.raises(slm.InvalidModelFile, match=message) as caught:
        GgufFile.open(Source(**members))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (bytes(67), r"returned 67 bytes \(accepted: 68\)"),
        (bytes(69), r"returned 69 bytes \(accepted: 68\)"),
        (b"", "returned 0 bytes"),
        (None, r"returned None \(accepted: bytes, or contiguous uint8\)"),
        ("text" * 17, "returned str"),
        ([0] * 68, "returned list"),
        (np.zeros(17, np.float32), "returned an array of float32"),
        (np.zeros(136, np.uint8)[::2], "returned an array of uint8"),
        (np.full(68, None), "returned an array of object"),
        (np.zeros((2, 34), np.uint8, order="F"), "returned an array of uint8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_data_of_another_kind_or_length_never_reaches_a_kernel(data: Any, message: str) -> None:
    with (
        GgufFile.open(Source(data={"one": data})) as file,
        pytest.raises(slm.InvalidModelFile, match=rf"^<Source>: tensor 'one': tensor_data\(\) {message}"),
    ):
        file.tensor_data("one")


@pytest.mark.parametrize(
    "error", [OSError(5, "the network\nis down"), KeyError("x"), MemoryError(), slm.ModelClosed("y")]
)
def test_any_exception_of_a_source_is_named_in_one_line(error: Exception) -> None:
    def fail(*_: object) -> None:
        raise error

    for member, name in (("tensor_data", "tensor 'two'"), ("fingerprint", "the fingerprint")):
        source = Source()
        setattr(source, member, fail)
        with GgufFile.open(source) as file:
            read: Callable[[], object] = (
                file.fingerprint if member == "fingerprint" else lambda: file.tensor_data("two")
            )
            with pytest.raises(
                slm.InvalidModelFile, match=f"{name} cannot be read: {type(error).__name__}: "
            ) as caught:
                read()
            assert caught.value.__cause__ is error
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [None, 5, "", "0" * 63, "0" * 65, "g" * 64, "A" * 64, "0" * 64 + "\n", b"0" * 64])
def test_a_fingerprint_has_64_digits(value: Any) -> None:
    with GgufFile.open(Source(print=value)) as file, pytest.raises(slm.InvalidModelFile, match=r"64 lower-case hexad"):
        file.fingerprint()


def test_arrays_are_shared_read_only_and_aligned() -> None:
    array, odd = np.arange(68, dtype=np.uint8), memoryview(bytearray(80))[1:69]
    with GgufFile.open(Source(data={"one": array})) as file:
        blocks = file.tensor_data("one")
        assert np.shares_memory(blocks, array)
        assert not blocks.flags.writeable
    with GgufFile.open(Source(data={"one": odd})) as file:
        assert file.tensor_data("one").ctypes.data % 8 == 0, "kernels read numbers of up to 8 bytes at once"


def test_one_call_of_a_source_runs_at_a_time() -> None:
    """The first call waits for a second one, which must not come."""
    inside, second = threading.Semaphore(0), threading.Event()

    class Slow(Source):
        def tensor_data(self, name: str) -> Any:
            if inside.acquire(blocking=False):
                second.set()
            inside.release()
            second.wait(0.2)
            inside.acquire(blocking=False)
            return super().tensor_data(name)

    with GgufFile.open(Slow()) as file:
        threads = [threading.Thread(target=file.tensor_data, args=["one"]) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not second.is_set()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_whose_tensors_are_incomplete_is_refused(path: Path, name: str) -> None:
    source = FileTensors(path)
    source.tensors = {name: value for name, value in source.tensors.items() if name != "blk.0.attn_q.weight"}
    with pytest.raises(slm.SlmError, match=r"attn_q") as caught:
        slm.load(source, backend=name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BACKENDS)
def test_an_error_anywhere_in_loading_is_one_line_and_frees_the_model(path: Path, name: str) -> None:
    """The n-th read fails, for n up to the number of reads."""
    source = FileTensors(path)
    slm.load(source, backend=name).close()
    n_reads = sum(source.reads.values())
    for n in range(0, n_reads, 5):
        calls = iter(range(n_reads))

        def fail(name: str, data: bytes, n: int = n, calls: Iterator[int] = calls) -> bytes:
            if next(calls) == n:
                raise ConnectionError(f"no answer for {name}")
            return data

        with pytest.raises(slm.InvalidModelFile, match=r"^<FileTensors>: tensor '[\w.]+' cannot be read: Connection"):
            slm.load(FileTensors(path, fail), backend=name)


def test_random_slips_in_a_source_raise_one_line(path: Path) -> None:
    """Metadata, shapes, types and bytes of a working model, each changed at random: it loads, or is refused."""
    rng, good, refused = random.Random(0), FileTensors(path), 0
    for _ in range(60):
        source = FileTensors(path, lambda name, data: data[: len(data) - (rng.random() < 0.02)])
        source.metadata, source.tensors = whole(good), dict(good.tensors)  # type: ignore[assignment]
        key = rng.choice(list(good.metadata))
        source.metadata[key] = rng.choice([b"", rng.randbytes(12), 0, -1, "x", 2**31, [], ["a"], None, 1e30])  # type: ignore[index]
        name = rng.choice(list(good.tensors))
        shape, kind = good.tensors[name]
        wrong = rng.choice([(shape[::-1], kind), ((*shape, 1), kind), (shape, 0), (shape, 30), (shape, 8), ((), kind)])
        if rng.random() < 0.3:
            source.tensors[name] = wrong  # type: ignore[index]
        try:
            with slm.load(source, backend="native", tier="reference") as model:
                logits_of(model, n=3)
        except slm.SlmError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 20
