"""Where a SPIRe drafter keeps keys and values of each row, and its draft steps as programs on a CPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.sampling import RowSampling, Sampling
from spectrain.drafting.stopping import DraftEnds, StopRule
from spectrain.kernels import Programs, unique
from spectrain.models.spire import SpireDrafter
from spectrain.target.forward import DecoderProgram, can_fuse
from spectrain.target.llama import KeysValues
from spectrain.target.masks import Nodes
from spectrain.target.tree import DraftTree


class SlotStore:
    """K/V of the sinks and of the last positions, of each row and draft block, in slots found by position.

    Position p stands at slot p where it is a sink, else at slot s + p mod (W + g). Behind these are slots for the nodes
    of a tree that is being drafted, which several of one position may share. The last slot takes what is to be thrown
    away. `positions` [rows, S] int64 says what stands where, -1 nothing, or a node.
    """

    def __init__(self, drafter: SpireDrafter, gamma: int, max_rows: int, tree_nodes: int = 0) -> None:
        self.drafter, self.config = drafter, drafter.config
        shape, weight = self.config.shape, drafter.norm.weight
        self.ring_tokens = self.config.window_tokens + gamma
        self.first_node = self.config.sink_tokens + self.ring_tokens  # the slot of a tree's root
        n_slots = self.first_node + tree_nodes + 1
        size = (max_rows, shape.n_kv_head, n_slots, shape.head_dim)
        self.stores = [KeysValues(weight.new_zeros(size), weight.new_zeros(size)) for _ in drafter.blocks]
        self.positions = torch.full((max_rows, n_slots), -1, dtype=torch.int64, device=weight.device)
        drafter.rope.move(weight.device)
        self.n_rows = 0
        self.storage = unique()
        self.fuses = weight.device.type == "cpu" and can_fuse(drafter, shape)
        self._programs = Programs()
        self.fused: ModuleType | None = None  # the module whose kernels run `step` on a GPU

    def reader(self, n_rows: int) -> DraftProgram:
        return self._programs.get(n_rows, lambda: DraftProgram(self, n_rows))

    def chain(
        self, n_rows: int, n_steps: int, sampling: Sampling | RowSampling, stop: StopRule | None = None
    ) -> DraftProgram:
        key = n_rows, n_steps, None if sampling.greedy else sampling.shares_noise, stop
        program = self._programs.get(key, lambda: DraftProgram(self, *key))
        program.options.copy_(sampling.options)
        return program

    def level(self, n_rows: int, n_nodes: int) -> LevelProgram:
        return self._programs.get(("level", n_rows, n_nodes), lambda: LevelProgram(self, n_rows, n_nodes))

    def memory(self, n_rows: int, n_nodes: int) -> MemoryProgram:
        return self._programs.get(("memory", n_rows, n_nodes), lambda: MemoryProgram(self, n_rows, n_nodes))

    def kept(self, lengths: Tensor) -> Tensor:
        """Return the positions [R, s + W + g] that are kept of texts of lengths [R]; -1 where there are fewer."""
        last = lengths[:, None]
        near = last - self.ring_tokens + torch.arange(self.ring_tokens, device=last.device)
        near = near.masked_fill(near < self.config.sink_tokens, -1)  # a sink is not taken twice
        sinks = torch.arange(self.config.sink_tokens, device=last.device).expand(len(lengths), -1)
        return torch.cat([sinks.masked_fill(sinks >= last, -1), near], dim=1)

    def join(self, rows: range) -> None:
        """Add rows at the end, with nothing kept yet."""
        self.positions[rows.start : rows.stop] = -1
        self.n_rows = rows.stop

    def write_memories(self, memories: list[Tensor], positions: Tensor, rows: slice) -> None:
        """Projects memories [n, P, D], one tensor a draft block, and stores them; position -1 is thrown away."""
        rope = self.drafter.rope(positions.clamp_min(0))
        projected = [
            block.keys_values(memory.to(block.input_norm.weight.dtype), rope)
            for block, memory in zip(self.drafter.blocks, memories, strict=True)
        ]
        self.write(projected, positions, rows)

    def write(self, keys_values: list[KeysValues], positions: Tensor, rows: slice) -> None:
        """Stores K/V [n, H_kv, P, D_head] of positions [n, P] in rows `rows`."""
        self.put(keys_values, self.claim(positions, rows), rows)

    def claim(self, positions: Tensor, rows: slice) -> Tensor:
        """Note that positions [n, P] are about to be stored in rows `rows`. Return their slots [n, P]."""
        n_sinks = self.config.sink_tokens
        slots = torch.where(positions < n_sinks, positions, n_sinks + positions % self.ring_tokens)
        slots = slots.masked_fill(positions < 0, self.positions.shape[1] - 1)
        self.positions[rows].scatter_(1, slots, positions)
        return slots

    def put(self, keys_values: list[KeysValues], slots: Tensor, rows: slice) -> None:
        """Stores K/V [n, H_kv, P, D_head] in slots [n, P] of rows `rows`."""
        for store, new in zip(self.stores, keys_values, strict=True):
            index = slots[:, None, :, None].expand_as(new.keys)
            store.keys[rows].scatter_(2, index, new.keys)
            store.values[rows].scatter_(2, index, new.values)

    def read(self, queries: Tensor) -> tuple[list[KeysValues], Tensor]:
        """All slots, and which of them the queries at positions [n] see: [n, 1, 1, S + 1] bool, themselves last."""
        n_rows = len(queries)
        earlier = self.before(queries)
        itself = self.config.sees_itself(earlier)[:, None]
        return self.all_of(n_rows), torch.cat([earlier, itself], dim=1)[:, None, None]

    def seen_by(self, queries: Tensor) -> Tensor:
        """Which slots the queries at positions [n] see, [n, S] bool, where their own K/V stand at these positions."""
        earlier, own = self.before(queries), self.positions[: len(queries)] == queries[:, None]
        return earlier | (own & self.config.sees_itself(earlier)[:, None])

    def before(self, queries: Tensor) -> Tensor:
        """Which slots of earlier positions the queries at positions [n] see, [n, S] bool."""
        positions, t = self.positions[: len(queries)], queries[:, None]
        near = (positions > t - self.config.window_tokens) | (positions < self.config.sink_tokens)
        return near & (positions >= 0) & (positions < t)

    def all_of(self, n_rows: int) -> list[KeysValues]:
        """All slots of the first rows."""
        return [KeysValues(store.keys[:n_rows], store.values[:n_rows]) for store in self.stores]

    def read_by(self, tree: DraftTree, roots: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
        """Which slots the last n_new nodes of each row's tree see, [n, n_new, S] bool, and their own, [n, n_new].

        `roots` [n] are the positions of the roots. The ring holds tokens before them alone, as no chain is drafted.
        """
        n_rows, n_nodes = tree.shape
        positions, roots = self.positions[:n_rows, None], roots[:, None, None]
        reach = roots + tree.depth[:, -n_new:, None] - self.config.window_tokens
        near = (positions > reach) | (positions < self.config.sink_tokens)
        seen = near & (positions >= 0)
        seen[:, :, self.first_node : self.first_node + n_nodes] = tree.ancestors[:, -n_new:]
        slots = torch.arange(n_nodes - n_new, n_nodes, device=seen.device) + self.first_node
        own = slots.expand(n_rows, -1)[..., None]
        seen.scatter_(2, own, False)  # a node is one of its ancestors
        return seen.scatter(2, own, self.config.sees_itself(seen)[..., None]), own[..., 0]

    def step(self, x: Tensor, positions: Tensor, slots: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Read m nodes of each row through our own kernels on a GPU, and store their memories.

        Args:
            x: [n, m, D] inputs of the first block.
            positions: [n, m] int64.
            slots: [n, m] int64, where their own K/V go, and then those of their memories.
            seen: [n, m, S] bool, the slots that each node sees; its own one, where it sees itself.

        Returns:
            Logits [n, m, K], and final states [n, m, D].
        """
        drafter, fused, stores = self.drafter, self.fused, self.all_of(len(x))
        nodes = Nodes(torch.zeros_like(positions[:, 0]), seen.contiguous())
        step = fused.Step(drafter.rope, positions.contiguous(), slots.contiguous(), nodes)
        part, added, states = x.flatten(0, 1), None, []
        for block, store in zip(drafter.blocks, stores, strict=True):
            part, attended = step.attend(block, part, added, store.keys, store.values)
            states.append(part[None])
            part, added = fused.after_attention(block, part, attended)
        part, final = fused.normed(drafter.norm, part, added)
        if self.config.feedback:
            memories = drafter.memories([*states, part[None]])
            for block, store, memory in zip(drafter.blocks, stores, memories, strict=True):
                step.remember(block, memory[0], store.keys, store.values)
        final = final.view_as(x)
        return fused.linear(drafter.lm_head, final), final

    def fits(self, drafter: SpireDrafter, gamma: int, max_rows: int) -> bool:  # a method always reads as many nodes
        ring_tokens = self.config.window_tokens + gamma
        return self.drafter is drafter and (self.ring_tokens, len(self.positions)) == (ring_tokens, max_rows)

    def clear(self) -> None:
        """Forget all rows."""
        self.positions.fill_(-1)
        self.n_rows = 0

    def forget(self, row: int) -> None:
        """Empty a row, which may be a new one at the end."""
        self.positions[row] = -1
        self.n_rows = max(self.n_rows, row + 1)

    def free(self, row: int) -> None:
        """A row ended: the last one moves into its place."""
        last = self.n_rows - 1
        if row != last:
            self.positions[row] = self.positions[last]
            for store in self.stores:
                store.keys[row], store.values[row] = store.keys[last], store.values[last]
        self.n_rows = last


