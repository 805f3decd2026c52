"""`method=spire`: a chain of `gamma` tokens from a SPIRe drafter (Neelam et al. 2025, section 3).

The drafter never reads the context again: of the target's captured block inputs it projects K/V for the sinks and the
window only, into a ring of slots per row. A draft step attends to those slots, and writes the memory of the token it
just read at that token's slot. After verification the slots of the root and of the accepted tokens are overwritten with
K/V of the target's activations. Slots of rejected tokens lie ahead of the next root, where nothing sees them before
they are overwritten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spectrain.decoding import Context, Verified
from spectrain.drafting.budget import AUTO, ChainBudget
from spectrain.drafting.draft_chain import ChainDrafter, Chains, DraftStep, draft_chain, lengths_of
from spectrain.drafting.spire_slots import SlotStore
from spectrain.drafting.stopping import StopRule
from spectrain.errors import UserError, check_whole
from spectrain.kernels import MOST_TOKENS, Graphs, padded
from spectrain.methods.options import Dtype, Nodes, Whole
from spectrain.models.artifacts import fastest_gamma, trained_acceptance
from spectrain.models.rollout import SpireStates, chunk_tokens, windowed_states
from spectrain.models.spire import SpireDrafter, load
from spectrain.target import DraftTree, KVCache, TargetModel, TargetOutput
from spectrain.target.lean import fused_kernels
from spectrain.target.llama import KeysValues, additive
from spectrain.target.transfer import to_device
from spectrain.target.weights import for_drafting, version


def build(
    target: TargetModel,
    drafter: str,
    gamma: Whole | None = None,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
    draft_vocab: Whole | Literal["auto"] | None = AUTO,
) -> Spire:
    """The method from an exported drafter; raises UserError where it was trained for another target.

    gamma: None takes, with max_nodes "auto", as many tokens in each step as pay; else the number that was the fastest
    after training, which is in the export. For the others see `Spire`.
    """
    loaded, fastest = load(Path(drafter), target), fastest_gamma(Path(drafter))
    k, window = loaded.config.k, loaded.config.window_tokens
    acceptance = trained_acceptance(Path(drafter))
    length, budget = lengths_of(gamma, max_nodes, fastest or k, min(LONGER * k, window), acceptance)
    return Spire(loaded, length, draft_dtype=draft_dtype, draft_vocab=draft_vocab, budget=budget)


def open_states(target: TargetModel, drafter: str, rollout_tokens: int) -> SpireStates:
    """Open an exported drafter whose states an acceptance head reads."""
    loaded = load(Path(drafter), target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return SpireStates(loaded, min(rollout_tokens, loaded.config.window_tokens))


def of_states(states: SpireStates, gamma: int, stop: StopRule | None, draft_dtype: str) -> Spire:
    """The method that drafts with these states: chains of at most gamma tokens, ended by the rule."""
    gamma = min(gamma, states.drafter.config.window_tokens)
    return Spire(states.drafter, gamma, stop=stop, draft_dtype=draft_dtype)


def for_trees(
    target: TargetModel, drafter: str, levels: int, branches: int, draft_dtype: str, draft_vocab: int | str | None
) -> Spire:
    """The model of a `TreeDrafter`. A tree has no more levels than tokens in the window."""
    loaded = load(Path(drafter), target)
    levels = min(levels, loaded.config.window_tokens)
    n_read = 1 + branches * (levels - 1)  # the root, and the branches of each level but the last
    return Spire(loaded, levels, draft_dtype=draft_dtype, draft_vocab=draft_vocab, tree_nodes=n_read)


DRAFTER = "spire"
PATHS = (8, 32, 128)  # nodes of accepted paths, whose memories are written at once
LONGER = 2  # times the k of training a chain may have that adapts
FEW_TOKENS = 8192  # that are drafted on a CPU, where a draft step takes as long as reading its weights does


def check_drafted(drafter: SpireDrafter, draft_vocab: int) -> None:
    """Raise UserError unless a drafter can be held to so many tokens."""
    most = drafter.config.draft_vocab or drafter.config.shape.vocab_size
    check_whole("draft_vocab", draft_vocab, 1, most)
    if draft_vocab < most and drafter.kept is None:
        raise UserError(
            f"draft_vocab={draft_vocab} needs a drafter that was trained with draft_vocab=N; give null here"
        )


@dataclass(eq=False)
class Unread:
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


class Spire(ChainDrafter):
    """Drafts with a `SpireDrafter`.

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
        drafter: SpireDrafter,
        gamma: int | None = None,
        stop: StopRule | None = None,
        draft_dtype: str = "float32",
        budget: ChainBudget | None = None,
        tree_nodes: int = 0,
        draft_vocab: int | str | None = None,
    ) -> None:
        config, self.tree_nodes = drafter.config, tree_nodes
        super().__init__(config.k if gamma is None else gamma, budget)
        self.trained, self.stop, self.draft_dtype, self.draft_vocab = drafter, stop, draft_dtype, draft_vocab
        if draft_vocab not in (None, AUTO):
            check_drafted(drafter, draft_vocab)
        self.drafter = drafter  # as it drafts; `start` makes it
        self._made_for: tuple = ()
        self._of: Spire | None = None  # whose drafter this one drafts with
        self.slots: SlotStore | None = None
        self.graphs: Graphs | None = None  # that run draft steps
        if self.gamma > config.window_tokens:
            raise UserError(f"gamma={self.gamma} must be 1..window_tokens={config.window_tokens} of the drafter")
        self.capture_layers = config.captured_layers

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        shape = self.drafter.config.shape
        if target.vocab_size != shape.vocab_size or target.config.hidden_size != shape.hidden_size:
            raise UserError(
                f"the SPIRe drafter is for a target of vocabulary {shape.vocab_size} and width {shape.hidden_size}, "
                f"not {target.vocab_size} and {target.config.hidden_size}; train one for this target"
            )
        drafter = self.drafter = self.fitted(target)
        self.graphs = target.graphs
        if self.slots is not None and self.slots.fits(drafter, self.gamma, cache.max_rows):
            self.slots.clear()
        else:
            if self.slots is not None and self.graphs is not None:
                self.graphs.forget(self.slots.storage)
            self.slots = SlotStore(drafter, self.gamma, cache.max_rows, self.tree_nodes)
        self.slots.fused = fused_kernels(shape, target.device) if target.fuses else None
        self._prompts: list[Unread] = []
        self._missed: deque[Unread] = deque()  # of steps without this method
        # [rows, D] the target's state before each root. `state` [n, D] is the one before the token that is read next.
        self.finals = self.drafter.norm.weight.new_zeros(cache.max_rows, shape.hidden_size)

    def share(self, other: Spire) -> None:
        """Draft with the drafter of another method, which must be of the same folder and options."""
        self._of, self.trained = other, other.trained

    def fitted(self, target: TargetModel) -> SpireDrafter:
        """Return the drafter as it drafts for a target: where the target is, with weights of `draft_dtype`."""
        if self._of is not None:
            return self._of.fitted(target)
        if self._of_trained(target) != self._made_for:
            self.drafter = self._made(target)
            self._made_for = self._of_trained(target)  # which may have been moved
        return self.drafter

    def _of_trained(self, target: TargetModel) -> tuple:
        """What changes where another drafter must be made for a target."""
        return target.device, target.dtype, self.trained.norm.weight.data_ptr(), version(self.trained)

    @torch.no_grad()
    def _made(self, target: TargetModel) -> SpireDrafter:
        trained, n_tokens, ready = self.trained, self.draft_vocab, {}
        if n_tokens == AUTO:
            n_tokens = FEW_TOKENS if target.device.type == "cpu" else None
        if trained.kept is not None:
            trained = trained.held_to(n_tokens)
        config = trained.config
        own = for_drafting(trained, self.draft_dtype, target.device, target.dtype)
        if config.input == "projected":
            table = trained.input_table().to(own.norm.weight.dtype)
            ready["embed_tokens"] = nn.Embedding.from_pretrained(table)
        if config.unembedding == "target":
            layer = trained.tables.unembedding_layer(trained.kept)
            ready["lm_head"] = for_drafting(layer, self.draft_dtype, target.device, layer.weight.dtype)
        return own.with_modules(ready)

    def read_of_prompts(self, lengths: Tensor) -> Tensor | None:
        return self.slots.kept(lengths) if self.capture_layers else None

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        super().prefill(context, output, rows)
        if not self.capture_layers:
            return
        for one in (*self._prompts, *self._missed):
            one.of += [-1] * len(rows)
        self.slots.join(rows)
        lengths, captured = context.lengths[rows.start : rows.stop] - 1, output.captured  # of the prompts
        kept = self.slots.kept(lengths)
        if not torch.equal(output.positions, kept):  # another method wanted to read more of the prompts
            places = (kept[:, :, None] == output.positions[:, None]).long().argmax(dim=-1)
            captured = captured.gather(1, places[:, :, None, None].expand(-1, -1, *captured.shape[2:]))
        # Their memories are made when something is drafted: many methods share a generation, and not all of them draft.
        self._prompts.append(Unread(captured, kept, [-1] * rows.start + [*range(len(rows))]))

    def draft(self, context: Context, gamma: int) -> DraftTree:
        self._catch_up()
        if not self.capture_layers:
            self._read_context(context)
        roots = context.lengths - 1  # [n] positions
        self.state = self.finals[: context.n_rows]
        return draft_chain(
            context,
            gamma,
            first=lambda: self._step(context.roots, roots),
            step=lambda tokens, i: self._step(tokens, roots + i),
            stop=self.stop,
            whole=self._shortest_way(context),
        )

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> None:
        if not self.capture_layers:
            return
        if self._prompts or self._missed:  # nothing was drafted, and what is older must be written first
            self.watch(context, output, verified)
            return
        captured, positions = output.captured, output.positions
        path = verified.path[:, : 1 + tree.deepest]
        if self.graphs is not None:  # which are few where paths have one of a few lengths
            path = F.pad(path, (0, padded(path.shape[1], PATHS) - path.shape[1]), value=-1)
        if not tree.is_chain or self.graphs is not None:
            captured, positions = _along(path, captured, positions)
        if self.slots.fuses:
            self.slots.memory(*positions.shape).write(captured, positions, verified.accepted)
        elif self.graphs is None:
            self._keep(captured, positions, path)
        else:
            self.graphs.run(("memories", self.slots.storage), self._keep, captured, positions, path)
        if self.drafter.config.previous_state:
            self.finals[: context.n_rows] = _at(captured[:, :, -1], verified.accepted)

    def read_roots(self, context: Context) -> Tensor:
        self._catch_up()
        if not self.capture_layers:
            self._read_context(context)
        self.state = self.finals[: context.n_rows, None]
        return self.read_nodes(context, DraftTree.root_only(context.roots), 1)[:, 0]

    def read_nodes(self, context: Context, tree: DraftTree, n_new: int) -> Tensor:
        n_rows, n_nodes = tree.shape
        depth, tokens = tree.depth, tree.tokens[:, -n_new:]
        positions = (context.lengths[:, None] - 1 + depth)[:, -n_new:]
        parents = tree.parents[:, -n_new:].clamp_min(0)
        above = self.state.gather(1, parents[:, :, None].expand(-1, -1, self.state.shape[2]))
        seen, slots = self.slots.read_by(tree, context.lengths - 1, n_new)
        if self.slots.fuses and n_rows * n_new <= MOST_TOKENS:
            logits, states = self.slots.level(n_rows, n_new).read(tokens, positions, slots, seen, above)
        elif self.graphs is None:
            logits, states = self._read_level(tokens, positions, slots, seen, above)
        else:
            key, inputs = ("level", self.slots.storage), (tokens, positions, slots, seen, above)
            logits, states = self.graphs.run(key, self._read_level, *inputs)
            states = states.clone()  # the next level may be as large, and overwrites them
        self.state = states if n_nodes == n_new else torch.cat([self.state, states], dim=1)
        return logits

    def _read_level(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: Tensor, above: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Read nodes [n, m] of trees, which see the slots `seen` [n, m, S] and then stand in `slots` [n, m].

        `above` [n, m, D] are the final states of their parents. Returns logits [n, m, K] and final states [n, m, D].
        """
        x = self.drafter.joined(self.drafter.embed(tokens), above)
        if self.slots.fused is not None:
            return self.slots.step(x, positions, slots, seen)
        n_rows, past = len(tokens), self.slots.all_of(len(tokens))
        own = torch.diag_embed(seen.gather(2, slots[:, :, None])[..., 0])  # [n, m, m]
        seen = seen.scatter(2, slots[:, :, None], False)  # a node's own keys are not in its slot yet
        mask = additive(torch.cat([seen, own], dim=2)[:, None], past[0].keys.dtype)
        states, memories = self.drafter.step(x, self.drafter.rope(positions), past, mask)
        self.slots.put(memories, slots, slice(0, n_rows))
        return self.drafter.kept_logits(states), states

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
        elif self.graphs is not None:  # whose outputs the next step overwrites
            captured, positions = captured.clone(), positions.clone()
        config = self.drafter.config
        if len(self._missed) == config.window_tokens:
            of = [n for n, own in zip(context.n_tokens, self._missed[0].of, strict=True) if own >= 0]
            if min(of) > config.sink_tokens + config.window_tokens:
                self._missed.popleft()  # it is no sink, and no window reaches back to it
            else:
                self._catch_up()
        self._missed.append(Unread(captured, positions, [*range(context.n_rows)]))

    def resume(self, context: Context, emitted: Sequence[Sequence[int]]) -> None:
        self._catch_up()

    def _catch_up(self) -> None:
        """Keep the memories of prompts, and of tokens that were decoded without this method."""
        for prompts in self._prompts:
            self._remember(*prompts.by_row(prompts.rows), prompts.rows)
        self._prompts.clear()
        if self._missed:
            rows = slice(0, len(self._missed[0].of))
            parts = [missed.by_row(rows) for missed in self._missed]
            self._missed.clear()
            self._remember(*(torch.cat(values, dim=1) for values in zip(*parts, strict=True)), rows)

    def _remember(self, captured: Tensor, positions: Tensor, rows: slice) -> None:
        """Keep the memories of states [n, P, C, D] of some rows at positions [n, P], -1 for none."""
        last = positions.amax(1, keepdim=True)
        # A slot is written once: what no window reaches any more is left out.
        gone = (positions <= last - self.slots.ring_tokens) & (positions >= self.drafter.config.sink_tokens)
        positions = positions.masked_fill(gone, -1)
        self.slots.write_memories(self._memories(captured), positions, rows)
        if self.drafter.config.previous_state:
            finals = _at(captured[:, :, -1], positions.argmax(1))
            self.finals[rows] = torch.where(last >= 0, finals, self.finals[rows])

    def free(self, row: int) -> None:
        super().free(row)
        for one in (*self._prompts, *self._missed):
            one.of[row] = one.of[-1]
            one.of.pop()
        self._prompts = [one for one in self._prompts if max(one.of, default=-1) >= 0]
        self._missed = deque(one for one in self._missed if max(one.of, default=-1) >= 0)
        self.finals[row] = self.finals[self.slots.n_rows - 1]
        self.slots.free(row)

    def _keep(self, captured: Tensor, positions: Tensor, path: Tensor) -> None:
        """Write the memories of states [n, A, C, D] at positions [n, A] of accepted paths [n, A], which end with -1."""
        positions = positions.masked_fill(path < 0, -1)
        self.slots.write_memories(self._memories(captured), positions, slice(0, len(path)))

    def _shortest_way(self, context: Context) -> Callable | None:
        """Return what drafts whole chains, see `draft_chain`: a program or a CUDA graph; None: neither does."""
        if self.slots.fuses:
            return self._program_chain if self.stop is None or self.stop.compiles else None
        return self._graph_chain if self.replays(context, self.graphs, self.drafter.config.shape.vocab_size) else None

    def _program_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        ends, greedy, uniforms = self.stop is not None, context.sampling.greedy, context.uniforms
        # A program that a rule may end is made for the longest chain.
        program = self.slots.chain(context.n_rows, self.gamma if ends else n_steps, context.sampling, self.stop)
        numbers = None
        if not greedy:
            numbers = uniforms.next(self.gamma) if ends else uniforms.take(n_steps, lengths)
        if ends:
            program.ends.begin(n_steps if lengths is None else lengths, context.stop_ids)
        tokens, probs, ended = program.draft(context.roots, context.lengths - 1, self.state, numbers)
        if ends and not greedy:
            uniforms.skip(ended, self.gamma)
        return tokens, probs, ended if ends else lengths

    def _graph_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        def read(i: int, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return self._read(tokens[:, 0], positions, state)

        starts = context.roots[:, None], context.lengths - 1, self.state
        key = "chain", self.slots.storage
        return self.replayed(self.graphs, key, read, context, n_steps, lengths, *starts)

    def _memories(self, captured: Tensor) -> list[Tensor]:
        """Of captured [n, P, C, D] the inputs [n, P, D] of the blocks that the draft blocks were copied from."""
        return [captured[:, :, i] for i in range(self.drafter.config.n_layer)]

    def _step(self, tokens: Tensor, positions: Tensor) -> DraftStep:
        """Read one token per row, [n], at positions [n]."""
        if self.slots.fuses:
            x = self.drafter.joined(self.drafter.embed(tokens), self.state)
            logits, self.state = self.slots.reader(len(tokens)).read(x, positions)
        elif self.graphs is None:
            logits, self.state = self._read(tokens, positions, self.state)
        else:
            key = "spire", self.slots.storage
            logits, self.state = self.graphs.run(key, self._read, tokens, positions, self.state)
        return DraftStep(logits, self.state)

    def _read(self, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [n, V] and final states [n, D], and store the tokens' memories."""
        x = self.drafter.joined(self.drafter.embed(tokens[:, None]), state[:, None])
        if self.slots.fused is not None:
            slots = self.slots.claim(positions[:, None], slice(0, len(tokens)))
            logits, hidden = self.slots.step(x, positions[:, None], slots, self.slots.seen_by(positions)[:, None])
            return self.drafter.spread(logits[:, 0]), hidden[:, 0]
        rope = self.drafter.rope(positions[:, None])
        past, seen = self.slots.read(positions)
        seen = additive(seen, past[0].keys.dtype)
        hidden, memories = self.drafter.step(x, rope, past, seen)
        self.slots.write(memories, positions[:, None], slice(0, len(tokens)))
        return self.drafter.logits(hidden[:, 0]), hidden[:, 0]

    def _read_context(self, context: Context) -> None:
        """Without target activations: the drafter reads each row's text up to its root by itself.

        An ablation, so simple rather than fast: the whole text each step.
        """
        config = self.drafter.config
        for row in range(context.n_rows):
            length = context.n_tokens[row] - 1
            chunk = chunk_tokens(config, length)
            tokens = context.tokens[row, :length].to(context.device)
            padded = F.pad(tokens, (0, -length % chunk))[None]
            _, every = windowed_states(self.drafter, self.drafter.embed(padded), chunk)
            n_sinks = min(config.sink_tokens, length)
            near = range(max(n_sinks, length - self.slots.ring_tokens), length)  # a slot is written once
            kept = torch.tensor([*range(n_sinks), *near], device=context.device)
            self.slots.forget(row)
            read = [KeysValues(kv.keys[:, :, kept], kv.values[:, :, kept]) for kv in every]
            self.slots.write(read, kept[None], slice(row, row + 1))


def _along(path: Tensor, captured: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return those states [n, A, C, D] and positions [n, A] of a tree that lie on paths [n, A], which end with -1."""
    nodes = path.clamp_min(0)
    return captured.gather(1, nodes[:, :, None, None].expand(-1, -1, *captured.shape[2:])), positions.gather(1, nodes)


def _at(states: Tensor, places: Tensor) -> Tensor:  # [n, P, D], [n] -> [n, D]
    if len(places) == 1 and places.device.type == "cpu":
        return states[:, int(places[0])]
    return states.gather(1, places[:, None, None].expand(-1, 1, states.shape[-1]))[:, 0]
