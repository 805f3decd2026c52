"""Roll a drafter out from every root of a text that the target wrote, so that stop rules can be compared.

A stop rule only truncates a draft. So one roll-out of `gamma` tokens from every root, along the text while the target
accepts and along the rejected token from there on, holds what every rule would have done; see `stop_simulation.py`.

Where the target's text has x, and p and q are the warped distributions, speculative sampling has accepted the drafted
token, x itself, with probability min(1, q(x) / p(x)). Otherwise it has rejected a token that follows
norm(max(0, q - p)). Greedy decoding, with one-hot p and q, is the same without chance. Tokens behind a rejected token
are drawn from q and discarded. Random numbers belong to a position of the text, or to a root and a depth behind it: one
decoding uses each at most once, so its distribution is exact, and all rules see the same ones.

Letters: n tokens of a text, of which the first n - 1 are roots; R roots at a time, g draft length, V vocabulary,
T tokens of prompt and text, C captured layers of the target, D hidden size, M heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import Context, KVCache, Sampling, TargetModel, TargetOutput
from spectrain.decoding.context import until_end
from spectrain.decoding.sampling import draw_token
from spectrain.measure.simulation import Text
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.methods.stopping import StopRule, confidence, entropy
from spectrain.models.head import AcceptanceHead


@dataclass(frozen=True)
class DraftPaths:
    """The drafts from each root of one text. Root t is the text's token t, counted from 0."""

    n_tokens: int  # n
    max_new_tokens: int  # the limit of the text; a shorter text was ended by its last token
    accepted: np.ndarray  # [n - 1] int64: tokens of a whole draft that are emitted
    confidence: np.ndarray  # [n - 1, g] float32, of the distribution that each token is drawn from
    entropy: np.ndarray  # [n - 1, g] float32, nats
    heads: np.ndarray  # [M, n - 1, g] float32: f of each token; 0 where the drafter does not read it
    ends: np.ndarray  # [n - 1] int64: drafted tokens up to and including the first that ends a text; g: none does

    @property
    def room(self) -> np.ndarray:
        """Tokens that the draft behind each root may have, [n - 1] int64; a deeper one is never emitted whole."""
        return self.max_new_tokens - 2 - np.arange(self.n_tokens - 1)


@torch.inference_mode()
def draft_paths(
    target: TargetModel,
    opened: OpenDrafter,
    heads: Sequence[AcceptanceHead],
    text: Text,
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling,
    coins: np.random.Generator,
    rows: int = 64,
    stop_token_ids: Sequence[int] | None = None,
) -> DraftPaths:
    """Roll the drafter out from every root of a text, `rows` roots at a time.

    The target has drawn the text, whose response has at least two tokens, by `sampling` and up to max_new_tokens. The
    drafter runs as it does in decoding, up to gamma tokens; the heads share its forwards. `coins` decides which drafted
    tokens were accepted and which others were drawn, so it must not have drawn the text. `stop_token_ids` end texts;
    None: the target's EOS ids.
    """
    stop_ids = torch.tensor(target.eos_ids if stop_token_ids is None else stop_token_ids, dtype=torch.int64)
    target = target.with_capture(opened.states.capture_layers)
    tokens, n = torch.tensor([*text.prompt, *text.response], device=target.device), len(text.response)
    features = target.features(tokens[None])
    before = features.final_hidden[0, -n - 1 : -1]  # [n, D]: the state before each token of the text
    p = None if sampling.greedy else sampling.warp(target.logits_of(before))
    numbers = [coins.random(shape, dtype=np.float32) for shape in ((n,), (n,), (n, gamma))]
    known = _KnownText(text, tokens, sampling, p, *(torch.from_numpy(one).to(target.device) for one in numbers))

    recorder = _Recorder(heads, n - 1, gamma)
    drafter = opened.with_stop(gamma, recorder)
    whole = KVCache(1)  # of an ordinary draft model, which reads the text once
    if isinstance(drafter, Speculative):
        drafter.draft_model.prefill(
            tokens[None, :-1].to(drafter.draft_model.device), [len(tokens) - 1], whole, range(1)
        )
    accepted, ends = [], []
    for start in range(0, n - 1, rows):
        roots = range(start, min(start + rows, n - 1))
        recorder.rows = slice(roots.start, roots.stop)
        context = _TextContext(known, roots, max_new_tokens)
        drafter.start(target, KVCache(len(roots)))
        _read_until_roots(drafter, context, whole, features.captured)
        drafted = drafter.propose(context).tokens[:, 1:]
        accepted += context.accepted.tolist()
        ends += until_end(drafted, stop_ids.to(drafted.device)).tolist()
    recorded = recorder.values.numpy()
    return DraftPaths(
        n, max_new_tokens, np.array(accepted), recorded[0], recorded[1], recorded[2:], np.array(ends, dtype=np.int64)
    )


