"""Choose what depends on the machine or the text: nodes of a draft tree, SSSD's discounts, when drafts should end.

    python -m spectrain.tune budget=true target=<folder or hub id> prompts=<file.jsonl> methods=[logitspec,pld]
    python -m spectrain.tune method=sssd datastore=<folder> target=<folder or hub id> prompts=<file.jsonl> limit=60
    python -m spectrain.tune method=specdecpp target=<folder or hub id> prompts=<file.jsonl> limit=60

See docs/tune.md. The run folder keeps what was measured and found; an interrupted run continues there. `budget=true`
writes checkpoints/budget-*.json, by which `max_nodes=auto` goes; the others write a yaml for `tuned=`.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from spectrain.cli import command, open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure import answers, budget, questions, stopping
from spectrain.measure.baselines import BASELINES
from spectrain.measure.forward_cost import Grid, forward_cost
from spectrain.measure.sssd import choose_options
from spectrain.methods import registry
from spectrain.reporting.cost_plots import budget_acceptance, budgets, stopping_fronts
from spectrain.reporting.drawing import write_png
from spectrain.reporting.tables import show
from spectrain.reporting.tuning import budget_parts, discount_parts, stopping_parts
from spectrain.stores.budget_table import BudgetTable, machine_of
from spectrain.stores.environment import date_of, device_facts, provenance
from spectrain.stores.folder import sha256
from spectrain.stores.locations import CHECKPOINTS
from spectrain.stores.prompts import Question
from spectrain.training.runs import RunFolder

CONTEXTS = (64, 256, 1024, 4096)  # tokens; the first three that fit the target
WRITER_GAMMA = 4  # tokens drafted while the target answers; the answers do not depend on it


def main(cfg: DictConfig) -> None:
    searches = {"budget": tune_budget, "sssd": tune_sssd, "specdecpp": tune_specdecpp}
    name = cfg.method["_target_"].split(".")[-2] if cfg.get("method") else None
    name = "budget" if cfg.budget else name
    if name not in searches:
        choices = "budget=true or method=sssd or method=specdecpp"
        raise UserError(f"method={name or 'null'} has nothing to tune; give {choices}")
    searches[name](cfg)


def tune_budget(cfg: DictConfig) -> None:
    """Measure forward seconds, acceptance and the rest of a step of methods that draft trees."""
    sampling = Sampling.from_options(cfg.sampling)
    methods = tree_methods(cfg)
    asked = questions.read_questions(cfg.prompts, cfg.limit)
    check_whole("max_new_tokens", cfg.max_new_tokens, 2)
    target = open_target(cfg)
    contexts = cfg.contexts or [c for c in CONTEXTS if c < target.max_positions][:3]
    grid = Grid(tuple(cfg.nodes), tuple(cfg.batch_sizes), tuple(contexts), cfg.repeats)
    check_whole("nodes", grid.nodes[0], 2)
    grid.check(target)
    machine, prints = machine_of(target), fingerprint(target.model, target.tokenizer)
    prompts = list(questions.prompt_ids(asked, target, cfg.chat, cfg.max_new_tokens).values())
    artifacts, takes_all = registry.given_artifacts(cfg), registry.takes_all(cfg)
    drafters = budget.build_sizes(target, methods, artifacts, grid.nodes, skip_unbuilt=takes_all)
    run = begun(cfg, target, {"methods": methods, "questions": questions.digest(asked), "machine": machine})
    with interruptible(run):
        cost = forward_cost(target, grid, run.path / "forward.json", cfg.seed)
        work = (target, drafters, prompts, grid.batch_sizes[-1], cfg.max_new_tokens, sampling, cfg.seed)
        rows = budget.measure_groups(*work, run.path / "groups.jsonl")
    options = {name: OmegaConf.to_container(methods[name], resolve=True) for name in drafters}
    facts = {"target": cfg.target.path, "date": date_of(), "prompts": questions.name_of(cfg.prompts)}
    facts |= {"n_prompts": len(prompts), "max_new_tokens": cfg.max_new_tokens}
    table = BudgetTable(prints, machine, cost, budget.curve_entries(drafters, options, rows, sampling), facts)
    file = table.save(CHECKPOINTS)
    write_png(budgets(table), run.path / "budget.png")
    write_png(budget_acceptance(table), run.path / "accepted.png")
    run.finish({"budget_table": str(file), "machine": machine})
    show(budget_parts(table), 110, f"{file}, {run.path}/budget.png")


def tree_methods(cfg: DictConfig) -> dict[str, DictConfig]:
    """The methods and variants asked for; with `all`, those that draft trees. Raises UserError where there are none."""
    found = registry.method_configs(cfg, reserved=BASELINES)
    del found[registry.BASELINE]
    chains = [name for name, options in found.items() if not registry.drafts_trees(options)]
    if chains and not registry.takes_all(cfg):
        raise UserError(f"methods={chains[0]} drafts no trees, so it has no node budget to tune; leave it out")
    found = {name: options for name, options in found.items() if name not in chains}
    if not found:
        raise UserError(f"methods={cfg.methods} names no method that drafts trees; give methods=[logitspec,...] or all")
    return found


def tune_sssd(cfg: DictConfig) -> None:
    """Search for SSSD's discounts and calibrate its sources, on answers that the target writes greedily."""
    grid = {name: list(values) for name, values in cfg.grid.items()}
    tuned = registry.with_tuned(cfg.method, cfg.tuned)
    method = OmegaConf.to_container(tuned)
    for name in grid:
        if name not in method or name.startswith("_"):
            raise UserError(f"grid.{name} is no option of sssd; leave it out")
    if method["last_logits"]:
        raise UserError("last_logits cannot be simulated without the target; give method.last_logits=false")
    check_whole("max_new_tokens", cfg.max_new_tokens, 2)
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit)
    target = open_target(cfg)
    opened = registry.build_method(tuned, target, registry.given_artifacts(cfg))
    run = begun(cfg, target, {"questions": questions.digest(asked), "method": method} | digest_of_responses(cfg))
    with interruptible(run):
        file = answered(cfg, target, opened, asked, Sampling(), run)
        found = choose_options(opened, method, grid, answers.read_answers(file, target, least=2))
    defaults, kept_out = registry.method_config("sssd"), ("datastore", "max_nodes")
    changed = {k: v for k, v in found["options"].items() if v != defaults.get(k) and k not in kept_out}
    output = write_tuned({"sssd": changed}, run.path / "sssd.yaml", "sssd")
    tau = {name: [one.value, one.low, one.high] for name, one in found["tau"].items()}
    run.finish({"tau": tau, "chosen": changed, "tried": found["tried"], "responses": found["responses"]})
    parts = discount_parts(tau, found["responses"][1], found["winner"])
    show(parts, 100, f"{output}: python -m spectrain.bench tuned={output} ...")


