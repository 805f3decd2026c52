"""The throughput model of SPIRe (Neelam et al. 2025, section 2): what a decoding step costs, without running anything.

    python scripts/spire_throughput.py                                        # the paper's Figure 4
    python scripts/spire_throughput.py --target Qwen/Qwen3-8B --draft-vocab 32768   # what depths of a drafter gain

    cost of a forward      = max(FLOPs, bytes x operational intensity)              in FLOP-equivalents
    throughput multiplier  = tau / ((k x draft + verify) / target)

A forward does 2 FLOPs per parameter and row, and reads its weights and its KV cache. docs/plan.md has the formulas, and
what is left out.

Letters: B batch sizes, L context lengths. Arrays are [B, L] float64: one row per batch size, one column per context.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import brentq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a checkout need not be installed

from spectrain.errors import UserError
from spectrain.measure.tables import show, table_of
from spectrain.models.packages import target_path
from spectrain.planning.peaks import hardware_named
from spectrain.planning.plan import empty_model
from spectrain.target.modules import find_blocks, unsupported_layer_type

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LONGEST_DRAFT = 16  # tokens; longer drafts are not tried
REJECTED = 0.424, 0.30  # by a drafter of one block, and the power by which it falls with the blocks


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

    def with_layers(self, n_layer: int) -> Shape:
        """Return the shape of a drafter that is made of some of this model's blocks, as SPIRe's is."""
        return dataclasses.replace(self, n_layer=n_layer, body_parameters=None)


@dataclass(frozen=True)
class Hardware:
    """What forwards run on."""

    operational_intensity: float  # FLOPs that it does in the time in which it reads a byte
    bytes_per_value: float = 1  # of weights and KV cache

    def cost(self, flops: np.ndarray, n_bytes: np.ndarray) -> np.ndarray:
        """Compute the FLOP-equivalents of a forward whose computation and memory traffic overlap (section 2)."""
        return np.maximum(flops, n_bytes * self.operational_intensity)


@dataclass(frozen=True)
class SparseCache:
    """How much of the context a draft step reads: sinks, and a window of fixed size or a share of the context."""

    sink_tokens: int = 1
    window_tokens: int | None = None  # None: context // 8, as in the paper's figures

    def tokens(self, context_tokens: np.ndarray) -> np.ndarray:
        if self.window_tokens is None:
            return self.sink_tokens + context_tokens // 8
        return np.minimum(context_tokens, self.sink_tokens + self.window_tokens)


@dataclass(frozen=True)
class Acceptance:
    """tau, as it was measured with drafts of k tokens. For other k the acceptance rate is taken to be constant."""

    tau: float
    k: int = 4

    @property
    def rate(self) -> float:
        """The probability alpha that the target accepts a drafted token: tau = 1 + alpha + ... + alpha^k."""
        return brentq(lambda alpha: sum(alpha**i for i in range(self.k + 1)) - self.tau, 0.0, 1.0)

    def at(self, k: int) -> float:
        """Return tau of drafts of k tokens."""
        return self.tau if k == self.k else sum(self.rate**i for i in range(k + 1))


@dataclass(frozen=True)
class Method:
    """How drafts are made, and how well they are accepted."""

    shape: Shape  # of the model that drafts; the target's own for MagicDec
    acceptance: Acceptance
    cache: SparseCache | None = None  # None: it reads the whole context
    feedback: bool = False  # whether the memory of each drafted token is projected to K and V once more


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

    def flops(self, shape: Shape, batch: Sequence[int], extra_parameters: int = 0) -> np.ndarray:
        """Compute the FLOPs of a forward over one token per row, [B, 1]."""
        return 2.0 * (self.parameters(shape) + extra_parameters) * np.asarray(batch, dtype=np.float64)[:, None]

    def traffic(self, shape: Shape, batch: Sequence[int], cached_tokens: Sequence[int]) -> np.ndarray:
        """Compute the bytes of weights and KV cache that one forward reads, [B, L]."""
        rows = np.asarray(batch, dtype=np.float64)[:, None]
        cache = rows * np.asarray(cached_tokens, dtype=np.float64)[None] * shape.kv_values
        return (self.parameters(shape) + cache) * self.hardware.bytes_per_value

    def verify(self, batch: Sequence[int], context_tokens: Sequence[int], n_tokens: int = 1) -> np.ndarray:
        """Compute the cost of the target's forward over some tokens per row, [B, L]; one token: plain decoding."""
        traffic = self.traffic(self.target, batch, context_tokens)
        return self.hardware.cost(n_tokens * self.flops(self.target, batch), traffic)

    def draft(self, method: Method, batch: Sequence[int], context_tokens: Sequence[int]) -> np.ndarray:
        """Compute the cost of drafting one token per row, [B, L]."""
        contexts = np.asarray(context_tokens)
        cached = contexts if method.cache is None else method.cache.tokens(contexts)
        extra = method.shape.kv_values * method.shape.hidden_size if method.feedback else 0  # all K and V projections
        flops = self.flops(method.shape, batch, extra)
        return self.hardware.cost(flops, self.traffic(method.shape, batch, cached))

    def multiplier(self, method: Method, k: int, batch: Sequence[int], context_tokens: Sequence[int]) -> np.ndarray:
        """Compute the throughput of drafts of k tokens relative to autoregressive decoding, [B, L].

        The target scores k + 1 tokens per row: the root and the drafts.
        """
        where = batch, context_tokens
        step = k * self.draft(method, *where) + self.verify(*where, n_tokens=k + 1)
        return method.acceptance.at(k) * self.verify(*where) / step

    def best(
        self, method: Method, batch: Sequence[int], context_tokens: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the draft length of the highest throughput in each cell. Returns both, [B, L]."""
        by_k = [self.multiplier(method, k, batch, context_tokens) for k in range(1, LONGEST_DRAFT + 1)]
        return np.max(by_k, axis=0), np.argmax(by_k, axis=0) + 1


def shape_of_model(name: str) -> Shape:
    """Read the shape of a Hugging Face causal LM from its config alone.

    Parameters are counted in an empty model (torch's `meta` device), so biases, norms of heads and MLPs without a gate
    count as they are.

    Args:
        name: bundled checkpoint, folder or hub id.

    Raises:
        UserError: there is no such config, or the model does not cost what the formulas say.
    """
    model, path = empty_model(name), target_path(name)
    config, blocks = model.config, find_blocks(model)
    text = config.get_text_config()
    if any((getattr(text, key, None) or 1) > 1 for key in EXPERTS) or unsupported_layer_type(config):
        raise UserError(f"the cost of {path} is not modelled; choose a dense model with attention, and give n_layer")
    n_head, hidden = text.num_attention_heads, text.hidden_size
    return Shape(
        n_layer=text.num_hidden_layers,
        hidden_size=hidden,
        n_head=n_head,
        n_kv_head=getattr(text, "num_key_value_heads", None) or n_head,
        head_dim=getattr(text, "head_dim", None) or hidden // n_head,
        intermediate_size=getattr(text, "intermediate_size", None) or getattr(text, "ffn_dim", None) or 4 * hidden,
        vocab_size=text.vocab_size,
        body_parameters=sum(p.numel() for p in blocks.parameters()),
    )


def speedup_by_depth(
    target: Shape, hardware: Hardware, draft_vocab: int | None, batch: Sequence[int], context_tokens: Sequence[int]
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield numbers of a SPIRe drafter's blocks, with the predicted speedups and the draft lengths, [B, L] each.

    They are 1, 2, 3, 4 and a quarter of the target's. The unembedding counts, because a draft step reads it.
    """
    cache, model = SparseCache(1, 64), CostModel(target, hardware, count_unembedding=True)
    for n_layer in sorted(n for n in {1, 2, 3, 4, target.n_layer // 4} if 1 <= n <= target.n_layer):
        shape = target.with_layers(n_layer)
        if draft_vocab is not None:
            shape = dataclasses.replace(shape, vocab_size=min(draft_vocab, target.vocab_size))
        method = Method(shape, Acceptance(tau_of_depth(n_layer), 4), cache, feedback=True)
        yield n_layer, *model.best(method, batch, context_tokens)


def tau_of_depth(n_layer: int) -> float:
    """Return the tau to expect of a drafter of some blocks that drafts four tokens.

    Its rejections fall with a power of the depth, as measured on the bundled target (docs/results/depth.json).
    """
    alpha = 1 - REJECTED[0] * n_layer ** -REJECTED[1]
    return sum(alpha**i for i in range(5))


BATCH = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT_TOKENS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# FLOPs per byte and bytes per value (SPIRe, appendix): an H100 in FP8, as the paper rounds it.
MODEL = CostModel(Shape(8, 512, 8, 8, 128, 4096), Hardware(600, 1))
# A vanilla drafter of half the layers and half the width; the last two of the target's blocks; tau of Table 1.
METHODS = {
    "vanilla": Method(Shape(4, 256, 8, 8, 64, 2048), Acceptance(2.647)),
    "magicdec": Method(MODEL.target, Acceptance(3.891), SparseCache()),
    "spire": Method(MODEL.target.with_layers(2), Acceptance(3.401), SparseCache(), feedback=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="bundled checkpoint, folder or hub id, of which only the config is read")
    parser.add_argument("--hardware", default="H100", help="a name of conf/hardware/")
    parser.add_argument("--draft-vocab", type=int, help="tokens that the drafter can draft")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context-tokens", type=int, nargs="+", default=[1024, 8192])
    args = parser.parse_args()
    if args.target is None:
        return show([("Throughput relative to plain decoding, by the length of the context", table_of(figure_4()))])
    rows, peaks = [], hardware_named(args.hardware)
    hardware = Hardware(peaks.flops_per_s["bf16"] / peaks.bytes_per_s, 2)
    where = args.draft_vocab, args.batch, args.context_tokens
    for n_layer, speedups, lengths in speedup_by_depth(shape_of_model(args.target), hardware, *where):
        rows.append({"blocks": str(n_layer), "tau of 4": f"{tau_of_depth(n_layer):.2f}"})
        for i, batch in enumerate(args.batch):
            for j, context in enumerate(args.context_tokens):
                rows[-1][f"batch {batch}, {context:,} tokens"] = f"{speedups[i, j]:.2f} ({lengths[i, j]})"
    show([("Speedup over plain decoding, and draft length", table_of(rows))])


def figure_4() -> list[dict[str, str]]:
    rows = [{"method": name, "batch": str(batch)} for name in METHODS for batch in BATCH]
    values = [row for method in METHODS.values() for row in MODEL.multiplier(method, 4, BATCH, CONTEXT_TOKENS)]
    for row, cells in zip(rows, values, strict=True):
        row |= {f"{n:,} tokens": f"{cell:.2f}" for n, cell in zip(CONTEXT_TOKENS, cells, strict=True)}
    return rows


if __name__ == "__main__":
    main()
