"""Control vectors that are made of texts; the oracles are properties of the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import slm_core as slm
from slm_core.adapters import write_control_vector
from slm_core.steering import _principal

POSITIVE, NEGATIVE = ("My dog is very", "Once upon a time", "12 + 30 ="), ("A cat was", "It is", "The end of 7")


@pytest.fixture(scope="module")
def model() -> Iterator[slm.Model]:
    with slm.load(slm.demo_model_path(), backend="native", tier="reference") as model:
        yield model


def test_the_mean_is_the_difference_of_last_states(model: slm.Model) -> None:
    states = [[model.hidden_states(text, layers=[2, 4])[:, -1] for text in texts] for texts in (POSITIVE, NEGATIVE)]
    expected = np.mean(states[0], axis=0) - np.mean(states[1], axis=0)
    directions = model.control_vector(POSITIVE, NEGATIVE, layers=[2, 4])
    for layer, each in zip((2, 4), expected, strict=True):
        np.testing.assert_allclose(directions[layer], each, rtol=0, atol=1e-4 * np.abs(each).max())


@pytest.mark.parametrize("method", ["mean", "pca"])
def test_a_pair_steers_its_negative_text_to_the_state_of_its_positive_text(
    model: slm.Model, method: str, tmp_path: Path
) -> None:
    """With a scale of 1, at the steered layer, at the last token."""
    write_control_vector(
        model.control_vector(POSITIVE[:1], NEGATIVE[:1], layers=[3], method=method), tmp_path / "v.gguf"
    )
    name = model.adapters.load(tmp_path / "v.gguf", f"v-{method}").name
    wanted = model.hidden_states(POSITIVE[0], layers=[3])[0, -1]
    steered = model.hidden_states(NEGATIVE[0], layers=[3], adapters={name: 1.0})[0, -1]
    model.adapters.unload(name)
    before = model.hidden_states(NEGATIVE[0], layers=[3])[0, -1]
    assert np.linalg.norm(steered - wanted) < 1e-4 * np.linalg.norm(wanted) < np.linalg.norm(before - wanted)


def test_the_principal_component_leaves_out_what_varies_less() -> None:
    rng = np.random.default_rng(2)
    component = rng.standard_normal(40)
    component /= np.linalg.norm(component)
    strengths = rng.uniform(2, 4, 30)
    differences = np.outer(strengths, component) + 0.05 * rng.standard_normal((30, 40))
    direction = _principal(differences)
    assert direction @ component > 0.999 * np.linalg.norm(direction), "another direction, or its opposite"
    assert np.linalg.norm(direction) == pytest.approx(strengths.mean(), rel=0.02)
    np.testing.assert_allclose(_principal(-differences), -direction)


@pytest.mark.parametrize("isolated", [False, True])
def test_numbers_of_layers_may_be_numpys(isolated: bool) -> None:
    with slm.load(slm.demo_model_path(), backend="native", isolated=isolated) as model:
        states = model.hidden_states("a b", layers=np.array([1, 4]))  # type: ignore[arg-type]
        np.testing.assert_array_equal(states, model.hidden_states("a b", layers=[1, 4]))


def test_all_layers_but_the_first_have_a_direction(model: slm.Model) -> None:
    shares: list[float] = []
    directions = model.control_vector(POSITIVE, NEGATIVE, progress=shares.append)
    assert [*directions] == [*range(1, model.info.n_layers)]
    assert {(each.dtype.name, each.shape) for each in directions.values()} == {("float32", (model.info.n_embd,))}
    assert shares == pytest.approx([i / 6 for i in range(1, 7)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"negative": NEGATIVE[:2]}, "3 positive texts, but 2 negative texts"),
        ({"positive": (), "negative": ()}, "0 positive texts"),
        ({"method": "svm"}, r"method='svm' \(accepted: mean, pca\)"),
        ({"layers": [0, 1]}, "0 has no direction"),
        ({"layers": [99]}, r"layers=\[99\] \(accepted: one or more of 0 to 5\)"),
    ],
)
def test_wrong_arguments_are_refused(model: slm.Model, options: dict[str, object], message: str) -> None:
    with pytest.raises(slm.InvalidOption, match=message):
        model.control_vector(**{"positive": POSITIVE, "negative": NEGATIVE, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["llamacpp", "onnx"])
def test_other_backends_refuse(backend: str) -> None:
    with (
        slm.load(slm.demo_model_path(), backend=backend) as model,
        pytest.raises(slm.UnsupportedOutput, match=f"the backend {backend} gives no hidden states of this model's lay"),
    ):
        model.hidden_states("a", layers=[1])
