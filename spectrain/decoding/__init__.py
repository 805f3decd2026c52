"""The decoding loop: one lossless loop for every method, batch first. See `loop.py`."""

from spectrain.decoding.context import Context
from spectrain.decoding.drafter import Drafter
from spectrain.decoding.engine import Engine, Request, generate, stream
from spectrain.decoding.fingerprint import fingerprint, tokenizer_fingerprint
from spectrain.decoding.generation import Generation
from spectrain.decoding.kv_cache import KVCache
from spectrain.decoding.loading import load_target
from spectrain.decoding.loop import Emitted
from spectrain.decoding.prefixes import Prefixes
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.target import TargetModel, TargetOutput
from spectrain.decoding.transfer import to_device
from spectrain.decoding.tree import DraftTree, Source
from spectrain.decoding.verify import Verified, verify

__all__ = [
    "Context",
    "DraftTree",
    "Drafter",
    "Emitted",
    "Engine",
    "Generation",
    "KVCache",
    "Prefixes",
    "Request",
    "Sampling",
    "Source",
    "TargetModel",
    "TargetOutput",
    "Verified",
    "fingerprint",
    "generate",
    "load_target",
    "stream",
    "to_device",
    "tokenizer_fingerprint",
    "verify",
]
