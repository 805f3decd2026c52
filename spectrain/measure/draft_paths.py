"""Roll a drafter out from every root of a text that the target wrote, so that stop rules can be compared.

A stop rule only truncates a draft. So one roll-out of `gamma` tokens from every root, along the text while the target
accepts and along the rejected token from there on, holds what every rule would have done; see `stop_simulation.py`.

Where the target's text has x, and p and q are the warped distributions, speculative sampling has accepted the drafted
token, x itself, with probability min(1, q(x) / p(x)). Otherwise it has rejected a token that follows
norm(max(0, q - p)). Greedy decoding, with one-hot p and q, is the same without chance. Tokens behind a rejected token
or the end of the text are drawn from q and discarded. Random numbers belong to a position of the text, or to a root and
a depth behind it: one decoding uses each at most once, so its distribution is exact, and all rules see the same ones.

Letters: n tokens of a text, of which the first n - 1 are roots; R roots at a time, g draft length, V vocabulary,
T tokens of prompt and text, C captured layers of the target, D hidden size, M heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spectrain.decoding import Context, KVCache, Sampling, TargetModel, TargetOutput
from spectrain.decoding.errors import check_whole
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
) -> DraftPaths:
    """Roll the drafter out from every root of a text.

    Args:
        target: wrote the text.
        opened: the drafter; it runs as it does in decoding.
        heads: of this drafter; they share its forwards.
        text: its response has at least two tokens.
        gamma: most tokens of a draft.
        max_new_tokens: the limit of the text.
        sampling: by which the text was drawn.
        coins: decides which drafted tokens were accepted and which others were drawn; must not have drawn the text.
        rows: roots drafted from at a time.
    """
    check_whole("rows", rows, 1)
    target = target.with_capture(opened.states.capture_layers)
    known = _KnownText.read(target, text, sampling, coins, gamma)
    recorder = _Recorder(heads)
    drafter = opened.with_stop(gamma, recorder)
    reader = _reader_of(drafter, known)
    accepted, n_tokens = [], len(text.response)
    for start in range(0, n_tokens - 1, rows):
        roots = range(start, min(start + rows, n_tokens - 1))
        context = _TextContext(known, roots, max_new_tokens)
        drafter.start(target, KVCache(len(roots)))
        reader(context)
        recorder.parts.append(torch.zeros(2 + len(heads), len(roots), gamma))
        drafter.propose(context)
        accepted += context.accepted.tolist()
    recorded = torch.cat(recorder.parts, dim=1).numpy()
    return DraftPaths(n_tokens, max_new_tokens, np.array(accepted), recorded[0], recorded[1], recorded[2:])


@dataclass(frozen=True)
class _KnownText:
    """A text, the target's outputs on it, and uniform random numbers in [0, 1), float32."""

    prompt: list[int]
    text: list[int]
    tokens: Tensor  # [T] int64, both
    sampling: Sampling
    p: Tensor | None  # [n, V] float32: what each token of the text was drawn from; None: greedy
    captured: Tensor | None  # [1, T, C, D]
    accept: Tensor  # [n] whether the draft at a position was accepted
    reject: Tensor  # [n] which token was rejected there
    behind: Tensor  # [n, g] the tokens of a root's draft behind its rejection, by depth

    @classmethod
    def read(
        cls, target: TargetModel, text: Text, sampling: Sampling, coins: np.random.Generator, gamma: int
    ) -> _KnownText:
        tokens = torch.tensor([*text.prompt, *text.response], device=target.device)
        p = captured = None
        if not sampling.greedy or target.capture_layers:
            features = target.features(tokens[None])
            captured = features.captured
            if not sampling.greedy:
                before = features.final_hidden[0, len(text.prompt) - 1 : -1]  # [n, D]: the state before each token
                p = sampling.warp(target.logits_of(before))
        n = len(text.response)
        numbers = (coins.random(shape, dtype=np.float32) for shape in ((n,), (n,), (n, gamma)))
        numbers = (torch.from_numpy(one).to(target.device) for one in numbers)
        return cls(text.prompt, text.response, tokens, sampling, p, captured, *numbers)


