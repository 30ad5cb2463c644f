"""Converts a GGUF file to a directory that onnxruntime-genai, optimum and this backend can load.

It contains the graph and its weights, the tokenizer, the chat template and the settings files of these programs.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnx import ModelProto, TensorProto
from slm_core.architectures import ModelSpec, Rope, ropes_of
from slm_core.errors import InvalidOption, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.modelinfo import chat_template, further_templates, model_info
from slm_core.tokenization import build_vocab
from slm_core.tokenization.export import tokenizer_files
from slm_core.types import Progress
from slm_onnx import BACKEND
from slm_onnx.coverage import read_supported
from slm_onnx.ports import PLANES, Kinds, past, present
from slm_onnx.products import GraphOptions
from slm_onnx.standalone import StandaloneGraph
from slm_onnx.tensors import read_values

GRAPH, WEIGHTS = "model.onnx", "model.onnx.data"
FINGERPRINT, N_PARAMS, QUANTIZATION = "slm_core.fingerprint", "slm_core.n_params", "slm_core.quantization"
"""Metadata keys of the graph: the GGUF file that it was made from, so that its dumps fit, and a description."""

_MOST_POSITIONS = 1 << 17  # the graph contains RoPE's tables
_PAGE = 4096  # alignment of memory mappings
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TOKENS = ("input_ids", "attention_mask", "position_ids")
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the directory of a model.

    Args:
        source: the GGUF file.
        folder: the directory to create. It must not exist, or be empty. After an error it does not exist.
        progress: called with the share that is done.

    Raises:
        InvalidModelFile, UnsupportedModel: the file is damaged, or its model cannot be converted.
        InvalidOption: the folder is not empty, or cannot be written.
    """
    with GgufFile.open(source) as gguf:
        spec = read_supported(gguf)
        texts = _texts(gguf, spec)
        try:
            _make(folder, gguf, spec, texts, progress)
        except OSError as error:
            raise InvalidOption(f"cannot write {folder}: {error.strerror or error}") from error


def rope_of(gguf: GgufFile, spec: ModelSpec) -> Rope:
    """The RoPE of a model with one RoPE for all layers and contexts."""
    (rope,) = ropes_of(spec, _n_ctx(gguf), partial(read_values, gguf)).values()
    return rope


def write_graph(model: ModelProto, weights: Mapping[str, NDArray[Any]], folder: Path) -> None:
    """Write a graph and its weights; arrays with the same memory are written once."""
    offsets: dict[tuple[int, int], int] = {}
    with (folder / WEIGHTS).open("wb") as file:
        for tensor in model.graph.initializer:
            if tensor.data_location != TensorProto.EXTERNAL:
                continue
            array = weights[tensor.name]
            key = (array.__array_interface__["data"][0], array.nbytes)
            if key not in offsets:
                file.seek(-file.tell() % _PAGE, 1)
                offsets[key] = file.tell()
                file.write(array.astype(array.dtype.newbyteorder("<"), copy=False).data)
            del tensor.external_data[:]
            for name, value in (("location", WEIGHTS), ("offset", offsets[key]), ("length", array.nbytes)):
                tensor.external_data.add(key=name, value=str(value))
    (folder / GRAPH).write_bytes(model.SerializeToString())


def _make(folder: Path, gguf: GgufFile, spec: ModelSpec, texts: Mapping[str, str], progress: Progress) -> None:
    folder = folder.absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidOption(f"{folder} is there already (accepted: a new folder, or an empty one)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _write_all(temporary, gguf, spec, texts, progress)
        temporary.chmod(0o755)  # like other folders; only the owner can read a temporary folder
        temporary.replace(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_all(folder: Path, gguf: GgufFile, spec: ModelSpec, texts: Mapping[str, str], progress: Progress) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    graph = StandaloneGraph(gguf, spec, GraphOptions(), rope_of(gguf, spec), _n_ctx(gguf))
    model = graph.build(lambda share: progress(0.7 * share))
    message = model.model()
    info = model_info(gguf, backend=BACKEND, device="")
    stated = {FINGERPRINT: info.fingerprint, N_PARAMS: str(info.n_params), QUANTIZATION: info.quantization}
    for key, value in stated.items():
        message.metadata_props.add(key=key, value=value)
    write_graph(message, model.weights, folder)
    progress(1.0)


def _texts(gguf: GgufFile, spec: ModelSpec) -> dict[str, str]:
    """All files but the graph and its weights, by name."""
    if spec.architecture not in _CLASSES:
        raise UnsupportedModel(
            f"{gguf.path}: architecture {spec.architecture!r} is not converted (accepted: {', '.join(_CLASSES)})"
        )
    if any(rope.long is not None for rope in Kinds.of(spec).ropes):
        raise UnsupportedModel(f"{gguf.path}: LongRoPE, which depends on the context's length, is not converted")
    if any(layer.experts for layer in spec.layers):
        raise UnsupportedModel(f"{gguf.path}: a model of experts is not converted")
    vocab = build_vocab(gguf)
    ids = {"bos_token_id": vocab.bos, "eos_token_id": sorted(vocab.eog_ids), "pad_token_id": vocab.eos}
    named = {name: value for name, value in ids.items() if value not in (None, [])}
    files = tokenizer_files(gguf, _n_ctx(gguf))
    template = chat_template(gguf)
    if template is not None:
        files["chat_template.jinja"] = template
    for name, text in further_templates(gguf).items():
        if not _TEMPLATE_NAME.fullmatch(name):
            raise UnsupportedModel(f"{gguf.path}: a chat template is named {name[:80]!r}, which cannot be a file name")
        files[f"additional_chat_templates/{name}.jinja"] = text
    settings = {
        "config.json": {**_config(gguf, spec), **named},
        "generation_config.json": named,
        "genai_config.json": _genai_config(gguf, spec, named),
    }
    return files | {name: json.dumps(data, indent=2) + "\n" for name, data in settings.items()}


def _n_ctx(gguf: GgufFile) -> int:
    return min(model_info(gguf, backend=BACKEND, device="").n_ctx_train, _MOST_POSITIONS)


def _config(gguf: GgufFile, spec: ModelSpec) -> dict[str, Any]:
    """``config.json`` in the format of transformers."""
    return {
        "architectures": [_CLASSES[spec.architecture]],
        "model_type": spec.architecture,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.n_embd,
        "intermediate_size": gguf.tensors["blk.0.ffn_gate.weight"].shape[0],
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.norm_eps,
        "max_position_embeddings": _n_ctx(gguf),
        "rope_theta": Kinds.of(spec).ropes[0].freq_base,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
    }


def _genai_config(gguf: GgufFile, spec: ModelSpec, ids: Mapping[str, Any]) -> dict[str, Any]:
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": GRAPH,
        "head_size": spec.head_dim,
        "hidden_size": spec.n_embd,
        "inputs": {name: name for name in _TOKENS} | _names("past", past),
        "outputs": {"logits": "logits"} | _names("present", present),
        "num_attention_heads": spec.n_heads,
        "num_hidden_layers": spec.n_layers,
        "num_key_value_heads": spec.n_kv_heads,
    }
    n_ctx = _n_ctx(gguf)
    model = {"type": spec.architecture, "context_length": n_ctx, "vocab_size": spec.n_vocab, "decoder": decoder, **ids}
    return {"model": model, "search": {"max_length": n_ctx, "do_sample": False, "past_present_share_buffer": True}}


def _names(which: str, name: Callable[[int | str, str], str]) -> dict[str, str]:
    """The names of the caches, with "%d" for the layer number."""
    return {f"{which}_{plane}_names": name("%d", plane) for plane in PLANES}
