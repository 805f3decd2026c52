"""Vanilla speculative decoding: a small model drafts a chain (Leviathan et al. 2023, Chen et al. 2023).

Letters: n active rows, R new rows, T tokens fed, gamma draft length, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from spectrain.decoding.drafter import Context, Drafter
from spectrain.decoding.errors import UserError
from spectrain.decoding.kv_cache import KVCache
from spectrain.decoding.loading import load_target
from spectrain.decoding.target import TargetModel, TargetOutput
from spectrain.decoding.transfer import without
from spectrain.decoding.tree import DraftTree
from spectrain.decoding.verify import Verified
from spectrain.decoding.weights import draft_dtype_of
from spectrain.methods.draft_chain import DraftStep, draft_chain, gamma_within
from spectrain.methods.stopping import StopRule
from spectrain.models.artifacts import fastest_gamma
from spectrain.models.draft_states import in_vocabulary

GAMMA = 4  # drafted tokens per step


def build(
    target: TargetModel,
    drafter: str,
    gamma: int | None = None,
    max_nodes: int | None = None,
    draft_dtype: str = "auto",
) -> Speculative:
    """The method from a Hugging Face folder or id; see `load_draft_model`.

    gamma: None takes the fastest that training measured, if the folder is an export that says so, else GAMMA.
    """
    gamma = (fastest_gamma(Path(drafter)) or GAMMA) if gamma is None else gamma
    return Speculative(load_draft_model(target, drafter, draft_dtype), gamma, max_nodes, draft_dtype=draft_dtype)


def load_draft_model(target: TargetModel, drafter: str, draft_dtype: str = "float32") -> TargetModel:
    """A Hugging Face folder or id, loaded where the target is, with weights of `draft_dtype` (see `draft_dtype_of`).

    Raises:
        UserError: it cannot be loaded, or its tokenizer differs from the target's.
    """
    weights = draft_dtype_of(draft_dtype, target.device, target.dtype)
    dtype = str(target.dtype if weights == torch.int8 else weights).removeprefix("torch.")
    options = {"device": str(target.device), "graphs": "none" if target.graphs is None else "auto"}
    draft_model = load_target(drafter, dtype=dtype, role="draft model", **options)
    check_tokenizers(target, draft_model)
    return draft_model


class Speculative(Drafter):
    """Drafts gamma tokens per step for all rows at once, from any causal LM of the target's vocabulary.

    Args:
        draft_model: the small model, with its tokenizer where the target has one.
        gamma: drafted tokens per step; fewer where a row has less room.
        max_nodes: nodes that the target may score, root and drafted tokens; caps gamma. None: gamma + 1.
        stop: ends drafts before gamma tokens.
        draft_dtype: float32 leaves the model's weights as they are; for auto and int8 see `draft_dtype_of`.
    """

    def __init__(
        self,
        draft_model: TargetModel,
        gamma: int = GAMMA,
        max_nodes: int | None = None,
        stop: StopRule | None = None,
        draft_dtype: str = "float32",
    ):
        if draft_dtype_of(draft_dtype, draft_model.device, draft_model.dtype) == torch.int8:
            draft_model = draft_model.in_8_bits()
        self.draft_model = draft_model.with_hidden() if stop is not None and stop.needs_hidden else draft_model
        self.stop = stop
        self.gamma = gamma_within(gamma, max_nodes)
        self.cache: KVCache | None = None
        self.vocab_size = draft_model.vocab_size
        self._before = torch.empty(0, dtype=torch.int64)  # [n] the token before each row's root
        self._fits: TargetModel | None = None  # the last target whose tokenizer was compared

    def start(self, target: TargetModel, cache: KVCache) -> None:
        if self._fits is None or self._fits.tokenizer is not target.tokenizer:
            check_tokenizers(target, self.draft_model)
        self._fits = target
        self.vocab_size = target.vocab_size
        if self.cache is not None:
            self.draft_model.keep_cache(self.cache)
        self.cache = self.draft_model.new_cache(cache.max_rows, cache.block_tokens, cache.capacity)

    def prefill(self, context: Context, output: TargetOutput, rows: range) -> None:
        lengths = [context.n_tokens[row] - 1 for row in rows]
        longest = max(context.n_tokens[row] + context.room[row] for row in rows)
        if longest > self.draft_model.max_positions:
            raise UserError(
                f"prompt and new tokens may reach {longest}, but the draft model's context holds "
                f"{self.draft_model.max_positions}; shorten the prompt, lower max_new_tokens or choose another drafter"
            )
        prompts = context.tokens[rows.start : rows.stop, : max(lengths)].to(self.draft_model.device)
        self.draft_model.prefill(prompts, lengths, self.cache, rows)
        last = torch.tensor(lengths, device=prompts.device)[:, None] - 1
        self._before = torch.cat([self._before[: rows.start].to(prompts.device), prompts.gather(1, last)[:, 0]])

    def propose(self, context: Context) -> DraftTree:
        return draft_chain(
            context,
            self.gamma,
            first=lambda: self._read_unseen(context),
            # The last token is not fed: its K and V are made up for if it is accepted.
            step=lambda tokens, i: self._read(DraftTree.root_only(tokens.to(self.draft_model.device)), context),
            stop=self.stop,
        )

    def observe(self, context: Context, tree: DraftTree, output: TargetOutput, verified: Verified) -> None:
        before = tree.tokens.gather(1, verified.last[:, None])[:, 0]
        self._before = before.to(self.draft_model.device)

    def free(self, row: int) -> None:
        self.cache.free(row)
        self._before = without(self._before, row)

    def _read_unseen(self, context: Context) -> DraftStep:
        """Feed what the draft cache lacks of the rows' texts: their roots, and after a fully accepted draft the tokens
        before them, which were drafted but never fed. What the cache holds behind these was rejected.
        """
        device = self.draft_model.device
        roots, seen = context.roots.to(device), zip(context.n_tokens, self.cache.lengths, strict=True)
        n_unseen = max(max(total - known for total, known in seen), 1)  # 1 or 2, the same for all rows
        starts = [total - n_unseen for total in context.n_tokens]
        self.cache.truncate(starts, context.lengths.to(device) - n_unseen)
        if n_unseen == 1:
            return self._read(DraftTree.root_only(roots), context)
        return self._read(DraftTree.chain(self._before, roots[:, None]), context)

    def _read(self, chain: DraftTree, context: Context) -> DraftStep:
        """Run the draft model on one chain per row and keep it. Returns what it says at the end of each chain."""
        output = self.draft_model.score(chain, self.cache)
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
