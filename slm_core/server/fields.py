"""Fields of request bodies that several APIs share."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field

from slm_core.sampling import Sampling


class Strict(BaseModel):
    """A part of a body: an unknown field is an error, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class SamplingFields(Strict):
    """Options of ``slm_core.Sampling`` under their names (docs/sampling.md), except ``custom``."""

    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    top_a: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repeat_penalty: float | None = None
    penalty_window: int | None = None
    no_repeat_ngram: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_window: int | None = None
    dry_breakers: list[str | int] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    adaptive_entropy: float | None = None
    adaptive_decay: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    min_tokens: int | None = None
    min_keep: int | None = None
    order: list[str] | None = Field(None, description="The order of the steps.")
    temperature: float | None = Field(None, description="0 chooses the likeliest token.")
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Added to the logits of tokens, by id.")
    banned_tokens: list[int] | None = Field(None, description="Ids of tokens that are never chosen.")
    eog_bias: float | None = Field(None, description="Added to the logits of tokens that end an answer.")
    seed: int | None = None
    stop: str | list[str] | None = Field(None, description="Texts that end the answer.")

    def sampling(self, default: Sampling, **others: object) -> Sampling:
        """The sampling options: the defaults, replaced by the options in the body.

        Args:
            default: the default options.
            others: options that this API names in its own way; None keeps the default.

        Raises:
            InvalidOption: an invalid value.
        """
        values: Mapping[str, object] = {
            name: value for name in SamplingFields.model_fields if (value := getattr(self, name)) is not None
        }
        given = {**values, **{name: value for name, value in others.items() if value is not None}}
        if isinstance(self.stop, str):
            given["stop"] = (self.stop,)
        return Sampling.from_dict({**default.to_dict(), **given})


class EngineFields(Strict):
    """Fields for the engine."""

    model: str | None = Field(None, description="A name from /v1/models; the first model by default.")
    priority: float = Field(0, description="Requests with a larger priority come first.")
    cache_salt: str | None = Field(None, description="Requests share cached prefixes only with the same salt.")
