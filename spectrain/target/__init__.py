"""The target model: what its config says, the engines that run it, its KV cache, and the trees that it scores."""

from spectrain.target.device import to_device
from spectrain.target.fingerprint import fingerprint, tokenizer_fingerprint
from spectrain.target.kv_cache import KVCache
from spectrain.target.loading import load_target
from spectrain.target.target import TargetModel, TargetOutput, text_dtype
from spectrain.target.tree import DraftTree, Source

__all__ = [
    "DraftTree",
    "KVCache",
    "Source",
    "TargetModel",
    "TargetOutput",
    "fingerprint",
    "load_target",
    "text_dtype",
    "to_device",
    "tokenizer_fingerprint",
]
