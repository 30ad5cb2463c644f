"""The paged KV cache: pages of 64 tokens, a block table for each sequence, copy on write, typed storage."""

from slm_native.kv.cache import BatchPlan, PagedKvCache, Rotate, Run
from slm_native.kv.chunks import in_chunks
from slm_native.kv.codecs import Array, KvCodec, Planes, codec_of
from slm_native.kv.parts import part_of
from slm_native.kv.spans import in_spans
from slm_native.kv.store import PAGE_TOKENS, HostKvLayer, HostPageStore, KvLayer, PageIndex, PageLayout, PageStore

__all__ = [
    "PAGE_TOKENS",
    "Array",
    "BatchPlan",
    "HostKvLayer",
    "HostPageStore",
    "KvCodec",
    "KvLayer",
    "PageIndex",
    "PageLayout",
    "PageStore",
    "PagedKvCache",
    "Planes",
    "Rotate",
    "Run",
    "codec_of",
    "in_chunks",
    "in_spans",
    "part_of",
]
