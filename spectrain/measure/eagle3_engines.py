"""What vLLM and SGLang make of an EAGLE-3 folder, as readings, and what to write so that they read it otherwise.

The rules are those of vLLM 0.33.0 (`llama_eagle3.py`, `gpu_model_runner.py`) and SGLang 0.5.23 (`llama_eagle3.py`). Each
takes other keys for the same thing, has defaults of its own, and passes over what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from spectrain.measure.eagle3_readings import Opened, Reading
from spectrain.models.eagle3 import default_layers
from spectrain.target.target import FINAL

LAYERS = "eagle_aux_hidden_state_layer_ids"
VLLM, SGLANG = "vLLM 0.33", "SGLang 0.5.23"
CLASSES = {
    VLLM: ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "LlamaForCausalLM"),
    SGLANG: ("LlamaForCausalLMEagle3",),
}
KEYS = (  # of config.json, that decide how it is read
    *("architectures", LAYERS, "eagle_config", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    *("rope_theta", "rope_scaling", "rope_parameters", "draft_vocab_size", "tie_word_embeddings"),
)


@dataclass(frozen=True)
class Served:
    """A folder in an engine."""

    engine: str
    reading: Reading | None  # None: it does not load it
    notes: tuple[str, ...] = ()  # why not, and what it passes over


def served(files: Mapping, opened: Opened) -> list[Served]:
    """Say how each engine reads a folder whose config.json has these keys."""
    return [_vllm(files, opened), _sglang(files, opened)]


def _vllm(files: Mapping, opened: Opened) -> Served:
    inner, is_speculators = files.get("eagle_config") or {}, "speculators_model_type" in files
    layers = files.get(LAYERS) or inner.get(LAYERS)  # those of eagle_config as they are
    flags = {flag: bool(files.get(flag, inner.get(flag))) for flag in ("norm_before_fc", "fc_norm", "norm_output")}
    flags["norm_before_residual"] = bool(files.get("norm_before_residual", is_speculators))
    n_states = files.get("num_aux_hidden_states") or len(inner.get(LAYERS) or (1, 2, 3))
    lacking = () if is_speculators else _lacking(VLLM, files, opened)
    if n_states != len(opened.first.config.target_layers) and not is_speculators:
        lacking += (f"it makes fc for {n_states} states; write num_aux_hidden_states",)
    return _read(VLLM, opened, layers, flags, lacking)


def _sglang(files: Mapping, opened: Opened) -> Served:
    inner = files.get("eagle_config") or {}
    layers = [layer + 1 for layer in inner.get(LAYERS) or ()]
    flags = {flag: bool(files.get(flag, inner.get(flag))) for flag in ("norm_before_fc", "fc_norm", "norm_output")}
    notes = ("it ignores norm_before_residual",) if files.get("norm_before_residual") else ()
    found = _read(SGLANG, opened, layers, flags | {"norm_before_residual": False}, _lacking(SGLANG, files, opened))
    if files.get("tie_word_embeddings"):
        notes += ("it takes the embedding for lm_head; write tie_word_embeddings: false",)
    return replace(found, notes=found.notes + notes)


def _lacking(engine: str, files: Mapping, opened: Opened) -> tuple[str, ...]:
    """Return why an engine does not load a folder of this layout."""
    named = files.get("architectures") or []
    known = CLASSES[engine]
    why = () if set(named) & set(known) else (f"it knows no architectures: {named}; write [{known[0]}]",)
    return why if "offsets" in opened.vocabularies else (*why, "d2t leads out of the vocabulary as offsets")


def _read(engine: str, opened: Opened, layers: list[int] | None, flags: dict, lacking: tuple[str, ...]) -> Served:
    config = opened.first.config
    chosen = tuple(sorted(set(layers or default_layers(opened.n_layer))))
    notes = ()
    if config.is_windowed:
        option = {SGLANG: f"; serve with --speculative-draft-window-size {config.window_tokens}"}.get(engine, "")
        notes = (f"it attends to all positions, not to a window of {config.window_tokens}{option}",)
    if len(chosen) != len(config.target_layers) or not all(0 <= layer < opened.n_layer for layer in chosen):
        lacking += (f"it would read the inputs of blocks {chosen}, and fc takes {len(config.target_layers)} states",)
    if lacking:
        return Served(engine, None, lacking)
    config = replace(config, target_layers=chosen, window_tokens=config.shape.max_positions, **flags)
    return Served(engine, Reading(config), notes)


def to_write(engine: str, now: Reading, wanted: Reading) -> list[str]:
    """Return what to write so that an engine reads a folder as wanted, one entry for each fact that differs."""
    lines, config = [], wanted.config
    for name, one in now.differences(wanted).items():
        if name == "pairing":
            lines.append("no engine pairs so; train it again with tokens shifted by one")
        elif name == "layers" and FINAL in one:
            lines.append("no engine gives it normed final states; train it again with other layers")
        elif name == "layers":
            ids = list(one) if engine == VLLM else [layer - 1 for layer in one]
            lines.append(f"write {'' if engine == VLLM else 'eagle_config.'}{LAYERS}: {ids}")
        elif name == "norm_before_residual" and engine == SGLANG:
            lines.append("SGLang has no norm_before_residual; serve it with vLLM")
        elif name == "norms":
            flags = {"fc_norm": config.fc_norm, "norm_before_fc": config.norm_before_fc}
            lines.append("write " + ", ".join(f"{flag}: {str(is_so).lower()}" for flag, is_so in flags.items()))
        elif name in ("norm_before_residual", "norm_output"):
            lines.append(f"write {name}: {str(one).lower()}")
        elif name == "rope":
            scaling = {key: value for key, value in one.items() if key != "rope_theta"}
            lines.append(f"write rope_theta: {one.get('rope_theta')}, rope_scaling: {scaling or 'null'}")
        elif name == "d2t":
            lines.append("write d2t as offsets, target id - row, with the ids in the order of lm_head's rows")
    return lines
