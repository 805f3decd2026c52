"""The only code that accepts or rejects a draft.

Every rule leaves the text to the target: greedy output equals the target's greedy decoding, and samples follow its
warped distribution. Chains drawn from a q are judged as a block (Sun et al. 2024) or token by token (Leviathan 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain import kernels
from spectrain.decoding.sampling import RowSampling, Sampling, SharedNoise, Uniforms, argmax, draw_token
from spectrain.kernels import ROWS, Graphs, padded
from spectrain.target.kv_cache import KVCache
from spectrain.target.tree import DraftTree

VERIFICATIONS = ("token", "block")
# Logits of a step, greedy and drawn: a graph has its own memory for them, and for several times as many where it draws.
MOST_REPLAYED, MOST_DRAWN = 1 << 26, 1 << 24


@dataclass(frozen=True)
class Verified:
    """What the target makes of a tree."""

    path: Tensor  # [B, A] int64 node indices, path[:, 0] = 0 (the root), padded with -1
    accepted: Tensor  # [B] int64 accepted nodes; counts neither root nor bonus, so path has accepted + 1 entries
    bonus: Tensor  # [B] int64 token drawn from the target behind the last accepted node: the next root
    is_moved: bool = False  # whether the accepted nodes stand in order in the cache already

    @property
    def last(self) -> Tensor:
        """[B] int64: the last node of each path, whose logits the bonus was drawn from."""
        return self.path.gather(1, self.accepted[:, None])[:, 0]

    def last_logits(self, logits: Tensor) -> Tensor:
        """Of logits [B, N, V], return those that the bonus was drawn from, [B, V]."""
        return logits[:, 0] if logits.shape[1] == 1 else at_node(logits, self.last)


def is_replayed(sampling: Sampling, n_rows: int, n_nodes: int, vocab_size: int) -> bool:
    """Whether graphs take logits of this shape, with their rows padded."""
    return padded(n_rows, ROWS) * n_nodes * vocab_size <= (MOST_REPLAYED if sampling.greedy else MOST_DRAWN)


def verify(
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling | RowSampling,
    uniforms: Uniforms | SharedNoise | None = None,
    verification: str = "token",
    best: Tensor | None = None,
    graphs: Graphs | None = None,
    cache: KVCache | None = None,
) -> Verified:
    """Accept a path of each row's tree and draw its bonus token. On a GPU the host waits for nothing here.

    Args:
        tree: any tree when greedy or deterministic; a chain when its nodes were drawn from a q (`tree.probs`).
        logits: [B, N, V] of the target.
        sampling: the same for target and drafter; that of each row where rows differ.
        uniforms: the rows' random numbers; not read when greedy.
        verification: "token" or "block", the rule for chains that were drawn from a q. Both give the same distribution;
            block accepts at least as many tokens on average. Greedy and deterministic drafts have one rule.
        best: [B, N] int64 the likeliest token of each node; None: not known. Only greedy decoding reads it.
        graphs: replay the verification of trees whose logits are few; None: none do.
        cache: of the target, in which they move the accepted nodes, too.
    """
    # A q is judged by uniform numbers; where the noise is shared there are none.
    assert tree.probs is None or not sampling.shares_noise, "with shared noise drafts are deterministic"
    if graphs is not None and isinstance(sampling, Sampling) and is_replayed(sampling, *logits.shape):
        return _replayed(graphs, cache, tree, logits, sampling, uniforms, verification)
    if sampling.greedy:
        return _verify_greedy(tree, argmax(logits) if best is None else best)
    assert tree.probs is None or tree.is_chain, "drafts that were drawn from q are chains; branching is deterministic"
    if kernels.reads(logits):
        by_block = verification == "block"
        numbers, q, probe = uniforms.next(1 + tree.deepest), tree.probs, tree.probe
        judged = tree.tokens, tree.parents, logits, sampling.options, numbers, q, probe, by_block
        path, accepted, bonus, used = kernels.accept(*judged)
        uniforms.skip(used, 1 + tree.deepest)
        return Verified(path, accepted, bonus)
    numbers = _numbers(tree, uniforms)
    if tree.probs is not None:
        return _verify_chain(tree, logits, sampling, numbers, verification)
    verified = _verify_greedy(tree, _drawn(tree, logits, sampling, numbers))
    uniforms.skip(verified.accepted + 1, 1 + tree.deepest)
    return verified


def _numbers(tree: DraftTree, uniforms: Uniforms | SharedNoise) -> Tensor:
    """The random numbers of trees by depth [B, 1 + deepest]; of chains that were drawn from a q they are taken.

    A chain reads one number for each drafted token, then the bonus's.
    """
    if tree.probs is None:
        return uniforms.next(1 + tree.deepest)
    return uniforms.take(tree.shape[1], tree.drafted.sum(-1) + 1)


def _drawn(tree: DraftTree, logits: Tensor, sampling: Sampling | RowSampling, numbers: Tensor) -> Tensor:
    """Draw the token behind each node from the warped p, [B, N], by the number of the node's depth in [B, 1 + deepest].

    Whatever path the text takes, the token at each place is drawn by the same number. So a draft is accepted as far as
    it agrees with these tokens, as a greedy one is, and a row takes randomness for its path only.
    """
    probs, of_nodes = sampling.warp(logits).flatten(0, 1), numbers.gather(1, tree.depth).flatten()
    return draw_token(probs, of_nodes).view(tree.shape)


def _replayed(
    graphs: Graphs,
    cache: KVCache | None,
    tree: DraftTree,
    logits: Tensor,
    sampling: Sampling,
    uniforms: Uniforms,
    verification: str,
) -> Verified:
    """Verify by a CUDA graph: it is some fifty small kernels, which the host would launch one by one."""
    moves = cache is not None and not tree.by_place
    inputs = {name: getattr(tree, name) for name in ("tokens", "parents", "probs", "probe")} | {"logits": logits}
    inputs["lengths"] = cache.lengths_on(logits.device) if moves else None
    if not sampling.greedy:
        inputs["numbers"] = uniforms.next(tree.shape[1]) if tree.probs is None else _numbers(tree, uniforms)
    names = [name for name, values in inputs.items() if values is not None]

    def verified(*values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        given = dict.fromkeys(inputs) | dict(zip(names, values, strict=True))
        of_tree = given["tokens"], given["parents"], given["parents"], given["probs"], given["probe"]
        padded, logits = DraftTree(*of_tree, is_chain=tree.by_place), given["logits"]
        if padded.probs is not None:
            found = _verify_chain(padded, logits, sampling, given["numbers"], verification)
        else:
            best = argmax(logits) if sampling.greedy else _drawn(padded, logits, sampling, given["numbers"])
            found = _verify_greedy(padded, best)
        if moves:
            cache.move(found.path, given["lengths"])
        return found.path, found.accepted, found.bonus

    key = "verify", cache.storage if moves else None, sampling, verification, tree.by_place, *names
    outputs = graphs.run(key, verified, *(inputs[name] for name in names))
    outputs = [output.clone() for output in outputs]  # another generation may replay it before the next step
    found = Verified(*outputs, is_moved=moves)
    if not sampling.greedy and tree.probs is None:
        uniforms.skip(found.accepted + 1, tree.shape[1])
    return found


def _verify_greedy(tree: DraftTree, best: Tensor) -> Verified:
    """Accept what equals the target's argmax [B, N] at its parent, all the way from the root."""
    if tree.shape[1] == 1:
        zeros = torch.zeros_like(tree.tokens)
        return Verified(zeros, zeros[:, 0], best[:, 0])
    if tree.is_chain and best.device.type == "cpu":
        return _verify_greedy_chain(tree, best)
    if tree.is_chain:
        matches = (tree.tokens[:, 1:] == best[:, :-1]) & tree.drafted[:, 1:]
        last = matches.cumprod(1).sum(1)
    else:
        matches = (tree.tokens == best.gather(1, tree.parents.clamp_min(0))) & tree.drafted
        matches[:, 0] = True
        reached = (matches[:, None] | ~tree.ancestors).all(-1)
        last = torch.where(reached, tree.depth, -1).argmax(-1)  # the deepest; of equal ones the first
    return _ending_at(tree, last, best.gather(1, last[:, None])[:, 0])


