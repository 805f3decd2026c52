"""The decoding loop of every method: propose a tree, one target forward, verify, commit.

    generations = generate(load_target("checkpoints/pystdlib-8l"), Speculative(draft), prompts, max_new_tokens=64)

Batching is continuous: `batch_size` slots are kept filled from the list of prompts, and a row that ends leaves at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from spectrain.decoding.context import Context
from spectrain.decoding.generation import Clock, Ending, Generation
from spectrain.decoding.kv_cache import KVCache
from spectrain.decoding.memory import is_out_of_memory, out_of_memory_advice
from spectrain.decoding.sampling import Sampling, row_generator
from spectrain.decoding.target import TargetModel
from spectrain.decoding.tree import DraftTree, Source
from spectrain.decoding.verify import Verified, verify
from spectrain.errors import UserError, check_whole

if TYPE_CHECKING:
    from spectrain.decoding.drafter import Drafter

MOST_NODES = 128  # of a step, for which the cache has room behind the text from the start
PROBE = 1 << 16  # is added to the parents of probes


@dataclass(frozen=True)
class Emitted:
    """The tokens that one row gained, by prefill or in a step."""

    prompt_index: int
    tokens: list[int]
    sources: list[int]  # Source of each
    generation: Generation | None  # the whole continuation, where it ended with these tokens


@torch.inference_mode()
def generate(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None = None,
    **options,
) -> list[Generation]:
    """Continue each prompt. Arguments and errors are those of `stream`; the generations are in the prompts' order."""
    steps = stream(target, drafter, prompts, max_new_tokens, sampling, **options)
    ended = {step.prompt_index: step.generation for step in steps if step.generation is not None}
    return [ended[index] for index in range(len(prompts))]


def stream(
    target: TargetModel,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    seed: int = 0,
    prompt_numbers: Sequence[int] | None = None,
    batch_size: int | None = 1,
    stop_token_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    verification: str = "block",
    cache_block_tokens: int = 256,
) -> Iterator[Emitted]:
    """Continue each prompt, and yield its tokens as they are accepted.

    The text follows the target's own distribution, whatever the drafter guesses.

    Args:
        target: the model whose text this is.
        drafter: the method.
        prompts: token ids.
        max_new_tokens: maximum length of a continuation.
        sampling: one for all prompts, or one for each, of which all have the same `draws`; None: greedy.
        seed: prompt i draws from a generator seeded by (seed, i), so its sample is the same in any batch, unless how
            many tokens are drawn from a draft model depends on the batch (max_nodes=auto). With `draws=shared` it is
            the same with any drafter.
        prompt_numbers: the numbers i; None: 0, 1, ...
        batch_size: rows decoded together; None: all prompts.
        stop_token_ids: tokens that end a text; None: the target's EOS ids, (): none.
        stop_strings: a text ends with the token that completes one of them; needs the target's tokenizer.
        verification: "block" or "token": how drafts that were drawn from a q are verified; see `verify`.
        cache_block_tokens: the slots of a row in the caches are a multiple of this.

    Yields:
        For each row after each step, the tokens that it gained.

    Raises:
        UserError: a prompt is empty, too long for the target, or holds tokens outside its vocabulary; or the batch
            does not fit in memory.
    """
    check_whole("max_new_tokens", max_new_tokens, 1)
    batch_size = max(1, len(prompts)) if batch_size is None else batch_size
    check_whole("batch_size", batch_size, 1)
    if stop_strings and target.tokenizer is None:
        raise UserError("stop_strings need the target's tokenizer; load the target with one, or use stop_token_ids")
    for index, prompt in enumerate(prompts):
        check_prompt(target, prompt, max_new_tokens, f"prompt {index}")
    if not prompts:
        return
    samplings = [one.drawn_by(drafter) for one in _samplings(sampling, len(prompts))]
    n_slots = min(batch_size, len(prompts))
    stop_ids = frozenset(target.eos_ids if stop_token_ids is None else stop_token_ids)
    ending = Ending(frozenset(target.eos_ids), stop_ids, tuple(stop_strings), target.tokenizer)
    # The steps of a batch in which one row draws take as long as if all did.
    drafter.prepare(target, next((one for one in samplings if not one.greedy), samplings[0]), n_slots)
    target = target.with_capture(drafter.capture_layers)
    longest = max(map(len, prompts)) + max_new_tokens
    cache = target.new_cache(n_slots, cache_block_tokens, longest + MOST_NODES)
    known_stops = [token for token in stop_ids if 0 <= token < target.vocab_size]
    context = Context(samplings, target.device, n_slots, known_stops)
    batch = Batch(target, drafter, cache, context, ending, verification, Clock(target.device))
    generators = [row_generator(seed, number) for number in prompt_numbers or range(len(prompts))]
    waiting = 0
    try:
        if target.graphs is not None and len(set(samplings)) == 1:  # else nothing but forwards is recorded
            from spectrain.decoding.rehearsal import rehearse  # here: it imports drafters, which import this module

            def batch_of(drafter: Drafter, context: Context) -> Batch:
                never = Ending(frozenset(), frozenset(), (), None)
                return Batch(target, drafter, cache, context, never, verification, Clock(target.device))

            rehearse(target, drafter, cache, samplings[0], known_stops, batch_of)
        with torch.inference_mode():
            drafter.start(target, cache)
        batch.clock = Clock(target.device)  # which does not count what is prepared once
        while waiting < len(prompts) or batch.rows:
            first, waiting = waiting, min(waiting + n_slots - len(batch.rows), len(prompts))
            if waiting > first:
                new = slice(first, waiting)
                yield from batch.join(first, prompts[new], generators[new], samplings[new], max_new_tokens)
            else:
                yield from batch.step()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        target.drop_caches()
        raise UserError(out_of_memory_advice(target.device, n_slots, longest)) from error
    finally:
        target.keep_cache(cache)


