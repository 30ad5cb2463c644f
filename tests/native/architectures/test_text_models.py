"""Directories of vision-language models, which are loaded as their text model."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from native.architectures.checkpoints import change_config, change_tensors, save_directory
from native.architectures.engines import make_subject, native_logits, transformers_logits
from native.exact import exact
from slm_core.architectures import read_spec
from slm_core.checkpoints import Checkpoint
from slm_core.errors import InvalidModelFile, UnsupportedModel
from slm_core.gguf import GgufFile
from slm_core.types import Capability

N_TOKENS = 60  # longer than the sliding windows of the families
BOUND = 1e-4  # clause 9 of the contract: float32, relative
OPTIONS = exact(n_ctx=N_TOKENS, n_batch=N_TOKENS)


@pytest.fixture(scope="module")
def tokens(random_tokens) -> list[int]:
    return random_tokens(N_TOKENS)


@pytest.mark.parametrize(
    ("family", "vision", "extra_config"),
    [
        ("gemma3", "vision_tower.vision_model.embeddings.weight", {"mm_tokens_per_image": 256}),
        ("llama4", "vision_model.class_embedding", {"image_token_index": 300, "tie_word_embeddings": False}),
        ("gemma3n", "vision_tower.x", {"audio_config": {}, "audio_token_id": 300}),
        ("gemma4", "embed_vision.x", {"audio_config": None, "image_token_id": 300}),
        ("gemma3", "model.multi_modal_projector.x", {"image_token_id": 300}),
        ("gemma3n", "model.embed_audio.x", {"audio_config": {}}),
        ("gemma4", "model.audio_tower.x", {"video_token_id": 300}),
    ],
)
def test_vision_language_models_are_loaded_as_their_text_model(
    tmp_path, load, tokens, assert_close, caplog, family, vision, extra_config
):
    """The prefix is ``language_model`` before transformers 5, and ``model`` since then."""
    subject = make_subject(tmp_path, family)
    folder = save_directory(subject.model, tmp_path / "hf")
    image = {vision: torch.ones(2, 3), f"{vision}.y": torch.ones(2)}
    prefix_change = ("^model.", "model.language_model.") if vision.startswith("model.") else ("^", "language_model.")
    change_tensors(folder, lambda logits: {re.sub(*prefix_change, name): each for name, each in logits.items()} | image)
    change_config(
        folder,
        lambda stated: {
            "architectures": ["ForConditionalGeneration"],
            "model_type": family,
            "text_config": {key: value for key, value in stated.items() if key != "architectures"},
            "vision_config": {"model_type": "siglip_vision_model"},
            **extra_config,
        },
    )
    with caplog.at_level(logging.INFO), load(folder).new_context(OPTIONS) as context:
        logits = native_logits(context, tokens, [N_TOKENS])
    assert_close(logits, transformers_logits(subject.model, tokens), BOUND)
    assert "2 tensors change nothing here" in caplog.text


@pytest.mark.parametrize("nested", [False, True])
def test_the_text_model_of_qwen2_vl(tmp_path, nested):
    """As published and as saved by transformers; another test compares M-RoPE."""
    subject = make_subject(tmp_path, "qwen2vl")
    folder = save_directory(subject.model, tmp_path / "hf")
    prefix = "model.language_model." if nested else "model."
    change_tensors(
        folder,
        lambda tensors: {
            **{re.sub(r"^model\.", prefix, name): each for name, each in tensors.items()},
            "visual.merger.x": torch.ones(2),
        },
    )
    kind = {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}}

    def change(stated):
        text = {key: value for key, value in stated.items() if key not in ("rope_parameters", "architectures")} | kind
        outside = {"model_type": "qwen2_5_vl" if nested else "qwen2_vl", "image_token_id": 300, "vision_config": {}}
        return {"text_config": text, "tie_word_embeddings": False, **outside} if nested else text | outside

    change_config(folder, change)
    with Checkpoint(folder) as directory, GgufFile.open(subject.path) as file:
        assert directory.tensors.keys() == file.tensors.keys()
        assert all(directory.tensor_data(name).tobytes() == file.tensor_data(name).tobytes() for name in file.tensors)
        assert read_spec(directory) == read_spec(file)


@pytest.mark.parametrize("family", ["qwen3vl", "qwen3vlmoe"])
@pytest.mark.parametrize("n_deep", [0, 2])
def test_the_text_model_of_qwen3_vl(tmp_path, load, tokens, assert_close, family, n_deep):
    """As transformers saves the whole model. With DeepStack, text logits are equal, but M-RoPE is not supported."""
    subject = make_subject(tmp_path, family)
    whole = _as_vision_language_model(subject.model, n_deep)
    folder = save_directory(whole, tmp_path / "hf")
    with Checkpoint(folder) as directory, GgufFile.open(subject.path) as file:
        assert directory.tensors.keys() == file.tensors.keys()
        assert all(directory.tensor_data(name).tobytes() == file.tensor_data(name).tobytes() for name in file.tensors)
        directory_spec, file_spec = read_spec(directory), read_spec(file)
        layers_without_sections = [replace(layer, rope=replace(layer.rope, sections=())) for layer in file_spec.layers]
        assert directory_spec == (replace(file_spec, layers=tuple(layers_without_sections)) if n_deep else file_spec)
    with load(folder).new_context(OPTIONS) as context:
        assert (Capability.MROPE_POSITIONS in context.capabilities) == (n_deep == 0)
        assert_close(native_logits(context, tokens, [N_TOKENS]), transformers_logits(whole, tokens), BOUND)


def test_experts_of_qwen3_vl_may_be_transposed(tmp_path, load, tokens, assert_close):
    """Published directories store (in, out) and one more key; transformers 5 reads them, but saves (out, in)."""
    whole = _as_vision_language_model(make_subject(tmp_path, "qwen3vlmoe").model, 2)
    folder = save_directory(whole, tmp_path / "hf")
    shapes: dict[str, tuple[int, ...]] = {}

    def published(tensors):
        shapes.update({name.rsplit(".", 1)[-1]: each.shape for name, each in tensors.items() if ".experts." in name})
        return {name: each.swapaxes(1, 2) if ".experts." in name else each for name, each in tensors.items()}

    change_tensors(folder, published)
    assert shapes == {"gate_up_proj": (7, 2 * 64, 288), "down_proj": (7, 288, 64)}, "transformers saves other shapes"
    change_config(folder, lambda stated: stated | {"text_config": stated["text_config"] | {"norm_topk_prob": True}})
    again = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(folder)
    expected = transformers_logits(again, tokens)
    assert_close(transformers_logits(whole, tokens), expected, BOUND)
    with load(folder).new_context(OPTIONS) as context:
        assert_close(native_logits(context, tokens, [N_TOKENS]), expected, BOUND)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("down_proj", (7, 288, 65), "neither rows nor columns of 64"),
        ("gate_up_proj", (7, 288, 288), "look the same"),
        ("gate_up_proj", (7, 126, 288), r"not \(7, 64, 288\)"),
    ],
)
def test_wrong_experts_of_qwen3_vl_are_refused(tmp_path, load, name, shape, message):
    folder = save_directory(_as_vision_language_model(make_subject(tmp_path, "qwen3vlmoe").model, 2), tmp_path / "hf")
    there = f"model.language_model.layers.1.mlp.experts.{name}"
    change_tensors(folder, lambda tensors: {**tensors, there: torch.ones(shape)})
    with pytest.raises(InvalidModelFile, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def _as_vision_language_model(model: Any, n_deep: int) -> Any:
    """A vision-language model with the weights of a text model."""
    kind = {"qwen3": "Qwen3VL", "qwen3_moe": "Qwen3VLMoe"}[model.config.model_type]
    known = getattr(transformers, f"{kind}TextConfig")().to_dict().keys() - {"model_type"}
    stated = {key: value for key, value in model.config.to_dict().items() if key in known}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2], "mrope_interleaved": True}
    vision_config = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "num_position_embeddings": 16,
    }
    vision_config |= {"out_hidden_size": stated["hidden_size"], "deepstack_visual_indexes": list(range(n_deep))}
    config_keys = {"text_config": stated | {"rope_parameters": rope}, "vision_config": vision_config}
    config = getattr(transformers, f"{kind}Config")(**config_keys)
    whole = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.lm_head.load_state_dict(model.lm_head.state_dict())
    return whole


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mrope_interleaved": False}, UnsupportedModel, "'text_config.rope_parameters.mrope_interleaved' is False"),
        ({"mrope_section": [3, 3, 3]}, InvalidModelFile, "add up to 8"),
        ({"rope_type": "yarn"}, UnsupportedModel, "'rope_type' is 'yarn'"),
        ({"abacus": 3}, UnsupportedModel, "'text_config.rope_parameters.abacus' is 3"),
    ],
)
def test_wrong_rope_parameters_of_qwen3_vl_are_refused(tmp_path, load, change, error, message):
    folder = save_directory(_as_vision_language_model(make_subject(tmp_path, "qwen3vl").model, 2), tmp_path / "hf")

    def changed(stated):
        stated["text_config"]["rope_parameters"] |= change
        return stated

    change_config(folder, changed)
    with pytest.raises(error, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
