"""Directories of ONNX models: finds the decoder's files, and the roles of their inputs and outputs.

onnxruntime-genai names the roles in ``genai_config.json``. Optimum has standard names: ``input_ids``,
``attention_mask``, ``position_ids``, ``past_key_values.0.key`` to ``present.0.key`` and ``logits``. It exports one
graph, a merged graph with a switch for the first tokens (``use_cache_branch``), or a pair of graphs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.jsonfile import read_json

GENAI, CONFIG, GENERATION = "genai_config.json", "config.json", "generation_config.json"
_MERGED, _FIRST, _NEXT, _SINGLE = (
    *("decoder_model_merged.onnx", "decoder_model.onnx", "decoder_with_past_model.onnx", "model.onnx"),
)
_FOLDERS = ("", "onnx")
_CACHE = re.compile(r"(.*?)(\d{1,4})(.*?)(key|value)")
_ROLES = ("input_ids", "attention_mask", "position_ids", "use_cache_branch")
_PAST_NAMES = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
_PRESENT_NAMES = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}  # genai's defaults
_OTHER_PARTS = ("encoder", "vision", "speech", "embedding", "decoder_start_token_id")
_MOST_LAYERS = 1000


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a model.

    Attributes:
        folder: their folder.
        name: name of the layout.
        graphs: the decoder's graphs: one, or one for the first tokens of a sequence and one for later tokens.
        inputs: input names by role, from ``genai_config.json``; None for standard names.
        outputs: output names by role, from ``genai_config.json``; None for standard names.
        in_place: whether caches are written in place.
        config: the model's configuration; ``config.json`` overrides ``genai_config.json``.
        n_ctx: the longest context that the model was trained for; None if unknown.
        ends: ids of tokens that end an answer.
    """

    folder: Path
    name: str
    graphs: tuple[Path, ...]
    inputs: Mapping[str, str] | None
    outputs: Mapping[str, str] | None
    in_place: bool
    config: Mapping[str, Any]
    n_ctx: int | None
    ends: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ports:
    """The names of one graph's inputs and outputs.

    Attributes:
        tokens: int [1, n].
        mask: int [1, S], or None.
        positions: int [1, n], or None.
        branch: the switch of a merged graph, bool [1], or None.
        logits: float [1, n, V].
        past: keys and values of each layer, [1, K, S, D]; () if the graph is for first tokens only.
        present: keys and values after the run.
    """

    tokens: str
    mask: str | None
    positions: str | None
    branch: str | None
    logits: str
    past: tuple[str, ...]
    present: tuple[str, ...]


