"""Other readings of an EAGLE-3 folder: mistakes that load, run, and quietly accept little.

The same tensors fit whatever a row pairs, whichever states it reads, however these are normed and positions rotated, and
whatever token a row of the unembedding stands for. So each reading is another drafter over the same tensors. On the same
answers the one that it was trained with accepts the most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from spectrain.measure.acceptance import Acceptance, Answer, acceptance
from spectrain.models.eagle3 import Eagle3Config, Eagle3Drafter, default_layers, unrolled
from spectrain.target.llama import Rope
from spectrain.target.target import FINAL, TargetModel
from spectrain.terminal import stage

SAME = 0.01  # of tau: what differs by less is the same reading to a user
PAIRINGS = {  # what stands beside the state of position p, and what it predicts
    "shifted": "the token of p + 1, which predicts p + 2",
    "unshifted": "the token of p, which predicts p + 2: tokens are not shifted",
    "plain": "the token of p, which predicts p + 1: tokens are not shifted",
    "shifted twice": "the token of p + 2, which predicts p + 3: tokens are shifted twice",
}
NORMS = ("none", "fc_norm", "norm_before_fc")  # of the states before fc


@dataclass(frozen=True)
class Reading:
    """What files say of a drafter, or could have said."""

    config: Eagle3Config
    pairing: str = "shifted"
    vocabulary: str = "offsets"  # what d2t holds, of `Opened.vocabularies`

    def facts(self) -> dict[str, object]:
        """Return what tells readings apart, by name."""
        config = self.config
        return {
            "pairing": PAIRINGS[self.pairing],
            "layers": config.target_layers,
            "norms": NORMS[1] if config.fc_norm else NORMS[2] if config.norm_before_fc else NORMS[0],
            "norm_before_residual": config.norm_before_residual,
            "norm_output": config.norm_output,
            "rope": {name: one for name, one in sorted(config.shape.rope_parameters.items()) if one != "default"},
            "d2t": self.vocabulary,
            "window": config.window_tokens,
            "tables": (config.own_embedding, config.unembedding),
        }

    def differences(self, other: Reading) -> dict[str, object]:
        """Return the facts of another reading that are others here."""
        own = self.facts()
        return {name: one for name, one in other.facts().items() if one != own[name]}

    def __hash__(self) -> int:
        return hash(repr(self.facts()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reading) and not self.differences(other)


class Opened:
    """A drafter as it was opened, and all that it could be read as.

    Args:
        drafter: the drafter.
        target: its target.
        d2t: [K] int64 of its files; None: they have none.
    """

    def __init__(self, drafter: Eagle3Drafter, target: TargetModel, d2t: Tensor | None) -> None:
        self.drafter, self.n_layer, self.vocabularies = drafter, target.n_layer, {"offsets": drafter.kept}
        self.target_rope = getattr(target.model.config.get_text_config(), "rope_parameters", None)
        n_tokens, kept = drafter.config.shape.vocab_size, drafter.kept
        if d2t is not None and kept is not None:
            d2t = d2t.to(kept.device)
            as_offsets = d2t + torch.arange(len(d2t), device=kept.device)
            if torch.equal(kept, d2t):  # which had to be guessed
                self.vocabularies = {"ids": kept, "offsets": as_offsets}
            elif torch.equal(kept, as_offsets):
                self.vocabularies["ids"] = d2t
            if not torch.equal(as_offsets, as_offsets.sort().values):
                self.vocabularies["offsets, rows ascending by id"] = kept.sort().values
        self.vocabularies = {name: ids for name, ids in self.vocabularies.items() if is_map(ids, n_tokens)}
        self.first = Reading(drafter.config, vocabulary=next(iter(self.vocabularies)))

    def others(self, now: Reading) -> Iterator[Reading]:
        """Yield readings that differ from one in one fact: the mistakes that are known."""
        config, shape = now.config, now.config.shape
        for layers in layer_sets(config.target_layers, self.n_layer):
            yield replace(now, config=replace(config, target_layers=layers))
        for flag in ("norm_before_residual", "norm_output"):
            yield replace(now, config=replace(config, **{flag: not getattr(config, flag)}))
        for norms in NORMS:
            yield replace(now, config=replace(config, **{flag: flag == norms for flag in NORMS[1:]}))
        plain = {"rope_type": "default", "rope_theta": shape.rope_parameters.get("rope_theta", 10_000.0)}
        for rope in (self.target_rope, plain, {"rope_type": "default", "rope_theta": 10_000.0}):
            if rope:
                yield replace(now, config=replace(config, shape=replace(shape, rope_parameters=dict(rope))))
        yield from (replace(now, pairing=pairing) for pairing in PAIRINGS)
        yield from (replace(now, vocabulary=name) for name in self.vocabularies)

    def drafter_of(self, reading: Reading) -> Eagle3Drafter:
        """Return the drafter that a reading is, over the same tensors."""
        with torch.device("meta"):
            other = Eagle3Drafter(reading.config)
        state = self.drafter.state_dict()
        norms = [one for name, one in state.items() if name.startswith(("state_norms.", "states_norm."))]
        n_states = len(reading.config.target_layers)
        whole = torch.cat(norms) if norms else state["norm.weight"].new_ones(n_states * len(state["norm.weight"]))
        parts = {f"state_norms.{i}.weight": part for i, part in enumerate(whole.chunk(n_states))}
        held = {"states_norm.weight": whole, **parts, **state, "kept": self.vocabularies[reading.vocabulary]}
        other.load_state_dict({name: held[name] for name in other.state_dict()}, assign=True)
        other.tables, other.rope = self.drafter.tables, Rope(reading.config.shape)
        return other

    def acceptance(self, reading: Reading, answers: Sequence[Answer], k: int) -> Acceptance:
        """Return the acceptance of a reading on answers with the inputs of all blocks, and final states behind them."""
        drafter, layers = self.drafter_of(reading), list(reading.config.target_layers)

        def drafted(answer: Answer) -> tuple[Tensor, Tensor | None]:
            tokens, captured, known = answer.tokens, answer.captured[:, :, layers].to(drafter.norm.weight.dtype), 0
            if reading.pairing == "unshifted":
                tokens = F.pad(tokens[:, :-1], (1, 0))
            elif reading.pairing == "plain":  # what its first step predicts is the root
                captured, known = F.pad(captured[:, 1:], (0, 0, 0, 0, 0, 1)), 1
            elif reading.pairing == "shifted twice":
                captured = F.pad(captured[:, :-1], (0, 0, 0, 0, 1, 0))
            steps = unrolled(drafter, tokens, captured, k + known, k, answer.first - known)
            n_drafts = len(answer.p) // k
            hidden = torch.stack([step[0, :n_drafts] for step in steps[known:]], dim=1).flatten(0, 1)
            return F.linear(hidden, drafter.unembedding.to(hidden.dtype)), drafter.kept

        return acceptance(answers, k, drafted)


def is_map(ids: Tensor | None, n_tokens: int) -> bool:
    """Whether a draft vocabulary [K] has tokens that exist, each once; None has all."""
    return ids is None or (int(ids.min()) >= 0 and int(ids.max()) < n_tokens and len(ids.unique()) == len(ids))


def layer_sets(now: tuple[int, ...], n_layer: int) -> Iterator[tuple[int, ...]]:
    """Yield the blocks whose inputs may have been meant: those of other conventions, one off, and final states."""
    n_states = len(now)
    known = [now] + ([default_layers(n_layer), (n_layer // 4, n_layer // 2, 3 * n_layer // 4)] if n_states == 3 else [])
    if n_states > 1:  # those of block drafters
        known.append(tuple(2 + round(i * (n_layer - 4) / (n_states - 1)) for i in range(n_states)))
    moved = [tuple(layer + off for layer in layers) for layers in known for off in (0, 1, -1)]
    for layers in dict.fromkeys([*moved, *((*layers[:-1], FINAL) for layers in known)]):
        whole = [layer for layer in layers if layer != FINAL]
        if sorted(set(whole)) == whole and all(0 <= layer < n_layer for layer in whole):
            yield layers


class Readings:
    """What readings of a drafter accept on the same answers; each is measured once."""

    def __init__(self, opened: Opened, answers: Sequence[Answer], k: int) -> None:
        self.opened, self.answers, self.k = opened, answers, k
        self.measured: dict[Reading, Acceptance] = {}

    def __getitem__(self, reading: Reading) -> Acceptance:
        if reading not in self.measured:
            self.measured[reading] = self.opened.acceptance(reading, self.answers, self.k)
        return self.measured[reading]

    def is_better(self, one: Reading, other: Reading) -> bool:
        """Whether a reading has a higher expected tau than another beyond the paired 95 % interval."""
        gain = self[one].gain_over(self[other])
        return gain.low > 0 and gain.value > SAME

    def best(self) -> Reading:
        """Try all known mistakes, and others on top of the one that explains the most, until none does."""
        best = self.opened.first
        while True:
            others = [one for one in dict.fromkeys(self.opened.others(best)) if one != best]
            with stage("trying other readings", len(others)) as advance:
                for one in others:
                    self[one]
                    advance()
            better = max(others, key=lambda one: self[one].tau().value)
            if not self.is_better(better, best):
                return best
            best = better