def _samplings(sampling: Sampling | Sequence[Sampling] | None, n_prompts: int) -> list[Sampling]:
    """Return the sampling of each prompt."""
    if sampling is None or isinstance(sampling, Sampling):
        return [sampling or Sampling()] * n_prompts
    if len(sampling) != n_prompts:
        raise UserError(f"{len(sampling)} samplings were given for {n_prompts} prompts; give one for each, or one")
    if len({one.draws for one in sampling}) > 1:
        raise UserError("the prompts of a batch differ in sampling.draws; give all of them the same")
    return list(sampling)


def check_prompt(target: TargetModel, prompt: Sequence[int], max_new_tokens: int, name: str = "the prompt") -> None:
    """Raise UserError unless the target can continue these token ids by max_new_tokens."""
    if not len(prompt):
        raise UserError(f"{name} is empty; give at least one token")
    wrong = [token for token in (min(prompt), max(prompt)) if not 0 <= token < target.vocab_size]
    if wrong:
        raise UserError(
            f"{name} holds token id {wrong[0]}, but the target's vocabulary has {target.vocab_size}; "
            "tokenize it with the target's tokenizer"
        )
    if len(prompt) + max_new_tokens > target.max_positions:
        raise UserError(
            f"{name} has {len(prompt)} tokens and max_new_tokens={max_new_tokens}, but the target's context holds "
            f"{target.limit}; shorten the prompt or lower max_new_tokens"
        )


@dataclass
class _Row:
    """A prompt that is being continued."""

    prompt_index: int
    joined_s: float
    shares_at_start: dict[str, float]
    generation: Generation


