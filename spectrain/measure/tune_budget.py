"""`spectrain.tune budget=true`: measures forward seconds, acceptance and the rest of a step; writes the budget table.

    runs/tune-<hash>/forward.json     seconds of the target's forward (evaluation/forward_cost.py)
    runs/tune-<hash>/groups.jsonl     a row a group of prompts, method and node budget (evaluation/acceptance_curve.py)
    runs/tune-<hash>/budget.png       what nodes gain and cost; accepted.png: the gain of all methods
    checkpoints/budget-*.json         what `max_nodes=auto` reads (evaluation/budget_table.py)

The same command goes on after an interruption.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict
from rich.console import Console
from rich.progress import Progress

from spectrain.cli import open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint
from spectrain.decoding.budget import ForwardCost
from spectrain.decoding.errors import UserError, check_whole
from spectrain.decoding.loop import check_prompt
from spectrain.measure.acceptance_curve import GroupRow, curve_of, measure_group
from spectrain.measure.contenders import PEERS
from spectrain.measure.forward_cost import check_grid, measure_forward, steadied
from spectrain.measure.questions import digest, read_questions, use_chat
from spectrain.measure.results import BASELINE
from spectrain.methods.registry import build_method, drafts_trees, given_artifacts, method_configs, takes_all
from spectrain.reporting.budget_plot import draw_acceptance, draw_budgets
from spectrain.reporting.budget_report import budget_tables, forward_table, roofline_line
from spectrain.stores.budget_table import NO_OPTIONS, BudgetTable, CurveEntry, machine_of
from spectrain.stores.environment import date_of
from spectrain.stores.folder import read_lines, write_lines
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.prompts import conversation_ids
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

CONTEXTS = (64, 256, 1024, 4096)  # tokens; the first three that fit the target
SINGLE_PROMPTS = 4  # decoded one by one as well, for the seconds of a step at batch 1
TABLE_COLUMNS = 110  # where the output is no terminal


@dataclass(frozen=True)
class Group:
    """Prompts decoded as one batch."""

    name: str
    numbers: tuple[int, ...]
    prompts: tuple[list[int], ...]


def tune_budget(cfg: DictConfig) -> None:
    """See the module.

    Raises:
        UserError: an option is out of range, a method drafts no trees, or a prompt is too long.
    """
    sampling = Sampling.from_options(cfg.sampling)
    methods = tree_methods(cfg)
    questions = read_questions(cfg.prompts, cfg.limit)
    check_whole("max_new_tokens", cfg.max_new_tokens, 2)
    target = open_target(cfg)
    contexts = tuple(cfg.contexts or [c for c in CONTEXTS if c < target.max_positions][:3])
    check_grid(target, tuple(cfg.nodes), tuple(cfg.batch_sizes), contexts)
    check_whole("nodes", min(cfg.nodes), 2)
    check_whole("repeats", cfg.repeats, 1)
    machine = machine_of(target)
    with open_dict(cfg):
        cfg.measured = {"methods": methods, "questions": digest(questions), "machine": machine}
    run = RunFolder.find(cfg)
    chat = use_chat(cfg.chat, target.tokenizer)
    prompts = [conversation_ids(target.tokenizer, list(q.turns[:1]), [], chat) for q in questions]
    for question, prompt in zip(questions, prompts, strict=True):
        check_prompt(target, prompt, cfg.max_new_tokens, f"prompt {question.id}")
    drafters = build_drafters(cfg, methods, target)
    prints = fingerprint(target.model, target.tokenizer)
    run.begin(prints)
    try:
        cost = forward_cost(cfg, target, contexts, run.path / "forward.json")
        rows = measure_groups(cfg, target, drafters, groups_of(prompts, max(cfg.batch_sizes)), sampling, run.path)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on in {run.path}", file=sys.stderr)
        raise SystemExit(130) from None
    entries = curve_entries(methods, drafters, rows, sampling)
    facts = {
        "target": cfg.target.path,
        "date": date_of(),
        "prompts": Path(cfg.prompts).name if cfg.prompts else "held-out modules of the Python standard library",
        "n_prompts": len(prompts),
        "max_new_tokens": cfg.max_new_tokens,
    }
    table = BudgetTable(prints, machine, cost, entries, facts)
    file = table.save(CHECKPOINTS)
    draw_budgets(table, run.path / "budget.png")
    draw_acceptance(table, run.path / "accepted.png")
    run.finish({"budget_table": str(file), "machine": machine})
    report(table)
    Console(stderr=True).print(f"{file}, {run.path}/budget.png", style="dim", soft_wrap=True)


def tree_methods(cfg: DictConfig) -> dict[str, DictConfig]:
    """The methods and variants asked for; with `all`, those that draft trees.

    Raises:
        UserError: one that was named drafts no trees.
    """
    found = {name: options for name, options in method_configs(cfg, reserved=PEERS).items() if name != BASELINE}
    chains = [name for name, options in found.items() if not drafts_trees(options)]
    if chains and not takes_all(cfg):
        raise UserError(f"methods={chains[0]} drafts no trees, so it has no node budget to tune; leave it out")
    found = {name: options for name, options in found.items() if name not in chains}
    if not found:
        raise UserError(f"methods={cfg.methods} names no method that drafts trees; give methods=[logitspec,...] or all")
    return found


def build_drafters(
    cfg: DictConfig, methods: dict[str, DictConfig], target: TargetModel
) -> dict[str, dict[int, Drafter]]:
    """Each method under each budget of `nodes` that has room for it.

    Raises:
        UserError: a method that was named cannot be built.
    """
    given = given_artifacts(cfg)
    found: dict[str, dict[int, Drafter]] = {}
    for name, options in methods.items():
        refused = None
        for nodes in sorted(set(cfg.nodes)):
            try:
                sized = OmegaConf.merge(options, {"max_nodes": nodes})
                drafter = build_method(sized, target, given)
                found.setdefault(name, {})[nodes] = drafter
            except UserError as error:
                refused = error
        if name not in found:
            if not takes_all(cfg):
                raise UserError(f"{name}: {refused}") from refused
            log.warning("%s is left out: %s", name, refused)
    if not found:
        raise UserError("no method could be built; see the warnings")
    return found


def groups_of(prompts: Sequence[list[int]], batch_size: int) -> list[Group]:
    """Batches of all prompts, and the first few one by one."""
    n_single = SINGLE_PROMPTS if batch_size > 1 else len(prompts)
    singles = [Group(f"single {i}", (i,), (prompt,)) for i, prompt in enumerate(prompts[:n_single])]
    if batch_size == 1:
        return singles
    batches = []
    for start in range(0, len(prompts), batch_size):
        own = tuple(prompts[start : start + batch_size])
        batches.append(Group(f"batch {start}", tuple(range(start, start + len(own))), own))
    return [*singles, *batches]


def forward_cost(cfg: DictConfig, target: TargetModel, contexts: Sequence[int], file: Path) -> ForwardCost:
    """Measured, or read where an interrupted run has measured it already; with its fit. The file keeps raw medians."""
    if file.is_file():
        return steadied(ForwardCost.from_json(json.loads(file.read_text())), cfg.repeats)
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("forwards", total=cfg.repeats + 1)
        cost = measure_forward(
            *(target, (1, *cfg.nodes), tuple(cfg.batch_sizes), tuple(contexts), cfg.repeats, cfg.seed),
            on_round=lambda done: progress.update(task, completed=done + 1),
        )
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(cost.as_json()) + "\n")
    temporary.rename(file)
    return steadied(cost, cfg.repeats)


def measure_groups(
    cfg: DictConfig,
    target: TargetModel,
    drafters: dict[str, dict[int, Drafter]],
    groups: Sequence[Group],
    sampling: Sampling,
    folder: Path,
) -> list[GroupRow]:
    """Measures what `groups.jsonl` lacks and returns all rows."""
    file = folder / "groups.jsonl"
    rows = list(read_rows(file))
    done = {(row.method, row.nodes, row.group) for row in rows}
    asked = [(g, name, nodes) for g in groups for name, budgets in drafters.items() for nodes in budgets]
    todo = [(g, name, nodes) for g, name, nodes in asked if (name, nodes, g.name) not in done]
    warmed: set[str] = set()
    write_lines(file, (row.as_json() for row in rows))  # without a line that was cut off
    with file.open("a") as out, Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("acceptance", total=len(todo))
        for group, name, nodes in todo:
            work = (target, drafters[name][nodes], group.prompts, group.numbers)
            facts = {"method": name, "nodes": nodes, "group": group.name, "seed": cfg.seed}
            if name not in warmed:
                measure_group(*work, 2, sampling, **facts)
                warmed.add(name)
            row = measure_group(*work, cfg.max_new_tokens, sampling, **facts)
            out.write(json.dumps(row.as_json()) + "\n")
            out.flush()
            rows.append(row)
            progress.update(task, advance=1, description=name.ljust(16))
    return rows


def read_rows(file: Path) -> Iterator[GroupRow]:
    for values in read_lines(file):
        try:
            yield GroupRow.from_json(values)
        except (TypeError, KeyError):
            continue


def curve_entries(
    methods: dict[str, DictConfig],
    drafters: dict[str, dict[int, Drafter]],
    rows: Sequence[GroupRow],
    sampling: Sampling,
) -> tuple[CurveEntry, ...]:
    """A curve a method. Raises UserError where every text ended with its first token."""
    entries = []
    for name, budgets in drafters.items():
        own = [row for row in rows if row.method == name and row.forwards]
        if not own:
            raise UserError(f"{name}: every text ended with its first token; give other prompts")
        probes = any(getattr(drafter, "probe_shape", None) for drafter in budgets.values())
        options = OmegaConf.to_container(methods[name], resolve=True)
        options = {key: value for key, value in options.items() if key not in NO_OPTIONS}
        entries.append(CurveEntry(name, options, asdict(sampling), curve_of(own, min(budgets) if probes else 1)))
    return tuple(entries)


def report(table: BudgetTable) -> None:
    console = Console(width=None if sys.stdout.isatty() else TABLE_COLUMNS)
    console.print(forward_table(table.cost))
    console.print(roofline_line(table.cost))
    for found in budget_tables(table):
        console.print(found)
