"""Choose what depends on the machine or the text: nodes of a draft tree, SSSD's discounts, when drafts should end.

    python -m spectrain.tune budget=true target=<folder or hub id> prompts=<file.jsonl> methods=[logitspec,pld]
    python -m spectrain.tune method=sssd datastore=<folder> target=<folder or hub id> prompts=<file.jsonl> limit=60
    python -m spectrain.tune method=specdecpp target=<folder or hub id> prompts=<file.jsonl> limit=60

`budget=true` writes checkpoints/budget-*.json for `max_nodes=auto`, the others a yaml for `tuned=`. docs/measuring.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spectrain.cli import command, interruptible, open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.decoding.errors import UserError
from spectrain.measure import budget, questions, stopping
from spectrain.measure.baselines import BASELINES
from spectrain.measure.sssd import choose_options
from spectrain.methods import registry
from spectrain.reporting.cost_plots import budget_acceptance, budgets, stopping_fronts
from spectrain.reporting.drawing import write_png
from spectrain.reporting.tables import show
from spectrain.reporting.tuning import budget_parts, discount_parts, stopping_parts
from spectrain.stores.budget_table import NO_OPTIONS, BudgetTable, machine_of
from spectrain.stores.environment import date_of, device_facts, provenance
from spectrain.stores.folder import sha256
from spectrain.stores.locations import CHECKPOINTS
from spectrain.training.runs import RunFolder


def main(cfg: DictConfig) -> None:
    searches = {"budget=true": tune_budget, "method=sssd": tune_sssd, "method=specdecpp": tune_specdecpp}
    method = cfg.method["_target_"].split(".")[-2] if cfg.get("method") else "null"
    asked = "budget=true" if cfg.budget else f"method={method}"
    if asked not in searches:
        raise UserError(f"{asked} has nothing to tune; give {' or '.join(searches)}")
    searches[asked](cfg, Sampling.from_options(cfg.sampling))


def tune_budget(cfg: DictConfig, sampling: Sampling) -> None:
    """Measure forward seconds, acceptance and the rest of a step of methods that draft trees."""
    methods = registry.method_configs(cfg, reserved=BASELINES)
    chains = [name for name, options in methods.items() if not registry.drafts_trees(options)]
    if chains != [registry.BASELINE] and not registry.takes_all(cfg):
        raise UserError(f"methods={chains[1]} drafts no trees, so it has no node budget to tune; leave it out")
    methods = {n: OmegaConf.to_container(one, resolve=True) for n, one in methods.items() if n not in chains}
    asked = questions.read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    target = open_target(cfg)
    grid = budget.grid_of(target, cfg.nodes, cfg.batch_sizes, cfg.contexts, cfg.repeats)
    prompts = list(questions.prompt_ids(asked, target, cfg.chat, cfg.max_new_tokens).values())
    drafters = budget.build_sizes(target, methods, registry.given_artifacts(cfg), grid.nodes, registry.takes_all(cfg))
    measured = {"methods": methods, "questions": questions.digest(asked), "machine": machine_of(target)}
    with begun(cfg, target, measured) as run:
        cost = budget.forward_cost(target, grid, cfg.seed, run.path / "forward.json")
        work = (partial(generate, target, sampling=sampling, seed=cfg.seed), drafters, prompts)
        rows = budget.measure_groups(*work, grid.batch_sizes[-1], cfg.max_new_tokens, run.path / "groups.jsonl")
        facts = {"target": cfg.target.path, "date": date_of(), "prompts": questions.name_of(cfg.prompts)}
        facts |= {"n_prompts": len(prompts), "max_new_tokens": cfg.max_new_tokens}
        curves = budget.curve_entries(drafters, methods, rows, sampling)
        table = BudgetTable(fingerprint(target.model, target.tokenizer), machine_of(target), cost, curves, facts)
        file = table.save(CHECKPOINTS)
        write_png(budgets(table), run.path / "budget.png")
        write_png(budget_acceptance(table), run.path / "accepted.png")
        run.finish({"budget_table": str(file), "machine": table.machine})
        show(budget_parts(table), 110, f"{file}, {run.path}/budget.png")


def tune_sssd(cfg: DictConfig, _: Sampling) -> None:
    """Search for SSSD's discounts and calibrate its sources, on answers that the target writes greedily."""
    tuned = registry.with_tuned(cfg.method, cfg.tuned)
    method, grid = OmegaConf.to_container(tuned), OmegaConf.to_container(cfg.grid)
    if method["last_logits"]:
        raise UserError("last_logits cannot be simulated without the target; give method.last_logits=false")
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    target = open_target(cfg)
    opened = registry.build_method(tuned, target, registry.given_artifacts(cfg))
    with begun(cfg, target, {"questions": questions.digest(asked), "method": method}) as run:
        file = answered(cfg, target, opened, asked, Sampling(), run)
        found = choose_options(opened, method, grid, questions.read_answers(file, target, least=2))
        defaults = registry.method_config("sssd")
        changed = {k: v for k, v in found["options"].items() if v != defaults.get(k) and k not in NO_OPTIONS}
        output = registry.write_tuned(run.path / "sssd.yaml", {"sssd": changed}, "spectrain.tune method=sssd")
        tau = {name: [one.value, one.low, one.high] for name, one in found["tau"].items()}
        run.finish({"tau": tau, "chosen": changed, "tried": found["tried"], "responses": found["responses"]})
        parts = discount_parts(tau, found["responses"][1], found["winner"])
        show(parts, 100, f"{output}: python -m spectrain.bench tuned={output} ...")


