"""Say how well a drafter drafts for a target on this machine, and whether its files say how it was trained.

    spectrain check drafter=<folder> target=<folder>
    spectrain check drafter=<folder> target=<folder> prompts=questions.jsonl json=true

The target answers prompts, and the drafter is compared with it on the answers, without a server. Of an EAGLE-3 drafter
other readings of the same tensors are tried as well: the mistakes that load and run, and accept little. The exit code is
1 where one of them is surely better than what the files say, or none is better than guessing.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.cli import run

    run("spectrain.check")

from importlib import import_module
from pathlib import Path

from spectrain.cli import open_target
from spectrain.config.commands import Check
from spectrain.data.prompts import Question, question_ids
from spectrain.errors import UserError
from spectrain.measure import questions
from spectrain.measure.acceptance import Answer, acceptance_of_states, answered, of_frequencies
from spectrain.measure.tables import interval, show, table_of
from spectrain.methods.options import method_of_kind
from spectrain.models.artifacts import is_export, read_manifest
from spectrain.models.kinds import about
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import json_line
from spectrain.target import TargetModel

PLAIN = "vanilla"  # of folders that are no export: any model of transformers
SHOWN = 8  # readings, the best first


def main(options: Check) -> None:
    folder, k = Path(options.drafter), options.gamma
    kind = read_manifest(folder).kind if is_export(folder) else PLAIN
    if about(kind).option != "drafter":
        raise UserError(f"drafter={folder} is a {about(kind).noun}, which drafts nothing; give a drafter")
    target = open_target(options.target, all_ranks=True)
    if about(kind).check is None:
        states = method_of_kind(kind).open_states(target, str(folder), k)
        answers = ask(options, target.with_capture(states.capture_layers))
        measured = best = acceptance_of_states(answers, k, states)
        found = {"wrong": [], "notes": trained_as(folder)}
    else:
        checking = import_module(f"spectrain.measure.{about(kind).check}")
        answers = ask(options, target.with_capture(checking.capture_layers(target)))
        measured, best, found = checking.check(folder, target, answers, k)
    guessed = of_frequencies(answers, k)
    if best.first_gain_over(guessed).low <= 0:
        found["wrong"].append(
            f"It drafts no better than by how frequent tokens are (a first token {best.by_step(best.alpha)[0]} of the "
            f"time, against {guessed.by_step(guessed.alpha)[0]}): it is of another target or tokenizer."
        )
    result = {
        "kind": "check",
        **provenance(),
        **device_facts(target.device, target.dtype),
        "drafter": {"folder": str(folder), "kind": kind, "noun": about(kind).noun},
        "target": options.target.path,
        "prompts": questions.name_of(options.prompts) if options.prompts else ", ".join(bundled(target)),
        "answers": len(answers),
        "drafts": int(measured.drafts.sum()),
        "gamma": k,
        "alpha": [one.as_json() for one in measured.by_step(measured.alpha)],
        "agreed": [one.as_json() for one in measured.by_step(measured.agreed)],
        "tau": measured.tau().as_json(),
        "tau_greedy": measured.tau_greedy().as_json(),
        **found,
    }
    if options.json:
        print(json_line(result), end="")
    else:
        tell(result)
    if result["wrong"]:
        raise SystemExit(1)


def bundled(target: TargetModel) -> tuple[str, ...]:
    """Return the kinds of questions that a target is asked by default."""
    return questions.BUNDLED if target.tokenizer.chat_template is not None else ("code",)


def ask(options: Check, target: TargetModel) -> list[Answer]:
    """Let the target answer the user's prompts, or some of each kind that come with spectrain."""
    asked: list[Question] = []
    kinds = [options.prompts] if options.prompts else bundled(target)
    for i, one in enumerate(kinds):
        asked += questions.read_questions(one, (options.limit + i) // len(kinds) or 1)
    prompts = [question_ids(target.tokenizer, one, [], options.chat) for one in asked]
    return answered(target, prompts, options.max_new_tokens, options.gamma, options.answer_s)


def trained_as(folder: Path) -> list[str]:
    """Say what an export knows of its acceptance in training."""
    trained = read_manifest(folder).trained if is_export(folder) else {}
    tau = (trained.get("metrics") or {}).get("eval/tau_expected")
    return [f"After {trained['steps']:,} steps of training tau {tau:.2f} was expected on held-out rows."] if tau else []


def tell(result: dict) -> None:
    """Print the result as tables and sentences."""
    k = result["gamma"]
    rows = [
        {"accepted": name}
        | {f"token {i + 1}": f"{one['value']:.2f}" for i, one in enumerate(result[key])}
        | {"tau": interval(result[tau], 2)}
        for name, key, tau in (("T = 1", "alpha", "tau"), ("greedy", "agreed", "tau_greedy"))
    ]
    counted = f"{result['drafts']} drafts of {k} tokens in {result['answers']} answers of {result['target']}"
    drafter = result["drafter"]
    parts = [(f"{drafter['folder']} ({drafter['noun']}): {counted} ({result['prompts']})", table_of(rows))]
    if tried := result.get("readings"):
        rows = [
            {"reading": one["reading"], "tau": interval(one["tau"], 2), "gain": interval(one["gain"], 2)}
            for one in tried
            if one in tried[:SHOWN] or one["gain"] is None
        ]
        parts.append((f"the best of {len(tried)} readings of its tensors, T = 1", table_of(rows)))
    show(parts)
    for key, one in result.get("files", {}).items():
        print(f"config.json: {key}: {one}")
    said = [one["said"] for one in result.get("engines", []) if not one["write"]]
    for one in [*result["wrong"], *said, *result["notes"]]:
        print(one)
    if not result["wrong"]:
        print("No other reading is surely better." if tried else "Nothing is wrong.")
