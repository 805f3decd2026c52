"""What a drafter drafts from every root of a text that the target wrote: the material for comparing stop rules.

A stop rule only truncates a draft. So one roll-out of `gamma` tokens from every root, along the text while the target
accepts and along the rejected token from there on, holds what every rule would have done; see `stop_simulation.py`.

Given that the target's text has x at a position where p and q are the warped distributions, speculative sampling has
accepted the drafted token there (x itself) with probability min(1, q(x) / p(x)); else it has rejected a token of law
norm(max(0, q - p)). Greedy, with one-hot p and q, is the same without chance. What follows a rejected token, or the
token that ended the text, is drawn from q and discarded. The coins belong to a position of the text, or to a root and a
depth behind it: a decoding uses each at most once, so its law is exact, and all rules see the same ones.

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
from spectrain.methods.specdecpp import OpenDrafter
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.methods.stopping import StopRule, confidence, entropy
from spectrain.models.head import AcceptanceHead


@dataclass(frozen=True)
class DraftPaths:
    """The drafts from each root of one text. Root t is the text's token t, counted from 0."""

    n_tokens: int  # n
    max_new_tokens: int  # what the text was limited to; a shorter one was ended by its last token
    accepted: np.ndarray  # [n - 1] int64: tokens of a whole draft that are emitted
    confidence: np.ndarray  # [n - 1, g] float32, of the distribution that each token is drawn from
    entropy: np.ndarray  # [n - 1, g] float32, nats
    heads: np.ndarray  # [M, n - 1, g] float32: f of each token; 0 where the drafter does not read it


@torch.inference_mode()
def draft_paths(
    target: TargetModel,
    opened: OpenDrafter,
    heads: Sequence[AcceptanceHead],
    prompt: Sequence[int],
    text: Sequence[int],
    gamma: int,
    max_new_tokens: int,
    sampling: Sampling,
    coins: np.random.Generator,
    rows: int = 64,
) -> DraftPaths:
    """Rolls the drafter out from every root of a text.

    Args:
        target: wrote the text.
        opened: the drafter; it runs as it does in decoding.
        heads: of this drafter; they share its forwards.
        prompt: token ids.
        text: what the target wrote behind it, at least two tokens.
        gamma: most tokens of a draft.
        max_new_tokens: what the text was limited to.
        sampling: what it was drawn by.
        coins: decides which drafted tokens were accepted, and which others were drawn; must not have drawn the text.
        rows: roots drafted from at a time.
    """
    check_whole("rows", rows, 1)
    known = _read_text(target.with_capture(opened.states.capture_layers), prompt, text, sampling)
    luck = _Luck.draw(coins, len(text), gamma, target.device)
    recorder = _Recorder(heads)
    drafter = opened.with_stop(gamma, recorder)
    reader = _reader_of(drafter, known)
    accepted = []
    for start in range(0, len(text) - 1, rows):
        roots = range(start, min(start + rows, len(text) - 1))
        context = _TextContext(known, roots, max_new_tokens, sampling, luck)
        drafter.start(target, KVCache(len(roots)))
        reader(context)
        recorder.next_rows(len(roots), gamma)
        drafter.propose(context)
        accepted += context.accepted.tolist()
    return DraftPaths(len(text), max_new_tokens, np.array(accepted), *recorder.arrays())


@dataclass(frozen=True)
class _Known:
    """A text and what the target makes of it."""

    prompt: list[int]
    text: list[int]
    tokens: Tensor  # [T] int64, both
    p: Tensor | None  # [n, V] float32: what each token of the text but the first was drawn from; None: greedy
    captured: Tensor | None  # [1, T, C, D]


def _read_text(target: TargetModel, prompt: Sequence[int], text: Sequence[int], sampling: Sampling) -> _Known:
    tokens = torch.tensor([*prompt, *text], device=target.device)
    if sampling.greedy and not target.capture_layers:
        return _Known(list(prompt), list(text), tokens, None, None)
    features = target.features(tokens[None])
    p = None
    if not sampling.greedy:
        behind = features.final_hidden[0, len(prompt) - 1 : -1]  # [n, D]: the state before each token of the text
        p = sampling.warp(target.logits_of(behind))
    return _Known(list(prompt), list(text), tokens, p, features.captured)