def _verify_greedy_chain(tree: DraftTree, best: Tensor) -> Verified:
    """The same for a chain on the CPU, where a call of torch costs more than a loop over a few tokens."""
    (paths, accepted, bonus), nodes = ([], [], []), [*range(tree.shape[1])]
    for tokens, parents, said in zip(tree.tokens.tolist(), tree.parents.tolist(), best.tolist(), strict=True):
        last = 0
        while last + 1 < len(tokens) and parents[last + 1] >= 0 and tokens[last + 1] == said[last]:
            last += 1
        paths.append(nodes[: last + 1] + [-1] * (len(tokens) - last - 1))
        accepted.append(last)
        bonus.append(said[last])
    return Verified(*map(torch.from_numpy, map(np.array, (paths, accepted, bonus))))


def _verify_chain(tree: DraftTree, logits: Tensor, sampling: Sampling, numbers: Tensor, verification: str) -> Verified:
    """Accept x_1..x_last by either rule. A rejected rest is made up for by a bonus from the residual.

    `numbers` [B, N] float32 are those of `_numbers`.
    """
    n_nodes = tree.shape[1]
    lengths = tree.drafted.sum(-1)  # [B]
    p = sampling.warp(logits)  # [B, N, V]
    q = tree.probs
    rule = _accept_block if verification == "block" else _accept_tokens
    last, mass = rule(tree, p, numbers[:, :-1])
    p_last = at_node(p, last)
    q_next = at_node(q, (last + 1).clamp_max(n_nodes - 1))
    residual = (mass[:, None] * p_last - q_next).clamp_min(0)  # norm(max(0, P p - q)); draw_token does the normalising
    use_residual = (last < lengths) & (residual.sum(-1) > 0)  # a residual of 0 falls back to p
    weights = torch.where(use_residual[:, None], residual, p_last)
    return _ending_at(tree, last, draw_token(weights, numbers.gather(1, lengths[:, None])[:, 0]))


