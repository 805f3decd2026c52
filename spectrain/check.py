"""Say how well a drafter drafts for a target on this machine, and whether its files say how it was trained.

    python -m spectrain.check drafter=<folder> target=<folder>
    python -m spectrain.check drafter=<folder> target=<folder> prompts=questions.jsonl json=true

The target answers prompts, and the drafter is compared with it on the answers, without a server. Of an EAGLE-3 drafter
other readings of the same tensors are tried as well: the mistakes that load and run, and accept little. The exit code
is 1 where its files are to be changed: another reading is significantly better than what they say, to us or to an
engine.
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("spectrain.check")

from importlib import import_module
from pathlib import Path

from spectrain.cli import open_target
from spectrain.config.commands import Check
from spectrain.data.prompts import Question, question_ids
from spectrain.errors import UserError
from spectrain.measure import questions
from spectrain.measure.acceptance import Answer, answered, of_states
from spectrain.measure.tables import fixed, interval, show, table_of
from spectrain.methods.options import drafter_kind, method_of_kind
from spectrain.models.artifacts import is_export, read_manifest
from spectrain.models.kinds import about
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.files import json_line
from spectrain.target import TargetModel, text_dtype

SHOWN = 8  # readings, the best first


def main(options: Check) -> None:
    folder, k, kind = options.drafter, options.gamma, drafter_kind(options.drafter)
    if about(kind).option != "drafter":
        raise UserError(f"drafter={folder} is of kind {kind}, which drafts nothing alone; give a drafter")
    target = open_target(options.target, all_ranks=True)
    if about(kind).check is None:
        states = method_of_kind(kind).open_states(target, folder, k)
        answers = ask(options, target.with_capture(states.capture_layers))
        measured, found = of_states(answers, k, states), {"wrong": [], "notes": trained_as(Path(folder))}
    else:
        checking = import_module(f"spectrain.measure.{about(kind).check}")
        target = target.with_capture(checking.capture_layers(target))
        answers = ask(options, target)
        measured, found = checking.check(folder, target, answers, k)
    drafts = int(measured.drafts.sum())
    facts = {"drafter": folder, "drafter_kind": kind, "target": options.target.path, "gamma": k}
    facts |= {"prompts": ", ".join(prompts(options, target)), "answers": len(answers), "drafts": drafts}
    result = {"kind": "check", **provenance(), **device_facts(target.device, text_dtype(target)), **facts}
    result |= measured.as_json() | found
    if options.json:
        print(json_line(result), end="")
    else:
        tell(result)
    if result["wrong"]:
        raise SystemExit(1)


def prompts(options: Check, target: TargetModel) -> tuple[str, ...]:
    """Return what the target is asked: the user's prompts, or those of each kind that come with spectrain."""
    bundled = questions.BUNDLED if target.tokenizer.chat_template is not None else ("code",)
    return bundled[: options.limit] if options.prompts is None else (options.prompts,)


def ask(options: Check, target: TargetModel) -> list[Answer]:
    """Let the target answer prompts, as many of each kind."""
    asked: list[Question] = []
    for i, one in enumerate(kinds := prompts(options, target)):
        asked += questions.read_questions(one, -(-(options.limit - i) // len(kinds)))
    ids = [question_ids(target.tokenizer, one, [], options.chat) for one in asked]
    return answered(target, ids, options.max_new_tokens, options.gamma, options.answer_s)


def trained_as(folder: Path) -> list[str]:
    """Say what an export knows of its acceptance."""
    trained = read_manifest(folder).trained if is_export(folder) else {}
    tau = (trained.get("metrics") or {}).get("eval/tau_expected")
    ended = f"Its training ({trained.get('steps', 0):,} steps) ended with tau"
    return [f"{ended} {tau:.2f} at T = 1 on held-out texts."] if tau else []


def tell(result: dict) -> None:
    """Print tables, and what is to be said in sentences."""
    rows = []
    for name, key, tau in (("T = 1", "alpha", "tau"), ("greedy", "agreed", "tau_greedy")):
        steps = {f"token {i + 1}": fixed(one["value"], 2) for i, one in enumerate(result[key])}
        rows.append({"accepted": name, **steps, "tau": interval(result[tau], 2)})
    counted = f"{result['drafts']} drafts of {result['gamma']} in {result['answers']} answers of {result['target']}"
    title = f"{result['drafter']} ({about(result['drafter_kind']).noun}): {counted} ({result['prompts']})"
    parts, tried = [(title, table_of(rows))], result.get("readings", [])
    shown = [one for one in tried if one in tried[:SHOWN] or one["gain"] is None]
    rows = [one | {name: interval(one[name], 2) for name in ("tau", "gain")} for one in shown]
    show(parts + [(f"the best of {len(tried)} readings of its tensors, at T = 1", table_of(rows))] * bool(tried))
    for key, one in result.get("files", {}).items():
        print(f"config.json: {key}: {one}")
    for one in [*result["wrong"], *result["notes"]]:
        print(one)
    if tried and not result["wrong"]:
        print("Nothing is wrong.")
