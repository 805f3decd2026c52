"""The steps of a batch: propose a tree, one target forward, verify, commit.

`Engine` fills the batch with requests, `generate` and `stream` of generating.py are its simplest callers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from spectrain.decoding.context import Context
from spectrain.decoding.drafter import Chooser, Drafter
from spectrain.decoding.generation import Clock, Ending, Generation
from spectrain.decoding.prefixes import Prefixes
from spectrain.decoding.sampling import Sampling
from spectrain.decoding.verify import Verified, verify
from spectrain.target.device import is_out_of_memory, to_device
from spectrain.target.kv_cache import KVCache
from spectrain.target.target import TargetModel, TargetOutput
from spectrain.target.tree import DraftTree, Source

PROBE = 1 << 16  # is added to the parents of probes


@dataclass(frozen=True)
class TokenLogprobs:
    """What the target's own logits say of a token, without temperature or any other option of sampling."""

    logprob: float
    top: list[tuple[int, float]]  # the likeliest tokens and theirs, best first


@dataclass(frozen=True)
class Emitted:
    """The tokens that one request gained, by prefill or in a step."""

    request: int
    tokens: list[int]
    sources: list[int]  # Source of each
    generation: Generation | None = None  # the whole continuation, where it ended with these tokens
    error: str | None = None  # why it failed, in one sentence; then there is no generation
    logprobs: list[TokenLogprobs] | None = None  # of each token, where they were asked for


@dataclass(eq=False)
class Row:
    """A prompt that is continued, or waits for it."""

    request: int
    prompt: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator
    ending: Ending
    n_logprobs: int | None = None  # likeliest tokens whose log p are told beside those of its own; None: none are told
    joined_s: float = 0.0
    shares_at_start: dict[str, float] = field(default_factory=dict)
    generation: Generation = field(default_factory=Generation)


@dataclass(eq=False)
class Batch:
    """The active rows. Cache, context, drafter and `rows` keep the same order; all of them free a row by swapping."""

    target: TargetModel
    drafter: Drafter
    cache: KVCache
    context: Context
    verification: str
    clock: Clock
    prefixes: Prefixes | None = None  # where the texts of rows that leave are kept
    rows: list[Row] = field(default_factory=list)

    @torch.inference_mode()
    def join(self, rows: Sequence[Row], output: TargetOutput, read_s: float) -> list[Emitted]:
        """Add rows at the end, and draw their first tokens.

        The target has read their prompts into the cache: `output` is that of its `reading`, which took `read_s`.
        """
        context, began_s = self.context, self.clock.now - read_s
        new = range(len(self.rows), len(self.rows) + len(rows))
        generators, samplings = [row.generator for row in rows], [row.sampling for row in rows]
        context.append([row.prompt for row in rows], [row.max_new_tokens for row in rows], generators, samplings)
        last_logits = output.logits[:, 0]
        roots = context.draw_roots(new, last_logits)
        context.root(new, roots, last_logits)
        self.drafter.prefill(context, output, new)

        self.clock.lap(None)
        self.clock.settle()
        for row in rows:
            row.joined_s, row.shares_at_start = began_s, dict(self.clock.shares)
            row.generation.prefill_s = (self.clock.now - began_s) / len(rows)
        self.rows += rows
        first = torch.zeros(len(rows), 1, dtype=torch.int64, device=context.device)
        sources = [[int(Source.ROOT)]] * len(rows)
        return self._emit(new, [[token] for token in roots.tolist()], sources, output.logits, first)

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Run one step for all rows."""
        context, clock, n_rows = self.context, self.clock, len(self.rows)
        clock.lap("other", n_rows)  # since the last step, whoever has taken it
        tree = self.target.padded(self.drafter.propose(context))
        if not tree.is_chain and self.target.graphs is None:
            _ = tree.depth, tree.ancestors  # computed on first use; their time belongs to the draft, not the forward
        clock.lap("draft", n_rows)
        output = self.target.score(tree, self.cache)
        clock.lap("forward", n_rows)
        rule = context.sampling, context.uniforms, self.verification
        verified = verify(tree, output.logits, *rule, output.best, self.target.graphs, self.cache)
        clock.lap("verify", n_rows)
        self.cache.commit(_moving(tree, verified), verified.accepted)
        context.advance(verified, partial(verified.last_logits, output.logits))
        clock.lap("commit", n_rows)
        asked = self.drafter.observe(context, tree, output, verified)
        clock.lap("draft", n_rows)
        step = _read_back(tree, verified, asked)  # until here the host waited for nothing
        self.cache.extend([*map(len, step.emitted)])
        context.extend(step.emitted)
        clock.lap("verify", n_rows)
        self.drafter.extend(context, step.emitted, step.asked)
        clock.lap("draft", n_rows)
        chooser = self.drafter if isinstance(self.drafter, Chooser) else None
        clock.end_step(None if chooser is None else chooser.watch_clock(n_rows))
        for row, by_source, by_depth in zip(self.rows, step.by_source, step.by_depth, strict=True):
            row.generation.count_drafted(by_source, by_depth)
            if chooser is not None and chooser.choice is not None:
                row.generation.count_choice(chooser.choice)
        return self._emit(range(n_rows), step.emitted, step.sources, output.logits, verified.path)

    @torch.inference_mode()
    def drop(self, index: int) -> Emitted:
        """Remove a row whose text nobody wants any more."""
        row = self.rows[index]
        row.generation.finish_reason = "cancelled"
        self._leave([index])
        return Emitted(row.request, [], [], row.generation)

    def _emit(
        self, rows: range, emitted: list[list[int]], sources: list[list[int]], logits: Tensor, path: Tensor
    ) -> list[Emitted]:
        """Give each row its new tokens, cut where its text ends, and remove the rows that ended.

        logits [R, N, V] and accepted paths [R, A] are those that the tokens were drawn from, row rows[r] at r.
        """
        gained, ended = [], []
        for index, tokens, origins in zip(rows, emitted, sources, strict=True):
            row = self.rows[index]
            found = row.generation
            room = self.context.room[index] + len(tokens)  # before these tokens
            kept, reason = row.ending.cut(found.tokens, tokens[:room])
            if reason is None and len(kept) >= room:
                reason = "length"
            if found.tokens:  # the first token is prefill's
                found.accepted.append(min(len(kept), len(tokens) - 1))
            found.tokens += kept
            found.sources += origins[: len(kept)]
            place, told = index - rows.start, None
            if row.n_logprobs is not None:
                told = _logprobs(logits[place, path[place, : len(kept)]], kept, row.n_logprobs)
            gained.append(Emitted(row.request, kept, origins[: len(kept)], found if reason else None, logprobs=told))
            if reason is not None:
                found.finish_reason = reason
                ended.append(index)
        if ended:
            self._leave(ended)
        return gained

    def _leave(self, indices: Sequence[int]) -> None:
        """Remove rows, given in order, and settle what they cost."""
        n_rows, left = len(self.rows), [self.rows[index] for index in indices]
        for index in reversed(indices):
            if self.prefixes is not None:
                self._keep_text(index)
            for part in (self.cache, self.context, self.drafter):
                part.free(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
        self.clock.lap("other", n_rows)
        self.clock.settle()
        for row in left:
            row.generation.target_forwards = len(row.generation.accepted)
            row.generation.elapsed_s = self.clock.now - row.joined_s
            shares = self.clock.shares.items()
            row.generation.time_s = {stage: share - row.shares_at_start[stage] for stage, share in shares}

    def _keep_text(self, index: int) -> None:
        try:
            self.prefixes.add(self.context.tokens[index].numpy()[: self.cache.lengths[index]], self.cache, index)
        except (RuntimeError, MemoryError) as error:  # nobody needs it
            if not is_out_of_memory(error):
                raise


def _logprobs(logits: Tensor, tokens: Sequence[int], n_top: int) -> list[TokenLogprobs]:
    """Return what logits [K, V] say of the tokens that were drawn from them."""
    log_p = logits.float().log_softmax(-1)
    own = log_p.gather(1, to_device(torch.tensor(tokens), log_p.device)[:, None])[:, 0].tolist()
    values, ids = (one.tolist() for one in log_p.topk(min(n_top, log_p.shape[1])))
    return [TokenLogprobs(*one) for one in zip(own, map(list, map(zip, ids, values)), strict=True)]


@dataclass(frozen=True)
class _Step:
    """A step's result on the host, one list per row."""

    emitted: list[list[int]]  # accepted tokens, then the bonus
    sources: list[list[int]]
    by_source: list[list[int]]  # drafted nodes by Source
    by_depth: list[list[int]]  # drafted nodes by depth, from 0 on
    asked: list[list[int]]  # what the drafter wants to read


