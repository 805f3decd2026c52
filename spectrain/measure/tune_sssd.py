"""`spectrain.tune method=sssd`: searches for the discounts and calibrates the sources on known responses.

    python -m spectrain.tune method=sssd datastore=<folder> target=<folder or hub id> prompts=<file.jsonl> limit=60

The target answers the prompts once, greedily (`responses.jsonl` in the run folder; or `responses=<file>` of an earlier
run, and then it does not run). Every combination of `grid` is then tried on half of the responses by simulation, the
best one is calibrated, and what was chosen is compared with the defaults on the other half. `sssd.yaml` holds the
choice: `spectrain.bench tuned=<run>/sssd.yaml`.
"""

from __future__ import annotations

import itertools
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spectrain.cli import open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.loop import check_prompt
from spectrain.measure.questions import digest, read_questions, use_chat
from spectrain.measure.simulation import Text, simulate
from spectrain.measure.statistics import ratio_of_sums
from spectrain.methods.registry import build_method, given_artifacts, method_config, with_tuned
from spectrain.methods.sssd import Sssd
from spectrain.retrieval.calibration import calibrate
from spectrain.stores.folder import read_lines, sha256, write_lines
from spectrain.stores.prompts import conversation_ids
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

DECODED_TOGETHER = 8  # rows
NEUTRAL = ("input_scale", "input_prefix_decay", "input_depth_decay", "datastore_prefix_decay", "datastore_depth_decay")


def tune_sssd(cfg: DictConfig) -> None:
    """See the module.

    Raises:
        UserError: an option is out of range, or there are too few responses.
    """
    grid = {name: list(values) for name, values in cfg.grid.items()}
    method = with_tuned(cfg.method, cfg.tuned)
    for name in grid:
        if name not in method or name.startswith("_"):
            raise UserError(f"grid.{name} is no option of sssd; leave it out")
    if method.last_logits:
        raise UserError("last_logits cannot be simulated without the target; give method.last_logits=false")
    check_whole("max_new_tokens", cfg.max_new_tokens, 2)
    questions = [] if cfg.responses else read_questions(cfg.prompts, cfg.limit)
    with open_dict(cfg):
        cfg.measured = {"questions": digest(questions), "method": OmegaConf.to_container(method)}
        if cfg.responses and Path(cfg.responses).is_file():
            cfg.measured.responses = sha256(Path(cfg.responses))
    run = RunFolder.find(cfg)
    target = open_target(cfg)
    first = build_method(method, target, given_artifacts(cfg))
    run.begin(fingerprint(target.model, target.tokenizer))
    file = Path(cfg.responses) if cfg.responses else run.path / "responses.jsonl"
    try:
        if not cfg.responses:
            write_responses(cfg, target, first, questions, file)
        choose(method, first, grid, read_responses(file, target.vocab_size), run)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on in {run.path}", file=sys.stderr)
        raise SystemExit(130) from None


def choose(method: DictConfig, first: Sssd, grid: dict[str, list], texts: Sequence[Text], run: RunFolder) -> None:
    """Searches, calibrates, compares, and writes the choice into the run folder."""
    chosen_on, told_on = halves(texts)
    best, tried = search(first, method, grid, chosen_on)
    calibrated = with_calibration(first, best, chosen_on)
    candidates = {"defaults": method, "best discounts": best, "calibrated": calibrated}
    scores = {name: tau_of(first, options, told_on) for name, options in candidates.items()}
    # Chosen by what is not told on: the half that the discounts were chosen on. Of equal ones the plainest.
    on_chosen = {name: tau_of(first, options, chosen_on).value for name, options in candidates.items()}
    name = max(on_chosen, key=on_chosen.get)
    winner = candidates[name]
    defaults = method_config("sssd")
    kept_out = ("datastore", "max_nodes")
    chosen = OmegaConf.to_container(winner).items()
    changed = {k: v for k, v in chosen if v != defaults.get(k) and k not in kept_out}
    output = run.path / "sssd.yaml"
    header = f"# python -m spectrain.bench tuned={output} ...   (written by spectrain.tune method=sssd)\n"
    output.write_text(header + OmegaConf.to_yaml(OmegaConf.create({"sssd": changed})))
    told = {name: [score.value, score.low, score.high] for name, score in scores.items()}
    run.finish({"tau": told, "chosen": changed, "tried": tried, "responses": [len(chosen_on), len(told_on)]})
    report(scores, name, len(told_on), output)


