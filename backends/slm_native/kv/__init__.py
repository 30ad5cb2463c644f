"""The paged KV cache: pages of 64 tokens, a block table for each sequence, copy on write, typed storage."""

from slm_native.kv.cache import PagedKvCache
from slm_native.kv.codecs import Array, KvCodec, Planes, codec_of
from slm_native.kv.plan import BatchPlan, Run, in_blocks, in_chunks, part_of, with_biases
from slm_native.kv.store import PAGE_TOKENS, HostKvLayer, HostPageStore, KvLayer, PageIndex, PageLayout, PageStore
from slm_native.kv.stores import NewStore, Rotate, StoreGroup, in_model_order
from slm_native.kv.window import Held, WindowCache

__all__ = [
    "PAGE_TOKENS",
    "Array",
    "BatchPlan",
    "Held",
    "HostKvLayer",
    "HostPageStore",
    "KvCodec",
    "KvLayer",
    "NewStore",
    "PageIndex",
    "PageLayout",
    "PageStore",
    "PagedKvCache",
    "Planes",
    "Rotate",
    "Run",
    "StoreGroup",
    "WindowCache",
    "codec_of",
    "in_blocks",
    "in_chunks",
    "in_model_order",
    "part_of",
    "with_biases",
]
