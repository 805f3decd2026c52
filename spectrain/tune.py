"""Choose what depends on the text: SSSD's discounts, and when drafts should end.

    python -m spectrain.tune method=sssd datastore=<folder> target=<folder or hub id> prompts=<file.jsonl> limit=60
    python -m spectrain.tune method=specdecpp target=<folder or hub id> prompts=<file.jsonl> limit=60

Both write a yaml for `tuned=`. docs/measuring.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from spectrain.cli import command, interruptible, open_target
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint
from spectrain.decoding.memory import USABLE_SHARE, free_bytes, slot_bytes
from spectrain.errors import UserError
from spectrain.measure import questions, stopping
from spectrain.measure.sssd import Clock, choose_options
from spectrain.methods import registry
from spectrain.methods.lookup import MOST_NODES
from spectrain.methods.sizing import AUTO
from spectrain.reporting.cost_plots import stopping_fronts
from spectrain.reporting.drawing import write_png
from spectrain.reporting.tables import show
from spectrain.reporting.tuning import discount_parts, stopping_parts, tuned_at
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.folder import sha256
from spectrain.stores.forward_times import CONTEXT_TOKENS, NODES, forward_times
from spectrain.training.runs import RunFolder

NOT_TUNED = ("max_nodes", "datastore")


def main(cfg: DictConfig) -> None:
    searches = {"sssd": tune_sssd, "specdecpp": tune_specdecpp}
    method = cfg.method["_target_"].split(".")[-2] if cfg.get("method") else "null"
    if method not in searches:
        raise UserError(f"method={method} has nothing to tune; give {' or '.join(f'method={n}' for n in searches)}")
    searches[method](cfg, Sampling.from_options(cfg.sampling))


def tune_sssd(cfg: DictConfig, sampling: Sampling) -> None:
    """Search for SSSD's discounts and calibrate its sources, on answers that the target writes with this sampling."""
    tuned = registry.with_tuned(cfg.method, cfg.tuned)
    method, grid = OmegaConf.to_container(tuned), OmegaConf.to_container(cfg.grid)
    if method["last_logits"]:
        raise UserError("last_logits cannot be simulated without the target; give method.last_logits=false")
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    target, budgets = open_target(cfg), [method["max_nodes"]]
    if method["max_nodes"] == AUTO:  # a number is chosen for each setting, of the first nodes of the largest trees
        tuned.max_nodes, budgets = MOST_NODES, NODES[1:]
    opened = registry.build_method(tuned, target, registry.given_artifacts(cfg))
    check_rows(target, cfg.batch_size)
    with begun(cfg, target, {"questions": questions.digest(asked), "method": method}) as run:
        file = answered(cfg, target, opened, asked, sampling, run)
        texts = questions.read_answers(file, target, sampling, least=2)
        clock = Clock(forward_times(target, cfg.batch_size).up_to(opened.max_nodes), cfg.batch_size, budgets)
        found = choose_options(opened, method, grid, texts, clock)
        options, defaults = found.pop("options"), registry.method_config("sssd")
        changed = {k: v for k, v in options.items() if v != defaults.get(k) and k not in NOT_TUNED}
        results = device_facts(target.device, target.dtype) | found
        results |= {"chosen": changed, "sampling": sampling.describe(), "batch_size": cfg.batch_size}
        results |= {"max_nodes": method["max_nodes"], "plain_tokens_per_s": clock.plain_tokens_per_s}
        how = f"for tokens/s on {results['device']}: {tuned_at(results)}"
        output = run.path / "sssd.yaml"
        registry.write_tuned(output, {"sssd": changed}, "spectrain.tune method=sssd", how)
        run.finish(results)
        show(discount_parts(results), 100, f"{output}: python -m spectrain.bench tuned={output} ...")


def check_rows(target: TargetModel, n_rows: int) -> None:
    """Raise UserError where the forwards of so many rows cannot be timed for want of memory."""
    free = free_bytes(target.device)
    row_bytes = (CONTEXT_TOKENS + NODES[-1]) * slot_bytes(target) + NODES[-1] * target.vocab_size * 4  # cache, logits
    if free is not None and n_rows * row_bytes > USABLE_SHARE * free:
        fitting = max(1, int(USABLE_SHARE * free / row_bytes))
        raise UserError(f"batch_size={n_rows} rows do not fit into memory, about {fitting} do; lower batch_size")


def tune_specdecpp(cfg: DictConfig, sampling: Sampling) -> None:
    """Compare stop rules: heads at several thresholds, heuristics and fixed lengths, on one set of answers."""
    if sampling.shares_noise:
        raise UserError("method=specdecpp is tuned for tokens that are drawn; give sampling.draws=inverse")
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
    if cfg.responses and Path(cfg.responses).is_file():
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
