"""Vanilla speculative decoding: a small model drafts a chain (Leviathan et al. 2023, Chen et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spectrain.config.values import Dtype, Nodes, Whole
from spectrain.decoding.drafter import Context
from spectrain.drafting.budget import ChainBudget
from spectrain.drafting.draft_chain import PIECE, ChainDrafter, Chains, DraftStep, draft_chain, lengths_of
from spectrain.drafting.stopping import StopRule
from spectrain.errors import UserError
from spectrain.kernels import MOST_TOKENS
from spectrain.models.artifacts import fastest_gamma, is_export, read_manifest, trained_acceptance
from spectrain.models.draft_states import ModelStates, in_vocabulary, known_to
from spectrain.models.kinds import about
from spectrain.target.device import to_device
from spectrain.target.kv_cache import KVCache
from spectrain.target.loading import load_target
from spectrain.target.target import TargetModel, TargetOutput
from spectrain.target.tree import DraftTree
from spectrain.target.weights import draft_dtype_of

DRAFTER = "vanilla"
GAMMA = 4  # drafted tokens per step
MOST = 8  # of a chain that adapts


def build(
    target: TargetModel,
    drafter: str,
    gamma: Whole | None = None,
    max_nodes: Nodes | None = None,
    draft_dtype: Dtype = "auto",
) -> Speculative:
    """The method from a Hugging Face folder or id; see `load_draft_model`.

    gamma: None takes, with max_nodes "auto", as many tokens in each step as pay; else the number that was the fastest
    after training, if the folder is an export that says so, else GAMMA.
    """
    fastest, acceptance = fastest_gamma(Path(drafter)) or GAMMA, trained_acceptance(Path(drafter))
    length, budget = lengths_of(gamma, max_nodes, fastest, MOST, acceptance)
    return Speculative(load_draft_model(target, drafter, draft_dtype), length, draft_dtype=draft_dtype, budget=budget)


def open_states(target: TargetModel, drafter: str, rollout_tokens: int) -> ModelStates:
    """Open a draft model whose states an acceptance head reads. It has no rollouts."""
    return ModelStates(load_draft_model(target, drafter).with_hidden(), target.vocab_size)


def of_states(states: ModelStates, gamma: int, stop: StopRule | None, draft_dtype: str) -> Speculative:
    """The method that drafts with these states: chains of at most gamma tokens, ended by the rule."""
    return Speculative(states.model, gamma, stop=stop, draft_dtype=draft_dtype)


def for_trees(
    target: TargetModel, drafter: str, levels: int, branches: int, draft_dtype: str, draft_vocab: int | str | None
) -> Speculative:
    """The model of a `TreeDrafter`. It drafts all of its tokens, whatever draft_vocab says."""
    return Speculative(load_draft_model(target, drafter, draft_dtype), levels, draft_dtype=draft_dtype)


def load_draft_model(target: TargetModel, drafter: str, draft_dtype: str = "float32") -> TargetModel:
    """A Hugging Face folder or id, loaded where the target is, with weights of `draft_dtype` (see `draft_dtype_of`).

    Raises:
        UserError: it cannot be loaded, or its tokenizer differs from the target's.
    """
    if is_export(drafter) and (kind := read_manifest(Path(drafter)).kind) != DRAFTER:
        raise UserError(f"drafter={drafter} is {about(kind).a_noun}; give a vanilla drafter, or a Hugging Face folder")
    weights = draft_dtype_of(draft_dtype, target.device, target.dtype)
    dtype = str(target.dtype if weights == torch.int8 else weights).removeprefix("torch.")
    options = {"device": str(target.device), "graphs": "none" if target.graphs is None else "auto"}
    options["compile"] = "auto" if target.fuses else "none"
    draft_model = load_target(drafter, dtype=dtype, role="draft model", **options)
    check_tokenizers(target, draft_model)
    return draft_model


class Speculative(ChainDrafter):
    """Drafts gamma tokens per step for all rows at once, from any causal LM of the target's vocabulary.

    Args:
        draft_model: the small model, with its tokenizer where the target has one.
        gamma: drafted tokens per step; fewer where a row has less room.
        stop: ends drafts before gamma tokens.
        budget: see `ChainDrafter`.
        draft_dtype: float32 leaves the model's weights as they are; for auto and int8 see `draft_dtype_of`.
    """

    names = None  # tokens stand for themselves

    def __init__(
        self,
        draft_model: TargetModel,
        gamma: int = GAMMA,
        stop: StopRule | None = None,
        draft_dtype: str = "float32",
        budget: ChainBudget | None = None,
    ):
        super().__init__(gamma, budget, stop)
        if draft_dtype_of(draft_dtype, draft_model.device, draft_model.dtype) == torch.int8:
            draft_model = draft_model.in_8_bits()
        self.draft_model = draft_model.with_hidden() if stop is not None and stop.needs_hidden else draft_model
        self.cache: KVCache | None = None
        self.vocab_size = draft_model.vocab_size
        self.describe(max_positions=draft_model.max_positions, joins_late=True)
        self._fits: TargetModel | None = None  # the last target whose tokenizer was compared

    def share(self, other: Speculative) -> None:
        """Draft with the model of another method, which must be of the same folder and options."""
        self.draft_model = other.draft_model

    def start(self, target: TargetModel, cache: KVCache) -> None:
        super().start(target, cache)
        if self._fits is None or self._fits.tokenizer is not target.tokenizer:
            check_tokenizers(target, self.draft_model)
        self._fits = target
        self.vocab_size = target.vocab_size
        if self.cache is not None:
            self.draft_model.caches.keep(self.cache)
        self.cache = self.draft_model.caches.new(cache.max_rows, cache.block_tokens, cache.capacity)

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        super().prefill(context, output, rows)
        lengths = [context.n_tokens[row] - 1 for row in rows]
        longest = max(context.n_tokens[row] + context.room[row] for row in rows)
        if longest > self.method.max_positions:
            raise UserError(
                f"prompt and new tokens may reach {longest}, but the draft model's context holds "
                f"{self.method.max_positions}; shorten the prompt, lower max_new_tokens or choose another drafter"
            )
        prompts = context.tokens[rows.start : rows.stop, : max(lengths)].to(self.draft_model.device)
        prompts = known_to(self.draft_model, prompts)
        self.draft_model.prefill(prompts, lengths, self.cache, rows)

    def draft(self, context: Context, gamma: int) -> DraftTree:
        return draft_chain(
            context,
            gamma,
            first=lambda: self._read_unseen(context),
            # The last token is not fed: its K and V are made up for if it is accepted.
            step=lambda tokens, i: self._read(DraftTree.root_only(tokens.to(self.draft_model.device)), context),
            stop=self.stop,
            whole=self._graph_chain if self.replays(context, self.draft_model.graphs, self.vocab_size) else None,
        )

    def _graph_chain(self, context: Context, n_steps: int, lengths: Tensor | None) -> Chains:
        """Draw chains by a graph that reads the root and the token before it, which may be known, and goes on."""
        model, cache, totals = self.draft_model, self.cache, context.n_tokens
        if max(total - known for total, known in zip(totals, cache.lengths, strict=True)) > 2:
            self._read_unseen(context)
        tokens = to_device(torch.tensor(context.tail(2)), model.device)
        cache.truncate([total - 2 for total in totals])
        used = model.reach(cache, 1 + PIECE * -(-n_steps // PIECE))

        def read(i: int, tokens: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            logits, _, hidden = model.score_at(positions, known_to(model, tokens), cache, used)
            return in_vocabulary(logits[:, -1], self.vocab_size), state if hidden is None else hidden[:, -1]

        # Of no width where no rule reads states.
        width = model.config.get_text_config().hidden_size if self.stop is not None and self.stop.needs_hidden else 0
        state = torch.zeros(len(totals), width, dtype=model.dtype, device=model.device)
        key, starts = ("chain", cache.storage, used), (tokens, context.lengths - 2, state)
        found = self.replayed(model.graphs, key, read, context, n_steps, lengths, starts)
        cache.hold([total + found[0].shape[1] - 1 for total in totals])  # the last token was not read
        return found

    def read_roots(self, context: Context) -> Tensor:
        return self._read_unseen(context).logits

    def read_nodes(self, context: Context, tree: DraftTree, n_new: int) -> Tensor:
        device = self.draft_model.device
        lengths = self.cache.lengths_on(device) - 1
        self.cache.truncate([length - 1 for length in self.cache.lengths], lengths)  # the root is read once more
        tokens = known_to(self.draft_model, tree.tokens)
        moved = DraftTree(*(values.to(device) for values in (tokens, tree.parents, tree.source)))
        logits = self.draft_model.score(moved, self.cache).logits[:, -n_new:]
        self.cache.keep(1)
        return in_vocabulary(logits, self.vocab_size).to(context.device)

    def resume(self, context: Context, emitted: Sequence[Sequence[int]]) -> None:
        # What was drafted last stands in the cache behind the text of that time, whose last token may be unread.
        known = zip(self.cache.lengths, context.n_tokens, emitted, strict=True)
        self.cache.truncate([min(length, total - len(missed) - 1) for length, total, missed in known])

    def free(self, row: int) -> None:
        super().free(row)
        self.cache.free(row)

    def _read_unseen(self, context: Context) -> DraftStep:
        """Feed what the draft cache lacks of the rows' texts: their roots, after a fully accepted draft the tokens
        before them, which were drafted but never fed, and what was decoded plainly. What the cache holds behind these
        was rejected.
        """
        device, totals = self.draft_model.device, context.n_tokens
        while True:
            n_unseen = [max(total - known, 1) for total, known in zip(totals, self.cache.lengths, strict=True)]
            n = min(max(n_unseen), MOST_TOKENS, *totals)  # the same for all rows: some read tokens again
            starts = [total - max(n, unseen) for total, unseen in zip(totals, n_unseen, strict=True)]
            if n == max(n_unseen) == 1:
                self.cache.truncate(starts, context.lengths.to(device) - 1)
                return self._read(DraftTree.root_only(context.roots.to(device)), context)
            tokens = [context.tokens[row, start : start + n] for row, start in enumerate(starts)]
            read = to_device(torch.stack(tokens), device)
            self.cache.truncate(starts)
            said = self._read(DraftTree.chain(read[:, 0], read[:, 1:]), context, self.draft_model.without_graphs())
            if n == max(n_unseen):
                return said

    def _read(self, chain: DraftTree, context: Context, model: TargetModel | None = None) -> DraftStep:
        """Run the draft model on one chain per row and keep it. Returns what it says at the end of each chain."""
        chain = replace(chain, tokens=known_to(self.draft_model, chain.tokens))
        output = (model or self.draft_model).score(chain, self.cache)
        self.cache.keep(chain.shape[1])
        logits = in_vocabulary(output.logits[:, -1], self.vocab_size).to(context.device)
        return DraftStep(logits, output.hidden[:, -1] if output.hidden is not None else None)


def check_tokenizers(target: TargetModel, draft_model: TargetModel) -> None:
    """Raises UserError unless both models mean the same text by a token id."""
    if target.tokenizer is not None and draft_model.tokenizer is not None:
        if target.tokenizer.get_vocab() != draft_model.tokenizer.get_vocab():
            raise UserError(
                f"the draft model's tokenizer ({len(draft_model.tokenizer)} tokens) differs from the target's "
                f"({len(target.tokenizer)} tokens); choose a draft model of the target's family"
            )
    elif target.vocab_size != draft_model.vocab_size:
        raise UserError(
            f"the draft model's vocabulary has {draft_model.vocab_size} tokens, the target's {target.vocab_size}; "
            "choose a draft model with the target's tokenizer"
        )
