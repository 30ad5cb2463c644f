"""The paged KV cache: pages of 64 tokens, a block table for each sequence, copy on write, typed storage."""

from slm_native.kv.cache import BatchPlan, PagedKvCache, Run
from slm_native.kv.codecs import KvCodec, codec_of
from slm_native.kv.store import PAGE_TOKENS, KvLayer, PageIndex, PageLayout

__all__ = [
    "PAGE_TOKENS",
    "BatchPlan",
    "KvCodec",
    "KvLayer",
    "PageIndex",
    "PageLayout",
    "PagedKvCache",
    "Run",
    "codec_of",
]
