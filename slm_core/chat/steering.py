"""Options of a turn of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slm_core.argument_checks import check_kind
from slm_core.chat.tools import ToolErrors, ToolUse
from slm_core.constraints import Spec
from slm_core.generation import Event, StoppingCriterion
from slm_core.generation.speculation import Speculation
from slm_core.protocols import Constraint, Sampler
from slm_core.sampling import LogitsProcessor, Sampling
from slm_core.types import PrefillProgress, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Steering:
    """The options of a turn; ``Talking.stream`` documents them."""

    sampling: Sampling | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    constraint: Constraint | Spec | None = None
    stopping_criteria: Sequence[StoppingCriterion] | None = None
    speculation: Speculation | None = None
    timeout: float | None = None
    on_event: Callable[[Event], None] | None = None
    progress: PrefillProgress | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str = "auto"
    strict_tools: bool = False
    tool_errors: ToolErrors = "tell"
    max_rounds: int = 8

    @property
    def tool_use(self) -> ToolUse:
        """The options of tools.

        Raises:
            InvalidOption: an invalid value.
        """
        return ToolUse(self.tool_choice, self.strict_tools, self.tool_errors, self.max_rounds)

    def sampling_over(self, base: Sampling) -> Sampling:
        """The sampling of the turn.

        Args:
            base: the sampling of the chat.

        Raises:
            InvalidOption: an invalid value.
        """
        check_kind("sampling", self.sampling, Sampling)
        options = self.sampling if self.sampling is not None else base
        return options.override(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
        )
