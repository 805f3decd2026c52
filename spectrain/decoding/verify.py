"""The only code that accepts or rejects a draft (methods.md, section 1).

Every rule gives emitted text the target's own law: greedy equals the target's greedy decoding, sampling its warped
distribution.

Letters: B rows, N nodes, A = N path entries, V vocabulary; p target, q draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spectrain.decoding.sampling import Sampling, draw_token, draw_uniforms
from spectrain.decoding.tree import DraftTree


@dataclass(frozen=True)
class Verified:
    """What the target makes of a tree."""

    path: Tensor  # [B, A] int64 node indices, path[:, 0] = 0 (the root), padded with -1
    accepted: Tensor  # [B] int64 accepted nodes; counts neither root nor bonus, so path has accepted + 1 entries
    bonus: Tensor  # [B] int64 token drawn from the target behind the last accepted node: the next root

    @property
    def last(self) -> Tensor:
        """[B] int64: the last node of each path, whose logits the bonus was drawn from."""
        return self.path.gather(1, self.accepted[:, None])[:, 0]

    def last_logits(self, logits: Tensor) -> Tensor:
        """Of logits [B, N, V] those that the bonus was drawn from, [B, V]."""
        return logits[:, 0] if logits.shape[1] == 1 else _at(logits, self.last)


def verify(
    tree: DraftTree, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator] | None = None
) -> Verified:
    """Accepts a path of each row's tree and draws its bonus token.

    Args:
        tree: any tree when greedy or deterministic; a chain when its nodes were drawn from a q (`tree.probs`).
        logits: [B, N, V] of the target.
        sampling: the same for target and drafter.
        generators: one a row, used for that row only; not read when greedy.
    """
    if sampling.greedy:
        return _verify_greedy(tree, logits)
    if tree.probs is None:
        return _verify_deterministic(tree, logits, sampling, generators)
    assert tree.is_chain, "drafts that were drawn from q are verified as chains; a branching tree must be deterministic"
    return _verify_chain(tree, logits, sampling, generators)


def _verify_greedy(tree: DraftTree, logits: Tensor) -> Verified:
    """Accepts what equals the target's argmax at its parent, all the way from the root."""
    best = logits.argmax(-1)  # [B, N]
    if tree.shape[1] == 1:
        return _root_only(best[:, 0])
    if tree.is_chain:
        matches = (tree.tokens[:, 1:] == best[:, :-1]) & tree.drafted[:, 1:]
        last = matches.cumprod(1).sum(1)
    else:
        matches = (tree.tokens == best.gather(1, tree.parents.clamp_min(0))) & tree.drafted
        matches[:, 0] = True
        reached = (matches[:, None] | ~tree.ancestors).all(-1)
        last = torch.where(reached, tree.depth, -1).argmax(-1)  # the deepest; of equal ones the first
    return _ending_at(tree, last, best.gather(1, last[:, None])[:, 0])


def _verify_deterministic(
    tree: DraftTree, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> Verified:
    """Draws a token from the warped p at each node of the path; follows the child that equals it, else it is the bonus.

    The draws go level by level, for the rows still walking: a row pays (and takes randomness) for its path only.
    """
    n_rows, n_nodes = tree.shape
    rows = torch.arange(n_rows, device=logits.device)
    walking = [True] * n_rows
    last = torch.zeros(n_rows, dtype=torch.int64, device=logits.device)
    bonus = torch.zeros_like(last)
    # All nodes that spell the path so far: more than one where siblings are equal. Their logits are the same.
    frontier = torch.zeros(n_rows, n_nodes, dtype=torch.bool, device=logits.device)
    frontier[:, 0] = True
    for _ in range(n_nodes):
        uniforms = draw_uniforms(generators, [int(w) for w in walking], logits.device)[:, 0]
        drawn, _ = sampling.draw(logits[rows, last], uniforms)
        frontier = frontier.gather(1, tree.parents.clamp_min(0)) & tree.drafted & (tree.tokens == drawn[:, None])
        found = frontier.any(-1)
        walked = torch.tensor(walking, device=logits.device)
        bonus = torch.where(walked, drawn, bonus)  # stands if this is the row's last draw
        last = torch.where(walked & found, frontier.int().argmax(-1), last)
        frontier &= walked[:, None]
        walking = (walked & found).tolist()
        if not any(walking):
            break
    return _ending_at(tree, last, bonus)


def _verify_chain(
    tree: DraftTree, logits: Tensor, sampling: Sampling, generators: Sequence[torch.Generator]
) -> Verified:
    """Leviathan 2023, Algorithm 1: accepts x_i with min(1, p/q); at the first rejection draws from the residual."""
    n_nodes = tree.shape[1]
    lengths = tree.drafted.sum(-1)  # [B]
    p = sampling.warp(logits)  # [B, N, V]
    q = tree.probs
    uniforms = draw_uniforms(generators, (lengths + 1).tolist(), logits.device)
    uniforms = torch.nn.functional.pad(uniforms, (0, n_nodes - uniforms.shape[1]))

    drafted = tree.tokens[:, 1:, None]
    p_drafted = p[:, :-1].gather(-1, drafted)[..., 0]  # [B, gamma]: x_i is judged by p of the node before it
    q_drafted = q[:, 1:].gather(-1, drafted)[..., 0]
    accepts = (uniforms[:, :-1] * q_drafted < p_drafted) & tree.drafted[:, 1:]  # u < p / q
    last = accepts.cumprod(1).sum(1)

    rejected = last < lengths
    p_last = _at(p, last)
    q_next = _at(q, (last + 1).clamp_max(n_nodes - 1))
    residual = (p_last - q_next).clamp_min(0)  # norm(max(0, p - q)); draw_token does the normalising
    use_residual = rejected & (residual.sum(-1) > 0)  # a residual of 0 falls back to p
    weights = torch.where(use_residual[:, None], residual, p_last)
    return _ending_at(tree, last, draw_token(weights, uniforms.gather(1, lengths[:, None])[:, 0]))


def _at(values: Tensor, node: Tensor) -> Tensor:
    """values [B, N, V] at node [B]: [B, V]."""
    return values[torch.arange(len(node), device=node.device), node]


def _root_only(bonus: Tensor) -> Verified:
    zeros = torch.zeros_like(bonus)
    return Verified(zeros[:, None], zeros, bonus)


def _ending_at(tree: DraftTree, last: Tensor, bonus: Tensor) -> Verified:
    return Verified(tree.path_to(last), tree.depth.gather(1, last[:, None])[:, 0], bonus)
