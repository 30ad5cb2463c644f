"""The code that the contexts of all backends share: argument checks, the ledger, batches, dumps and their replay."""

from slm_core.context.base import ContextBase
from slm_core.context.checks import check_context_options, check_position_limit
from slm_core.context.core import joined_top, no_top_logits
from slm_core.context.finite import check_logits, check_states
from slm_core.context.model import ModelBase

__all__ = [
    "ContextBase",
    "ModelBase",
    "check_context_options",
    "check_logits",
    "check_position_limit",
    "check_states",
    "joined_top",
    "no_top_logits",
]
