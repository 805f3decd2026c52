"""Check the folder of an EAGLE-3 drafter: how it was trained, what its files say, and what engines make of them.

There are mistakes that load, run, and quietly accept little. The same tensors fit whatever a row pairs, whichever
states it reads, however these are normed and positions rotated, and whatever token a row of the unembedding stands for.
So each reading is another drafter over the same tensors. On the same answers the one that it was trained with accepts
the most.

The rules of engines are those of vLLM 0.33.0 and SGLang 0.5.23: of `llama_eagle3.py` in both, and of how vLLM's runners
choose layers. Each takes other keys for the same, has its own defaults, and passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from spectrain.measure.acceptance import Acceptance, Answer, Drafted, acceptance, joined
from spectrain.measure.statistics import Estimate
from spectrain.measure.tables import interval
from spectrain.models.eagle3 import (
    ARCHITECTURE,
    FLAGS,
    LAYERS,
    ROPE,
    Eagle3Config,
    Eagle3Drafter,
    default_layers,
    load,
    sglang_window,
    unrolled,
)
from spectrain.stores.files import load_json
from spectrain.target.llama import Rope
from spectrain.target.loading import fetched
from spectrain.target.target import FINAL, TargetModel
from spectrain.terminal import stage

VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
CLASSES = {
    VLLM: (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM", "Eagle3DraftModel"),
    SGLANG: (ARCHITECTURE,),
}
KEYS = ("architectures", LAYERS, "eagle_config", *FLAGS, *ROPE, "draft_vocab_size", "tie_word_embeddings")
USES_STATES = 1.3  # times what it drafts without knowing the states: so much a drafter gains by them at the least
SAME = 0.02  # of tau: readings that differ by less are alike to a user
SURE = 1.6  # times its 95 % interval that a gain must exceed, because the best of some thirty is looked at
CLOSE = 6  # readings whose order is looked at more closely
PAIRINGS = {
    "shifted": "tokens shifted by one against the states",
    "unshifted": "tokens that are not shifted against the states, to predict the token after the next",
    "next": "tokens that are not shifted against the states, to predict the next token",
    "twice": "tokens shifted by two against the states",
}
NORMS = {
    "": "no norm before fc",
    "fc_norm": "a norm of each state before fc (fc_norm)",
    "norm_before_fc": "one norm of all states before fc (norm_before_fc)",
}


@dataclass(frozen=True, eq=False)
class Reading:
    """What files say of a drafter, or could have said."""

    config: Eagle3Config
    pairing: str = "shifted"  # of PAIRINGS
    d2t: str = "offsets"  # what it holds, of `Readings.vocabularies`

    def facts(self) -> dict[str, str]:
        """Describe what tells readings apart, by name."""
        config, rope = self.config, dict(self.config.shape.rope_parameters)
        theta, kind = rope.pop("rope_theta", 10_000.0), rope.pop("rope_type", "default")
        blocks = ", ".join(str(layer) for layer in config.target_layers if layer != FINAL)
        flags = ("norm_before_residual", "norm_output")
        return {
            "pairing": PAIRINGS[self.pairing],
            "layers": f"the inputs of blocks {blocks}" + " and normed final states" * (FINAL in config.target_layers),
            "norms": NORMS["fc_norm" * config.fc_norm + "norm_before_fc" * config.norm_before_fc],
            **{flag: f"{flag}: {str(getattr(config, flag)).lower()}" for flag in flags},
            "rope": f"RoPE base {theta:,.0f}" + (f", scaled as {kind} {rope}" if kind != "default" else ""),
            "d2t": f"d2t as {self.d2t}",
            "window": f"a window of {config.window_tokens}" if config.is_windowed else "no window",
        }

    def unlike(self, other: Reading) -> dict[str, str]:
        """Return the facts that are others in another reading."""
        theirs = other.facts()
        return {name: said for name, said in self.facts().items() if said != theirs[name]}


class Readings:
    """A drafter as it was opened, all that it could be read as, and what readings accept of the same answers.

    Args:
        d2t: [K] int64 of its files; None: they have none.
        own: the target's answers, with the inputs of all its blocks, and the final states behind these.
        k: tokens of a draft.
    """

    def __init__(
        self, drafter: Eagle3Drafter, target: TargetModel, d2t: Tensor | None, own: Sequence[Answer], k: int
    ) -> None:
        self.drafter, self.target, self.own, self.k = drafter, target, own, k
        self._measured: dict[tuple, tuple[Reading, Acceptance]] = {}
        kept, self.vocabularies = drafter.kept, {"offsets": drafter.kept}
        if d2t is not None and kept is not None:
            ids = d2t.to(kept.device)
            offsets = ids + torch.arange(len(ids), device=ids.device)
            if torch.equal(kept, ids):  # which had to be guessed
                found = {"ids": ids, "offsets": offsets}
            else:  # ours are opened in another order than that of the file
                found = {"offsets": kept} | ({"ids": ids} if torch.equal(kept, offsets) else {})
            if torch.equal(kept, offsets) and not torch.equal(kept, kept.sort().values):
                found["offsets, and rows ascending by id"] = kept.sort().values
            n_tokens, n_kept = target.vocab_size, len(kept)
            inside = {name: (int(one.min()) >= 0) and int(one.max()) < n_tokens for name, one in found.items()}
            self.vocabularies = {n: one for n, one in found.items() if inside[n] and len(one.unique()) == n_kept}
        self.first = Reading(drafter.config, d2t=next(iter(self.vocabularies)))

    @cached_property
    def far(self) -> list[Answer]:
        """Answers so far from the beginning of their text that rotations and windows differ."""
        return joined(self.target, self.own)

    @cached_property
    def foreign(self) -> list[Answer]:
        """Answers with the states of other places: what a drafter does without knowing them."""
        halves = [one.tokens.shape[1] // 2 for one in self.own]
        return [replace(one, captured=one.captured.roll(n, 1)) for one, n in zip(self.own, halves, strict=True)]

    @property
    def tried(self) -> list[Reading]:
        """What was measured, the highest expected tau first."""
        found = {key[0]: one for key, (one, _) in self._measured.items()}
        return sorted(found.values(), key=lambda one: -self.measured(one).value)

    def measured(self, reading: Reading, every: int | None = None, of: str = "own") -> Acceptance:
        """Return what a reading accepts of answers: own, far or foreign. `every`: distance of two roots; None: k."""
        key = tuple(reading.facts().values()), every or self.k, of
        if key not in self._measured:
            self._measured[key] = reading, self._acceptance(reading, getattr(self, of), every or self.k)
        return self._measured[key][1]

    def gain(self, one: Reading, other: Reading) -> Estimate:
        """Estimate how much higher the expected tau of a reading is: with all roots, where few leave it open."""
        of = "own" if one.unlike(other).keys().isdisjoint(("rope", "window")) else "far"
        for every in (self.k, 1):
            gain = self.measured(one, every, of).gain_over(self.measured(other, every, of))
            if abs(gain.value) > SURE * (gain.high - gain.low) / 2 or max(-gain.low, gain.high) < SAME:
                break
        return gain

    def is_better(self, one: Reading, other: Reading) -> bool:
        """Whether a reading has a significantly higher expected tau than another; see SURE."""
        gain = self.gain(one, other)
        return gain.value > max(SAME, SURE * (gain.high - gain.low) / 2)

    def uses_states(self, reading: Reading) -> bool:
        """Whether a reading accepts more than with the states of other places of the text."""
        control = self.measured(reading, of="foreign").value
        return self.measured(reading).value - 1 >= USES_STATES * (control - 1)

    def best(self) -> Reading:
        """Try all known mistakes, and others on top of the one that explains the most, until none does.

        What alone makes it significantly worse is not tried on top of others, and nothing on top of a reading that is
        better among noise.
        """
        best, better, worse = None, self.first, set()
        while best is None or (better is not best and self.is_better(better, best) and self.uses_states(better)):
            best = better
            others = [one for one in self.others(best) if worse.isdisjoint(one.unlike(best).items())]
            with stage("trying other readings", len(others)) as advance:
                for one in others:
                    if self.measured(one).gain_over(self.measured(best)).high < -SAME:
                        worse |= one.unlike(best).items()
                    advance()
                top, *close = sorted([best, *others], key=lambda one: -self.measured(one).value)[:CLOSE]
                close = [one for one in close if not self.is_better(top, one)]
                better = max([top, *close], key=lambda one: self.measured(one, 1).value)
        return best

    def others(self, now: Reading) -> Iterator[Reading]:
        """Yield the readings that differ from one in one fact."""
        config, shape = now.config, now.config.shape
        of_target = getattr(self.target.model.config.get_text_config(), "rope_parameters", None)
        ropes = [{"rope_theta": theta} for theta in (10_000.0, shape.rope_parameters.get("rope_theta")) if theta]
        ropes = [{"rope_type": "default"} | rope for rope in ropes] + [dict(of_target)] * bool(of_target)
        changes: list[dict] = [{"target_layers": layers} for layers in self.layer_sets()]
        changes += [{flag: not getattr(config, flag)} for flag in ("norm_before_residual", "norm_output")]
        changes += [{flag: flag == norms for flag in NORMS if flag} for norms in NORMS]
        changes += [{"shape": replace(shape, rope_parameters=rope)} for rope in ropes]
        found = [replace(now, config=replace(config, **change)) for change in changes]
        found += [replace(now, pairing=one) for one in PAIRINGS] + [replace(now, d2t=one) for one in self.vocabularies]
        yield from (one for one in found if one.unlike(now))

    def layer_sets(self) -> Iterator[tuple[int, ...]]:
        """Yield blocks whose inputs may have been meant: those of conventions, one off, and final states."""
        n, now = self.target.n_layer, self.first.config.target_layers
        of_blocks = tuple(2 + round(i * (n - 4) / max(1, len(now) - 1)) for i in range(len(now)))  # as DFlash has them
        known = [now, default_layers(n), (n // 4, n // 2, 3 * n // 4), of_blocks]
        moved = [tuple(layer + off for layer in layers) for layers in known for off in (0, 1, -1)]
        for layers in dict.fromkeys([*moved, *((*layers[:-1], FINAL) for layers in known)]):
            blocks = [layer for layer in layers if layer != FINAL]
            if len(layers) == len(now) and sorted(set(blocks)) == blocks and set(blocks) <= set(range(n)):
                yield layers

    def drafter_of(self, reading: Reading) -> Eagle3Drafter:
        """Return the drafter that a reading is, over the same tensors."""
        with torch.device("meta"):
            other = Eagle3Drafter(reading.config)
        state, n_states = self.drafter.state_dict(), len(reading.config.target_layers)
        norms = [one for name, one in state.items() if name.startswith(("state_norms.", "states_norm."))]
        whole = torch.cat(norms) if norms else state["norm.weight"].new_ones(n_states * len(state["norm.weight"]))
        state |= {f"state_norms.{i}.weight": part for i, part in enumerate(whole.chunk(n_states))}
        state |= {"states_norm.weight": whole, "kept": self.vocabularies[reading.d2t]}
        other.load_state_dict({name: state[name] for name in other.state_dict()}, assign=True)
        other.tables, other.rope = self.drafter.tables, Rope(reading.config.shape)
        return other

    def _acceptance(self, reading: Reading, answers: Sequence[Answer], every: int) -> Acceptance:
        drafter, layers = self.drafter_of(reading), list(reading.config.target_layers)
        known = int(reading.pairing == "next")  # whose first step predicts the root

        def drafted(answer: Answer) -> Drafted:
            tokens, captured = answer.tokens, answer.captured[:, :, layers]
            if reading.pairing == "unshifted":
                tokens = F.pad(tokens[:, :-1], (1, 0))
            elif reading.pairing == "next":
                captured = captured.roll(-1, 1)
            elif reading.pairing == "twice":
                captured = F.pad(captured[:, :-1], (0, 0, 0, 0, 1, 0))
            steps = unrolled(drafter, tokens, captured, self.k + known, every, answer.first - known)[known:]
            n_drafts = (len(answer.p) - self.k) // every + 1
            hidden = torch.stack([one[0, :n_drafts] for one in steps], dim=1)
            return F.linear(hidden, drafter.unembedding.to(hidden.dtype)), drafter.kept

        return acceptance(answers, self.k, drafted, every)


def capture_layers(target: TargetModel) -> tuple[int, ...]:
    """Return what answers have to capture: all that a drafter may have been trained on."""
    return (*range(target.n_layer), FINAL)


def check(folder: str, target: TargetModel, answers: Sequence[Answer], k: int) -> tuple[Acceptance, dict[str, object]]:
    """Return the acceptance of a drafter as its files say, and what is to be said of the folder.

    `files` are the keys of its config.json that decide how it is read; `readings` what was tried, the best first;
    `engines` what they make of it; `wrong` what is to be changed; `notes` all else.
    """
    drafter = load(Path(folder), target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    path, d2t = fetched(folder, "drafter"), None
    files = load_json(path / "config.json")
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            d2t = tensors.get_tensor("d2t") if "d2t" in tensors.keys() else d2t  # noqa: SIM118
    found = Readings(drafter, target, d2t, answers, k)
    first, best, wrong = found.first, found.best(), []
    if not found.uses_states(best):
        tau = interval(found.measured(best, of="foreign").tau().as_json(), 2)
        wrong.append(
            f"It makes nothing of this target's states: with those of other places of the text tau is {tau}. It was "
            "trained for another target, or in a way that is not known here."
        )
    elif best.unlike(first):
        wrong.append(f"It was trained with {_words(best, first)}: {_gain(found, best, first)}.")
    engines = [_engine(one, files, found, best) for one in CLASSES]
    readings = [
        {
            "reading": _words(one, first) or "as its files say",
            "tau": found.measured(one).tau().as_json(),
            "gain": found.measured(one).gain_over(found.measured(first)).as_json() if one.unlike(first) else None,
        }
        for one in found.tried
    ]
    said = {"files": {key: files[key] for key in KEYS if key in files}, "readings": readings, "engines": engines}
    said["wrong"] = wrong + [one["said"] for one in engines if one["write"]]
    said["notes"] = [one["said"] for one in engines if not one["write"]] + _not_told(found, best)
    return found.measured(first), said


def _words(one: Reading, other: Reading) -> str:
    return ", ".join(one.unlike(other).values())


def _gain(found: Readings, better: Reading, than: Reading) -> str:
    gain = found.gain(better, than)
    taus = f"tau {found.measured(better).value:.2f} in place of {found.measured(than).value:.2f}"
    return f"{taus} (+{gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}])"


def _not_told(found: Readings, best: Reading) -> list[str]:
    """Say which RoPE drafts as well as the best reading's on these texts."""
    ropes = [one for one in found.tried if best.unlike(one).keys() == {"rope"} and not found.is_better(best, one)]
    longest = max(answer.tokens.shape[1] for answer in found.far)
    alike = " or ".join(_words(one, best) for one in ropes)
    told = f"Texts of up to {longest} tokens do not tell {alike} from {best.facts()['rope']}"
    return [f"{told}; give prompts= of longer texts."] if ropes else []