def _moving(tree: DraftTree, verified: Verified) -> Tensor | None:
    """Return the accepted paths [n, A] whose nodes have to move in the cache; None: all stand where they belong."""
    if tree.is_chain or verified.is_moved:
        return None
    path = verified.path[:, : 1 + tree.deepest]
    if path.device.type != "cpu":
        return path
    path = path[:, : 1 + int(verified.accepted.max())]  # on a CPU looking costs less than moving
    return path if ((path != torch.arange(path.shape[1])) & (path > 0)).any() else None


def _read_back(tree: DraftTree, verified: Verified, asked: Tensor | None) -> _Step:
    """Copy a step, and what the drafter asked for, [n, K] int64, to the host in one transfer."""
    (n_rows, n), n_depths = tree.shape, 1 + tree.deepest
    bonus, asked = verified.bonus[:, None], [] if asked is None else [asked]
    if n == 1:
        found, roots, no_sources = _joined([bonus, *asked]), [[int(Source.ROOT)]] * n_rows, [[0] * len(Source)] * n_rows
        return _Step([row[:1] for row in found], roots, no_sources, [[0]] * n_rows, [row[1:] for row in found])
    # Probes are told from drafts by their parents.
    parents = tree.parents if tree.probe is None else torch.where(tree.probe, tree.parents + PROBE, tree.parents)
    path, step = verified.path[:, :n_depths], _Step([], [], [], [], [])
    for row in _joined([bonus, verified.accepted[:, None], parents, tree.tokens, tree.source, path, *asked]):
        above, tokens, sources = row[2 : 2 + n], row[2 + n : 2 + 2 * n], row[2 + 2 * n : 2 + 3 * n]
        nodes, by_source, by_depth = row[3 + 3 * n : 3 + 3 * n + row[1]], [0] * len(Source), [0] * n_depths
        depths = [0] * n
        for node, parent in enumerate(above):
            if parent >= 0:
                depths[node] = depth = 1 + depths[parent % PROBE]
                if parent < PROBE:
                    by_source[sources[node]] += 1
                    by_depth[depth] += 1
        step.emitted.append([*map(tokens.__getitem__, nodes), row[0]])
        step.sources.append([*map(sources.__getitem__, nodes), int(Source.ROOT)])
        step.by_source.append(by_source)
        step.by_depth.append(by_depth)
        step.asked.append(row[2 + 3 * n + n_depths :])
    return step


def _joined(parts: list[Tensor]) -> list[list[int]]:
    """Return the rows of tensors [n, .] side by side, in one transfer from a device."""
    if parts[0].device.type == "cpu":
        return [*map(list, itertools.starmap(itertools.chain, zip(*map(Tensor.tolist, parts), strict=True)))]
    return torch.cat(parts, dim=1).tolist()
