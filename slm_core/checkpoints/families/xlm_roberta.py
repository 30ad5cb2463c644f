"""xlm-roberta: XLM-RoBERTa, an encoder of many languages (multilingual E5, BGE-M3 and its reranker)."""

from __future__ import annotations

from slm_core.checkpoints.families.bert import roberta as recipe

__all__ = ["recipe"]