class StepProgram(DecoderProgram):
    """What a draft step computes for m nodes of each of B rows, in the slots of a store.

    A node's own K/V are written to its slot, where it may see them, and then overwritten by those of its memory.
    """

    def __init__(self, slots: SlotStore, n_rows: int, n_nodes: int) -> None:
        drafter, shape = slots.drafter, slots.config.shape
        super().__init__(shape, n_rows, n_nodes)
        self.final = self.floats(len(self.x), shape.hidden_size)
        self.states = self.floats(len(drafter.blocks) + 1, *self.final.shape)
        self.n_draft = slots.config.draft_vocab or shape.vocab_size
        self.logits = self.floats(len(self.x), self.n_draft)

    def step(self, slots: SlotStore, previous: Tensor | None, is_last: bool, seen: Tensor | None = None) -> None:
        """Append a step.

        Args:
            slots: the store.
            previous: [B m, D] final states one token earlier, which the input does not hold yet.
            is_last: of a chain, whose last token has memories that are never read.
            seen: [B, m, S] bool, the slots that each node sees, where `slots` says which are their own; None: the ring
                says both.
        """
        drafter, config, added = slots.drafter, slots.config, None
        if previous is not None:
            self.linear(previous, drafter.previous, self.added)
            added = self.added
        d, n_slots, m = config.shape.hidden_size, slots.positions.shape[1], len(self.x)
        if seen is None:
            seen = self.hold(torch.zeros(m, 1, n_slots, dtype=torch.bool))
            ring = config.window_tokens, config.sink_tokens, slots.ring_tokens, config.own_key
            self.goes_on(self.window(slots.positions, seen, *ring))
        self.rope_angles(drafter.rope)
        for i, (block, store) in enumerate(zip(drafter.blocks, slots.stores, strict=True)):
            self.norm(self.states[i], added, block.input_norm.weight, self.normed)
            self.goes_on(self.copy(self.states[i], self.states[i + 1]))
            self.linear(self.normed, block.qkv, self.qkv)
            self.split(block, store.keys, store.values)
            self.attend_to(store.keys, store.values, seen, n_slots)
            self.x = self.states[i + 1]
            self.mlp(block)
            added = self.added
        self.norm(self.x, added, drafter.norm.weight, self.final)
        if config.feedback and not is_last:
            mixed = self.floats(m, d)
            shares = drafter.feedback_shares().float()
            for block, store, weights in zip(drafter.blocks, slots.stores, shares, strict=True):
                self.mix(self.states, weights.contiguous(), mixed)
                self.norm(mixed, None, block.input_norm.weight, self.normed)
                self.remember(block, self.normed, store.keys, store.values)
        self.linear(self.final, drafter.lm_head, self.logits)