def _engine(engine: str, files: Mapping, found: Readings, best: Reading) -> dict[str, object]:
    """Return how an engine reads a folder, its tau, and what to write so that it reads it as it was trained."""
    inner, config, n_layer = files.get("eagle_config") or {}, found.first.config, found.target.n_layer
    is_vllm, named = engine == VLLM, files.get("architectures") or []
    outputs = inner.get(LAYERS) or ()  # to vLLM's V1 runner inputs, as they are
    layers = (files.get(LAYERS) or outputs) if is_vllm else [layer + 1 for layer in outputs]
    layers = tuple(sorted(set(layers or default_layers(n_layer))))
    flags = {flag: bool(files.get(flag, inner.get(flag))) for flag in FLAGS}
    flags["norm_before_residual"] = is_vllm and bool(
        files.get("norm_before_residual", "speculators_model_type" in files)
    )
    why = [] if set(named) & set(CLASSES[engine]) else [f"of architectures it knows {ARCHITECTURE}, not {named}"]
    if len(layers) != len(config.target_layers) or max(layers) >= n_layer:
        why.append(f"it would give fc the inputs of blocks {', '.join(map(str, layers))}")
    if "offsets" not in found.vocabularies:
        why.append("it adds the rows' numbers to d2t, which leads out of the vocabulary; write offsets")
    if not is_vllm and "draft_vocab_size" not in files and not files.get("tie_word_embeddings"):
        n_rows = "null" if config.unembedding == "target" else config.draft_vocab or config.shape.vocab_size
        why.append(f"it asks for draft_vocab_size, which is not there; write draft_vocab_size: {n_rows}")
    if why:
        write = [one for one in why if "; write " in one]
        return {"engine": engine, "tau": None, "said": f"{engine} does not load it: {', '.join(why)}.", "write": write}
    reading = Reading(replace(config, target_layers=layers, window_tokens=config.shape.max_positions, **flags))
    tau, notes = found.measured(reading).tau(), ""
    if config.is_windowed:
        option = "" if is_vllm else f" without --speculative-draft-window-size {sglang_window(config.window_tokens)}"
        notes += f"; it attends to the whole text{option}"
    if files.get("tie_word_embeddings") and not is_vllm:
        notes += "; it takes the embedding for lm_head"
    if config.own_embedding and not is_vllm:
        notes += "; it reads the target's embedding in place of the drafter's, which this tau does not show"
    write, said = [], f"reads it as it was trained, tau {tau.value:.2f}"
    if found.is_better(best, reading):
        write = [_to_write(engine, name, best) for name in best.unlike(reading) if name != "window"]
        said = f"reads {_words(reading, best)}, but it was trained with {_words(best, reading)}; "
        said += f"{' and '.join(write)}: {_gain(found, best, reading)}"
    write = write if all(one.startswith("write ") for one in write) else []
    return {"engine": engine, "tau": tau.as_json(), "said": f"{engine} {said}{notes}.", "write": write}


def _to_write(engine: str, name: str, wanted: Reading) -> str:
    """Return what to write so that an engine reads this fact of a folder as wanted, or what else to do."""
    config, layers, rope = wanted.config, wanted.config.target_layers, dict(wanted.config.shape.rope_parameters)
    if name == "norm_before_residual" and engine == SGLANG:
        return "serve it with vLLM, because SGLang never norms the residual"
    if name == "pairing" or (name == "layers" and FINAL in layers):
        return "train it again, because no engine reads it so"
    theta, is_scaled = rope.pop("rope_theta", None), rope.get("rope_type", "default") != "default"
    ids = f"{LAYERS}: {list(layers)}" if engine == VLLM else f"eagle_config.{LAYERS}: {[one - 1 for one in layers]}"
    return "write " + {
        "layers": ids,
        "norms": ", ".join(f"{flag}: {str(getattr(config, flag)).lower()}" for flag in ("fc_norm", "norm_before_fc")),
        "rope": f"rope_theta: {theta}, rope_scaling: {rope if is_scaled else 'null'}",
        "d2t": "d2t as target id - row, with ids in the order of lm_head's rows",
    }.get(name, wanted.facts()[name])
