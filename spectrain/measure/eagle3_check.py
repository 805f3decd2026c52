"""Check the folder of an EAGLE-3 drafter: how it was trained, what its files say, and what engines make of them.

The rules of engines are those of vLLM 0.33.0 and SGLang 0.5.23 (`llama_eagle3.py` of both, and how vLLM's runners
choose layers). Each takes other keys for the same, has its own defaults, and passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import safe_open

from spectrain.measure.acceptance import Acceptance, Answer
from spectrain.measure.eagle3_readings import SAME, Reading, Readings
from spectrain.models.eagle3 import default_layers, load
from spectrain.models.eagle3_folders import ARCHITECTURE, FLAGS, LAYERS, ROPE
from spectrain.stores.files import load_json
from spectrain.target.loading import fetched
from spectrain.target.target import FINAL, TargetModel

VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
USES_STATES = 1.2  # times what it drafts without knowing the states: so much a drafter gains by them at the least
KEYS = ("architectures", LAYERS, "eagle_config", *FLAGS, *ROPE, "draft_vocab_size", "tie_word_embeddings")
OF_VLLM = (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM")


@dataclass(frozen=True)
class Served:
    """A folder in an engine."""

    engine: str
    reading: Reading
    refusals: list[str]  # why it does not load it
    notes: list[str]  # what it passes over


def capture_layers(target: TargetModel) -> tuple[int, ...]:
    """Return what answers have to capture: all that a drafter may have been trained on."""
    return (*range(target.n_layer), FINAL)


def check(
    folder: str, target: TargetModel, answers: Sequence[Answer], k: int
) -> tuple[Acceptance, dict[str, list | dict]]:
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
    first, best = found.first, found.best()
    control, wrong = found[replace(best, pairing="elsewhere")].tau(), []
    if found[best].value - 1 < USES_STATES * (control.value - 1):
        best = first  # what is better among noise
        wrong.append(
            f"It makes nothing of this target's states: with those of other places of the text tau is {control}. It "
            "was trained for another target, or in a way that is not known here."
        )
    elif best.unlike(first):
        wrong.append(f"It was trained with {_words(best, first)}: {_gain(found, best, first)}.")
    engines = [_of_engine(one, found, best) for one in _served(files, found)]
    said = {
        "files": {key: files[key] for key in KEYS if key in files},
        "readings": [
            {
                "reading": _words(one, first) or "as its files say",
                "tau": found[one].tau().as_json(),
                "gain": found[one].gain_over(found[first]).as_json() if one.unlike(first) else None,
            }
            for one in found.tried
        ],
        "engines": engines,
        "wrong": wrong + [one["said"] for one in engines if one["write"]],
        "notes": [one["said"] for one in engines if not one["write"]] + _not_told(found, best),
    }
    return found[first], said


def _words(one: Reading, other: Reading) -> str:
    return ", ".join(one.unlike(other).values())


def _gain(found: Readings, better: Reading, than: Reading) -> str:
    gain = found[better].gain_over(found[than])
    taus = f"tau {found[better].value:.2f} in place of {found[than].value:.2f}"
    return f"{taus} (+{gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}])"


def _not_told(found: Readings, best: Reading) -> list[str]:
    """Say which RoPE drafts as well as the best reading's on these texts."""
    alike = []
    for one in found.tried:
        if best.unlike(one).keys() == {"rope"}:
            gain = found[one].gain_over(found[best])
            alike += [_words(one, best)] if gain.high > 0 or abs(gain.value) < SAME else []
    longest = max(answer.tokens.shape[1] for answer in found.answers)
    told = f"Texts of up to {longest} tokens do not tell {' or '.join(alike)} from {best.facts()['rope']}"
    return [f"{told}; give prompts= of longer texts."] if alike else []