class _TextContext(Context):
    """One row per root; draws are coupled with the text. `accepted` [R] counts tokens that decoding would emit."""

    def __init__(self, known: _KnownText, roots: range, max_new_tokens: int) -> None:
        # Greedy for those who ask: the tree needs no q, as nobody verifies it.
        super().__init__(Sampling(), known.tokens.device, len(roots))
        self.known = known
        self.append([known.prompt + known.text[:t] for t in roots], 0, [None] * len(roots))
        first = len(known.prompt)
        self.root(range(len(roots)), known.tokens[first + roots.start : first + roots.stop], self.last_logits)
        self.room = [max(max_new_tokens - t - 1, 2) for t in roots]  # the oracle asks about the last token, too
        self.places = torch.tensor(roots, device=self.device)  # [R] in the text, of the tokens drawn last
        self.alive = torch.ones_like(self.places, dtype=torch.bool)  # accepted so far
        self.accepted = torch.zeros_like(self.places)
        self.depth = 0

    def draw(self, logits: Tensor, active: Sequence[bool] | None = None) -> tuple[Tensor, None]:
        self.places, self.depth = self.places + 1, self.depth + 1
        n_tokens = len(self.known.text)
        self.alive &= self.places < n_tokens  # a draft beyond the end is cut off
        places = self.places.clamp_max(n_tokens - 1)
        truth = self.known.tokens[len(self.known.prompt) + places]
        if self.known.sampling.greedy:
            tokens = logits.argmax(-1)
            self.alive &= tokens == truth
        else:
            tokens = self._coupled(self.known.sampling.warp(logits), self.known.p[places], truth, places)
        self.accepted += self.alive
        return tokens, None

    def _coupled(self, q: Tensor, p: Tensor, truth: Tensor, places: Tensor) -> Tensor:
        """Tokens [R], from q and p [R, V] and the text's own tokens. Ends the rows whose token was rejected."""
        first = int(self.places[0]) - self.depth
        residual = (q - p).clamp_min(0)
        q_truth, p_truth = (values.gather(1, truth[:, None])[:, 0] for values in (q, p))
        # Without a residual q = p, and nothing can have been rejected.
        accepts = (self.known.accept[places] * p_truth < q_truth) | (residual.sum(-1) == 0)
        weights = torch.where(self.alive[:, None], residual, q)
        weights = torch.where((weights.sum(-1) > 0)[:, None], weights, q)
        behind = self.known.behind[first : first + len(q), self.depth - 1]
        others = draw_token(weights, torch.where(self.alive, self.known.reject[places], behind))
        self.alive &= accepts
        return torch.where(self.alive, truth, others)


class _Recorder(StopRule):
    """Never stops; records what rules look at."""

    def __init__(self, heads: Sequence[AcceptanceHead]) -> None:
        self.heads = [head.eval() for head in heads]
        self.needs_hidden = bool(self.heads)
        self.parts: list[Tensor] = []  # [2 + M, R, g] of each group of rows: confidence, entropy, heads

    def before(self, i: int, logits: Tensor) -> None:
        self.parts[-1][0, :, i - 1] = confidence(logits)
        self.parts[-1][1, :, i - 1] = entropy(logits)

    def read(self, i: int, hidden: Tensor | None) -> None:
        for number, head in enumerate(self.heads, start=2):
            self.parts[-1][number, :, i - 1] = head.probability(hidden)


def _reader_of(drafter: Speculative | Spire, known: _KnownText) -> Callable[[Context], None]:
    """A function that gives the drafter the text before each root of a context. The text itself is read once."""
    if isinstance(drafter, Spire):

        def read(context: Context) -> None:
            captured = known.captured
            if captured is not None:
                captured = captured[:, : max(context.n_tokens)].expand(context.n_rows, -1, -1, -1)
            output = TargetOutput(context.last_logits, captured, context.roots[:, None])
            drafter.prefill(context, output, range(context.n_rows))

        return read
    model, whole = drafter.draft_model, KVCache(1)
    model.prefill(known.tokens[None, :-1].to(model.device), [len(known.tokens) - 1], whole, range(1))

    def copy(context: Context) -> None:
        lengths = [n - 1 for n in context.n_tokens]
        for number, states in enumerate(zip(whole.keys, whole.values, strict=True)):
            rows = (one[:1, :, : max(lengths)].expand(len(lengths), -1, -1, -1) for one in states)
            drafter.cache.fill(number, *rows, lengths)

    return copy
