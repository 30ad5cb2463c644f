"""Status, support, loading and refused files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from slm_conformance.oracle.factories import make_tiny_model, tiny_model
from slm_conformance.oracle.families import family_model
from slm_conformance.oracle.gguf_writer import write_gguf
from slm_core import subprocess_probe
from slm_core.errors import BackendUnavailable, InvalidModelFile, InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.plugins import Registry
from slm_core.types import Capability, ContextOptions, KvType, ModelOptions
from slm_llamacpp import devices, library, logs, plugin, status_probe
from slm_llamacpp.backend import LlamaCppBackend
from tests.llamacpp.conftest import LoadModel
from tests.llamacpp.feeding import error, feed, new_context, some_tokens
from tests.llamacpp.models import changed_model, recurrent_model, windowed_model


@pytest.fixture
def backend() -> LlamaCppBackend:
    return LlamaCppBackend()


def test_the_plugin_registers_without_importing_its_engine() -> None:
    script = (
        "import sys; from slm_core.plugins import Registry; from slm_llamacpp import plugin;"
        "backend = Registry({'llamacpp': plugin}).backend('llamacpp');"
        "assert backend.name == 'llamacpp' and backend.load_options;"
        "print(sorted(name for name in sys.modules if name.startswith(('llama_cpp', 'torch', 'onnx', 'tokenizers'))))"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (0, "[]\n"), process.stderr


def test_the_entry_has_a_hint() -> None:
    entry = Registry({"llamacpp": plugin}).backends["llamacpp"]
    assert "slm-core[llamacpp]" in entry.hint


class TestStatus:
    def test_installed(self, backend: LlamaCppBackend) -> None:
        status = backend.status()
        assert status.installed
        assert status.version.startswith(importlib.metadata.version("llama-cpp-python"))
        assert "cpu" in [device.name for device in status.devices]

    def test_not_installed(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(importlib.metadata, "version", missing)
        status_probe.status.cache_clear()
        status = backend.status()
        assert not status.installed
        assert "not installed" in status.reason
        assert "pip install" in status.hint

    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("raise OSError('libgomp.so.1: no such file')", "libgomp.so.1: no such file"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "exit code -11"),
        ],
    )
    def test_a_broken_installation(
        self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
    ) -> None:
        monkeypatch.setattr(status_probe, "status", lambda: subprocess_probe.run("llama.cpp", script))
        status = backend.status()
        assert (status.installed, "\n" in status.reason) == (False, False)
        assert reason in status.reason

    def test_status_never_raises(self, backend: LlamaCppBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status_probe, "status", lambda: 1 / 0)
        assert "ZeroDivisionError" in backend.status().reason

    def test_asking_imports_no_engine(self) -> None:
        script = (
            "import sys; from slm_llamacpp.backend import LlamaCppBackend;"
            "assert LlamaCppBackend().status().installed; print('llama_cpp' in sys.modules)"
        )
        process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert process.stdout == "False\n", process.stderr


class TestSupports:
    def test_supported_files(self, backend: LlamaCppBackend, llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "has_gpu_build", lambda: False)
        for device in ("auto", "cpu"):
            support = backend.supports(llama_file, device)
            assert (support.supported, support.rank) == (True, 50)

    @pytest.mark.parametrize(("gpus", "rank"), [(("CUDA0",), 80), ((), 50)])
    def test_an_available_gpu_raises_the_rank(
        self,
        backend: LlamaCppBackend,
        llama_file: Path,
        monkeypatch: pytest.MonkeyPatch,
        gpus: tuple[str, ...],
        rank: int,
    ) -> None:
        available = [devices.Device(1, "CPU", "", devices.DeviceKind.CPU)]
        available += [devices.Device(2, name, "", devices.DeviceKind.GPU) for name in gpus]
        monkeypatch.setattr(library, "has_gpu_build", lambda: True)
        monkeypatch.setattr(devices, "all_devices", lambda: available)
        assert backend.supports(llama_file).rank == rank
        assert backend.supports(llama_file, "cpu").rank == 50, "the CPU was requested"

    @pytest.mark.parametrize(
        ("names", "has_gpu"),
        [
            (("libggml.so", "libggml.so.0", "libggml-base.so", "libggml-cpu-haswell.so", "libllama.so"), False),
            (("ggml-blas.dll", "ggml-rpc.dll", "libggml-cpu.so.0.25.3"), False),
            (("libggml.so", "libggml-cuda.so"), True),
            (("libggml-metal.dylib",), True),
            (("ggml-vulkan.dll",), True),
        ],
    )
    def test_gpu_builds_are_recognized_by_their_libraries(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], has_gpu: bool
    ) -> None:
        (tmp_path / "lib").mkdir()
        for name in names:
            (tmp_path / "lib" / name).touch()
        spec = ModuleSpec("llama_cpp", None, is_package=True)
        assert spec.submodule_search_locations is not None
        spec.submodule_search_locations.append(str(tmp_path))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        assert library.has_gpu_build() == has_gpu

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"general__architecture": "neo-bert"}, "'neo-bert' is an encoder"),
            ({"general__architecture": "t5"}, "an encoder with a decoder"),
            ({"general__architecture": "dream"}, "a diffusion model"),
            ({"general__architecture": "llama9"}, "'llama9' is not one that llama.cpp runs"),
            ({"general__architecture": None}, "general.architecture"),
            ({"llama__attention__causal": False}, "the model is an encoder"),
            ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model"),
            ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens"),
        ],
    )
    def test_unsupported_files(
        self, backend: LlamaCppBackend, tmp_path: Path, changes: dict[str, Any], words: str
    ) -> None:
        support = backend.supports(changed_model(tmp_path / "model.gguf", **changes))
        assert not support.supported
        assert words in support.reason

    def test_a_vocabulary_alone(self, backend: LlamaCppBackend, tmp_path: Path) -> None:
        path = write_gguf(tmp_path / "vocab.gguf", make_tiny_model("qwen2").metadata, {})
        assert "a vocabulary only" in backend.supports(path).reason
        with pytest.raises(UnsupportedModel, match="a vocabulary only"):
            backend.load(path, ModelOptions())

    def test_layers_for_multi_token_prediction(self, backend: LlamaCppBackend, tmp_path: Path) -> None:
        """Files of deepseek2 have them, and run without them; llama.cpp refuses them in files of llama."""
        unknown, known = tiny_model(tmp_path, "mtp_llama"), family_model(tmp_path, "small_mtp")
        assert "no llama models with layers for multi-token prediction" in backend.supports(unknown).reason
        with backend.load(known, ModelOptions()) as model, model.new_context(ContextOptions(32, 1, 32)) as context:
            assert model.info.n_layers == 2
            assert Capability.MTP not in context.capabilities

    def test_a_missing_device(self, backend: LlamaCppBackend, llama_file: Path) -> None:
        assert "no device 'cuda:7'" in backend.supports(llama_file, "cuda:7").reason
        with pytest.raises(BackendUnavailable, match="no device 'cuda:7'"):
            backend.load(llama_file, ModelOptions(device="cuda:7"))

    def test_not_installed(self, backend: LlamaCppBackend, llama_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "is_installed", lambda: False)
        assert "not installed" in backend.supports(llama_file).reason

    def test_damaged_files_raise(self, backend: LlamaCppBackend, tmp_path: Path) -> None:
        (tmp_path / "empty.gguf").touch()
        for path in (tmp_path / "nothing.gguf", tmp_path, tmp_path / "empty.gguf"):
            for call in (lambda p=path: backend.supports(p), lambda p=path: backend.load(p, ModelOptions())):
                with pytest.raises(InvalidModelFile) as caught:
                    call()
                assert "\n" not in str(caught.value)

    def test_llamacpp_knows_every_claimed_architecture(self, tmp_path: Path) -> None:
        # llama.cpp complains about the architecture if it is unknown, and about missing keys if it is known.
        script = (
            "import sys; from pathlib import Path; from slm_llamacpp import library, logs, source;"
            "from tests.llamacpp.models import changed_model; api = library.load(); path = Path(sys.argv[1])\n"
            "for name in sorted(source._RUNS):\n"
            "    params = api.llama_model_default_params(); params.vocab_only = True\n"
            "    changed_model(path, general__architecture=name)\n"
            "    with logs.collected() as complaints:\n"
            "        api.llama_model_load_from_file(str(path).encode(), params)\n"
            "    if 'architecture' in logs.reason_in(complaints): print(name, logs.reason_in(complaints))\n"
        )
        command = [sys.executable, "-c", script, str(tmp_path / "model.gguf")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *filter(None, sys.path)])}
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (process.returncode, process.stdout) == (0, ""), process.stderr


class TestLoad:
    def test_info(self, load: LoadModel, llama_file: Path) -> None:
        info = load(llama_file).info
        assert (info.architecture, info.n_layers, info.n_embd, info.n_vocab) == ("llama", 3, 96, 305)
        assert info.backend == f"llamacpp {importlib.metadata.version('llama-cpp-python')}"
        assert info.device == "cpu"

    @pytest.mark.parametrize("options", [{"use_mmap": True}, {"use_mmap": False}, {"repack": False}, {"n_ubatch": 3}])
    def test_options_do_not_change_the_answer(
        self, load: LoadModel, llama_file: Path, options: Mapping[str, object]
    ) -> None:
        expected = feed(new_context(load(llama_file)), some_tokens(20))
        assert error(feed(new_context(load(llama_file, **options)), some_tokens(20)), expected) <= 1e-5

    def test_flash_attention_follows_the_option(self, load: LoadModel, llama_file: Path) -> None:
        off, on = (
            feed(new_context(load(llama_file, flash_attention=flash)), some_tokens(20)) for flash in (False, True)
        )
        default = feed(new_context(load(llama_file)), some_tokens(20))
        assert (default == off).all(), "the default on a CPU is off for few sequences"
        assert 1e-5 < error(on, off) < 1e-2, "llama.cpp's flash attention rounds keys and values to f16"

    @pytest.mark.parametrize(
        ("n_seq_max", "kv_type", "is_on"), [(8, KvType.F16, False), (9, KvType.F16, True), (9, KvType.F32, False)]
    )
    def test_flash_attention_is_on_for_many_sequences_in_f16(
        self, load: LoadModel, llama_file: Path, n_seq_max: int, kv_type: KvType, *, is_on: bool
    ) -> None:
        default, off, on = (
            feed(new_context(load(llama_file, **options), n_seq_max=n_seq_max, kv_type=kv_type), some_tokens(20))
            for options in ({}, {"flash_attention": False}, {"flash_attention": True})
        )
        assert error(on, off) > 1e-5
        assert (default == (on if is_on else off)).all()

    def test_check_tensors_finds_a_damaged_weight(self, load: LoadModel, tmp_path: Path) -> None:
        path = make_tiny_model("qwen2", "f16").write(tmp_path / "model.gguf")
        with GgufFile.open(path) as gguf:
            offset = gguf.tensors["blk.1.ffn_up.weight"].offset
        data = bytearray(path.read_bytes())
        data[offset : offset + 2] = b"\x00\x7e"  # NaN
        path.write_bytes(data)
        load(path)
        with pytest.raises(InvalidModelFile, match="invalid data"):
            load(path, check_tensors=True)

    def test_memory_that_cannot_be_locked(
        self, load: LoadModel, llama_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        api = library.load()
        load_file = api.llama_model_load_from_file

        def warn_and_load(path: bytes, params: Any) -> int:
            warning = b"warning: failed to mlock 4096-byte buffer (after previously locking 0 bytes): no memory\n"
            logs.receive(3, warning, None)
            return int(load_file(path, params))

        monkeypatch.setattr(api, "llama_model_load_from_file", warn_and_load)
        with pytest.raises(InvalidOption, match="use_mlock=True, but the system"):
            load(llama_file, use_mlock=True)
        load(llama_file)

    def test_locked_memory(self, load: LoadModel, llama_file: Path) -> None:
        for options in ({"use_mlock": True}, {"use_mlock": True, "use_mmap": False}):
            assert feed(new_context(load(llama_file, **options)), [1]).shape[0] == 1

    @pytest.mark.parametrize("n_threads", [0, -1, 1.5, True, "2", 10_000])
    def test_wrong_numbers_of_threads_are_refused(
        self, backend: LlamaCppBackend, llama_file: Path, n_threads: Any
    ) -> None:
        with pytest.raises(InvalidOption, match="n_threads="):
            backend.load(llama_file, ModelOptions(n_threads=n_threads))

    def test_threads_reach_llamacpp(self, backend: LlamaCppBackend, llama_file: Path) -> None:
        with backend.load(llama_file, ModelOptions(n_threads=3)) as model:
            context: Any = new_context(model)
            api = context._api
            assert api.llama_n_threads(context._pointer) == api.llama_n_threads_batch(context._pointer) == 3

    def test_gpu_options_on_a_cpu(self, load: LoadModel, llama_file: Path) -> None:
        with pytest.raises(InvalidOption, match="n_gpu_layers=4 is for GPUs"):
            load(llama_file, n_gpu_layers=4)

    @pytest.mark.parametrize("make", [windowed_model, recurrent_model])
    def test_other_architectures(self, backend: LlamaCppBackend, load: LoadModel, tmp_path: Path, make: Any) -> None:
        path = make(tmp_path / "model.gguf", *((8,) if make is windowed_model else ()))
        assert backend.supports(path).supported
        assert load(path).info.n_layers in (2, 4)


class TestProgress:
    def test_progress_rises_from_0_to_1(self, backend: LlamaCppBackend, llama_file: Path) -> None:
        shares: list[float] = []
        backend.load(llama_file, ModelOptions(n_threads=1, progress=shares.append)).close()
        assert shares == sorted(shares)
        assert (shares[0], shares[-1]) == (0.0, 1.0)

    @pytest.mark.parametrize("raised", [ValueError("stop"), KeyboardInterrupt()])
    @pytest.mark.parametrize("after", [0, 2])
    def test_an_exception_cancels(
        self, backend: LlamaCppBackend, llama_file: Path, raised: BaseException, after: int
    ) -> None:
        calls: list[float] = []

        def progress(share: float) -> None:
            calls.append(share)
            if len(calls) > after:
                raise raised

        with pytest.raises(type(raised)) as caught:
            backend.load(llama_file, ModelOptions(n_threads=1, progress=progress))
        assert caught.value is raised
        assert len(calls) == after + 1, "loading continued after the exception"


class TestRefusals:
    """Files that pass the header check, but that llama.cpp does not load: a one-line error with its reason."""

    @pytest.mark.parametrize(
        ("changes", "kind", "words"),
        [
            ({"llama__attention__layer_norm_rms_epsilon": None}, InvalidModelFile, "layer_norm_rms_epsilon"),
            ({"llama__block_count": 4}, InvalidModelFile, "blk.3"),
            (
                {"tokenizer__ggml__pre": "never-heard-of"},
                UnsupportedModel,
                "unknown pre-tokenizer type: 'never-heard-of'",
            ),
            ({"tokenizer__ggml__model": "never-heard-of"}, UnsupportedModel, "unknown tokenizer: 'never-heard-of'"),
            ({"tokenizer__ggml__merges": None}, InvalidModelFile, "merges"),
        ],
    )
    def test_reason(
        self,
        load: LoadModel,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        changes: dict[str, Any],
        kind: type[Exception],
        words: str,
    ) -> None:
        path = changed_model(tmp_path / "model.gguf", **changes)
        with pytest.raises(kind) as caught:
            load(path)
        assert words in str(caught.value)
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert any(record.levelno == logging.ERROR and words in record.getMessage() for record in caplog.records)