class LevelProgram(StepProgram):
    """A draft step that reads m nodes of each row's tree."""

    def __init__(self, slots: SlotStore, n_rows: int, n_nodes: int) -> None:
        super().__init__(slots, n_rows, n_nodes)
        self.seen = self.hold(torch.zeros(n_rows, n_nodes, slots.positions.shape[1], dtype=torch.bool))
        self.previous = self.floats(*self.final.shape) if slots.config.previous_state else None
        self.embed(slots.drafter.embed_tokens.weight, self.states[0])
        self.step(slots, self.previous, is_last=False, seen=self.seen)
        self.finish()

    def read(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, seen: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return logits [B, m, K], which the next call overwrites, and final states [B, m, D].

        Args:
            tokens: [B, m] int64.
            positions: [B, m] int64.
            slots: [B, m] int64, where their K/V are written.
            seen: [B, m, S] bool, the slots that they see.
            previous: [B, m, D] final states of their parents, which not every drafter reads.
        """
        for own, given in ((self.tokens, tokens), (self.positions, positions), (self.slots, slots), (self.seen, seen)):
            own.copy_(given)
        if self.previous is not None:
            self.previous.copy_(previous.flatten(0, 1))
        self.run()
        return self.logits.view(*tokens.shape, -1), self.final.view(*tokens.shape, -1).clone()


class DraftProgram(StepProgram):
    """Draft steps of B rows as one program: what `Spire._read` computes.

    Args:
        slots: the store.
        n_rows: B.
        n_steps: each reads what the one before it drafted; None: one, whose tokens are given.
        by_noise: whether the steps draw their tokens by shared noise; None: greedily.
        stop: ends chains before n_steps tokens; a rule that compiles.
    """

    def __init__(
        self,
        slots: SlotStore,
        n_rows: int,
        n_steps: int | None = None,
        by_noise: bool | None = None,
        stop: StopRule | None = None,
    ) -> None:
        super().__init__(slots, n_rows, 1)
        drafter, shape = slots.drafter, slots.config.shape
        self.spread, draws = drafter.spread, []
        self.ends: DraftEnds | None = None
        names = None if drafter.kept is None else self.hold(drafter.kept.contiguous())
        self.options = self.hold(torch.zeros(n_rows, 4, dtype=torch.float64))  # of sampling
        self.drafted = self.hold(torch.zeros(n_rows, n_steps or 1, dtype=torch.int64))
        if n_steps is None:
            self.step(slots, None, is_last=False)
        else:
            following = self.tokens, self.positions
            kind = torch.int64 if by_noise else torch.float32
            self.numbers = self.hold(torch.zeros(n_rows, n_steps, dtype=kind))
            previous = self.previous = self.floats(n_rows, shape.hidden_size) if slots.config.previous_state else None
            if stop is not None:
                self.ends = DraftEnds(self, stop, n_rows)
            for i in range(n_steps):
                self.embed(drafter.embed_tokens.weight, self.states[0])
                self.step(slots, previous, is_last=i == n_steps - 1)
                previous = None if previous is None else self.final
                if stop is not None:
                    self.ends.read(i, self.final, self.logits)
                if by_noise is None:
                    self.argmax(self.logits, self.n_draft, self.drafted[:, i:], n_steps, following, names)
                else:
                    drawing = self.options, self.numbers[:, i], self.drafted[:, i], following, names
                    draws.append(self.drawn(self.logits, *drawing))
                if stop is not None:
                    self.ends.drawn(self.drafted[:, i])
        self.draws = np.array(draws)  # [n_steps, 2] operations, see `Program.drawn`
        self.finish()

    def read(self, embedded: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, V] and final states [B, D] for embeddings [B, D] at positions [B]."""
        self.states[0].copy_(embedded)
        self.positions.copy_(positions[:, None])
        self.run()
        return self.spread(self.logits.clone()), self.final.clone()

    def draft(
        self, roots: Tensor, positions: Tensor, previous: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draft tokens behind roots [B] at positions [B], one after the other.

        Where a rule ends the drafts, `ends.begin` comes before.

        Args:
            roots: int64.
            positions: int64.
            previous: [B, D] the target's final states before the roots, which not every drafter reads.
            numbers: [B, n_steps] that tokens are drawn by; None: they are the likeliest.

        Returns:
            Tokens [B, g]; what they were drawn from behind an entry for the roots, [B, 1 + g, V] (greedy: None); and,
            where a rule has ended the drafts, how many of them are each row's, [B] int64. g is n_steps, or the longest.
        """
        self.tokens.copy_(roots[:, None])
        self.positions.copy_(positions[:, None])
        if self.previous is not None:
            self.previous.copy_(previous)
        n_rows, n_steps = self.drafted.shape
        q, drawn = None, self.draws
        if numbers is not None:
            self.numbers.copy_(numbers)
            q = torch.empty(n_rows, 1 + n_steps, self.n_draft, dtype=torch.float32)
            n_bytes = 4 * self.n_draft  # of a distribution
            places = np.arange(q.data_ptr() + n_bytes, q.data_ptr() + n_bytes * (1 + n_steps), n_bytes)
            for operation, field in ((0, 3), (1, 1)):
                self.point(drawn[:, operation], field, places)
                self.point(drawn[:, operation], field + 1, (1 + n_steps) * self.n_draft)
        self.run()
        lengths = None if self.ends is None else self.ends.finish()
        width = n_steps if lengths is None else int(lengths.max())
        return self.drafted[:, :width].clone(), None if q is None else self.spread(q[:, : 1 + width], 0.0), lengths


class MemoryProgram(DecoderProgram):
    """Writes what the target's states of a chain's accepted nodes project to into a store: B rows of n nodes."""

    def __init__(self, slots: SlotStore, n_rows: int, n_nodes: int) -> None:
        config, drafter = slots.config, slots.drafter
        super().__init__(config.shape, n_rows, n_nodes)
        self.accepted = self.hold(torch.zeros(n_rows, dtype=torch.int64))
        self.keep(slots.positions, self.accepted, config.sink_tokens, slots.ring_tokens)
        self.rope_angles(drafter.rope)
        self.inputs = []
        for block, store in zip(drafter.blocks, slots.stores, strict=True):
            self.inputs.append(self.norm(self.x, None, block.input_norm.weight, self.normed))
            self.remember(block, self.normed, store.keys, store.values)
        self.finish()

    def write(self, captured: Tensor, positions: Tensor, accepted: Tensor) -> None:
        """Of states [B, n, C, D] at positions [B, n], keep those of the root and of accepted [B] nodes."""
        states = [captured[:, :, i].contiguous() for i in range(len(self.inputs))]
        for place, one in zip(self.inputs, states, strict=True):
            self.point(place, 1, one)
        self.positions.copy_(positions)
        self.accepted.copy_(accepted)
        self.run()