@dataclass(eq=False)
class Batch:
    """The active rows. Cache, context, drafter and `rows` keep the same order; all of them free a row by swapping."""

    target: TargetModel
    drafter: Drafter
    cache: KVCache
    context: Context
    ending: Ending
    verification: str
    clock: Clock
    rows: list[_Row] = field(default_factory=list)

    @torch.inference_mode()
    def join(
        self,
        first_index: int,
        prompts: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator],
        samplings: Sequence[Sampling],
        max_new_tokens: int,
    ) -> list[Emitted]:
        """Read prompts into new rows at the end and draw their first tokens."""
        self.clock.settle()
        joined_s = self.clock.now
        context, lengths = self.context, [len(prompt) for prompt in prompts]
        new = range(len(self.rows), len(self.rows) + len(prompts))
        context.append(prompts, max_new_tokens, generators, samplings)
        tokens = context.tokens[new.start :, : max(lengths)].to(context.device)
        read = self.drafter.read_of_prompts(torch.tensor(lengths, device=context.device))
        output = self.target.prefill(tokens, lengths, self.cache, new, read)
        last_logits = output.logits[:, 0]
        roots = context.draw_roots(new, last_logits)
        context.root(new, roots, last_logits)
        self.drafter.prefill(context, output, new)

        self.clock.lap(None)
        self.clock.settle()
        share_s = (self.clock.now - joined_s) / len(prompts)
        for index in range(first_index, first_index + len(prompts)):
            self.rows.append(_Row(index, joined_s, dict(self.clock.shares), Generation(prefill_s=share_s)))
        return self._emit(new, [[token] for token in roots.tolist()], [[int(Source.ROOT)]] * len(prompts))

    @torch.inference_mode()
    def step(self) -> list[Emitted]:
        """Run one step for all rows."""
        context, clock, n_rows = self.context, self.clock, len(self.rows)
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
        self.cache.extend([len(tokens) for tokens in step.emitted])
        context.extend(step.emitted)
        clock.lap("verify", n_rows)
        self.drafter.extend(context, step.emitted, step.asked)
        clock.lap("draft", n_rows)
        for row, by_source, by_depth in zip(self.rows, step.by_source, step.by_depth, strict=True):
            row.generation.count_drafted(by_source, by_depth)
            if self.drafter.choice is not None:
                row.generation.count_choice(self.drafter.choice)
        return self._emit(range(n_rows), step.emitted, step.sources)

    def _emit(self, rows: range, emitted: list[list[int]], sources: list[list[int]]) -> list[Emitted]:
        """Give each row its new tokens, cut where its text ends, and remove the rows that ended."""
        gained, ended = [], []
        for index, tokens, origins in zip(rows, emitted, sources, strict=True):
            row = self.rows[index]
            found = row.generation
            room = self.context.room[index] + len(tokens)  # before these tokens
            kept, reason = self.ending.cut(found.tokens, tokens[:room])
            if reason is None and len(kept) >= room:
                reason = "length"
            if found.tokens:  # the first token is prefill's
                found.accepted.append(min(len(kept), len(tokens) - 1))
            found.tokens += kept
            found.sources += origins[: len(kept)]
            gained.append(Emitted(row.prompt_index, kept, origins[: len(kept)], found if reason else None))
            if reason is not None:
                found.finish_reason = reason
                ended.append(index)
        n_rows, left = len(self.rows), [self.rows[index] for index in ended]
        for index in reversed(ended):
            for part in (self.cache, self.context, self.drafter):
                part.free(index)
            self.rows[index] = self.rows[-1]
            self.rows.pop()
        self.clock.lap("other", n_rows)
        if left:
            self.clock.settle()
        for row in left:
            row.generation.target_forwards = len(row.generation.accepted)
            row.generation.elapsed_s = self.clock.now - row.joined_s
            shares = self.clock.shares.items()
            row.generation.time_s = {stage: share - row.shares_at_start[stage] for stage, share in shares}
        return gained


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
        step.emitted.append([*(tokens[node] for node in nodes), row[0]])
        step.sources.append([*(sources[node] for node in nodes), int(Source.ROOT)])
        step.by_source.append(by_source)
        step.by_depth.append(by_depth)
        step.asked.append(row[2 + 3 * n + n_depths :])
    return step


def _joined(parts: list[Tensor]) -> list[list[int]]:
    """Return the rows of tensors [n, .] side by side, in one transfer from a device."""
    if parts[0].device.type == "cpu":
        return [[*itertools.chain(*rows)] for rows in zip(*(part.tolist() for part in parts), strict=True)]
    return torch.cat(parts, dim=1).tolist()
