"""The throughput model of SPIRe (Neelam et al. 2025, section 2): what a decoding step costs, without running anything.

    cost of a forward      = max(FLOPs, bytes x operational intensity)              in FLOP-equivalents
    throughput multiplier  = tau / ((k x draft + verify) / target)

A forward does 2 FLOPs per parameter and row, and reads its weights and its KV cache. The FLOPs of attention itself,
activations, prefill, sampling and communication are left out, and kernels are taken to reach the hardware's peaks.

    target = shape_of_model("HuggingFaceTB/SmolLM2-135M-Instruct")     # from its config alone
    model = CostModel(target, hardware)
    spire = Method(target.with_layers(2), Acceptance(3.401, k=4), SparseCache(), feedback=True)
    model.multiplier(spire, k=4, batch=[1, 8], context_tokens=[512])   # [B, L]

Letters: B batch sizes, L context lengths. Arrays are [B, L] float64: one row per batch size, one column per context.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from scipy.optimize import brentq
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from spectrain.config import conf_dir
from spectrain.config import groups as options
from spectrain.config.fields import typed
from spectrain.config.training import Train
from spectrain.errors import UserError
from spectrain.models.packages import target_path
from spectrain.stores.environment import cpu_name
from spectrain.stores.files import read_yaml
from spectrain.target.loading import first_line, load_config
from spectrain.target.modules import find_blocks, unsupported_layer_type
from spectrain.training.drafters import GUESSED_VOCAB

BYTES_PER_VALUE = {"fp8": 1, "int8": 1, "fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
LONGEST_DRAFT = 16  # tokens; longer drafts are not tried
MEASURED_S = 0.5  # of a CPU's rates
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
    """The hardware that forwards run on. Without peaks no cost has seconds."""

    name: str
    operational_intensity: float  # FLOPs that it does in the time in which it reads a byte
    bytes_per_value: float = 1  # of weights and KV cache
    flops_per_s: float | None = None

    @property
    def bytes_per_s(self) -> float:
        return self.flops_per_s / self.operational_intensity

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


def empty_model(name: str, **options: object) -> PreTrainedModel:
    """Return a Hugging Face causal LM without memory, from its config alone.

    Raises:
        UserError: there is no such config.
    """
    path = target_path(name)
    config = load_config(path, "target")
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # transformers raises types of its own here
        why = first_line(error)[:160]
        raise UserError(f"transformers makes no model of the config of {path} ({why}); give another target") from error


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


def speedup_by_depth(config: Train, hardware: Hardware) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Predict by the number of a drafter's blocks what it gains over a workload, and its draft lengths, [B, L] each.

    Candidates are 1, 2, 3, 4 and a quarter of the blocks, and what was asked. The unembedding counts, because a draft
    step reads it.

    Args:
        config: of a training whose kind is planned `by_depth`.
        hardware: that decodes.
    """
    target, own = shape_of_model(config.target.path), config.own
    wanted = {1, 2, 3, 4, target.n_layer // 4, own.n_layer if isinstance(own.n_layer, int) else 1}
    cache, workload, found = SparseCache(own.sink_tokens, own.window_tokens), config.workload, {}
    for n_layer in sorted(n for n in wanted if 1 <= n <= target.n_layer):
        shape = target.with_layers(n_layer)
        if own.draft_vocab is not None:
            n_tokens = GUESSED_VOCAB if own.draft_vocab == "auto" else own.draft_vocab
            shape = dataclasses.replace(shape, vocab_size=min(n_tokens, target.vocab_size))
        method = Method(shape, Acceptance(tau_of_depth(n_layer), 4), cache, own.feedback)
        model = CostModel(target, hardware, count_unembedding=True)
        found[n_layer] = model.best(method, workload.batch, workload.context_tokens)
    return found


def fastest_depth(config: Train, hardware: Hardware) -> int:
    """Return the number of blocks that gains most, as a mean over the workload."""
    found = speedup_by_depth(config, hardware)
    return max(found, key=lambda n_layer: float(found[n_layer][0].mean()))


def tau_of_depth(n_layer: int) -> float:
    """Return the tau to expect of a drafter of some blocks that drafts four tokens.

    Its rejections fall with a power of the depth, as measured on the bundled target (docs/results/depth.json).
    """
    alpha = 1 - REJECTED[0] * n_layer ** -REJECTED[1]
    return sum(alpha**i for i in range(5))


def hardware_named(device: str) -> options.Hardware | None:
    """Return the file of conf/hardware/ for a GPU whose name holds the one that the file gives; None: there is none."""
    files = map(read_yaml, sorted((conf_dir() / "hardware").glob("*.yaml")))
    return next((typed(one, options.Hardware, checks=False) for one in files if one["name"] in device), None)


def read_hardware(node: options.Hardware, dtype: str) -> Hardware:
    """Return the peaks of a machine; where none are given it is this machine, which is measured now."""
    if node.flops_per_s is None:
        flops_per_s, bytes_per_s = cpu_rates(dtype, torch.get_num_threads())
        name = f"this CPU ({cpu_name()}, {torch.get_num_threads()} thread(s)), {dtype}"
        return Hardware(name, flops_per_s / bytes_per_s, BYTES_PER_VALUE[dtype], flops_per_s)
    if dtype not in node.flops_per_s:
        known = ", ".join(node.flops_per_s)
        raise UserError(f"hardware={node.name} has no peak for dtype={dtype}; choose among {known}")
    flops_per_s = node.flops_per_s[dtype]
    return Hardware(f"{node.name}, {dtype}", flops_per_s / node.bytes_per_s, BYTES_PER_VALUE[dtype], flops_per_s)


@cache
def cpu_rates(dtype: str, n_threads: int) -> tuple[float, float]:
    """Return FLOPs per second of a matrix product, and bytes per second of one with a vector that no cache holds.

    They are interleaved for half a second, and both are medians, so a machine whose speed drifts hurts both alike.
    A processor that only emulates bfloat16 is a hundred times slower, so the number of turns cannot be fixed.
    """
    square = torch.ones(512, 512, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16)
    matrix, vector = torch.ones(2**15, 1024), torch.ones(1024)  # float32: in other dtypes slower than memory
    seconds = []
    with torch.inference_mode():
        while len(seconds) < 2 or np.sum(seconds) < MEASURED_S:  # the first turn is the warm-up
            seconds.append([_seconds(square, square), _seconds(matrix, vector)])
    product_s, stream_s = np.median(seconds[1:], axis=0)
    return float(2 * square.numel() ** 1.5 / product_s), float(4 * matrix.numel() / stream_s)


def _seconds(left: Tensor, right: Tensor) -> float:
    begun = time.perf_counter()
    left @ right
    return time.perf_counter() - begun