def tune_specdecpp(cfg: DictConfig, sampling: Sampling) -> None:
    """Compare stop rules: heads at several thresholds, heuristics and fixed lengths, on one set of answers."""
    cfg.method = registry.with_tuned(cfg.method, cfg.tuned)
    lists = ("gammas", "confidence", "entropy", "thresholds", "judge")
    given = {**cfg.stopping, **{name: registry.names(cfg.stopping[name]) for name in lists}}
    patterns = registry.names(given.pop("heads") or cfg.method.head or cfg.head)
    limits = {name: cfg.method[name] for name in ("min_candidates", "max_candidates")}
    options = stopping.StopOptions(**given, **limits, max_new_tokens=cfg.max_new_tokens, seed=cfg.seed)
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    target = open_target(cfg)
    drafters = {kind: path for kind, path in registry.given_artifacts(cfg).items() if kind in ("vanilla", "spire")}
    search = stopping.open_search(target, patterns, drafters, options, sampling)
    with begun(cfg, target, {"questions": questions.digest(asked), **search.digests()}, "results.json") as run:
        file = answered(cfg, target, search.writer, asked, sampling, run)
        texts = questions.read_answers(file, target, sampling, cfg.max_new_tokens)
        found = stopping.compare_stop_rules(target, search, texts, run.path / "timed.jsonl")
        facts = {"target": cfg.target.path, "prompts": questions.name_of(cfg.responses or cfg.prompts)}
        facts |= {"texts": len(texts), "timed": min(options.timed, len(texts))}
        results = provenance() | device_facts(target.device, target.dtype) | facts | search.described() | found
        write_png(stopping_fronts(results), run.path / "pareto.png")
        tuned = search.tuned_options(found["best"])
        registry.write_tuned(run.path / "tuned.yaml", tuned, "spectrain.tune method=specdecpp")
        run.finish(results)
        show(stopping_parts(results), 150, f"{run.path}/results.json, pareto.png, tuned.yaml")


@contextmanager
def begun(cfg: DictConfig, target: TargetModel, measured: dict, result: str = "result.json") -> Iterator[RunFolder]:
    """Begin the run. `measured`: what a resumed run must share with its beginning, though no option names it."""
    if cfg.responses and not cfg.budget and Path(cfg.responses).is_file():
        measured["responses"] = sha256(Path(cfg.responses))
    OmegaConf.update(cfg, "measured", measured, force_add=True)
    with RunFolder.claim(cfg, result) as run, interruptible(f"to resume in {run.path}"):
        run.begin(fingerprint(target.model, target.tokenizer))
        yield run


def answered(
    cfg: DictConfig, target: TargetModel, drafter: Drafter, asked: Sequence, sampling: Sampling, run: RunFolder
) -> Path:
    """The file of the target's answers: that of `responses=`, or of this run."""
    if cfg.responses:
        return Path(cfg.responses)
    file, prompts = run.path / "responses.jsonl", questions.prompt_ids(asked, target, cfg.chat, cfg.max_new_tokens)
    questions.write_answers(target, drafter, prompts, cfg.max_new_tokens, sampling, cfg.seed, file)
    return file


if __name__ == "__main__":
    command("tune")(main)()
