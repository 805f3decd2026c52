"""One way to run a drafter that is made of our own blocks: its tokens one by one, in levels of trees, or as chains.

A token reads the keys of the text before it (`window_keys.py`), and then leaves keys of its own there. On a CPU this is
a program (`kernels/cpu/program.py`), on a GPU our kernels or torch in CUDA graphs, and elsewhere torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding.sampling import RowSampling, Sampling
from spectrain.drafting.stopping import DraftEnds, StopRule
from spectrain.drafting.window_keys import WindowKeys
from spectrain.kernels import MOST_TOKENS, Graphs, Programs
from spectrain.models.drafter_model import DrafterModel
from spectrain.target.forward import DecoderProgram, can_fuse
from spectrain.target.llama import additive
from spectrain.target.masks import Nodes


class DraftNodes(NamedTuple):
    """Nodes that a drafter reads together, m of each row, which do not see each other."""

    tokens: Tensor  # [n, m] int64
    positions: Tensor  # [n, m] int64
    slots: Tensor  # [n, m] int64, where their own K/V go, and then those of their memories
    seen: Tensor  # [n, m, S] bool, the slots that each node sees; its own one, where it sees itself
    above: Tensor  # [n, m, D] final states of their parents, which not every drafter reads
    lengths: Tensor | None = None  # [n] int64, slots before those S that all nodes see; None: none


class DraftRuntime:
    """A drafter as it drafts, and the keys of its rows."""

    graphs: Graphs | None = None  # that run its steps on a GPU; None: they run as they are
    kernels: ModuleType | None = None  # whose kernels run them on a GPU; None: torch does

    def __init__(self, model: DrafterModel, keys: WindowKeys) -> None:
        device = model.norm.weight.device
        self.model, self.keys = model, keys
        self.compiles = device.type == "cpu" and model.in_programs and can_fuse(model, model.config.shape)
        self._programs = Programs()
        model.rope.move(device)

    def next(self, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Read one token per row, [n], at positions [n]; `state` [n, D] is the final state before each.

        Returns logits [n, V], and final states [n, D].
        """
        return self.run("next", self.one, tokens, positions, state)

    def run(self, name: str, function: Callable[..., object], *inputs: Tensor) -> object:
        """Call a function of tensors that reads the keys; on a GPU its graph is replayed, see `Graphs.run`."""
        if self.graphs is None:
            return function(*inputs)
        return self.graphs.run((name, self.keys.storage), function, *inputs)

    def one(self, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `next` without a graph around it."""
        seen, slots, lengths = self.keys.read_one(positions)
        nodes = DraftNodes(tokens[:, None], positions[:, None], slots, seen, state[:, None], lengths)
        if self.compiles:
            logits, states = self.read(nodes)
            logits = logits.clone()  # the next call may overwrite them
        else:
            logits, states = self._read(*nodes)
        return self.model.spread(logits[:, 0]), states[:, 0]

    def read(self, nodes: DraftNodes) -> tuple[Tensor, Tensor]:
        """Read nodes, and store what later ones see of them.

        Returns logits [n, m, K], which the next call may overwrite, and final states [n, m, D].
        """
        shape = nodes.tokens.shape
        if self.compiles and shape.numel() <= MOST_TOKENS:
            return self._programs.get(shape, lambda: NodesProgram(self.model, self.keys, *shape)).read(nodes)
        logits, states = self.run("nodes", self._read, *(one for one in nodes if one is not None))
        # The next nodes may be as many, and a graph overwrites them.
        return logits, states if self.graphs is None else states.clone()

    def chain(self, n_rows: int, n_steps: int, sampling: Sampling | RowSampling, stop: StopRule | None) -> ChainProgram:
        """Return the program of chains of so many tokens that a rule may end; there is one where `compiles`."""
        key = n_rows, n_steps, None if sampling.greedy else sampling.shares_noise, stop
        program = self._programs.get(key, lambda: ChainProgram(self.model, self.keys, *key))
        program.options.copy_(sampling.options)
        return program

    def keep(
        self, captured: Tensor, positions: Tensor, path: Tensor, accepted: Tensor, following: Tensor | None
    ) -> Tensor:
        """Store the memories of states [n, A, C, D] at positions [n, A] of accepted paths [n, A], which end with -1.

        `accepted` [n] int64 are the nodes of the paths behind their roots. For `following` [n, A], and what is
        returned, [n, A, D], which the next call may overwrite, see `DrafterModel.read_target`.
        """
        if self.compiles:
            size = positions.shape
            made = self._programs.get(("keep", *size), lambda: MemoryProgram(self.model, self.keys, *size))
            return made.write(captured, positions, accepted, following)
        inputs = captured, positions, path, *([] if following is None else [following])
        return self.run("memories", self._keep, *inputs)

    def _keep(self, captured: Tensor, positions: Tensor, path: Tensor, following: Tensor | None = None) -> Tensor:
        return self.remember(captured, positions.masked_fill(path < 0, -1), slice(0, len(path)), following)

    def remember(self, captured: Tensor, positions: Tensor, rows: slice, following: Tensor | None) -> Tensor:
        """Store the memories of states [n, P, C, D] of some rows at positions [n, P]; those at -1 are thrown away.

        For `following` [n, P], and what is returned, [n, P, D], see `DrafterModel.read_target`.
        """
        rope = self.model.rope(positions.clamp_min(0))
        memories, states = self.model.read_target(captured, following)
        projected = [
            block.keys_values(memory.to(block.input_norm.weight.dtype), rope)
            for block, memory in zip(self.model.blocks, memories, strict=True)
        ]
        self.keys.write(projected, positions, rows)
        return states

    def _read(self, *given: Tensor | None) -> tuple[Tensor, Tensor]:
        nodes = DraftNodes(*given)
        x, own_slots = self.model.joined(self.model.embed(nodes.tokens), nodes.above), nodes.slots[:, :, None]
        if self.kernels is not None:
            return self._fused(x, nodes)
        past, seen = self.keys.context(nodes.seen, nodes.lengths)
        own = torch.diag_embed(seen.gather(2, own_slots)[..., 0])  # [n, m, m]
        seen = seen.scatter(2, own_slots, False)  # a node's own keys are not in its slot yet
        mask = additive(torch.cat([seen, own], dim=2)[:, None], self.model.norm.weight.dtype)
        states, memories = self.model.step(x, self.model.rope(nodes.positions), past, mask)
        self.keys.put(memories, nodes.slots, slice(0, len(x)))
        return self.model.kept_logits(states), states

    def _fused(self, x: Tensor, nodes: DraftNodes) -> tuple[Tensor, Tensor]:
        """Compute `_read` of inputs x [n, m, D] by our own kernels on a GPU."""
        model, fused, stores = self.model, self.kernels, self.keys.all_of(len(x))
        lengths = torch.zeros_like(nodes.positions[:, 0]) if nodes.lengths is None else nodes.lengths
        places = nodes.positions.contiguous(), nodes.slots.contiguous(), Nodes(lengths, nodes.seen.contiguous())
        step = fused.Step(model.rope, *places)
        part, added, states = x.flatten(0, 1), None, []
        for block, store in zip(model.blocks, stores, strict=True):
            if model.pairs:
                joined = fused.linear(block.qkv, block.normed(part))
                attended = step.attended(block, joined, store.keys, store.values)
                part = block.residual(part).contiguous()
            else:
                part, attended = step.attend(block, part, added, store.keys, store.values)
            states.append(part[None])
            part, added = fused.after_attention(block, part, attended)
        part, final = fused.normed(model.norm, part, added)
        if model.config.feedback:
            memories = model.memories([*states, part[None]])
            for block, store, memory in zip(model.blocks, stores, memories, strict=True):
                step.remember(block, memory[0], store.keys, store.values)
        final, part = (one.view(*x.shape[:2], -1) for one in (final, part))
        logits = fused.linear(model.lm_head, final)
        return logits, final if model.normed_states else part

    def fits(self, model: DrafterModel, kind: type[WindowKeys], ring_tokens: int, max_rows: int) -> bool:
        """Whether it can go on with such keys; a method always reads trees of equally many nodes."""
        keys = self.keys
        is_long_enough = type(keys) is kind and keys.ring_tokens >= ring_tokens
        return self.model is model and is_long_enough and len(keys.positions) == max_rows


class StepProgram(DecoderProgram):
    """What a draft step computes for m nodes of each of B rows, and stores of them.

    A node's own K/V are written to its slot, where it may see them, and then overwritten by those of its memory.
    """

    def __init__(self, model: DrafterModel, keys: WindowKeys, n_rows: int, n_nodes: int) -> None:
        self.model, self.keys, shape = model, keys, model.config.shape
        super().__init__(shape, n_rows, n_nodes)
        self.final = self.floats(len(self.x), shape.hidden_size)
        self.states = self.floats(len(model.blocks) + 1, *self.final.shape)
        self.last = self.states[-1]
        self.previous = self.final if model.normed_states else self.last  # what the next token reads of this one
        self.n_draft = model.config.draft_vocab or shape.vocab_size
        self.logits = self.floats(len(self.x), self.n_draft)

    def step(self, is_last: bool, seen: Tensor | None = None) -> None:
        """Append a step, behind which `previous` [B m, D] holds final states. It reads those of the token before.

        Args:
            is_last: of a chain, whose last token has memories that are never read.
            seen: [B, m, S] bool, the slots that each node sees, where `slots` says which are their own; None: the ring
                says both, or in whole texts the position does.
        """
        model, keys, config, added = self.model, self.keys, self.model.config, None
        if config.previous_state and not model.pairs:
            self.linear(self.previous, model.previous, self.added)
            added = self.added
        d, n_slots, m = config.shape.hidden_size, keys.positions.shape[1], len(self.x)
        if seen is None and keys.is_whole:
            seen = self.hold(torch.ones(1, 1, 1, dtype=torch.bool))
            self.slots = self.lengths = self.positions
        elif seen is None:
            seen = self.hold(torch.zeros(m, 1, n_slots, dtype=torch.bool))
            ring = config.window_tokens, config.sink_tokens, keys.ring_tokens, config.own_key
            self.goes_on(self.window(keys.positions, seen, *ring))
        self.rope_angles(model.rope)
        self.x = self.states[0]
        for i, (block, store) in enumerate(zip(model.blocks, keys.stores, strict=True)):
            if model.pairs:
                self.linear(block.append_normed(self, self.x, self.previous), block.qkv, self.qkv)
                block.append_residual(self, self.previous, self.last)
            else:
                self.norm(self.states[i], added, block.input_norm.weight, self.normed)
                self.goes_on(self.copy(self.states[i], self.states[i + 1]))
                self.linear(self.normed, block.qkv, self.qkv)
            self.split(block, store.keys, store.values)
            self.attend(self.queries, store.keys, store.values, self.attended, seen)
            self.x = self.states[i + 1]
            self.mlp(block)
            added = self.added
        self.norm(self.x, added, model.norm.weight, self.final)
        if config.feedback and not is_last:
            mixed = self.floats(m, d)
            shares = model.feedback_shares().float()
            for block, store, weights in zip(model.blocks, keys.stores, shares, strict=True):
                self.mix(self.states, weights.contiguous(), mixed)
                self.norm(mixed, None, block.input_norm.weight, self.normed)
                self.remember(block, self.normed, store.keys, store.values)
        self.linear(self.final, model.lm_head, self.logits)


class NodesProgram(StepProgram):
    """A draft step that reads m nodes of each row's tree."""

    def __init__(self, model: DrafterModel, keys: WindowKeys, n_rows: int, n_nodes: int) -> None:
        super().__init__(model, keys, n_rows, n_nodes)
        n_marks = keys.n_marks if keys.is_whole else keys.positions.shape[1]
        self.seen = self.hold(torch.zeros(n_rows, n_nodes, n_marks, dtype=torch.bool))
        self.embed(model.embed_tokens.weight, self.states[0])
        self.step(is_last=False, seen=self.seen)
        self.finish()

    def read(self, nodes: DraftNodes) -> tuple[Tensor, Tensor]:
        """Return logits [B, m, K], which the next call overwrites, and final states [B, m, D]."""
        for name in ("tokens", "positions", "slots", "seen"):
            getattr(self, name).copy_(getattr(nodes, name))
        if nodes.lengths is not None:
            self.lengths.copy_(nodes.lengths)
        if self.model.config.previous_state:
            self.previous.copy_(nodes.above.flatten(0, 1))
        self.run()
        return self.logits.view(self.n_rows, self.n, -1), self.previous.view(self.n_rows, self.n, -1).clone()


class ChainProgram(StepProgram):
    """A chain of draft steps of B rows, each of which reads what the one before it drafted.

    Args:
        n_steps: most tokens of a chain.
        by_noise: whether the steps draw their tokens by shared noise; None: greedily.
        stop: ends chains before n_steps tokens; a rule that compiles.
    """

    def __init__(
        self,
        model: DrafterModel,
        keys: WindowKeys,
        n_rows: int,
        n_steps: int,
        by_noise: bool | None,
        stop: StopRule | None = None,
    ) -> None:
        super().__init__(model, keys, n_rows, 1)
        self.spread, draws = model.spread, []
        names = None if model.kept is None else self.hold(model.kept.contiguous())
        self.options = self.hold(torch.zeros(n_rows, 4, dtype=torch.float64))  # of sampling
        self.drafted = self.hold(torch.zeros(n_rows, n_steps, dtype=torch.int64))
        following = self.tokens, self.positions
        self.numbers = self.hold(torch.zeros(n_rows, n_steps, dtype=torch.int64 if by_noise else torch.float32))
        self.ends = None if stop is None else DraftEnds(self, stop)
        for i in range(n_steps):
            self.embed(model.embed_tokens.weight, self.states[0])
            self.step(is_last=i == n_steps - 1)
            if stop is not None:
                self.ends.read(i, self.final)
            if by_noise is None:
                self.argmax(self.logits, self.n_draft, self.drafted[:, i:], n_steps, following, names)
            else:
                drawing = self.options, self.numbers[:, i], self.drafted[:, i], following, names
                draws.append(self.drawn(self.logits, *drawing))
            if stop is not None:
                self.ends.drawn(self.drafted[:, i])
        self.draws = np.array(draws)  # [n_steps, 2] operations, see `Program.drawn`
        self.finish()

    def draft(
        self, roots: Tensor, positions: Tensor, previous: Tensor, numbers: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Draft tokens behind roots [B] int64 at positions [B] int64, one after the other.

        Where a rule ends the drafts, `ends.begin` comes before.

        Args:
            previous: [B, D] the target's final states before the roots, which not every drafter reads.
            numbers: [B, n_steps] that tokens are drawn by; None: they are the likeliest.

        Returns:
            Tokens [B, g]; what they were drawn from behind an entry for the roots, [B, 1 + g, V] (greedy: None); and,
            where a rule has ended the drafts, how many of them are each row's, [B] int64. g is n_steps, or the longest.
        """
        self.tokens.copy_(roots[:, None])
        self.positions.copy_(positions[:, None])
        if self.model.config.previous_state:
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
    """Writes what the target's states of a chain's accepted nodes project to into its keys: B rows of n nodes."""

    def __init__(self, model: DrafterModel, keys: WindowKeys, n_rows: int, n_nodes: int) -> None:
        config = model.config
        super().__init__(config.shape, n_rows, n_nodes)
        self.accepted = self.hold(torch.zeros(n_rows, dtype=torch.int64))
        self.keep(keys.positions, self.accepted, config.sink_tokens, keys.ring_tokens)
        self.rope_angles(model.rope)
        self.inputs, self.fused = [], None
        if model.pairs:
            self.captured = self.floats(len(self.x), len(config.captured_layers) * config.shape.hidden_size)
            self.fused = model.append_fused(self, self.captured)
            self.embed(model.embed_tokens.weight, self.x)
        for block, store in zip(model.blocks, keys.stores, strict=True):
            normed = self.normed
            if model.pairs:
                normed = block.append_normed(self, self.x, self.fused)
            else:
                self.inputs.append(self.norm(self.x, None, block.input_norm.weight, normed))
            self.remember(block, normed, store.keys, store.values)
        self.finish()

    def write(self, captured: Tensor, positions: Tensor, accepted: Tensor, following: Tensor | None) -> Tensor:
        """Of states [B, n, C, D] at positions [B, n], keep those of the root and of accepted [B] nodes.

        Return what the next token reads as the state before it, [B, n, D]; see `DrafterModel.read_target`.
        """
        states = [captured[:, :, i].contiguous() for i in range(len(self.inputs))]
        for place, one in zip(self.inputs, states, strict=True):
            self.point(place, 1, one)
        self.positions.copy_(positions)
        self.accepted.copy_(accepted)
        if self.fused is not None:
            self.captured.view(captured.shape).copy_(captured)
            self.tokens.copy_(following)
        self.run()
        return captured[:, :, -1] if self.fused is None else self.fused.view(*positions.shape, -1)
