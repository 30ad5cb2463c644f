"""The backend itself: status, support of files, options."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from slm_conformance.oracle.factories import make_tiny_model, tiny_model
from slm_conformance.oracle.tensor_source import FileTensors
from slm_conformance.suite.bench import Bench
from slm_conformance.suite.scenarios.base import Scenarios
from slm_core.errors import (
    BackendUnavailable,
    InvalidModelFile,
    SlmError,
    UnknownOption,
    UnsupportedModel,
    VocabError,
)
from slm_core.protocols import Vocab
from slm_core.types import BackendStatus, ModelOptions, ModelSource, SourceKind, Support


class TestBackend(Scenarios):
    """The nouns Backend and Model."""

    on_one_model = (
        "test_status",
        "test_a_missing_file",
        "test_a_damaged_file",
        "test_source_kinds",
        "test_a_damaged_source",
        "test_an_unknown_architecture",
        "test_a_file_without_a_vocabulary",
        "test_an_unknown_option",
        "test_options_are_listed",
        "test_an_unknown_device",
    )

    def test_status(self, bench: Bench) -> None:
        """Backend: a name of lower case letters, digits and underscores; a status with version and devices."""
        name = bench.backend.name
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name), f"the backend's name is {name!r}"
        spec = bench.workshop.fixtures.backend
        assert ":" in spec or name == spec, f"the backend is registered as {spec!r}, and calls itself {name!r}"
        status = bench.backend.status()
        assert isinstance(status, BackendStatus), f"status() returned {type(status).__name__}"
        assert (status.name, status.installed) == (name, True), f"the status of a loaded backend is {status}"
        assert status.version, "the status of an installed backend has no version"
        assert any(device.available for device in status.devices), "the status names no device that is available"

    def test_devices(self, bench: Bench) -> None:
        """Backend: each device of ``status`` loads models, is ``untried``, or has a reason why it is unavailable."""
        for device in bench.backend.status().devices:
            if not device.available:
                why = device.detail
                assert why and "\n" not in why, f"device {device.name!r} cannot be used, and not one line says why"
            elif not device.untried:
                options = dataclasses.replace(bench.workshop.options(), device=device.name)
                try:
                    bench.backend.load(bench.path, options).close()
                except SlmError as error:
                    raise AssertionError(f"device {device.name!r} is listed as available: {error}") from error

    def test_supports_the_model(self, bench: Bench) -> None:
        """Backend: ``supports`` says yes to a file that loads, with a rank and a reason."""
        support = bench.backend.supports(bench.path, bench.workshop.fixtures.device)
        assert isinstance(support, Support), f"supports() returned {type(support).__name__}"
        assert support.supported, f"supports() says no to a file that it loads: {support.reason}"
        assert 0 <= support.rank <= 100, f"the rank is {support.rank}, ranks are from 0 to 100"

    def test_info(self, bench: Bench) -> None:
        """Model: ``info`` equals the file's metadata."""
        info, weights = bench.model.info, bench.weights()
        shape = weights.shape
        properties = (info.architecture, info.n_layers, info.n_embd, info.n_vocab)
        expected = (shape.architecture, shape.n_layers, shape.n_embd, weights.n_vocab)
        assert properties == expected, (
            f"architecture, n_layers, n_embd and n_vocab are {properties}, the file says {expected}"
        )
        n_params = sum(tensor.size for tensor in weights.tensors.values())
        assert info.n_params == n_params, f"n_params is {info.n_params}, the tensors have {n_params} elements"
        assert bench.vocab.size == weights.n_vocab, "vocab.size is another than the number of logits"
        assert Path(info.path).samefile(bench.path), f"info.path is {info.path}"

    def test_fingerprint(self, bench: Bench) -> None:
        """Model: equal content has an equal fingerprint, wherever the file is; other weights have another."""
        fingerprint = bench.model.info.fingerprint
        with bench.workshop.load(Path(shutil.copy(bench.path, bench.directory / "other name.gguf"))) as copy:
            assert copy.info.fingerprint == fingerprint, "a copy of the file at another path has another fingerprint"
        with bench.workshop.load(bench.sibling(bench.directory)) as other:
            assert other.info.fingerprint != fingerprint, "a model with other weights has the same fingerprint"

    def test_a_missing_file(self, bench: Bench) -> None:
        """Backend: a missing file and a directory raise ``InvalidModelFile``."""
        for path in (bench.directory / "missing.gguf", bench.directory):
            with bench.refused(f"loading {path.name}", InvalidModelFile):
                bench.workshop.load(path)
            with bench.refused(f"supports({path.name})", InvalidModelFile):
                bench.backend.supports(path)

    def test_a_damaged_file(self, bench: Bench) -> None:
        """Backend: an empty file, random bytes and a truncated file raise ``InvalidModelFile``."""
        intact = tiny_model(bench.directory, "llama", "q8_0").read_bytes()
        damaged: Mapping[str, bytes] = {
            "an empty file": b"",
            "text": b"this is no model, whatever its name says\n" * 10,
            "half a header": intact[:2000],
            "half a file": intact[: len(intact) // 2],
            "all but a byte": intact.rstrip(b"\0")[:-1],
        }
        for what, data in damaged.items():
            path = bench.directory / "damaged.gguf"
            path.write_bytes(data)
            with bench.refused(f"loading {what}", InvalidModelFile):
                bench.workshop.load(path)

    def test_source_kinds(self, bench: Bench) -> None:
        """Backend: bytes and an object, if declared, give the logits and the fingerprint of the file, bit for bit."""
        kinds, file = bench.backend.source_kinds, SourceKind.FILE
        assert file in kinds and kinds <= frozenset(SourceKind), (
            f"source_kinds is {kinds}; the suite's models are files"
        )
        path = bench.sibling(bench.directory)
        sources: Mapping[SourceKind, ModelSource] = {
            file: path,
            SourceKind.BYTES: path.read_bytes(),
            SourceKind.TENSORS: FileTensors(path),
        }
        rows, fingerprints = {}, {}
        for kind, source in sources.items():
            if kind in kinds:
                support = bench.backend.supports(source, bench.workshop.fixtures.device)
                assert kind is file or support.supported, f"supports() says no to {kind}: {support.reason}"
                with bench.workshop.load(source) as model:
                    rows[kind] = bench.feed(bench.context(n_ctx=32, model=model), range(9)).copy()
                    fingerprints[kind] = model.info.fingerprint
        for kind in rows:
            assert fingerprints[kind] == fingerprints[file], f"{kind} have another fingerprint than the file"
            assert np.array_equal(rows[kind], rows[file]), f"{kind} give other logits than the file"

    def test_a_damaged_source(self, bench: Bench) -> None:
        """Backend: an object that raises, or returns other tensors than declared, raises ``InvalidModelFile``."""
        if SourceKind.TENSORS not in bench.backend.source_kinds:
            pytest.skip("declared absent: objects with tensors")
        path, changed = bench.sibling(bench.directory), "token_embd.weight"
        changes: Mapping[str, Callable[[str, bytes], object]] = {
            "raises": lambda name, data: 1 // 0,
            "returns None": lambda name, data: None,
            "returns a byte less": lambda name, data: data[1:] if name == changed else data,
            "returns a byte more": lambda name, data: data + b"0" if name == changed else data,
        }
        for what, change in changes.items():
            with (
                FileTensors(path, change) as source,
                bench.refused(f"loading an object that {what}", InvalidModelFile),
            ):
                bench.workshop.load(source).close()

    def test_an_unknown_architecture(self, bench: Bench) -> None:
        """Backend: an unknown architecture raises ``UnsupportedModel``, and ``supports`` says no."""
        tiny = make_tiny_model("llama")
        tiny.metadata["general.architecture"] = "abacus"
        path = tiny.write(bench.directory / "abacus.gguf")
        support = bench.backend.supports(path, bench.workshop.fixtures.device)
        assert not support.supported, "supports() says yes to a file of the architecture 'abacus'"
        assert support.reason, "supports() says no to a file, but not why"
        with bench.refused("loading a file of the architecture 'abacus'", UnsupportedModel):
            bench.workshop.load(path)

    def test_a_file_without_a_vocabulary(self, bench: Bench) -> None:
        """Vocab: a file without a vocabulary is refused, or computes tokens, and its texts raise ``VocabError``."""
        whole = make_tiny_model("small_llama")
        metadata = {key: value for key, value in whole.metadata.items() if not key.startswith("tokenizer.")}
        n_vocab = whole.tensors["token_embd.weight"].shape[0]
        metadata |= {"tokenizer.ggml.model": "none", "llama.vocab_size": n_vocab}
        bare = dataclasses.replace(whole, metadata=metadata)
        path = bare.write(bench.directory / "bare.gguf")
        try:
            bench.workshop.load(path).close()
        except UnsupportedModel:
            return
        rows = []
        for file in (path, whole.write(bench.directory / "whole.gguf")):
            with bench.workshop.load(file) as model:
                rows.append(bench.feed(bench.context(n_ctx=32, model=model), range(9)))
                if file == path:
                    _check_no_texts(bench, model.vocab, n_vocab)
        bench.same(rows[0], rows[1], "the logits of a file without its vocabulary")

    def test_an_unknown_option(self, bench: Bench) -> None:
        """Backend: an option that ``load_options`` does not list raises ``UnknownOption``."""
        options = ModelOptions(bench.workshop.fixtures.device, backend_options={"no_such_option": 1})
        with bench.refused("loading with the option no_such_option", UnknownOption):
            bench.backend.load(bench.path, options)

    def test_options_are_listed(self, bench: Bench) -> None:
        """Backend: ``load_options`` describes each option in a line."""
        options = dict(bench.backend.load_options)
        bare = [name for name, text in options.items() if not text.strip() or "\n" in text]
        assert not bare, f"these options are not described in one line: {', '.join(bare)}"

    def test_an_unknown_device(self, bench: Bench) -> None:
        """Backend: an unknown device is an error, and ``supports`` says no to it."""
        with bench.refused("loading on the device 'abacus'", BackendUnavailable):
            bench.backend.load(bench.path, ModelOptions("abacus"))
        support = bench.backend.supports(bench.path, "abacus")
        assert not support.supported, "supports() says yes to the device 'abacus'"
        assert support.reason, "supports() says no to a device, but not why"

    def test_progress(self, bench: Bench) -> None:
        """Backend: ``progress`` is called with shares from 0 to 1, ending at 1; an exception in it cancels."""
        shares: list[float] = []
        bench.backend.load(bench.path, bench.workshop.options(shares.append)).close()
        assert shares, "progress was never called"
        assert all(a <= b for a, b in zip([0.0, *shares], [*shares, 1.0], strict=True)), f"progress went {shares}"
        assert shares[-1] == 1.0, f"progress ended at {shares[-1]}, not at 1.0"

        def refuse(share: float) -> None:
            raise KeyError(share)

        with pytest.raises(KeyError):
            bench.backend.load(bench.path, bench.workshop.options(refuse)).close()


def _check_no_texts(bench: Bench, vocab: Vocab, n_vocab: int) -> None:
    assert vocab.size == n_vocab, f"the vocabulary has {vocab.size} tokens, the model {n_vocab}"
    named = vocab.bos, vocab.eos, vocab.infill
    assert named == (None, None, None), f"a file without a vocabulary has bos, eos and infill {named}"
    with bench.refused("encode without a vocabulary", VocabError):
        vocab.encode("a", add_special=False, parse_special=False)
    with bench.refused("token_bytes without a vocabulary", VocabError):
        vocab.token_bytes(1)
    with bench.refused("decode without a vocabulary", VocabError):
        vocab.decode([1])
