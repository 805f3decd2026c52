"""A Hugging Face causal LM as the loop uses it: prefill, tree scoring, and captured block inputs.

Llama-like models run on the lean decoder of `llama.py`. Any other decoder of transformers whose layers are attention
runs on its own modules (`modules.py`): it takes a complete 4-D mask, explicit position ids and our `KVCache`.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from spectrain.errors import UserError, check_choice
from spectrain.kernels import NODES, ROWS, Graphs, padded
from spectrain.target.cache_pool import CachePool
from spectrain.target.facts import ModelFacts
from spectrain.target.hidden_states import Features, read_texts, stacked
from spectrain.target.kv_cache import KVCache
from spectrain.target.lean import LLAMA_LIKE, LeanEngine, shape_of, why_not_fused, why_not_lean
from spectrain.target.masks import Nodes, nodes_mask, tree_mask
from spectrain.target.modules import TransformersEngine, check_supported
from spectrain.target.prefill import read_prompts
from spectrain.target.sharded import TensorGroup
from spectrain.target.tree import DraftTree
from spectrain.target.weights import Int8Linear

ENGINES = ("auto", "lean", "transformers")
GRAPHS = ("auto", "none")
COMPILE = ("auto", "triton", "none")
T = TypeVar("T")
FINAL = -1  # among captured layers: the final states, the inputs of the unembedding


@dataclass(frozen=True)
class TargetOutput:
    """The result of one forward, or of a prefill (shapes in parentheses), in the dtype of steps or of whole texts."""

    logits: Tensor  # [B, N, V] ([R, 1, V], of each prompt's last token); meaningless at silent probes
    captured: Tensor | None  # [B, N, C, D] ([R, P, C, D]) inputs of the blocks `capture_layers`
    positions: Tensor  # [B, N] ([R, P]) int64 position ids
    hidden: Tensor | None = None  # [B, N, D] inputs of the unembedding, if the model keeps them; None after a prefill
    best: Tensor | None = None  # [B, N] int64 the likeliest tokens, where they are known already


class TargetModel(ModelFacts):
    """A causal LM with the calls that decoding and training need.

    Args:
        model: any Hugging Face causal LM with full attention or windows, on torch's attention where it can have that.
        tokenizer: its tokenizer; needed only where text is read or written.
        capture_layers: indices of the blocks whose inputs every forward returns; FINAL stands for the final states.
        prefill_chunk: prompt tokens per forward, where no programs read prompts; bounds the memory of long prompts.
        keeps_hidden: whether `score` returns the final hidden states, too.
        engine: "lean" runs the model on `LlamaDecoder`, "transformers" on its own modules; "auto" takes the lean
            decoder where it knows the architecture.
        dtype: to compute in; None: that of the weights. Others are for the lean decoder on a CPU.
        graphs: "auto" replays steps as CUDA graphs where the whole model is on one GPU; "none" never.
        compile: "auto" runs these steps through our own kernels where the model is on a GPU and Triton is installed;
            "triton" demands it; "none" leaves them to torch.
        group: the ranks that hold the model together; None: this process holds it alone.

    Raises:
        UserError: the model is none that the loop can run, or the engine does not know it.
    """

    has_blocks = True  # False: nothing is run, and only embedding and unembedding are in memory (`open_tables`)

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        capture_layers: Sequence[int] = (),
        prefill_chunk: int = 2048,
        keeps_hidden: bool = False,
        engine: str = "auto",
        dtype: torch.dtype | None = None,
        graphs: str = "auto",
        compile: str = "auto",
        group: TensorGroup | None = None,
    ):
        check_supported(model)
        self.config, self.tokenizer, self.group = model.config, tokenizer, group
        self.prefill_chunk, self.keeps_hidden = prefill_chunk, keeps_hidden
        check_choice("target.compile", compile, COMPILE)
        self._engine = _engine(model, engine, dtype, compile)
        check_choice("target.graphs", graphs, GRAPHS)
        is_on_one_card = self.device.type == "cuda" and len({one.device for one in model.parameters()}) == 1
        self.graphs = Graphs() if graphs == "auto" and is_on_one_card else None
        # Shared, as `graphs` is, by the copies that capture other layers.
        self.caches = CachePool(self._engine, self.graphs, self.n_layer)
        self.capture_layers = _checked(capture_layers, self.n_layer)

    @property
    def engine(self) -> str:
        """What the model runs on: lean or transformers."""
        return self._engine.name

    @property
    def tables(self) -> nn.ModuleList:
        """Embedding and unembedding."""
        return nn.ModuleList([self.model.get_input_embeddings(), self.model.get_output_embeddings()])

    @property
    def text_blocks(self) -> Sequence[nn.Module]:
        """The blocks of the lean decoder that whole texts run through; () of other models."""
        return self._engine.text_decoder.blocks if self.engine == "lean" else ()

    def to(self, device: torch.device) -> None:
        """Move the model in place, unless it is spread over several devices."""
        if device != self.device and not hasattr(self.model, "hf_device_map"):
            for module in [self.model] if self.has_blocks else self.tables:
                module.to(device)

    def in_8_bits(self) -> TargetModel:
        """Return the same model with weights of 8 bits where it runs on the lean decoder and a CPU; for drafting."""
        if not isinstance(self._engine, LeanEngine) or self._engine.layers is Int8Linear:
            return self
        engine = LeanEngine(self.model, self.dtype, Int8Linear)
        return self._with(_engine=engine, caches=CachePool(engine, self.graphs, self.n_layer))

    def with_capture(self, capture_layers: Sequence[int]) -> TargetModel:
        """Return the same model, capturing other layers."""
        return self._with(capture_layers=_checked(capture_layers, self.n_layer))

    def with_hidden(self) -> TargetModel:
        """Return the same model, whose `score` keeps the final hidden states."""
        return self._with(keeps_hidden=True)

    def without_graphs(self) -> TargetModel:
        """Return the same model, whose steps run as they are."""
        return self._with(graphs=None)

    def _with(self, **changes: object) -> TargetModel:
        other = copy.copy(self)
        vars(other).update(changes)
        return other

    @property
    def leads(self) -> bool:
        """Whether this process speaks for all that hold the model together."""
        return self.group is None or self.group.rank == 0

    def agreed(self, value: T) -> T:
        """Return the value of the process that leads: ranks that hold a model together decide alike by it."""
        return value if self.group is None else self.group.agreed(value)

    @property
    def fuses(self) -> bool:
        """Whether steps run through our own kernels."""
        return self._engine.fused is not None

    @property
    def model(self) -> PreTrainedModel:
        """The Hugging Face model, whose weights may be in a shorter dtype than `dtype`, which loses nothing."""
        return self._engine.model

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return self._engine.device

    @property
    def dtype(self) -> torch.dtype:
        """Of steps and prompts; see `LeanEngine.dtype`."""
        return self._engine.dtype

    def forward(self, tokens: Tensor) -> TargetOutput:
        """Run a plain causal forward over tokens [B, T] int64 without a cache, for training and teacher forcing.

        Returns logits [B, T, V] and captured [B, T, C, D]. The caller decides about gradients. No mask is built: sdpa
        runs with `is_causal`, so memory is linear in T.
        """
        logits, captured, _ = self._engine.run(tokens, capture_layers=self.capture_layers)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return TargetOutput(logits, stacked(captured), positions)

    def features(self, tokens: Tensor, starts: Tensor | None = None) -> Features:
        """Run a plain causal forward over tokens [B, T] int64 that computes the logits of one position only.

        With `starts`, documents that are packed into a row do not see each other (see `packed_mask`). Memory is linear
        in T, but for the masks of packed rows of up to MOST_MASKED tokens.
        """
        return read_texts(self._engine, self.capture_layers, self.prefill_chunk, tokens, starts)

    def features_of_own(self, tokens: Tensor, starts: Tensor | None = None) -> Features:
        """Return the `features` of rows that this rank has alone, and the others of its group others.

        The group reads the rows of each rank in turn, so that all else of a training is divided among all ranks.
        """
        if self.group is None:
            return self.features(tokens, starts)
        for rank, rows in enumerate(self.group.gathered(tokens, starts)):
            found = self.features(*rows)
            if rank == self.group.rank:
                own = found
        return own

    def logits_of(self, hidden: Tensor) -> Tensor:
        """Return the logits [..., V] of final hidden states [..., D], as a forward computes them."""
        return self._engine.logits_of(hidden)

    @property
    def unembedding(self) -> Tensor:
        """[V, D]: `final_hidden @ unembedding.T` are the logits (of models without output bias or soft-capping)."""
        return self._engine.unembedding

    def prefill(
        self, tokens: Tensor, lengths: Sequence[int], cache: KVCache, rows: range, read: Tensor | None = None
    ) -> TargetOutput:
        """Read prompts, tokens [R, T] int64, padded on the right with any valid id, into new rows at the cache's end.

        `read` [R, P] int64 are the positions whose captured states are wanted, -1 for none; None: P = T, all of them.

        Returns logits [R, 1, V] of each prompt's last token ([R, T, V] is never formed) and captured [R, P, C, D],
        whose entries past a row's length, and for positions of -1, are meaningless.
        """
        pieces = self.reading(tokens, lengths, cache, rows, read)
        while True:
            try:
                next(pieces)
            except StopIteration as stop:
                return stop.value

    def reading(
        self,
        tokens: Tensor,
        lengths: Sequence[int],
        cache: KVCache,
        rows: range,
        read: Tensor | None = None,
        known: int = 0,
        chunk: int | None = None,
    ) -> Generator[None, None, TargetOutput]:
        """Read prompts piece by piece, as `prefill` does, and return what it returns.

        Args:
            tokens, lengths, cache, rows, read: of `prefill`.
            known: tokens of the only prompt that the cache's row holds already. Of them those are read once more whose
                captured states are wanted.
            chunk: most tokens of a piece; None: `prefill_chunk`.
        """
        size = min(chunk or self.prefill_chunk, self.prefill_chunk)
        of_engine = self._engine, self.capture_layers, size
        return TargetOutput(*(yield from read_prompts(*of_engine, tokens, lengths, cache, rows, read, known)))

    def score(self, tree: DraftTree, cache: KVCache, positions: Tensor | None = None) -> TargetOutput:
        """Score every node of every row's tree in one forward, after the row's committed tokens.

        The nodes' K and V are left in the cache for `cache.commit`. Returns logits [B, N, V], captured [B, N, C, D].
        Position ids [B, N] are the row's cached tokens plus the node's depth. Where the cache holds only a part of the
        text, give the text's `positions`.
        """
        if self.graphs is not None or (self.fuses and cache.keys):
            return self._replayed(tree, cache, positions)
        n_rows, n_nodes = tree.shape
        starts, lengths = cache.lengths, cache.lengths_on(tree.tokens.device)[:, None]
        slots = lengths + _places(n_nodes, lengths.device) if n_nodes > 1 else lengths
        used = cache.begin(range(n_rows), starts, n_nodes, slots)
        if positions is None:
            positions = slots  # as in a chain
            if used > self.max_positions or not tree.is_chain:
                # A drafter that ignores `room` may draft past the context; such tokens are never emitted.
                positions = (lengths + tree.depth).clamp_max(self.max_positions - 1)
        forward = self._engine.forward_of(cache, n_rows, n_nodes, self.capture_layers, tree.n_silent)
        if forward is not None:
            ancestors = None if tree.is_chain else tree.ancestors
            logits, best, captured, hidden = forward(tree.tokens, positions, slots, lengths[:, 0], ancestors)
            return TargetOutput(logits, captured, positions, hidden.clone() if self.keeps_hidden else None, best)
        mask = None if n_nodes == 1 and min(starts) == max(starts) else tree_mask(tree, starts, slots, used)
        logits, captured, hidden = self._run_tree(tree.tokens, positions, cache, mask, tree.n_silent)
        return TargetOutput(logits, stacked(captured), positions, hidden)

    def _run_tree(
        self, tokens: Tensor, positions: Tensor, cache: KVCache, mask: Tensor | Nodes | None, n_silent: int
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        kept = partial(_around, n_silent) if n_silent else None
        logits, captured, hidden = self._engine.run(
            tokens, positions, cache, mask, self.capture_layers, kept, self.keeps_hidden
        )
        if n_silent:
            silent = logits.new_zeros(len(logits), n_silent, logits.shape[2])
            logits = torch.cat([logits[:, :1], silent, logits[:, 1:]], dim=1)
        return logits, captured, hidden if self.keeps_hidden else None

    def _replayed(self, tree: DraftTree, cache: KVCache, positions: Tensor | None) -> TargetOutput:
        """`score` by our own kernels or a CUDA graph, of trees that are padded to one of a few sizes."""
        n_nodes, tree = tree.shape[1], self.padded(tree)
        used = self.reach(cache, tree.shape[1])

        def forward(tokens: Tensor, lengths: Tensor, parents: Tensor, *given: Tensor) -> tuple:
            nodes = DraftTree(tokens, parents, parents, is_chain=tree.by_place)
            positions = given[0] if given else (lengths[:, None] + nodes.depth).clamp_max(self.max_positions - 1)
            scored = self.score_at(lengths, tokens, cache, used, positions, nodes.ancestors, tree.n_silent)
            return *scored, positions

        key = "score", cache.storage, used, self.capture_layers, self.keeps_hidden, tree.n_silent, tree.by_place
        inputs = tree.tokens, self.unread(cache.lengths_on(tree.tokens.device)), tree.parents
        inputs += () if positions is None else (positions,)
        run = forward if self.graphs is None else partial(self.graphs.run, key, forward)
        logits, captured, hidden, positions = run(*inputs)
        captured = [states[:, :n_nodes] for states in captured]
        hidden = None if hidden is None else hidden[:, :n_nodes]
        return TargetOutput(logits[:, :n_nodes], stacked(captured), positions[:, :n_nodes], hidden)

    def padded(self, tree: DraftTree) -> DraftTree:
        """Return a tree as graphs take it: padded to one of a few sizes; without graphs as it is."""
        return tree if self.graphs is None else tree.padded(padded(tree.shape[1], NODES))

    def reach(self, cache: KVCache, n_nodes: int) -> int:
        """Let graphs write n nodes of each row behind its committed tokens. Return how many slots attention reads."""
        assert self.graphs is None or padded(cache.n_rows, ROWS) <= cache.max_rows, (cache.n_rows, cache.max_rows)
        cache.begin(range(cache.n_rows), cache.lengths, n_nodes)
        return cache.capacity  # with fewer for shorter texts, others would be recorded as a text grows

    def unread(self, lengths: Tensor) -> Tensor:
        """Return lengths [n] padded as graphs pad rows: those behind the batch have nothing to read."""
        return lengths if self.graphs is None else F.pad(lengths, (0, padded(len(lengths), ROWS) - len(lengths)))

    def score_at(
        self,
        lengths: Tensor,
        tokens: Tensor,
        cache: KVCache,
        used: int,
        positions: Tensor | None = None,
        ancestors: Tensor | None = None,
        n_silent: int = 0,
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """What a graph records of `score`: nodes [R, N] behind the first lengths [R] tokens of a cache's first rows.

        Attention reads the first `used` slots. Without `positions` and `ancestors` the nodes are a chain. Returns
        logits [R, N, V], the captured states of each layer [R, N, D], and final states, if the model keeps them.
        """
        n_rows, n_nodes = tokens.shape
        slots = lengths[:, None] + torch.arange(n_nodes, device=tokens.device)
        if ancestors is None:
            ancestors = torch.ones(n_nodes, n_nodes, dtype=torch.bool, device=tokens.device).tril()
            ancestors = ancestors.expand(n_rows, -1, -1)
        positions = slots.clamp_max(self.max_positions - 1) if positions is None else positions
        if self.fuses and cache.keys:  # whose attention reads what each row has
            return self._run_tree(tokens, positions, cache, Nodes(lengths, ancestors), n_silent)
        cache.place(slots, used)
        return self._run_tree(tokens, positions, cache, nodes_mask(slots, ancestors, used), n_silent)


def _checked(capture_layers: Sequence[int], n_layer: int) -> tuple[int, ...]:
    for layer in capture_layers:
        if layer != FINAL and not 0 <= layer < n_layer:
            raise UserError(f"capture layer {layer} must be a block of the target, 0..{n_layer - 1}")
    return tuple(capture_layers)


def text_dtype(target: TargetModel) -> torch.dtype:
    """Return the dtype of whole texts, which is the one that the user asked for."""
    return target._engine.text_dtype


@lru_cache(maxsize=64)
def _places(n_nodes: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(n_nodes, device=device)


def _engine(
    model: PreTrainedModel, name: str, dtype: torch.dtype | None, compile: str
) -> LeanEngine | TransformersEngine:
    """Return the engine that a user asks for by name."""
    check_choice("target.engine", name, ENGINES)
    why = "" if name == "transformers" else why_not_lean(model)
    if why is None:
        if compile == "triton" and (missing := why_not_fused(shape_of(model), model.device)) is not None:
            raise UserError(f"target.compile=triton cannot have its kernels: {missing}; give target.compile=auto")
        return LeanEngine(model, dtype, compiles=compile != "none")
    if compile == "triton":
        raise UserError(f"target.compile=triton is for the lean decoder, which runs {', '.join(LLAMA_LIKE)} models")
    if name == "lean":
        known = ", ".join(LLAMA_LIKE)
        raise UserError(f"target.engine=lean runs {known}, but {why}; give target.engine=transformers")
    return TransformersEngine(model)


def _around(n_silent: int, hidden: Tensor) -> Tensor:  # [B, N, D] -> [B, N - n_silent, D]
    return torch.cat([hidden[:, :1], hidden[:, 1 + n_silent :]], dim=1)
