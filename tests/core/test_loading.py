"""``slm.load``: the chosen backend, and the reported reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import slm_core as slm
from scripted import ByteVocab, ScriptedContext, TagFormatter, says
from slm_conformance.oracle.factories import make_tiny_model
from slm_core import loading
from slm_core.errors import (
    BackendUnavailable,
    InvalidModelFile,
    InvalidOption,
    PluginError,
    TemplateError,
    UnknownBackend,
    UnsupportedModel,
)
from slm_core.plugins import FormatterSource
from slm_core.types import (
    BackendStatus,
    ContextOptions,
    KvType,
    ModelInfo,
    ModelOptions,
    ModelSource,
    SourceKind,
    Support,
)


class FakeModel:
    def __init__(self, backend: str, options: ModelOptions, template: str | None) -> None:
        self.options, self.vocab, self.closed = options, ByteVocab(), False
        self.context_options: list[ContextOptions] = []
        self.info = ModelInfo(Path("x"), backend, "arch", "", 1, 1, 1, 260, 64, "F32", 4, "f", template, "cpu")

    def new_context(self, options: ContextOptions) -> ScriptedContext:
        self.context_options.append(options)
        return ScriptedContext(says("hello"), n_ctx=options.n_ctx, n_seq_max=options.n_seq_max, n_batch=options.n_batch)

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeBackend:
    name: str
    rank: int = 0
    installed: bool = True
    devices: tuple[str, ...] = ("auto", "cpu")
    template: str | None = "a template"
    source_kinds: frozenset[SourceKind] = frozenset({SourceKind.FILE})
    loaded: list[FakeModel] = field(default_factory=list)

    def status(self) -> BackendStatus:
        raise AssertionError("loading needs no status: it may be slow to find out")

    def supports(self, source: Path, device: str) -> Support:
        if not self.installed:
            return Support(False, "not here")
        return Support(device in self.devices, f"no device {device}", self.rank)

    def load(self, source: Path, options: ModelOptions) -> FakeModel:
        if not self.installed:
            raise BackendUnavailable("not here")
        self.loaded.append(FakeModel(self.name, options, self.template))
        return self.loaded[-1]


class FakeRegistry:
    def __init__(self, *backends: FakeBackend) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.formatters = {"template": None, "tags": None}
        self.guessable = False
        self.requested_formatter = ""

    def backend(self, name: str) -> FakeBackend:
        if name not in self.backends:
            raise UnknownBackend(name)
        return self.backends[name]

    def has_formatter(self, name: str) -> bool:
        return name in self.formatters

    def guess_formatter(self, has_token: Callable[[str], bool]) -> str | None:
        return "tags" if self.guessable and has_token("<|start|>") and not has_token("ab") else None

    def formatter(self, name: str, source: FormatterSource) -> TagFormatter:
        assert source.eos_token == "<|end|>"
        self.requested_formatter = name
        if name == "template" and source.template == "broken":
            raise TemplateError("the template is broken")
        if name not in self.formatters:
            raise TemplateError(f"unknown chat format {name}")
        return TagFormatter()


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> FakeRegistry:
    monkeypatch.delenv("SLM_BACKEND", raising=False)
    fake_registry = FakeRegistry(
        FakeBackend("slow", rank=1),
        FakeBackend("fast", rank=50),
        FakeBackend("gpu", rank=90, devices=("cuda",)),
        FakeBackend("absent", rank=100, installed=False),
    )
    monkeypatch.setattr(loading, "registry", lambda: fake_registry)
    return fake_registry


def test_the_best_backend_for_the_device_is_chosen_with_a_reason(known: FakeRegistry) -> None:
    model = slm.load("m.gguf")
    assert (model.info.backend, model.info.backend_name) == ("fast", "fast")
    for part in ("ranked 50", "slow 1", "gpu: no device auto", "absent: not here"):
        assert part in model.info.reason
    assert slm.load("m.gguf", device="cuda").info.backend == "gpu"


def test_the_name_overrides_the_environment_which_overrides_the_rank(
    known: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLM_BACKEND", "slow")
    assert slm.load("m.gguf").info.backend == "slow"
    assert slm.load("m.gguf").info.reason == "named by SLM_BACKEND"
    assert slm.load("m.gguf", backend="gpu").info.reason == "named by the caller"


def test_unusable_backends_are_named(known: FakeRegistry) -> None:
    with pytest.raises(UnknownBackend):
        slm.load("m.gguf", backend="nobody")
    with pytest.raises(BackendUnavailable, match="not here"):
        slm.load("m.gguf", backend="absent")
    with pytest.raises(UnsupportedModel, match=r"device 'npu'.*fast: no device npu"):
        slm.load("m.gguf", device="npu")


def test_a_broken_plugin_does_not_prevent_others(known: FakeRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = known.backend

    def backend(name: str) -> FakeBackend:
        if name == "absent":
            raise PluginError("cannot be imported")
        return whole(name)

    monkeypatch.setattr(known, "backend", backend)
    model = slm.load("m.gguf")
    assert model.info.backend == "fast"
    assert "absent: cannot be imported" in model.info.reason


@pytest.mark.parametrize("answer", [ValueError("no such\nkey"), UnsupportedModel("another format"), None])
def test_a_backend_that_does_not_answer_does_not_prevent_others(
    known: FakeRegistry, monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    def supports(source: ModelSource, device: str = "auto") -> None:
        if answer is not None:
            raise answer

    monkeypatch.setattr(known.backends["gpu"], "supports", supports)
    reasons = {"ValueError": "gpu: ValueError: no such key", "UnsupportedModel": "gpu: another format"}
    reason = reasons.get(type(answer).__name__, "gpu: supports() returned NoneType")
    for order in (None, ["gpu", "fast"]):
        model = slm.load("m.gguf", backend=order)
        assert model.info.backend == "fast"
        assert reason in model.info.reason


def test_a_file_that_is_damaged_for_one_backend_may_be_the_format_of_another(
    known: FakeRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def supports(source: ModelSource, device: str = "auto") -> Support:
        raise InvalidModelFile("not a GGUF file")

    for name in ("fast", "absent"):
        monkeypatch.setattr(known.backends[name], "supports", supports)
    model = slm.load("m.npz")
    assert model.info.backend == "slow"
    assert "fast: not a GGUF file" in model.info.reason
    for name in ("slow", "gpu"):
        monkeypatch.setattr(known.backends[name], "supports", lambda source, device: Support(False, "no"))
    with pytest.raises(InvalidModelFile, match="not a GGUF file"):
        slm.load("m.npz")


def test_options_reach_the_backend(known: FakeRegistry) -> None:
    shares: list[float] = []
    slm.load("m.gguf", device="cpu", n_threads=3, progress=shares.append, n_gpu_layers=5)
    options = known.backends["fast"].loaded[0].options
    assert (options.device, options.n_threads, options.backend_options) == ("cpu", 3, {"n_gpu_layers": 5})
    assert options.progress == shares.append


def test_contexts_have_the_requested_sizes_and_types(known: FakeRegistry) -> None:
    model = slm.load("m.gguf")
    with model.new_context(n_ctx=99, n_seq_max=2, n_batch=7, kv_type_k="q8_0", kv_type_v=KvType.F16):
        pass
    assert known.backends["fast"].loaded[0].context_options == [ContextOptions(99, 2, 7, KvType.Q8_0, KvType.F16)]
    with pytest.raises(
        InvalidOption, match=r"unknown KV type 'q3' \(accepted: f32, f16, bf16, q8_0, q6_0, q5_0, q4_0, f8_e4m3\)"
    ):
        model.new_context(kv_type_k="q3")


def test_a_chat_creates_and_closes_its_own_context(known: FakeRegistry) -> None:
    with slm.load("m.gguf") as model:
        with model.chat(system="s", sampling=slm.Sampling(temperature=0)) as chat:
            assert chat.send("x").text == "hello"
            context = chat.session.context
        with pytest.raises(slm.SlmError, match="closed"):
            context.length(0)
    assert known.backends["fast"].loaded[0].closed


def test_the_chat_format_is_the_models_by_default(known: FakeRegistry) -> None:
    assert slm.load("m.gguf").info.formatter == "tags"
    formatter = TagFormatter()
    assert slm.load("m.gguf", formatter=formatter).formatter is formatter
    with pytest.raises(TemplateError, match="unknown chat format"):
        slm.load("m.gguf", formatter="nothing")
    assert known.backends["fast"].loaded[-1].closed, "an unusable model is closed"


@pytest.mark.parametrize(
    ("template", "message"), [(None, "no chat template.*(registered: tags)"), ("broken", "is broken")]
)
def test_a_model_without_a_usable_format_loads_but_cannot_chat(
    known: FakeRegistry, template: str | None, message: str
) -> None:
    known.backends["fast"].template = template
    model = slm.load("m.gguf")
    assert model.info.formatter.startswith("none: ")
    with pytest.raises(TemplateError, match=message):
        model.chat()
    assert slm.load("m.gguf", formatter="tags").chat(sampling=slm.Sampling(temperature=0)).send("x").text == "hello"


def test_a_model_without_a_template_gets_the_format_of_its_tokens(
    known: FakeRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    known.backends["fast"].template, known.guessable = None, True
    model = slm.load("m.gguf")
    assert known.requested_formatter == "tags"
    assert model.info.formatter == "tags (guessed from the vocabulary: the model has no template)"
    assert "look like 'tags', which is used" in caplog.text, "a guess is reported"


def test_the_callers_template_overrides_the_models(known: FakeRegistry) -> None:
    slm.load("m.gguf", chat_template="another")
    assert known.requested_formatter == "template"
    with pytest.raises(TemplateError, match="is broken"):
        slm.load("m.gguf", chat_template="broken")
    with pytest.raises(InvalidOption, match="not both"):
        slm.load("m.gguf", chat_template="another", formatter="tags")
    for template in (b"another", Path("another.jinja"), 1):
        with pytest.raises(InvalidOption, match=r"^chat_template=.* \(accepted: a text, or None\)$"):
            slm.load("m.gguf", chat_template=template)  # type: ignore[arg-type]
        with pytest.raises(InvalidOption, match=r"^template=.* \(accepted: a text, or None\)$"):
            slm.formatter(template)  # type: ignore[arg-type]


def test_info_has_the_settings_in_effect(tmp_path: Path) -> None:
    path = make_tiny_model("llama").write(tmp_path / "m.gguf")
    with slm.load(path, backend="native", n_threads=2, tier="cpu") as model:
        assert "2 threads" in model.info.settings["kernels"]
        assert model.info.settings["swa_full"] == "True"
    with slm.load(path, backend="native", tier="reference", isolated=True) as model:
        assert model.info.settings["tier"] == "reference: the reference tier was asked for"
    (tmp_path / "m.profile.toml").write_text("[decode]\nbuckets = [1, 4]\n")
    with slm.load(path, backend="native", tier="torch", device="cpu", dtype="float32") as model:
        assert "float32" in model.info.settings["kernels"]
        assert "(1, 4)" in model.info.settings["profile"]
    with slm.load(path, backend="llamacpp", n_threads=1, flash_attention=True) as model:
        assert (model.info.settings["threads"], model.info.settings["flash_attention"]) == ("1", "True")
        assert "n_gpu_layers" not in model.info.settings
    with slm.load(path, backend="onnx", n_threads=1, accuracy_level=0) as model:
        assert (model.info.settings["threads"], model.info.settings["accuracy_level"]) == ("1", "0")
