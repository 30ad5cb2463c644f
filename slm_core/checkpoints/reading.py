"""Reads a directory's JSON files into a recipe."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias, cast

from slm_core.checkpoints import families, packed
from slm_core.checkpoints.changes import Change
from slm_core.checkpoints.config import Config
from slm_core.checkpoints.packed import Packing
from slm_core.checkpoints.recipe import Part, Recipe
from slm_core.checkpoints.store import INDEX, SINGLE
from slm_core.display import count
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import PlainValue
from slm_core.gguf.cursor import shown
from slm_core.jsonfile import read_json

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, WORLD = "tokenizer.json", "rwkv_vocab_v20230424.txt"
"""The files of a vocabulary; the second one is RWKV World's."""
_GENERATES = re.compile("ForCausalLM$|LMHeadModel$|ForConditionalGeneration$")
_ENCODES = re.compile("Model$|ForMaskedLM$")
_RANKS = re.compile("ForSequenceClassification$")
_ENCODERS = ("bert", "modernbert", "nomic_bert", "roberta", "xlm-roberta")
_TYPES = {"xlm_roberta": "xlm-roberta"}
"""The ``model_type`` of families whose modules have other names."""
_POOLING, _DENSE = "1_Pooling/config.json", ("2_Dense", "3_Dense")  # the files of sentence-transformers
_IDENTITY = "torch.nn.modules.linear.Identity"
_POOLINGS = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}
"""GGUF's number of each pooling."""
_RANK_POOLING = 4
_METHODS = ("fp8", "compressed-tensors", "mxfp4", *packed.METHODS)
_BLOCK = [128, 128]

Sources: TypeAlias = Mapping[str, Mapping[str, Change | None]]
"""By name in a directory: the names in GGUF files, with the conversion of each."""


def family_names() -> list[str]:
    """Every ``model_type`` with a module in ``families``."""
    return sorted(_TYPES.get(module.name, module.name) for module in pkgutil.iter_modules(families.__path__))


