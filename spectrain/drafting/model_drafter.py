"""Drafting with a model that is made of our own blocks and reads the target's states: what all such kinds share.

The drafter never reads the context again: of the target's captured states it projects K/V for what it may see alone,
into slots of each row (`window_keys.py`). A draft step attends to those slots, and writes the memory of the token it
just read at that token's slot. After verification the slots of the root and of the accepted tokens are overwritten with
K/V of the target's activations. Slots of rejected tokens lie ahead of the next root, where nothing sees them before
they are overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding import Context, Verified
from spectrain.decoding.verify import at_node
from spectrain.drafting.budget import AUTO, ChainBudget
from spectrain.drafting.draft_chain import ChainDrafter, Chains, DraftStep, draft_chain
from spectrain.drafting.runtime import DraftNodes, DraftRuntime
from spectrain.drafting.stopping import StopRule
from spectrain.drafting.window_keys import WindowKeys, kind_of_keys
from spectrain.errors import UserError, check_whole
from spectrain.kernels import padded
from spectrain.models.drafter_model import DrafterModel
from spectrain.target import DraftTree, KVCache, TargetModel, TargetOutput
from spectrain.target.device import to_device
from spectrain.target.kv_cache import States
from spectrain.target.lean import fused_kernels
from spectrain.target.weights import for_drafting, version

PATHS = (8, 32, 128)  # nodes of accepted paths, whose memories are written at once
MOST_MISSED = 64  # steps without drafting whose states wait for the next draft
FEW_TOKENS = 8192  # that are drafted on a CPU, where a draft step takes as long as reading its weights does


def check_drafted(drafter: DrafterModel, draft_vocab: int) -> None:
    """Raise UserError unless a drafter can be held to so many tokens."""
    most = drafter.config.draft_vocab or drafter.config.shape.vocab_size
    check_whole("draft_vocab", draft_vocab, 1, most)
    if draft_vocab < most and not drafter.is_ranked:
        raise UserError(
            f"draft_vocab={draft_vocab} needs a drafter that was trained with draft_vocab=N, and here, so that it says "
            "which tokens are frequent; give null"
        )


@dataclass(eq=False)
class PendingStates:
    """States of the target whose memories a drafter has not made yet."""

    captured: Tensor  # [m, P, C, D]
    positions: Tensor  # [m, P] int64, -1 for none
    of: list[int]  # of each row of the batch, which of the m is its own; -1: none

    @property
    def rows(self) -> slice:
        """Of the batch, from the first to the last that has states here."""
        have = [row for row, of in enumerate(self.of) if of >= 0]
        return slice(have[0], have[-1] + 1) if have else slice(0, 0)

    def by_row(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Captured states [n, P, C, D] and positions [n, P] of these rows of the batch."""
        if self.of[rows] == [*range(len(self.captured))]:
            return self.captured, self.positions
        of = to_device(torch.tensor(self.of[rows]), self.positions.device)
        own = of.clamp_min(0)
        return self.captured[own], self.positions[own].masked_fill(of[:, None] < 0, -1)