def _accept_tokens(tree: DraftTree, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Leviathan 2023, Algorithm 1: accept x_i with min(1, p / q), up to the first that is rejected.

    p is [B, N, V], uniforms are [B, gamma], both float32. Return the last accepted node [B] int64, and the P [B]
    float32 that scales p in the residual: here 1.
    """
    p_drafted, q_drafted = _of_drafted(tree, p)
    accepts = (uniforms * q_drafted < p_drafted) & tree.drafted[:, 1:]  # u < p / q
    return accepts.cumprod(1).sum(1), torch.ones_like(p[:, 0, 0])


def _accept_block(tree: DraftTree, p: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sun et al. 2024, Algorithm 2: accept x_1..x_i for the largest i with u_i < h_i. Arguments as `_accept_tokens`.

    P_0 = 1, P_i = min(P_{i-1} p(x_i) / q(x_i), 1); S_i = sum_v max(0, P_i p(v) - q(v)) at the node after x_i;
    h_i = S_i / (S_i + 1 - P_i) inside the chain and P_i at its end. P_i is the residual's P after x_i.
    """
    p_drafted, q_drafted = (values.double() for values in _of_drafted(tree, p))
    # In logarithms P is a walk that is pushed back below 0: its sum less the highest sum so far. A product of float32
    # ratios would underflow, and not come back where later ratios are large. The floor gives 0/0 = 0.
    walk = (p_drafted.log() - q_drafted.clamp_min(1e-300).log()).cumsum(1)
    P = (walk - walk.cummax(1).values.clamp_min(0)).exp()  # [B, gamma] float64, exactly 1 where nothing is lacking

    inner = P[:, :-1]
    S = (inner.float()[..., None] * p[:, 1:-1] - tree.probs[:, 2:]).clamp_min(0).sum(-1)  # [B, gamma - 1]
    h = torch.where(inner >= 1, 1.0, S / (S + 1 - inner))  # a q of NaN accepts nothing
    step = torch.arange(1, P.shape[1] + 1, device=P.device)
    at_end = step == tree.drafted.sum(-1, keepdim=True)
    h = torch.where(at_end, P, torch.nn.functional.pad(h, (0, 1)))
    # The root stands before, so that a chain without a token has a largest, too.
    last = torch.nn.functional.pad(((uniforms < h) & tree.drafted[:, 1:]) * step, (1, 0)).amax(1)
    return last, torch.nn.functional.pad(P, (1, 0), value=1.0).gather(1, last[:, None])[:, 0].float()


def _of_drafted(tree: DraftTree, p: Tensor) -> tuple[Tensor, Tensor]:
    """p(x_i) and q(x_i), [B, gamma] each: x_i is judged by p of the node before it."""
    drafted = tree.tokens[:, 1:, None]
    return p[:, :-1].gather(-1, drafted)[..., 0], tree.probs[:, 1:].gather(-1, drafted)[..., 0]


def at_node(values: Tensor, node: Tensor) -> Tensor:
    """Return values [B, N, V] at node [B]: [B, V]."""
    if len(node) == 1 and node.device.type == "cpu":
        return values[:, int(node)]
    return values[torch.arange(len(node), device=node.device), node]


def _ending_at(tree: DraftTree, last: Tensor, bonus: Tensor) -> Verified:
    accepted = last if tree.is_chain else tree.depth.gather(1, last[:, None])[:, 0]
    return Verified(tree.path_to(last), accepted, bonus)
