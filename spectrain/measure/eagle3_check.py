"""Check the folder of an EAGLE-3 drafter: how it was trained, what its files say, and what engines make of them.

The rules of engines are those of vLLM 0.33.0 and SGLang 0.5.23: of `llama_eagle3.py` in both, and of how vLLM's runners
choose layers. Each takes other keys for the same, has its own defaults, and passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import safe_open

from spectrain.measure.acceptance import Acceptance, Answer
from spectrain.measure.eagle3_readings import Reading, Readings
from spectrain.models.eagle3 import ARCHITECTURE, FLAGS, LAYERS, ROPE, default_layers, load
from spectrain.stores.files import load_json
from spectrain.target.loading import fetched
from spectrain.target.target import FINAL, TargetModel

VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
CLASSES = {
    VLLM: (ARCHITECTURE, "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM", "Eagle3DraftModel"),
    SGLANG: (ARCHITECTURE,),
}
KEYS = ("architectures", LAYERS, "eagle_config", *FLAGS, *ROPE, "draft_vocab_size", "tie_word_embeddings")
USES_STATES = 1.3  # times what it drafts without knowing the states: so much a drafter gains by them at the least


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
    control = found.measured(best, of="foreign").tau()
    if found.measured(best).value - 1 < USES_STATES * (control.value - 1):
        best = first  # what is better among noise
        wrong.append(
            f"It makes nothing of this target's states: with those of other places of the text tau is {control}. It "
            "was trained for another target, or in a way that is not known here."
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
    if why:
        write = [one for one in why if "; write " in one]
        return {"engine": engine, "tau": None, "said": f"{engine} does not load it: {', '.join(why)}.", "write": write}
    reading = Reading(replace(config, target_layers=layers, window_tokens=config.shape.max_positions, **flags))
    tau, notes = found.measured(reading).tau(), ""
    if config.is_windowed:
        option = "" if is_vllm else f" without --speculative-draft-window-size {config.window_tokens}"
        notes += f"; it attends to the whole text{option}"
    if files.get("tie_word_embeddings") and not is_vllm:
        notes += "; it takes the embedding for lm_head"
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