def _served(files: Mapping, found: Readings) -> list[Served]:
    """Return how each engine reads a folder whose config.json has these keys."""
    inner, first = files.get("eagle_config") or {}, found.first.config
    is_speculators, named = "speculators_model_type" in files, files.get("architectures") or []
    flags = {flag: bool(files.get(flag, inner.get(flag))) for flag in FLAGS}
    n_states = files.get("num_aux_hidden_states") or len(inner.get(LAYERS) or (0, 0, 0))
    layers = {
        VLLM: files.get(LAYERS) or inner.get(LAYERS),  # the second as they are
        SGLANG: [layer + 1 for layer in inner.get(LAYERS) or ()],
    }
    engines = []
    for engine, knows in {VLLM: OF_VLLM, SGLANG: (ARCHITECTURE,)}.items():
        refusals, notes, own = [], [], dict(flags)
        chosen = tuple(sorted(set(layers[engine] or default_layers(found.target.n_layer))))
        if not (is_speculators and engine == VLLM) and not set(named) & set(knows):
            refusals.append(f"it knows none of architectures: {named}; write [{ARCHITECTURE}]")
        if len(chosen) != len(first.target_layers) or max(chosen) >= found.target.n_layer:
            refusals.append(f"it would give fc the inputs of blocks {', '.join(map(str, chosen))}")
        elif n_states != len(chosen) and not is_speculators:
            refusals.append(f"it makes fc for {n_states} states; write num_aux_hidden_states: {len(chosen)}")
        if "offsets" not in found.vocabularies:
            refusals.append("it adds the number of the row to d2t, which leads out of the vocabulary; write offsets")
        if engine == SGLANG:
            notes += ["it ignores norm_before_residual"] if own["norm_before_residual"] else []
            notes += ["it takes the embedding for lm_head"] if files.get("tie_word_embeddings") else []
            own["norm_before_residual"] = False
        elif is_speculators:
            own["norm_before_residual"] = bool(files.get("norm_before_residual", True))
        window = f"; serve with --speculative-draft-window-size {first.window_tokens}" * (engine == SGLANG)
        notes += [f"it has no window of {first.window_tokens}{window}"] if first.is_windowed else []
        chosen = first.target_layers if refusals else chosen
        config = replace(first, target_layers=chosen, window_tokens=first.shape.max_positions, **own)
        engines.append(Served(engine, Reading(config), refusals, notes))
    return engines


def _of_engine(one: Served, found: Readings, best: Reading) -> dict[str, object]:
    """Return what is said of an engine, its tau, and what to write so that it reads a folder as it was trained."""
    if one.refusals:
        said = f"{one.engine} does not load it: {', and '.join(one.refusals)}."
        return {"engine": one.engine, "tau": None, "said": said, "write": one.refusals}
    tau, notes = found[one.reading].tau(), "".join(f"; {note}" for note in one.notes)
    result = {"engine": one.engine, "tau": tau.as_json()}
    if not found.is_better(best, one.reading):
        return result | {"said": f"{one.engine} reads it as it was trained, tau {tau.value:.2f}{notes}.", "write": []}
    lines = [_to_write(one.engine, name, best) for name in best.unlike(one.reading) if name != "window"]
    reads = f"{one.engine} reads {_words(one.reading, best)}, but it was trained with {_words(best, one.reading)}"
    said = f"{reads}; {' and '.join(lines)}: {_gain(found, best, one.reading)}{notes}."
    return result | {"said": said, "write": lines if all(line.startswith("write ") for line in lines) else []}


def _to_write(engine: str, name: str, wanted: Reading) -> str:
    """Return what to write so that an engine reads this fact of a folder as wanted, or what else to do."""
    config, layers = wanted.config, wanted.config.target_layers
    rope = {key: value for key, value in config.shape.rope_parameters.items() if key != "rope_theta"}
    scaling = "null" if rope.get("rope_type", "default") == "default" else rope
    if name == "norm_before_residual" and engine == SGLANG:
        return "serve it with vLLM, because SGLang never norms the residual"
    if name == "pairing" or (name == "layers" and FINAL in layers):
        return "train it again, because no engine reads it so"
    where = LAYERS if engine == VLLM else f"eagle_config.{LAYERS}"
    return (
        "write "
        + {
            "layers": f"{where}: {[layer - (engine == SGLANG) for layer in layers]}",
            "norms": f"fc_norm: {str(config.fc_norm).lower()}, norm_before_fc: {str(config.norm_before_fc).lower()}",
            "norm_before_residual": f"norm_before_residual: {str(config.norm_before_residual).lower()}",
            "norm_output": f"norm_output: {str(config.norm_output).lower()}",
            "rope": f"rope_theta: {config.shape.rope_parameters.get('rope_theta')}, rope_scaling: {scaling}",
            "d2t": "d2t as target id - row, with ids in the order of lm_head's rows",
        }[name]
    )