def read_recipe(folder: Path) -> Recipe:
    """Read a directory's ``config.json`` into a recipe; no weights are read.

    Raises:
        InvalidModelFile: it is not a directory of a model, or damaged, or a value is impossible.
        UnsupportedModel: its files are of another kind, or need a feature that is not implemented.
    """
    if not (folder / CONFIG).is_file():
        raise InvalidModelFile(f"{folder}: a directory without a {CONFIG}{_instead(folder)}")
    if not (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        raise UnsupportedModel(f"{folder}: there is no {SINGLE}{_instead(folder)}")
    config = Config(folder / CONFIG, read_json(folder / CONFIG))
    recipe = recipe_of(config)
    if not _is_encoder(config):
        return recipe
    if _ranks(config):
        return _with_rank_head(config, recipe)
    return _with_dense(folder, replace(recipe, metadata={**recipe.metadata, **_pooling(folder)}))


def vocabulary_of(folder: Path) -> Path:
    """The path of a directory's vocabulary, which may be missing."""
    world = folder / WORLD
    return world if world.is_file() and not (folder / TOKENIZER).is_file() else folder / TOKENIZER


def recipe_of(config: Config) -> Recipe:
    """The recipe of a configuration.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``read_recipe``.
    """
    kind = config.text("model_type")
    if kind not in family_names():
        raise UnsupportedModel(
            f"{config.source}: 'model_type' is {kind[:80]!r}, which is not implemented for directories (accepted:"
            f" {', '.join(family_names())}); a GGUF file of it may be"
        )
    _check_task(config)
    packing = _packing(config)
    for about in [config, *([config.part("text_config")] if "text_config" in config else [])]:
        about.only("is_encoder_decoder", False)
        about.only("add_cross_attention", False)
    module = importlib.import_module(f"{families.__name__}.{kind.replace('-', '_')}")
    recipe = cast("Callable[[Config], Recipe]", module.recipe)(config)
    config.refuse_others()
    return replace(recipe, packing=packing)


def sources_of(config: Config, stored: Collection[str]) -> Sources:
    """The tensors of GGUF files that are made of each of the ``stored`` tensors of a directory, and how.

    Raises:
        InvalidModelFile, UnsupportedModel: see ``read_recipe``; or a tensor becomes a part of a stack (experts).
    """
    recipe = recipe_of(config)
    by_name = {renamed(name, recipe.renamed): name for name in stored}
    sources: dict[str, dict[str, Change | None]] = {}
    for name, part in recipe.parts(by_name).items():
        for source in by_name.keys() & part.names():
            if part.n_stacked:
                raise UnsupportedModel(f"{shown(by_name[source])} is one of several matrices in {name}")
            sources.setdefault(by_name[source], {})[name] = part.change
    return sources


def renamed(name: str, renames: Mapping[str, str]) -> str:
    """A tensor's name with the prefix that recipes use; see ``Recipe.renamed``."""
    for pattern, replacement in renames.items():
        name = re.sub(pattern, replacement, name)
    return name


def answer_ends(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer, from the configurations, or else from the section of a text model.

    Raises:
        InvalidModelFile: a value is not a token.
    """
    tokens: list[int] = []
    for path in (folder / CONFIG, folder / GENERATION):
        stated = read_json(path) if path.exists() else {}
        text = stated.get("text_config")
        value = stated.get("eos_token_id")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        ends = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise InvalidModelFile(f"{path}: 'eos_token_id' is {repr(value)[:80]} (accepted: tokens)")
        tokens += ends
    return tuple(dict.fromkeys(tokens))


def _pooling(folder: Path) -> dict[str, PlainValue]:
    """The pooling of an embedding model, if the directory has a file for it.

    Raises:
        UnsupportedModel: the pooling is not implemented.
    """
    if not (folder / _POOLING).is_file():
        return {}
    settings = read_json(folder / _POOLING)
    modes = [name for name, value in settings.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModel(f"{folder / _POOLING}: {modes[:5]} (accepted: one of {', '.join(_POOLINGS)})")
    return {"pooling_type": _POOLINGS[modes[0]]}


def _with_rank_head(config: Config, recipe: Recipe) -> Recipe:
    """``recipe`` with the head of a reranker.

    Raises:
        UnsupportedModel: the family has no rerankers, or it is a classifier of several labels.
    """
    n_labels = len(config.mapping("id2label")) or 2  # the default of transformers
    if not recipe.rank_head or n_labels != 1:
        raise UnsupportedModel(
            f"{config.source}: a classifier of {count(n_labels, 'label')} (accepted: a reranker, which has one label,"
            " of model_type bert, modernbert, roberta or xlm-roberta)"
        )
    metadata = {**recipe.metadata, **recipe.rank_metadata, "pooling_type": _RANK_POOLING}
    return replace(recipe, metadata=metadata, model={**recipe.model, **recipe.rank_head})


def _with_dense(folder: Path, recipe: Recipe) -> Recipe:
    """``recipe`` with the dense layers after pooling; EmbeddingGemma has two.

    Raises:
        UnsupportedModel: another model has these layers, or they are of another kind.
    """
    folders = [name for name in _DENSE if (folder / name).exists()]
    if folders and recipe.architecture != "gemma-embedding":
        raise UnsupportedModel(f"{folder / folders[0]}: layers after pooling are not implemented for this model")
    metadata, model = dict(recipe.metadata), dict(recipe.model)
    for name in folders:
        config = Config(folder / name / CONFIG, read_json(folder / name / CONFIG))
        config.only("bias", False)
        config.only("activation_function", _IDENTITY)
        config.neutral("module_input_name", "module_output_name")
        prefix = f"dense_{name[0]}"
        metadata |= {f"{prefix}_feat_{end}": config.size(f"{end}_features") for end in ("in", "out")}
        model[f"{prefix}.weight"] = Part(f"{name}/linear.weight")
        config.refuse_others()
    return replace(recipe, metadata=metadata, model=model, subfolders=folders)


def _ranks(config: Config) -> bool:
    return any(map(_RANKS.search, config.strings("architectures")))


def _is_encoder(config: Config) -> bool:
    kind = config.text("model_type")
    is_bidirectional = config.is_true("use_bidirectional_attention")
    return kind in _ENCODERS or (kind == "gemma3_text" and is_bidirectional)


def _check_task(config: Config) -> None:
    names = config.strings("architectures")
    if _is_encoder(config):
        if names and not any(map(_ENCODES.search, names)) and not _ranks(config):
            raise UnsupportedModel(
                f"{config.source}: 'architectures' is {repr(names)[:80]}"
                " (accepted: ...Model, ...ForMaskedLM, ...ForSequenceClassification)"
            )
    elif names and not any(map(_GENERATES.search, names)):
        raise UnsupportedModel(
            f"{config.source}: 'architectures' is {repr(names)[:80]}, which does not generate text"
            " (accepted: ...ForCausalLM)"
        )


def _packing(config: Config) -> Packing | None:
    """How matrices of integers are packed. All other quantized weights, except FP8 and MXFP4, are refused."""
    if "quantization" in config and "quant_method" not in config.part("quantization_config"):
        raise UnsupportedModel(
            f"{config.source}: 'quantization' is that of MLX, which is not implemented; take a GGUF file, or the"
            " original weights"
        )
    if "quantization_config" not in config:
        return None
    about = config.part("quantization_config")
    method = about.text("quant_method")
    if method not in _METHODS:
        raise UnsupportedModel(
            f"{config.source}: 'quantization_config.quant_method' is {method[:80]!r}, which is not implemented"
            f" (accepted: {', '.join(_METHODS)}); take a GGUF file, or the original weights"
        )
    if method in packed.METHODS:
        return Packing.read(about, method)
    if method == "mxfp4":
        about.neutral("modules_to_not_convert", "dequantize")
    elif method == "fp8":
        about.only("weight_block_size", _BLOCK)
        about.only("fmt", "e4m3")
        about.neutral("activation_scheme", "modules_to_not_convert", "scale_fmt", "dequantize")
    else:
        about.only("format", "float-quantized", "naive-quantized", packed.PACK_QUANTIZED)
        about.only("quantization_status", "compressed", "frozen")
        about.neutral("config_groups", "global_compression_ratio", "ignore", "kv_cache_scheme", "version")
        about.neutral("sparsity_config")
        about.only("transform_config", {})  # rotations of activations
        if about.text("format", "") == packed.PACK_QUANTIZED:
            return Packing.of_compressed_tensors(about)
    return None


def _instead(folder: Path) -> str:
    """Advice for a directory without readable weights, as the end of an error message."""
    if gguf_files := sorted(folder.glob("*.gguf"), key=lambda path: (-path.stat().st_size, path.name)):
        return f", but with GGUF files (such as {gguf_files[0].name}): give the path of one"  # the largest is a model
    if any(folder.glob("model-*-of-*.safetensors")):
        return f", and its shards need their index, {INDEX}: download it, too"
    if (folder / "adapter_config.json").is_file():
        return ", but an adapter of PEFT: load its base model, and then the adapter (model.adapters.load, or --lora)"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        return ", and pickled weights are never read: save it anew by transformers' save_pretrained"
    return ""