def tune_specdecpp(cfg: DictConfig) -> None:
    """Compare stop rules: heads at several thresholds, heuristics and fixed lengths, on one set of answers."""
    with open_dict(cfg):
        cfg.method = registry.with_tuned(cfg.method, cfg.tuned)
    sampling, given = Sampling.from_options(cfg.sampling), cfg.stopping
    values = {name: [] if v is None else list(v) if OmegaConf.is_list(v) else [v] for name, v in given.items()}
    least, most = cfg.method.min_candidates, cfg.method.max_candidates
    check_whole("max_new_tokens", cfg.max_new_tokens, 3)  # the first two are never drafted
    check_whole("seed", cfg.seed, 0)
    for name, value in {"method.min_candidates": least, "method.max_candidates": most}.items():
        check_whole(name, value, 1)
    for name in ("timed", "rows"):
        check_whole(f"stopping.{name}", given[name], 1)
    stopping.settings_of(values, ["a head"], least, most, "method.max_candidates")
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit)
    target = open_target(cfg)
    patterns = next(filter(None, map(registry.names, (given.heads, cfg.method.head, cfg.head))), [])
    drafters = {kind: path for kind, path in registry.given_artifacts(cfg).items() if kind in ("vanilla", "spire")}
    opened, heads = stopping.open_heads(target, patterns, drafters, sampling)
    longest = opened.with_stop(most, None).gamma  # a SPIRe drafter has its window
    settings = stopping.settings_of(values, list(heads), least, longest, "this drafter's window_tokens")
    limits = (least, longest, given.timed, given.rows, cfg.max_new_tokens)
    search = stopping.StopSearch(opened, heads, settings, *limits, sampling, cfg.seed)
    measured = {"questions": questions.digest(asked), "drafter": opened.facts.fingerprint}
    measured["heads"] = {name: sha256(head.folder / "model.safetensors") for name, head in heads.items()}
    run = begun(cfg, target, measured | digest_of_responses(cfg), "results.json")
    with interruptible(run):
        file = answered(cfg, target, opened.with_stop(min(WRITER_GAMMA, longest), None), asked, sampling, run)
        texts = answers.read_answers(file, target, sampling, cfg.max_new_tokens)
        found = stopping.compare_stop_rules(target, search, texts, run.path / "timed.jsonl")
    results = facts(cfg, target, search, len(texts)) | found.results()
    write_png(stopping_fronts(results), run.path / "pareto.png")
    write_tuned(search.tuned_options(found.best), run.path / "tuned.yaml", "specdecpp")
    run.finish(results)
    show(stopping_parts(results), 150, f"{run.path}/results.json, pareto.png, tuned.yaml")