@dataclass(frozen=True)
class _Luck:
    """Uniform numbers in [0, 1), float32."""

    accept: Tensor  # [n] whether the draft at a position was accepted
    reject: Tensor  # [n] which token was rejected there
    behind: Tensor  # [n, g] what a root's draft goes on with after its rejection, by depth

    @classmethod
    def draw(cls, coins: np.random.Generator, n_tokens: int, gamma: int, device: torch.device) -> _Luck:
        shapes = ((n_tokens,), (n_tokens,), (n_tokens, gamma))
        return cls(*(torch.from_numpy(coins.random(shape, dtype=np.float32)).to(device) for shape in shapes))


class _TextContext(Context):
    """A row a root; draws are coupled with the text. `accepted` [R] counts tokens that decoding would emit."""

    def __init__(self, known: _Known, roots: range, max_new_tokens: int, sampling: Sampling, luck: _Luck) -> None:
        # Greedy to those who ask: the tree needs no q, as nobody verifies it.
        super().__init__(Sampling(), known.tokens.device, len(roots))
        self.known, self.law, self.luck = known, sampling, luck
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
        self.alive &= self.places < n_tokens  # what is drafted behind the end is cut off
        places = self.places.clamp_max(n_tokens - 1)
        truth = self.known.tokens[len(self.known.prompt) + places]
        if self.law.greedy:
            tokens = logits.argmax(-1)
            self.alive &= tokens == truth
        else:
            tokens = self._coupled(self.law.warp(logits), self.known.p[places], truth, places)
        self.accepted += self.alive
        return tokens, None

    def _coupled(self, q: Tensor, p: Tensor, truth: Tensor, places: Tensor) -> Tensor:
        """Tokens [R], from q and p [R, V] and the text's own tokens; kills the rows that were rejected."""
        luck, first = self.luck, int(self.places[0]) - self.depth
        residual = (q - p).clamp_min(0)
        q_truth, p_truth = (values.gather(1, truth[:, None])[:, 0] for values in (q, p))
        # Without a residual q = p, and nothing can have been rejected.
        accepts = (luck.accept[places] * p_truth < q_truth) | (residual.sum(-1) == 0)
        weights = torch.where(self.alive[:, None], residual, q)
        behind = luck.behind[first : first + len(q), self.depth - 1]
        usable = weights.sum(-1) > 0
        weights = torch.where(usable[:, None], weights, q)
        others = draw_token(weights, torch.where(self.alive, luck.reject[places], behind))
        self.alive &= accepts
        return torch.where(self.alive, truth, others)


class _Recorder(StopRule):
    """Never stops; remembers what rules look at."""

    def __init__(self, heads: Sequence[AcceptanceHead]) -> None:
        self.heads = [head.eval() for head in heads]
        self.needs_hidden = bool(self.heads)
        self.parts: list[Tensor] = []  # [2 + M, R, g] of each group of rows: confidence, entropy, heads

    def next_rows(self, n_rows: int, gamma: int) -> None:
        self.parts.append(torch.zeros(2 + len(self.heads), n_rows, gamma))

    def before(self, i: int, logits: Tensor) -> None:
        self.parts[-1][0, :, i - 1] = confidence(logits)
        self.parts[-1][1, :, i - 1] = entropy(logits)

    def read(self, i: int, hidden: Tensor | None) -> None:
        for number, head in enumerate(self.heads, start=2):
            self.parts[-1][number, :, i - 1] = head.probability(hidden)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = torch.cat(self.parts, dim=1).numpy()
        return found[0], found[1], found[2:]


def _reader_of(drafter: Speculative | Spire, known: _Known) -> Callable[[Context], None]:
    """What gives the drafter the text before each root of a context. The text is read once."""
    if isinstance(drafter, Spire):
        return lambda context: _read_captured(drafter, known, context)
    model, whole = drafter.draft_model, KVCache(1)
    n_tokens = len(known.tokens) - 1
    model.prefill(known.tokens[None, :-1].to(model.device), [n_tokens], whole, range(1))

    def read(context: Context) -> None:
        lengths = [n - 1 for n in context.n_tokens]
        for number, layer in enumerate(whole.layers):
            keys, values = (
                states[:1, :, : max(lengths)].expand(len(lengths), -1, -1, -1) for states in (layer.keys, layer.values)
            )
            drafter.cache.fill(number, keys, values, lengths)

    return read


def _read_captured(drafter: Spire, known: _Known, context: Context) -> None:
    rows = range(context.n_rows)
    captured = None
    if known.captured is not None:
        captured = known.captured[:, : max(context.n_tokens)].expand(len(rows), -1, -1, -1)
    drafter.prefill(context, TargetOutput(context.last_logits, captured, context.roots[:, None]), rows)
