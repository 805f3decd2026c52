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
from spectrain.decoding.errors import UserError
from spectrain.measure import questions, stopping
from spectrain.measure.sssd import choose_options
from spectrain.methods import registry
from spectrain.methods.sizing import AUTO
from spectrain.reporting.cost_plots import stopping_fronts
from spectrain.reporting.drawing import write_png
from spectrain.reporting.tables import show
from spectrain.reporting.tuning import discount_parts, stopping_parts
from spectrain.stores.environment import device_facts, provenance
from spectrain.stores.folder import sha256
from spectrain.training.runs import RunFolder

SIMULATED_NODES = 16  # of SSSD's trees, where max_nodes is auto
NOT_TUNED = ("max_nodes", "datastore")


def main(cfg: DictConfig) -> None:
    searches = {"sssd": tune_sssd, "specdecpp": tune_specdecpp}
    method = cfg.method["_target_"].split(".")[-2] if cfg.get("method") else "null"
    if method not in searches:
        raise UserError(f"method={method} has nothing to tune; give {' or '.join(f'method={n}' for n in searches)}")
    searches[method](cfg, Sampling.from_options(cfg.sampling))


def tune_sssd(cfg: DictConfig, _: Sampling) -> None:
    """Search for SSSD's discounts and calibrate its sources, on answers that the target writes greedily."""
    tuned = registry.with_tuned(cfg.method, cfg.tuned)
    method, grid = OmegaConf.to_container(tuned), OmegaConf.to_container(cfg.grid)
    if method["last_logits"]:
        raise UserError("last_logits cannot be simulated without the target; give method.last_logits=false")
    asked = [] if cfg.responses else questions.read_questions(cfg.prompts, cfg.limit, cfg.max_prompt_bytes)
    target = open_target(cfg)
    if method["max_nodes"] == AUTO:  # which has no trees to simulate before it has seen what is accepted
        tuned.max_nodes = method["max_nodes"] = SIMULATED_NODES
    opened = registry.build_method(tuned, target, registry.given_artifacts(cfg))
    with begun(cfg, target, {"questions": questions.digest(asked), "method": method}) as run:
        file = answered(cfg, target, opened, asked, Sampling(), run)
        found = choose_options(opened, method, grid, questions.read_answers(file, target, least=2))
        defaults = registry.method_config("sssd")
        changed = {k: v for k, v in found["options"].items() if v != defaults.get(k) and k not in NOT_TUNED}
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
