"""roberta: RoBERTa, an encoder with byte-level tokens."""

from __future__ import annotations

from slm_core.checkpoints.families.bert import roberta as recipe

__all__ = ["recipe"]