class ModelDrafter(ChainDrafter):
    """Drafts with a `DrafterModel`, chains or levels of trees.

    Of the target's captured states it stores what its blocks' keys and values are projected from, as late as possible.

    Args:
        drafter: trained for the target at hand.
        gamma: draft tokens per step; None takes the k it was trained with.
        budget: see `ChainDrafter`.
        stop: ends drafts before gamma tokens.
        draft_dtype: of its weights while it drafts, see `draft_dtype_of`.
        draft_vocab: how many of its tokens it drafts, the most frequent of them; "auto": FEW_TOKENS on a CPU, else all.
            A drafter that does not know which ones are frequent drafts all. None: all.
        tree_nodes: most nodes of a tree that it reads, the root included (see `TreeDrafter`); 0: it drafts chains only.

    Raises:
        UserError: gamma is larger than the window, or draft_vocab cannot be had.
    """

    def __init__(
        self,
        drafter: DrafterModel,
        gamma: int | None = None,
        stop: StopRule | None = None,
        draft_dtype: str = "float32",
        budget: ChainBudget | None = None,
        tree_nodes: int = 0,
        draft_vocab: int | str | None = None,
    ) -> None:
        config, self.tree_nodes = drafter.config, tree_nodes
        super().__init__(config.k if gamma is None else gamma, budget, stop)
        self.trained, self.draft_dtype, self.draft_vocab = drafter, draft_dtype, draft_vocab
        if draft_vocab not in (None, AUTO):
            check_drafted(drafter, draft_vocab)
        self.drafter = drafter  # as it drafts; `start` makes it
        self._made_for: tuple = ()
        self._of: ModelDrafter | None = None  # whose drafter this one drafts with
        self.runtime: DraftRuntime | None = None
        if self.gamma > config.window_tokens:
            raise UserError(f"gamma={self.gamma} must be 1..window_tokens={config.window_tokens} of the drafter")
        self.describe(capture_layers=config.captured_layers)

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        shape = self.drafter.config.shape
        if target.vocab_size != shape.vocab_size or target.config.hidden_size != shape.hidden_size:
            raise UserError(
                f"the drafter is for a target of vocabulary {shape.vocab_size} and width {shape.hidden_size}, "
                f"not {target.vocab_size} and {target.config.hidden_size}; train one for this target"
            )
        drafter = self.drafter = self.for_target(target)
        kind, ring_tokens = kind_of_keys(drafter.config, self.gamma, cache.capacity)
        if self.runtime is not None and self.runtime.fits(drafter, kind, ring_tokens, cache.max_rows):
            self.keys.clear()
        else:
            if self.runtime is not None and target.graphs is not None:
                target.graphs.forget(self.keys.storage)
            like = drafter.norm.weight
            sizes = ring_tokens, cache.max_rows, self.tree_nodes
            keys = kind(drafter.config, drafter.config.n_layer, like, *sizes)
            self.runtime = DraftRuntime(drafter, keys)
        self.runtime.graphs = target.graphs
        self.runtime.kernels = fused_kernels(shape, target.device) if target.fuses else None
        self._prompts: list[PendingStates] = []
        self._missed: deque[PendingStates] = deque()  # of steps without this method
        self.begin_with(None, 0)
        if self.keys.is_whole and self.method.capture_layers:
            cache.beside[self] = ref(drafter)
        # [rows, D] what each root reads of the state before it; `state` [n, D] is that of the token that is read next.
        self.finals = self.drafter.norm.weight.new_zeros(cache.max_rows, shape.hidden_size)

    def share(self, other: ModelDrafter) -> None:
        """Draft with the drafter of another method, which must be of the same folder and options."""
        self._of, self.trained = other, other.trained

    def for_target(self, target: TargetModel) -> DrafterModel:
        """Return the drafter as it drafts for a target: where the target is, with weights of `draft_dtype`."""
        if self._of is not None:
            return self._of.for_target(target)
        if _made_of(self.trained, target) != self._made_for:
            self.drafter = self._for_device(target)
            self._made_for = _made_of(self.trained, target)  # which may have been moved
        return self.drafter

    @torch.no_grad()
    def _for_device(self, target: TargetModel) -> DrafterModel:
        trained, n_tokens, ready = self.trained, self.draft_vocab, {}
        if n_tokens == AUTO:
            n_tokens = FEW_TOKENS if target.device.type == "cpu" and trained.is_ranked else None
        if trained.kept is not None:
            trained = trained.held_to(n_tokens)
        own = for_drafting(trained, self.draft_dtype, target.device, target.dtype)
        if not hasattr(trained, "embed_tokens"):
            ready["embed_tokens"] = nn.Embedding.from_pretrained(trained.input_table(own.norm.weight.dtype))
        if not hasattr(trained, "lm_head"):
            layer = trained.tables.unembedding_layer(trained.kept)
            ready["lm_head"] = for_drafting(layer, self.draft_dtype, target.device, layer.weight.dtype)
        return own.with_modules(ready)

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        return self.keys.kept(lengths)[:, self._n_known :] if self.method.capture_layers else None

    def begin_with(self, states: States | None, n_tokens: int) -> None:
        self._known, self._n_known = states, 0
        if states is not None:  # where it `pairs`, what stands at the last position depends on the token behind it
            self._n_known = min(n_tokens, states[0][0].shape[1]) - self.drafter.pairs

    def states_of(self, row: int, n_tokens: int) -> States:
        self._catch_up(self._context())
        return self.keys.states_of(row, n_tokens)

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        super().prefill(context, output, rows)
        if not self.method.capture_layers:
            return
        for one in (*self._prompts, *self._missed):
            one.of += [-1] * len(rows)
        self.keys.join(rows)
        self._context = ref(context)
        lengths, captured = context.lengths[rows.start : rows.stop] - 1, output.captured  # of the prompts
        kept, read = self.read_of_prompts(lengths), output.positions
        if self._n_known:
            self.keys.restore(rows.start, self._known, self._n_known)
            self.begin_with(None, 0)
        if read.shape != kept.shape or not ((read == kept) | (kept < 0)).all():  # another method wanted to read more
            of_position = read.new_zeros(len(read), 2 + int(read.max()))  # the first is for -1
            of_position.scatter_(1, read + 1, torch.arange(read.shape[1], device=read.device).expand_as(read))
            places = of_position.gather(1, kept + 1)
            captured = captured.gather(1, places[:, :, None, None].expand(-1, -1, *captured.shape[2:]))
        # Their memories are made when something is drafted: many methods share a generation, and not all of them draft.
        self._prompts.append(PendingStates(captured, kept, [-1] * rows.start + [*range(len(rows))]))

    def draft(self, context: Context, gamma: int) -> DraftTree:
        self._catch_up(context)
        self.read_context(context)
        roots = self._roots(context)
        self.state = self.finals[: context.n_rows]
        return draft_chain(
            context,
            gamma,
            first=lambda: self._next(context.roots, roots, 0),
            step=lambda tokens, i: self._next(tokens, roots + i, i),
            stop=self.stop,
            whole=self._shortest_way(context),
        )

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> None:
        if not self.method.capture_layers:
            return
        if self._prompts or self._missed:  # nothing was drafted, and what is older must be written first
            self.watch(context, output, verified)
            return
        captured, positions = output.captured, output.positions
        path = verified.path[:, : 1 + tree.deepest]
        if self.runtime.graphs is not None:  # which are few where paths have one of a few lengths
            path = F.pad(path, (0, padded(path.shape[1], PATHS) - path.shape[1]), value=-1)
        if not tree.is_chain or self.runtime.graphs is not None:
            captured, positions = _along(path, captured, positions)
        following, accepted = None, verified.accepted
        if self.drafter.pairs:
            tokens = tree.tokens.gather(1, path.clamp_min(0))
            following = tokens.roll(-1, 1).scatter_(1, accepted[:, None], verified.bonus[:, None])
        states = self.runtime.keep(captured, positions, path, accepted, following)
        if self.drafter.config.previous_state:
            self.finals[: context.n_rows] = at_node(states, accepted)

    def read_roots(self, context: Context) -> Tensor:
        self._catch_up(context)
        self.read_context(context)
        self.state = self.finals[: context.n_rows, None]
        return self.read_nodes(context, DraftTree.root_only(context.roots), 1)[:, 0]

    def read_nodes(self, context: Context, tree: DraftTree, n_new: int) -> Tensor:
        n_nodes = tree.shape[1]
        tokens, roots = tree.tokens[:, -n_new:], self._roots(context)
        positions = (roots[:, None] + tree.depth)[:, -n_new:]
        parents = tree.parents[:, -n_new:].clamp_min(0)
        above = self.state.gather(1, parents[:, :, None].expand(-1, -1, self.state.shape[2]))
        seen, slots, lengths = self.keys.read_by(tree, roots, n_new)
        logits, states = self.runtime.read(DraftNodes(tokens, positions, slots, seen, above, lengths))
        self.state = states if n_nodes == n_new else torch.cat([self.state, states], dim=1)
        return logits

    def read_context(self, context: Context) -> None:
        """Read the rows' texts up to their roots, where the drafter does not learn of them by the target's states."""

    @property
    def keys(self) -> WindowKeys:
        return self.runtime.keys

    @property
    def names(self) -> Tensor | None:
        return self.drafter.kept

    def watch(self, context: Context, output: TargetOutput, verified: Verified) -> None:
        captured, positions = output.captured, output.positions
        if captured.shape[1] > 1:
            path = verified.path
            if path.device.type == "cpu":
                path = path[:, : 1 + int(verified.accepted.max())]
            captured, positions = _along(path, captured, positions)
            positions = positions.masked_fill(path < 0, -1)
        elif self.runtime.graphs is not None:  # whose outputs the next step overwrites
            captured, positions = captured.clone(), positions.clone()
        config = self.drafter.config
        if len(self._missed) == min(config.window_tokens, MOST_MISSED):
            of = [n for n, own in zip(context.n_tokens, self._missed[0].of, strict=True) if own >= 0]
            if config.window_tokens <= MOST_MISSED and min(of) > config.sink_tokens + config.window_tokens:
                self._missed.popleft()  # it is no sink, and no window reaches back to it
            else:
                self._catch_up(context)
        self._missed.append(PendingStates(captured, positions, [*range(context.n_rows)]))

    def resume(self, context: Context, emitted: Sequence[Sequence[int]]) -> None:
        self._catch_up(context)

    def _catch_up(self, context: Context) -> None:
        """Keep the memories of prompts, and of tokens that were decoded without this method."""
        for prompts in self._prompts:
            self._remember(context, *prompts.by_row(prompts.rows), prompts.rows)
        self._prompts.clear()
        if self._missed:
            rows = slice(0, len(self._missed[0].of))
            parts = [missed.by_row(rows) for missed in self._missed]
            self._missed.clear()
            self._remember(context, *(torch.cat(values, dim=1) for values in zip(*parts, strict=True)), rows)

    def _remember(self, context: Context, captured: Tensor, positions: Tensor, rows: slice) -> None:
        """Keep the memories of states [n, P, C, D] of some rows at positions [n, P], -1 for none."""
        last = positions.amax(1, keepdim=True)
        # A slot is written once: what no window reaches any more is left out.
        gone = (positions <= last - self.keys.ring_tokens) & (positions >= self.drafter.config.sink_tokens)
        positions = positions.masked_fill(gone, -1)
        following = None
        if self.drafter.pairs:
            tokens = to_device(context.tokens[rows], positions.device)
            following = tokens.gather(1, (positions + 1).clamp_max(tokens.shape[1] - 1))
        states = self.runtime.remember(captured, positions, rows, following)
        if self.drafter.config.previous_state:
            finals = at_node(states, positions.argmax(1))
            self.finals[rows] = torch.where(last >= 0, finals, self.finals[rows])

    def free(self, row: int) -> None:
        super().free(row)
        for one in (*self._prompts, *self._missed):
            one.of[row] = one.of[-1]
            one.of.pop()
        self._prompts = [one for one in self._prompts if max(one.of, default=-1) >= 0]
        self._missed = deque(one for one in self._missed if max(one.of, default=-1) >= 0)
        self.finals[row] = self.finals[self.keys.n_rows - 1]
        self.keys.free(row)

    def _shortest_way(self, context: Context) -> Callable | None:
        """Return what drafts whole chains, see `draft_chain`: a program or a CUDA graph; None: neither does."""
        if self.runtime.compiles:
            return self._program_chain if self.stop is None or self.stop.compiles else None
        replays = self.replays(context, self.runtime.graphs, self.drafter.config.shape.vocab_size)
        return self._graph_chain if replays else None

    def _program_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        ends, greedy, uniforms = self.stop is not None, context.sampling.greedy, context.uniforms
        # A program that a rule may end is made for the longest chain.
        program = self.runtime.chain(context.n_rows, self.gamma if ends else n_steps, context.sampling, self.stop)
        numbers = None
        if not greedy:
            numbers = uniforms.next(self.gamma) if ends else uniforms.take(n_steps, lengths)
        if ends:
            program.ends.begin(n_steps if lengths is None else lengths, context.stop_ids)
        tokens, probs, ended = program.draft(context.roots, self._roots(context), self.state, numbers)
        if ends and not greedy:
            uniforms.skip(ended, self.gamma)
        return tokens, probs, ended if ends else lengths

    def _graph_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        starts = context.roots[:, None], self._roots(context), self.state
        key = "chain", self.keys.storage
        return self.replayed(self.runtime.graphs, key, self._in_graph, context, n_steps, lengths, starts)

    def _in_graph(self, i: int, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `_next` does, for a graph of whole chains to record; see `replayed`."""
        return self.runtime.one(tokens[:, 0], positions, state)

    def _next(self, tokens: Tensor, positions: Tensor, i: int) -> DraftStep:
        """Read one token per row, [n], the i-th of its chain (0: the root), at positions [n]."""
        logits, self.state = self.runtime.next(tokens, positions, self.state)
        return DraftStep(logits, self.hidden(self.state))

    def hidden(self, state: Tensor) -> Tensor:
        return self.drafter.unembedded(state)

    def _roots(self, context: Context) -> Tensor:
        """Return the positions [n] of the rows' roots, as the drafter counts them."""
        return context.lengths - (2 if self.drafter.pairs else 1)


def _made_of(trained: DrafterModel, target: TargetModel) -> tuple:
    """What changes where another drafter must be made for a target."""
    return target.device, target.dtype, trained.norm.weight.data_ptr(), version(trained)


def _along(path: Tensor, captured: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return those states [n, A, C, D] and positions [n, A] of a tree that lie on paths [n, A], which end with -1."""
    nodes = path.clamp_min(0)
    return captured.gather(1, nodes[:, :, None, None].expand(-1, -1, *captured.shape[2:])), positions.gather(1, nodes)