@dataclass(frozen=True)
class _KnownText:
    """A text, and uniform random numbers in [0, 1), float32."""

    text: Text
    tokens: Tensor  # [T] int64, prompt and response
    sampling: Sampling
    p: Tensor | None  # [n, V] float32: what each token of the text was drawn from; None: greedy
    accept: Tensor  # [n] whether the draft at a position was accepted
    reject: Tensor  # [n] which token was rejected there
    behind: Tensor  # [n, g] the tokens of a root's draft behind its rejection, by depth


class _TextContext(Context):
    """One row per root; draws are coupled with the text. `accepted` [R] counts tokens that decoding would emit."""

    def __init__(self, known: _KnownText, roots: range, max_new_tokens: int) -> None:
        # Greedy for those who ask: the tree needs no q, as nobody verifies it.
        super().__init__(Sampling(), known.tokens.device, len(roots))
        self.known, prompt = known, known.text.prompt
        self.append([prompt + known.text.response[:t] for t in roots], 0, [torch.Generator()] * len(roots))
        tokens = known.tokens[len(prompt) + roots.start : len(prompt) + roots.stop]
        self.root(range(len(roots)), tokens, self.last_logits)
        self.room = [max(max_new_tokens - t - 1, 2) for t in roots]  # the oracle asks about the last token, too
        self.roots_at = roots
        self.places = torch.tensor(roots, device=self.device)  # [R] in the text, of the tokens drawn last
        self.alive = torch.ones_like(self.places, dtype=torch.bool)  # accepted so far
        self.accepted = torch.zeros_like(self.places)
        self.depth = 0

    def draw(self, logits: Tensor, active: Sequence[bool] | None = None, place: int = 1) -> tuple[Tensor, None]:
        self.places, self.depth = self.places + 1, self.depth + 1
        n_tokens = len(self.known.text.response)
        self.alive &= self.places < n_tokens  # a draft beyond the end is cut off
        places = self.places.clamp_max(n_tokens - 1)
        truth = self.known.tokens[len(self.known.text.prompt) + places]
        if self.known.sampling.greedy:
            tokens = logits.argmax(-1)
            self.alive &= tokens == truth
        else:
            tokens = self._coupled(self.known.sampling.warp(logits), self.known.p[places], truth, places)
        self.accepted += self.alive
        return tokens, None

    def _coupled(self, q: Tensor, p: Tensor, truth: Tensor, places: Tensor) -> Tensor:
        """Tokens [R], from q and p [R, V] and the text's own tokens. Ends the rows whose token was rejected."""
        residual = (q - p).clamp_min(0)
        q_truth, p_truth = (values.gather(1, truth[:, None])[:, 0] for values in (q, p))
        # Without a residual q = p, and nothing can have been rejected.
        accepts = (self.known.accept[places] * p_truth < q_truth) | (residual.sum(-1) == 0)
        weights = torch.where(self.alive[:, None], residual, q)
        weights = torch.where((weights.sum(-1) > 0)[:, None], weights, q)
        behind = self.known.behind[self.roots_at.start : self.roots_at.stop, self.depth - 1]
        others = draw_token(weights, torch.where(self.alive, self.known.reject[places], behind))
        self.alive &= accepts
        return torch.where(self.alive, truth, others)


class _Recorder(StopRule):
    """Never stops; records what rules look at."""

    def __init__(self, heads: Sequence[AcceptanceHead], n_roots: int, gamma: int) -> None:
        self.heads = [head.eval() for head in heads]
        self.needs_hidden = bool(self.heads)
        self.values = torch.zeros(2 + len(heads), n_roots, gamma)  # confidence, entropy, heads
        self.rows = slice(0)  # the roots that are drafted from

    def before(self, i: int, logits: Tensor) -> None:
        self.values[0, self.rows, i - 1] = confidence(logits)
        self.values[1, self.rows, i - 1] = entropy(logits)

    def read(self, i: int, hidden: Tensor | None) -> None:
        for number, head in enumerate(self.heads, start=2):
            self.values[number, self.rows, i - 1] = head.probability(hidden)


def _read_until_roots(drafter: Speculative | Spire, context: Context, whole: KVCache, captured: Tensor | None) -> None:
    """Give the drafter the text before each root: of the cache of the whole text, or of the target's activations."""
    if isinstance(drafter, Spire):
        positions = drafter.slots.kept(context.lengths - 1)
        captured = None if captured is None else captured[0, positions.clamp_min(0)]
        return drafter.prefill(context, TargetOutput(context.last_logits, captured, positions), range(context.n_rows))
    lengths = [n - 1 for n in context.n_tokens]
    for number, states in enumerate(zip(whole.keys, whole.values, strict=True)):
        rows = (one[:1, :, : max(lengths)].expand(len(lengths), -1, -1, -1) for one in states)
        drafter.cache.fill(number, *rows, lengths)
