"""Check the folder of an EAGLE-3 drafter: how it was trained, what its files say, and what engines make of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from spectrain.measure.acceptance import Acceptance, Answer
from spectrain.measure.eagle3_engines import KEYS, Served, served, to_write
from spectrain.measure.eagle3_readings import SAME, Opened, Reading, Readings
from spectrain.models.artifacts import damage_of
from spectrain.models.eagle3 import load
from spectrain.stores.files import read_object
from spectrain.target.target import FINAL, TargetModel

WRITE = "write "


def capture_layers(target: TargetModel) -> tuple[int, ...]:
    """Return what answers have to capture: whatever a drafter could have been trained on."""
    return (*range(target.n_layer), FINAL)


def check(
    folder: Path, target: TargetModel, answers: Sequence[Answer], k: int
) -> tuple[Acceptance, Acceptance, dict[str, object]]:
    """Return the acceptance as its files say and as it is best read, and what is to be said of the folder.

    `files` are the keys of its config.json that decide how it is read, `readings` what was tried, the best first,
    `engines` what they make of it, `wrong` what is to be changed, and `notes` what could not be told.
    """
    drafter = load(folder, target).to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    files, d2t = read_object(folder / "config.json", dict, "export it again"), None
    for file in folder.glob("*.safetensors"):
        with damage_of(f"drafter={folder}", f"{file.name}: "), safe_open(file, "pt") as tensors:
            d2t = tensors.get_tensor("d2t") if "d2t" in tensors.keys() else d2t  # noqa: SIM118
    opened = Opened(drafter, target, d2t)
    found = Readings(opened, answers, k)
    first, best = opened.first, found.best()
    engines = [_of_engine(one, found, best) for one in served(files, opened)]
    trained = f"It was trained with {words(first.differences(best))}: {_gain(found, best, first)}."
    wrong = [trained] * (best != first) + [one["said"] for one in engines if one["write"]]
    by_tau = sorted(found.measured, key=lambda one: -found[one].tau().value)
    readings = [
        {
            "reading": words(first.differences(one)) if one != first else "as its files say",
            "tau": found[one].tau().as_json(),
            "gain": found[one].gain_over(found[first]).as_json() if one != first else None,
        }
        for one in by_tau
    ]
    said = {
        "files": {key: files[key] for key in KEYS if key in files},
        "read_as": {name: str(one) for name, one in first.facts().items()},
        "readings": readings,
        "engines": engines,
        "wrong": wrong,
        "notes": _not_told(found, best),
    }
    return found[first], found[best], said


def _of_engine(one: Served, found: Readings, best: Reading) -> dict[str, object]:
    """Return what an engine makes of the folder: its tau, what is said, and what to write so that it reads it best."""
    notes = "".join(f"; {note}" for note in one.notes)
    if one.reading is None:
        return {"engine": one.engine, "tau": None, "said": f"{one.engine} does not load it: {notes[2:]}.", "write": []}
    tau = found[one.reading].tau()
    result = {"engine": one.engine, "tau": tau.as_json(), "write": []}
    if not found.is_better(best, one.reading):
        return result | {"said": f"{one.engine} reads it as it was trained, tau {tau.value:.2f}{notes}."}
    lines = to_write(one.engine, one.reading, best)
    reads = f"{one.engine} reads {words(best.differences(one.reading))}, tau {tau.value:.2f}"
    said = f"{reads}; {', '.join(lines)}: tau {found[best].tau().value:.2f}{notes}."
    return result | {"said": said, "write": lines if all(line.startswith(WRITE) for line in lines) else []}


def _gain(found: Readings, better: Reading, than: Reading) -> str:
    gain = found[better].gain_over(found[than])
    taus = f"tau {found[better].tau().value:.2f} in place of {found[than].tau().value:.2f}"
    return f"{taus} (+{gain.value:.2f} [{gain.low:.2f}, {gain.high:.2f}])"


def _not_told(found: Readings, best: Reading) -> list[str]:
    """Say which RoPE would draft as well as the best reading's on these texts."""
    alike = []
    for one in found.measured:
        if [*best.differences(one)] == ["rope"]:
            gain = found[one].gain_over(found[best])
            if gain.high > 0 or abs(gain.value) < SAME:
                alike.append(words(best.differences(one)))
    longest = max(answer.tokens.shape[1] for answer in found.answers)
    if not alike:
        return []
    return [
        f"Texts of up to {longest} tokens do not tell {' or '.join(alike)} from what was read; "
        "give prompts= of longer texts."
    ]


def words(facts: Mapping[str, object]) -> str:
    """Describe facts of a reading."""
    return ", ".join(_words(name, value) for name, value in facts.items())


def _words(name: str, value: object) -> str:
    if name == "layers":
        blocks = ", ".join(str(layer) for layer in value if layer != FINAL)
        return f"the inputs of blocks {blocks}" + (" and the normed final states" if FINAL in value else "")
    if name == "norms":
        return {"none": "no norm before fc"}.get(value, f"{value}: true")
    if name == "rope":
        theta = f"RoPE base {value.get('rope_theta', 10_000.0):,.0f}"
        scaling = {key: one for key, one in value.items() if key != "rope_theta"}
        return f"{theta}, scaled by {scaling}" if scaling else theta
    if name == "pairing":
        return f"beside the state of p {value}"
    if name == "d2t":
        return f"d2t as {value}"
    if isinstance(value, bool):
        return f"{name}: {str(value).lower()}"
    return f"{name} {value}"