def find_layout(folder: Path) -> Layout:
    """Detect the layout of a directory; reads its JSON files, but no graph.

    Raises:
        InvalidModelFile: a file is damaged, or there is no decoder of a known layout.
        UnsupportedModel: there is more than a decoder, or an unknown kind of decoder.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    generation = read_json(folder / GENERATION) if (folder / GENERATION).exists() else {}
    if (folder / GENAI).exists():
        return _genai(folder, config, generation)
    name, graphs = _optimum_graphs(folder)
    n_ctx = _size(config, "max_position_embeddings", folder / CONFIG)
    ends = (*_ends(config, folder / CONFIG), *_ends(generation, folder / GENERATION))
    return Layout(folder, f"optimum, {name}", graphs, None, None, False, config, n_ctx, ends)


def find_ports(layout: Layout, graph: Path, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Ports:
    """Find the roles of a graph's inputs and outputs.

    Args:
        layout: the layout of its directory.
        graph: its file.
        inputs: the number of dimensions of each input, by name.
        outputs: the number of dimensions of each output, by name.

    Raises:
        UnsupportedModel: an input or output is missing or unknown.
    """
    if layout.inputs is not None and layout.outputs is not None:
        ports = _named_ports(layout.inputs, layout.outputs, inputs)
    else:
        ports = _standard_ports(inputs, outputs)
    expected = {ports.tokens, ports.mask, ports.positions, ports.branch, *ports.past} - {None}
    for kind, names, existing in (("input", expected, inputs), ("output", {ports.logits, *ports.present}, outputs)):
        for name in sorted(filter(None, names)):
            if name not in existing:
                raise UnsupportedModel(f"{graph}: there is no {kind} {name!r}")
    for name in sorted(inputs.keys() - expected):
        raise UnsupportedModel(f"{graph}: the input {name!r} is not known here")
    if len(ports.present) == 0 or (ports.past and len(ports.past) != len(ports.present)):
        raise UnsupportedModel(f"{graph}: it keeps no keys and values, so that each token would cost all before it")
    if inputs[ports.tokens] != 2 or outputs[ports.logits] != 3:
        raise UnsupportedModel(
            f"{graph}: {ports.tokens!r} and {ports.logits!r} are not [batch, tokens] and logits of them"
        )
    for name in (*ports.past, *ports.present):
        if {**outputs, **inputs}[name] != 4:
            raise UnsupportedModel(
                f"{graph}: the cache {name!r} has not the four dimensions batch, heads, tokens, width"
            )
    return ports


def _genai(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> Layout:
    file = folder / GENAI
    stated = read_json(file)
    model = _object(stated, "model", file)
    decoder = _object(model, "decoder", file)
    for part in (part for part in _OTHER_PARTS if part in model):
        raise UnsupportedModel(f"{file}: a model with {part!r} is more than a decoder")
    for part in ("pipeline", "sliding_window"):
        if decoder.get(part):
            raise UnsupportedModel(f"{file}: a decoder with {part!r} is not known here")
    inputs, outputs = (_texts(_object(decoder, part, file), file) for part in ("inputs", "outputs"))
    for role in sorted((inputs.keys() - {*_ROLES, *_PAST_NAMES}) | (outputs.keys() - {"logits", *_PRESENT_NAMES})):
        raise UnsupportedModel(f"{file}: the decoder's {role!r} is not known here")
    name = decoder.get("filename")
    if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
        raise InvalidModelFile(f"{file}: the decoder's filename {str(name)[:80]!r} is not a file of the directory")
    search = stated.get("search") or {}
    in_place = isinstance(search, dict) and search.get("past_present_share_buffer") is True
    ends = (*_ends(model, file), *_ends(generation, folder / GENERATION))
    settings = {"model_type": model.get("type"), "vocab_size": model.get("vocab_size")}
    settings |= {"hidden_size": decoder.get("hidden_size"), **config}
    n_ctx = _size(model, "context_length", file)
    return Layout(folder, "onnxruntime-genai", (folder / name,), inputs, outputs, in_place, settings, n_ctx, ends)


def _optimum_graphs(folder: Path) -> tuple[str, tuple[Path, ...]]:
    for inner in (folder / name for name in _FOLDERS):
        if (inner / _MERGED).is_file():
            return "merged", (inner / _MERGED,)
        if (inner / _FIRST).is_file() and (inner / _NEXT).is_file():
            return "a pair", (inner / _FIRST, inner / _NEXT)
        if (inner / _SINGLE).is_file():
            return "one graph", (inner / _SINGLE,)
    accepted = ", ".join((GENAI, _SINGLE, _MERGED, f"{_FIRST} with {_NEXT}"))
    raise InvalidModelFile(f"{folder}: no decoder of a known layout (accepted: {accepted})")


def _named_ports(named: Mapping[str, str], outputs: Mapping[str, str], inputs: Mapping[str, int]) -> Ports:
    patterns = [{**_PAST_NAMES, **named}[role] for role in _PAST_NAMES]
    patterns += [{**_PRESENT_NAMES, **outputs}[role] for role in _PRESENT_NAMES]
    n_layers = next((i for i in range(_MOST_LAYERS) if patterns[0].replace("%d", str(i)) not in inputs), 0)
    past, present = (
        tuple(name.replace("%d", str(i)) for i in range(n_layers) for name in pair)
        for pair in (patterns[:2], patterns[2:])
    )
    mask, positions, branch = (named.get(role) if named.get(role) in inputs else None for role in _ROLES[1:])
    tokens, logits = named.get("input_ids", "input_ids"), outputs.get("logits", "logits")
    return Ports(tokens, mask, positions, branch, logits, past, present)


def _standard_ports(inputs: Mapping[str, int], outputs: Mapping[str, int]) -> Ports:
    mask, positions, branch = (role if role in inputs else None for role in _ROLES[1:])
    past, present = (_caches(names, roles) for names, roles in ((inputs, _ROLES), (outputs, ("logits",))))
    return Ports(_ROLES[0], mask, positions, branch, "logits", past, present)


def _caches(names: Mapping[str, int], others: tuple[str, ...]) -> tuple[str, ...]:
    """The caches among ``names``: by layer, keys before values."""
    caches = [(int(m[2]), m[4], name) for name in names if name not in others and (m := _CACHE.fullmatch(name))]
    return tuple(name for _, _, name in sorted(caches))


def _object(stated: Mapping[str, Any], key: str, file: Path) -> dict[str, Any]:
    value = stated.get(key)
    if not isinstance(value, dict):
        raise InvalidModelFile(f"{file}: {key!r} is not an object")
    return value


def _texts(values: dict[str, Any], file: Path) -> dict[str, str]:
    for key, value in values.items():
        if not isinstance(value, str):
            raise InvalidModelFile(f"{file}: {key[:80]!r} is {str(value)[:80]!r}, not a name")
    return values


def _size(stated: Mapping[str, Any], key: str, file: Path) -> int | None:
    value = stated.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidModelFile(f"{file}: {key!r} is {repr(value)[:80]} (accepted: an integer from 1 on)")
    return value


def _ends(stated: Mapping[str, Any], file: Path) -> list[int]:
    value = stated.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise InvalidModelFile(f"{file}: 'eos_token_id' is {repr(value)[:80]} (accepted: token ids)")
    return ids
