"""`spectrain.tune method=specdecpp`: thresholds x heads, the heuristics and fixed lengths on one set of texts.

    python -m spectrain.tune method=specdecpp target=<folder or hub id> prompts=<file.jsonl> limit=60

The target answers the prompts once. From every token of every answer the drafter is rolled out once, and what each
setting would have cost follows exactly (`methods/draft_paths.py`, `methods/stop_simulation.py`). Real runs of a few
prompts say what a forward costs, which predicts every setting's speed; the best of each family is then timed itself.

    runs/tune-<hash>/responses.jsonl    the answers; timed.jsonl: seconds. An interrupted run goes on with both
    runs/tune-<hash>/results.json       everything that was found
    runs/tune-<hash>/pareto.png         discard rate against verification rate (SpecDec++, Figure 3)
    runs/tune-<hash>/tuned.yaml         the best setting of each method, for tuned= of bench and generate
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import track

from spectrain.cli import open_target
from spectrain.decoding import Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.loop import check_prompt
from spectrain.measure.draft_paths import DraftPaths, draft_paths
from spectrain.measure.pareto import Table
from spectrain.measure.questions import digest, read_questions
from spectrain.measure.simulation import Text
from spectrain.measure.stop_simulation import disagreements, misses_last, simulate_oracle, simulate_stops
from spectrain.measure.stopping_results import FIXED, HEAD, Found, best_settings, stopping_results
from spectrain.measure.stopping_times import TimedRow, fit_times
from spectrain.measure.tune_sssd import check_written_by, read_responses, write_responses
from spectrain.measure.tune_stop_inputs import FAMILIES, Stopping, check_options, open_stopping
from spectrain.measure.tune_stop_times import ORACLE, contender, measure, oracle, plain, regression_settings
from spectrain.methods.registry import with_tuned
from spectrain.reporting.stopping_plot import draw_fronts
from spectrain.reporting.stopping_report import stopping_tables
from spectrain.stores.environment import TYPED_COMMAND, date_of
from spectrain.stores.folder import sha256
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

RESULTS = "results.json"
COIN_STREAM = 0xC01  # tells the coins' random numbers from all others of this seed
WRITER_GAMMA = 4  # drafted while the target answers; the answers do not depend on it
TABLE_COLUMNS = 150  # where the output is no terminal


def tune_specdecpp(cfg: DictConfig) -> None:
    """See the module.

    Raises:
        UserError: an option is out of range, drafter and heads do not fit, or there are no texts.
    """
    with open_dict(cfg):
        cfg.method = with_tuned(cfg.method, cfg.tuned)
    sampling = Sampling.from_options(cfg.sampling)
    check_whole("max_new_tokens", cfg.max_new_tokens, 3)  # the first two are never drafted
    check_whole("seed", cfg.seed, 0)
    check_options(cfg)
    questions = [] if cfg.responses else read_questions(cfg.prompts, cfg.limit)
    target = open_target(cfg)
    stopping = open_stopping(cfg, target, sampling)
    with open_dict(cfg):
        cfg.measured = {
            "questions": digest(questions),
            "drafter": stopping.opened.facts.fingerprint,
            "heads": {name: sha256(head.folder / "model.safetensors") for name, head in stopping.heads.items()},
        }
        if cfg.responses and Path(cfg.responses).is_file():
            cfg.measured.responses = sha256(Path(cfg.responses))
    run = RunFolder.find(cfg, result=RESULTS)
    run.begin(fingerprint(target.model, target.tokenizer))
    try:
        texts = answers(cfg, target, stopping, questions, sampling, run)
        found, predicted = compare(cfg, target, stopping, texts, sampling, run)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on in {run.path}", file=sys.stderr)
        raise SystemExit(130) from None
    results = stopping_results(facts(cfg, target, stopping, texts, sampling), found, predicted)
    draw_fronts(results, run.path / "pareto.png")
    write_tuned(stopping, found, run.path / "tuned.yaml")
    run.finish(results)
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    for part in stopping_tables(results):
        console.print(part)
    Console(stderr=True).print(f"{run.path}/results.json, pareto.png, tuned.yaml", style="dim", soft_wrap=True)


def answers(
    cfg: DictConfig,
    target: TargetModel,
    stopping: Stopping,
    questions: Sequence,
    sampling: Sampling,
    run: RunFolder,
) -> list[Text]:
    """What the target answers, or what `responses=` says that it answered.

    Raises:
        UserError: there is no text of two tokens, or a response cannot have been written under these options.
    """
    file = Path(cfg.responses) if cfg.responses else run.path / "responses.jsonl"
    if not cfg.responses:
        writer = stopping.opened.with_stop(min(WRITER_GAMMA, stopping.max_candidates), None)
        write_responses(cfg, target, writer, questions, file, sampling)
    texts = read_responses(file, target.vocab_size)
    check_written_by(file, target, sampling)
    for number, text in enumerate(texts):
        check_prompt(target, text.prompt, cfg.max_new_tokens, f"prompt {number}")
        n_tokens, ended = len(text.response), text.response[-1] in target.eos_ids
        if n_tokens > cfg.max_new_tokens or (n_tokens < cfg.max_new_tokens and not ended):
            raise UserError(
                f"responses={file} has a response of {n_tokens} tokens, which max_new_tokens={cfg.max_new_tokens} does "
                "not give; give the max_new_tokens that it was written with"
            )
    if not texts:
        raise UserError("no response has two tokens or more; give other prompts")
    return texts


def roll_out(
    cfg: DictConfig, target: TargetModel, stopping: Stopping, texts: Sequence[Text], sampling: Sampling
) -> list[DraftPaths]:
    """The drafts from every root of every text."""
    modules = list(stopping.modules.values())
    found = []
    for number, text in enumerate(track(texts, "drafts", console=Console(stderr=True))):
        coins = np.random.default_rng((cfg.seed, number, COIN_STREAM))
        more = (stopping.max_candidates, cfg.max_new_tokens, sampling, coins, stopping.rows)
        found.append(draft_paths(target, stopping.opened, modules, text.prompt, text.response, *more))
    return found


def table_of(stopping: Stopping, paths: Sequence[DraftPaths]) -> Table:
    """What each text costs under each setting."""
    limits = (stopping.max_candidates, stopping.min_candidates)
    counts = [simulate_stops(one, stopping.settings, list(stopping.heads), *limits) for one in paths]
    return Table(
        np.array([one.tokens for one in counts]),
        *(
            np.stack([getattr(one, name) for one in counts], axis=1)
            for name in ("discarded", "target_calls", "draft_forwards")
        ),
    )


def compare(
    cfg: DictConfig, target: TargetModel, stopping: Stopping, texts: Sequence[Text], sampling: Sampling, run: RunFolder
) -> tuple[Found, dict | None]:
    """Simulates all settings, times some, and times the best of each family. Also what the oracle would do."""
    paths = roll_out(cfg, target, stopping, texts, sampling)
    table = table_of(stopping, paths)
    found = Found(
        [str(setting) for setting in stopping.settings],
        [FAMILIES[setting.rule] for setting in stopping.settings],
        [setting.head for setting in stopping.settings],
        [setting.judge for setting in stopping.settings],
        [setting.value for setting in stopping.settings],
        table,
    )
    asked, file = texts[: stopping.timed], run.path / "timed.jsonl"
    work = (cfg, target)
    chosen = regression_settings(stopping.settings, found.promising_head())
    first = [plain(), *(contender(stopping, setting) for setting in chosen)]
    found.regression = measure(*work, first, asked, sampling, "regression", file)
    drafted = [row for row in found.regression if row.draft_forwards]
    if not drafted:
        raise UserError("every timed text ended with its first token; give other prompts")
    found.times = fit_times(drafted, cfg.seed)
    found.best = best_settings(found)
    last = [plain(), *(contender(stopping, stopping.settings[i]) for i in found.best.values())]
    gamma = None if stopping.opened.facts.kind == "vanilla" else stopping.max_candidates
    if sampling.greedy:
        last.append(oracle(stopping, asked, gamma or cfg.max_new_tokens))
    found.measured = measure(*work, last, asked, sampling, "best", file)
    return found, predict_oracle(paths, gamma, found.measured) if sampling.greedy else None


def predict_oracle(paths: Sequence[DraftPaths], gamma: int | None, measured: Sequence[TimedRow]) -> dict:
    """Theorem 4.1 of all texts, and beside it what the loop did on those that were timed."""
    counts = [simulate_oracle(one, gamma) for one in paths]
    real = {row.question: row for row in measured if row.setting == ORACLE}
    rows = [
        {
            "question": number,
            "tokens": count.tokens,
            "disagreements": disagreements(one) if gamma is None else None,
            "last_token_disagrees": misses_last(one) if gamma is None else None,
            "target_calls": int(count.target_calls[0]),
            "draft_forwards": int(count.draft_forwards[0]),
            "measured_target_calls": real[number].target_calls if number in real else None,
            "measured_discarded": real[number].discarded if number in real else None,
        }
        for number, (one, count) in enumerate(zip(paths, counts, strict=True))
    ]
    return {"longest_draft": gamma, "texts": rows}


def write_tuned(stopping: Stopping, found: Found, file: Path) -> None:
    """The best setting of each method that `bench` and `generate` can run with this drafter."""
    limits = {"min_candidates": stopping.min_candidates, "max_candidates": stopping.max_candidates}
    best = {family: stopping.settings[i] for family, i in found.best.items()}
    spire = stopping.opened.facts.kind == "spire"
    tuned: dict[str, dict] = {"spire" if spire else "speculative": {"gamma": best[FIXED].value}}
    setting = best[HEAD]
    head = str(stopping.heads[setting.head].folder)
    tuned["specdecpp"] = {"head": head, "threshold": setting.value, **limits, "judge": setting.judge}
    for family in ("confidence", "entropy"):
        if family in best and not spire:  # these methods take an ordinary draft model
            tuned[f"{family}_stop"] = {"threshold": best[family].value, **limits}
    header = f"# python -m spectrain.bench tuned={file} ...   (written by spectrain.tune method=specdecpp)\n"
    file.write_text(header + OmegaConf.to_yaml(OmegaConf.create(tuned)))


def facts(
    cfg: DictConfig, target: TargetModel, stopping: Stopping, texts: Sequence[Text], sampling: Sampling
) -> Mapping:
    """What a reader needs to judge the numbers, or to repeat them."""
    device = target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    asked = cfg.responses or cfg.prompts
    return {
        "command": TYPED_COMMAND.get(),
        "date": date_of(),
        "target": cfg.target.path,
        "drafter": {"kind": stopping.opened.facts.kind, "path": stopping.opened.facts.path},
        "heads": {name: head.described() for name, head in stopping.heads.items()},
        "prompts": Path(asked).name if asked else "held-out modules of the Python standard library",
        "texts": len(texts),
        "timed": min(stopping.timed, len(texts)),
        "max_new_tokens": cfg.max_new_tokens,
        "min_candidates": stopping.min_candidates,
        "max_candidates": stopping.max_candidates,
        "sampling": sampling.describe(),
        "seed": cfg.seed,
        "device": f"{device} ({name})",
        "dtype": str(target.dtype).removeprefix("torch."),
        "batch_size": 1,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
