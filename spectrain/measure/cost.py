"""The throughput model of SPIRe (Neelam et al. 2025, section 2): what a decoding step costs, without running anything.

    cost of a forward      = max(FLOPs, bytes x operational intensity)              in FLOP-equivalents
    throughput multiplier  = tau / ((k x draft + verify) / target)

A forward does 2 FLOPs per parameter and row, and reads its weights and its KV cache. The FLOPs of attention itself,
activations, prefill, sampling and communication are left out, and kernels are taken to reach the peaks.

Letters: B batch sizes, L context lengths. Arrays are [B, L] float64: one row per batch size, one column per context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spectrain.errors import UserError, check_number, check_whole


@dataclass(frozen=True)
class Shape:
    """The dimensions of a decoder with a gated MLP that its cost depends on."""

    n_layer: int
    hidden_size: int
    n_head: int
    n_kv_head: int
    head_dim: int
    intermediate_size: int
    vocab_size: int = 0  # 0 where the unembedding is not counted
    body_parameters: int | None = None  # of the decoder blocks, counted in a model; None: of norms, attention and MLP

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                check_whole(name, value, 0 if name == "vocab_size" else 1)
        if self.n_head % self.n_kv_head:
            raise UserError(f"n_head={self.n_head} must be a multiple of n_kv_head={self.n_kv_head}")

    @property
    def body(self) -> int:
        """Parameters of the decoder blocks, without embedding, final norm and unembedding."""
        if self.body_parameters is not None:
            return self.body_parameters
        attention = 2 * self.hidden_size * (self.n_head + self.n_kv_head) * self.head_dim
        return self.n_layer * (2 * self.hidden_size + attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def kv_values(self) -> int:
        """Values that one token adds to the KV cache."""
        return 2 * self.n_layer * self.n_kv_head * self.head_dim

    @property
    def memory_projections(self) -> int:
        """Parameters of all K and V projections: SPIRe runs them once more for the memory of each drafted token."""
        return self.kv_values * self.hidden_size


@dataclass(frozen=True)
class Hardware:
    """The hardware that forwards run on. Without peaks no cost has seconds."""

    name: str
    operational_intensity: float  # FLOPs that it does in the time in which it reads a byte
    weight_bytes: float = 1  # per value
    kv_bytes: float = 1
    flops_per_s: float | None = None  # peaks
    bytes_per_s: float | None = None
    dtype: str | None = None  # of the multiplications
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("operational_intensity", "weight_bytes", "kv_bytes"):
            check_number(name, getattr(self, name), "(0, inf)")

    def cost(self, flops: np.ndarray, n_bytes: np.ndarray) -> np.ndarray:
        """Compute the FLOP-equivalents of a forward whose computation and memory traffic overlap (section 2)."""
        return np.maximum(flops, n_bytes * self.operational_intensity)

    def milliseconds(self, cost: np.ndarray) -> np.ndarray | None:
        return None if self.flops_per_s is None else 1e3 * cost / self.flops_per_s


@dataclass(frozen=True)
class SparseBudget:
    """How much of the context a sparse cache holds: sinks, and a window of fixed size or a share of the context."""

    sink_tokens: int = 1
    window_tokens: int | None = None  # None: context // share
    share: int = 8

    def __post_init__(self) -> None:
        check_whole("sink_tokens", self.sink_tokens, 0)
        check_whole("window_share", self.share, 1)
        if self.window_tokens is not None:
            check_whole("window_tokens", self.window_tokens, 1)

    def tokens(self, context_tokens: np.ndarray) -> np.ndarray:
        """Entries that a draft step reads: the whole context where it is shorter than sinks and window."""
        if self.window_tokens is None:
            return self.sink_tokens + context_tokens // self.share
        return np.minimum(context_tokens, self.sink_tokens + self.window_tokens)

    def __str__(self) -> str:
        return f"{self.sink_tokens} + {self.window_tokens or f'L // {self.share}'}"


@dataclass(frozen=True)
class Method:
    """How drafts are made, how long they are, and how many tokens they yield."""

    name: str  # vanilla | magicdec | spire | spire_dense
    shape: Shape  # of the model that drafts; the target's own for MagicDec
    k: int  # drafted tokens per step
    tau: float  # tokens per step, the target's own included: 1 .. k + 1
    budget: SparseBudget | None = None  # of its KV cache; None: the whole context
    feedback: bool = False  # whether the memory of each drafted token is projected to K and V once more

    def __post_init__(self) -> None:
        check_number(f"tau.{self.name}", self.tau, f"[1, {self.k + 1}]")  # at most k drafts and the target's own


@dataclass(frozen=True)
class StepCost:
    """FLOP-equivalents, each [B, L]."""

    draft: np.ndarray  # of one draft forward
    verify: np.ndarray
    target: np.ndarray  # of one token, without speculation
    k: int

    @property
    def step(self) -> np.ndarray:
        return self.k * self.draft + self.verify

    @property
    def iteration_time_multiplier(self) -> np.ndarray:
        """How many times as long as plain decoding a step takes."""
        return self.step / self.target


@dataclass(frozen=True)
class CostModel:
    """A target on a piece of hardware.

    The paper leaves the unembedding out, which is right for large models; `count_unembedding` adds it to every forward.
    """

    target: Shape
    hardware: Hardware
    count_unembedding: bool = False

    def parameters(self, shape: Shape) -> int:
        return shape.body + (shape.vocab_size * shape.hidden_size if self.count_unembedding else 0)

    def traffic(self, shape: Shape, batch: Sequence[int], cached_tokens: np.ndarray) -> np.ndarray:
        """Bytes of weights and KV cache that one forward reads, [B, L]."""
        rows = np.asarray(batch, dtype=np.float64)[:, None]
        cache = rows * np.asarray(cached_tokens, dtype=np.float64)[None] * shape.kv_values
        return self.parameters(shape) * self.hardware.weight_bytes + cache * self.hardware.kv_bytes

    def flops(self, shape: Shape, batch: Sequence[int], extra_parameters: int = 0) -> np.ndarray:
        """FLOPs of a forward over one token per row, [B, 1]."""
        return 2.0 * (self.parameters(shape) + extra_parameters) * np.asarray(batch, dtype=np.float64)[:, None]

    def step(self, method: Method, batch: Sequence[int], context_tokens: Sequence[int]) -> StepCost:
        """Compute what a step of a method costs. The target scores k + 1 tokens per row: the root and the drafts."""
        contexts = np.asarray(context_tokens)
        cached = contexts if method.budget is None else method.budget.tokens(contexts)
        extra = method.shape.memory_projections if method.feedback else 0
        flops, traffic = self.flops(self.target, batch), self.traffic(self.target, batch, contexts)
        return StepCost(
            draft=self.hardware.cost(self.flops(method.shape, batch, extra), self.traffic(method.shape, batch, cached)),
            verify=self.hardware.cost((method.k + 1) * flops, traffic),
            target=self.hardware.cost(flops, traffic),
            k=method.k,
        )

    def multiplier(self, method: Method, batch: Sequence[int], context_tokens: Sequence[int]) -> np.ndarray:
        """Throughput relative to autoregressive decoding, [B, L]."""
        return method.tau / self.step(method, batch, context_tokens).iteration_time_multiplier

    def intensity(self, batch: Sequence[int], context_tokens: Sequence[int], k: int) -> np.ndarray:
        """FLOPs per byte of a forward of the target over k tokens per row, [B, L]: Figure 3, without the root."""
        return k * self.flops(self.target, batch) / self.traffic(self.target, batch, np.asarray(context_tokens))

    def intensity_limit(self, context_tokens: Sequence[int], k: int) -> np.ndarray:
        """What `intensity` tends to as the batch grows, [L]: only the cache is left to read."""
        return 2.0 * k * self.parameters(self.target) / self._cache_bytes(context_tokens)

    def critical_context(self, k: int) -> float:
        """Tokens of the longest context in which verifying k tokens per row is compute-bound at some batch size."""
        cache_cost = self.target.kv_values * self.hardware.kv_bytes * self.hardware.operational_intensity
        return 2.0 * k * self.parameters(self.target) / cache_cost

    def critical_batch(self, context_tokens: Sequence[int], k: int) -> np.ndarray:
        """Rows from which verifying k tokens per row is compute-bound, [L]; inf where it never is."""
        parameters = self.parameters(self.target)
        spare = 2.0 * k * parameters / self.hardware.operational_intensity - self._cache_bytes(context_tokens)
        return np.divide(
            parameters * self.hardware.weight_bytes, spare, out=np.full(spare.shape, math.inf), where=spare > 0
        )

    def _cache_bytes(self, context_tokens: Sequence[int]) -> np.ndarray:
        """Bytes of one row's KV cache, [L]."""
        return np.asarray(context_tokens, dtype=np.float64) * self.target.kv_values * self.hardware.kv_bytes
