"""The decoding loop: one lossless loop for every method, batch first. See `loop.py`."""

from spectrain.decoding.context import Context
from spectrain.decoding.drafter import Drafter, Method
from spectrain.decoding.engine import Engine, Request
from spectrain.decoding.generating import generate, stream
from spectrain.decoding.generation import Generation
from spectrain.decoding.loop import Emitted
from spectrain.decoding.prefixes import Prefixes
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.verify import Verified, verify
from spectrain.target.device import to_device
from spectrain.target.fingerprint import fingerprint, tokenizer_fingerprint
from spectrain.target.kv_cache import KVCache
from spectrain.target.loading import load_target
from spectrain.target.target import TargetModel, TargetOutput
from spectrain.target.tree import DraftTree, Source

__all__ = [
    "Context",
    "DraftTree",
    "Drafter",
    "Emitted",
    "Engine",
    "Generation",
    "KVCache",
    "Method",
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