def facts(cfg: DictConfig, target: TargetModel, search: stopping.StopSearch, n_texts: int) -> dict:
    """What a reader needs to judge the numbers, or to repeat them."""
    return {
        **provenance({"python": platform.python_version(), "torch": torch.__version__}),
        "target": cfg.target.path,
        "drafter": {"kind": search.opened.facts.kind, "path": search.opened.facts.path},
        "heads": {name: head.described() for name, head in search.heads.items()},
        "prompts": questions.name_of(cfg.responses or cfg.prompts),
        "texts": n_texts,
        "timed": min(search.timed, n_texts),
        "max_new_tokens": cfg.max_new_tokens,
        "min_candidates": search.min_candidates,
        "max_candidates": search.max_candidates,
        "sampling": search.sampling.describe(),
        "seed": cfg.seed,
        **device_facts(target.device, target.dtype),
        "batch_size": 1,
    }


def begun(cfg: DictConfig, target: TargetModel, measured: dict, result: str = "result.json") -> RunFolder:
    """The run folder. `measured`: what a resumed run must share with its beginning, though no option names it."""
    with open_dict(cfg):
        cfg.measured = measured
    run = RunFolder.find(cfg, result=result)
    run.begin(fingerprint(target.model, target.tokenizer))
    return run


@contextmanager
def interruptible(run: RunFolder) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"interrupted; run the same command to continue in {run.path}", file=sys.stderr)
        raise SystemExit(130) from None


def digest_of_responses(cfg: DictConfig) -> dict[str, str]:
    given = cfg.responses and Path(cfg.responses).is_file()
    return {"responses": sha256(Path(cfg.responses))} if given else {}


def answered(
    cfg: DictConfig, target: TargetModel, drafter: Drafter, asked: list[Question], sampling: Sampling, run: RunFolder
) -> Path:
    """The file of the target's answers: that of `responses=`, or of this run."""
    if cfg.responses:
        return Path(cfg.responses)
    file, prompts = run.path / "responses.jsonl", questions.prompt_ids(asked, target, cfg.chat, cfg.max_new_tokens)
    answers.write_answers(target, drafter, prompts, cfg.max_new_tokens, sampling, cfg.seed, file)
    return file


def write_tuned(options: Mapping[str, Mapping], file: Path, method: str) -> Path:
    """Write options of methods as `tuned=` takes them."""
    header = f"# python -m spectrain.bench tuned={file} ...   (written by spectrain.tune method={method})\n"
    file.write_text(header + OmegaConf.to_yaml(OmegaConf.create(options)))
    return file


if __name__ == "__main__":
    command("tune")(main)()