def write_responses(
    cfg: DictConfig,
    target: TargetModel,
    method: Drafter,
    questions: Sequence,
    file: Path,
    sampling: Sampling | None = None,
) -> None:
    """Answers to what `file` lacks, a line each, greedy ones by default; an interrupted run goes on."""
    rows, writer = read_lines(file), written_by(target, sampling)
    write_lines(file, rows)  # without a line that was cut off
    done = {row["id"] for row in rows}
    chat = use_chat(cfg.chat, target.tokenizer)
    todo = []
    for number, question in enumerate(questions):
        if question.id not in done:
            prompt = conversation_ids(target.tokenizer, list(question.turns[:1]), [], chat)
            check_prompt(target, prompt, cfg.max_new_tokens, f"prompt {question.id}")
            todo.append((number, question.id, prompt))
    with file.open("a") as out:
        for start in track(range(0, len(todo), DECODED_TOGETHER), "responses", console=Console(stderr=True)):
            some = todo[start : start + DECODED_TOGETHER]
            numbers, _, prompts = zip(*some, strict=True)
            more = {"seed": cfg.seed, "prompt_numbers": numbers, "batch_size": DECODED_TOGETHER}
            found = generate(target, method, prompts, cfg.max_new_tokens, sampling, **more)
            for (_, name, prompt), generation in zip(some, found, strict=True):
                row = {"id": name, "prompt": prompt, "response": generation.tokens} | writer
                out.write(json.dumps(row) + "\n")
            out.flush()


def written_by(target: TargetModel, sampling: Sampling | None) -> dict[str, str]:
    """What a response's law depends on."""
    return {
        "target": fingerprint(target.model, target.tokenizer),
        "sampling": (sampling or Sampling()).describe(),
    }


def check_written_by(file: Path, target: TargetModel, sampling: Sampling) -> None:
    """Raises UserError where a row says that another target, or another sampling, wrote it."""
    expected = written_by(target, sampling)
    for number, row in enumerate(read_lines(file), start=1):
        for name, value in expected.items():
            if row.get(name, value) != value:
                raise UserError(
                    f"responses={file} row {number} was written with {name} {row[name]}, not {value}; give the same "
                    f"{name}, or let spectrain.tune write them anew"
                )


def read_responses(file: Path, vocab_size: int) -> list[Text]:
    """The texts of a file of responses.

    Raises:
        UserError: it is missing, or a row is no pair of token lists of this vocabulary.
    """
    if not file.is_file():
        raise UserError(f"responses={file} does not exist; give responses.jsonl of a run of spectrain.tune")
    texts = []
    rows, n_lines = read_lines(file), sum(1 for line in file.read_bytes().split(b"\n") if line.strip())
    if len(rows) < n_lines:
        raise UserError(f"responses={file} has {n_lines - len(rows)} lines that are not JSON; write it anew")
    for number, row in enumerate(rows, start=1):
        try:
            text = Text(list(row["prompt"]), list(row["response"]))
            fits = all(isinstance(t, int) and 0 <= t < vocab_size for t in text.prompt + text.response)
        except (KeyError, TypeError):
            fits = False
        if not fits:
            raise UserError(
                f"responses={file} row {number} has no prompt and response as token ids of this target; let "
                "spectrain.tune write them anew"
            )
        if len(text.response) > 1 and text.prompt:
            texts.append(text)
    return texts


def halves(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """Every other response to choose on, the rest to tell the result on."""
    if len(texts) < 2:
        raise UserError(f"there are {len(texts)} responses of two tokens or more; give more prompts")
    return list(texts[::2]), list(texts[1::2])


def tau_of(first: Sssd, options: DictConfig, texts: Sequence[Text]):
    """Tokens a step, with its interval over texts."""
    steps = simulate(with_options(first, options), texts)
    return ratio_of_sums([sum(s) for s in steps], [len(s) for s in steps])


def with_options(first: Sssd, options: DictConfig) -> Sssd:
    """The method over the store that is open already, with other options."""
    values = {k: v for k, v in OmegaConf.to_container(options).items() if k in first.options.__dataclass_fields__}
    return Sssd(first.store, type(first.options)(**values), first.budget)


def search(
    first: Sssd, method: DictConfig, grid: dict[str, list], texts: Sequence[Text]
) -> tuple[DictConfig, list[dict]]:
    """The best combination, and all of them with their tau."""
    tried = []
    combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    for changes in track(combinations, "combinations", console=Console(stderr=True)):
        options = OmegaConf.merge(method, changes)
        tried.append({**changes, "tau": tau_of(first, options, texts).value})
    best = max(tried, key=lambda one: one["tau"])
    return OmegaConf.merge(method, {k: v for k, v in best.items() if k != "tau"}), tried


def with_calibration(first: Sssd, options: DictConfig, texts: Sequence[Text]) -> DictConfig:
    """Measured factors in place of the discounts."""
    lookup = with_options(first, options)
    retriever = lookup.workers[0].retriever
    pairs = [(text.prompt, text.response) for text in texts]
    factors = calibrate(pairs, retriever, lookup.options.max_prefix, lookup.branch_tokens)
    return OmegaConf.merge(options, dict.fromkeys(NEUTRAL, 1.0), {"calibration": factors})


def report(scores: dict, winner: str, n_texts: int, output: Path) -> None:
    table = Table("options", "tau", "95 %", title=f"sssd, simulated on {n_texts} responses that nothing was chosen on")
    for name, score in scores.items():
        style = "bold" if name == winner else ""
        table.add_row(
            name, f"{score.value:.3f}", f"[{score.low:.3f}, {score.high:.3f}]".replace("[", "\\["), style=style
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    Console(stderr=True).print(f"{output}: python -m spectrain.bench tuned={output} ...", style="dim", soft_wrap=True)
