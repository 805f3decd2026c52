"""Whether a drafter is accepted in decoding as often as its training said, by draft position.

    python -m spectrain.parity run=runs/spire-1f0c93ab

Sides of one number (`evaluation/parity.py` defines it): what validation logged; the same computation on texts that the
loop wrote, at every position and at the steps that the loop took; the loop itself; and for a vanilla drafter
transformers' assisted generation. The last three may differ by chance only: else training, the loop and transformers
do not run the same drafter.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch import Tensor

from spectrain.cli import command, open_target
from spectrain.decoding import Drafter, Sampling, TargetModel
from spectrain.decoding.errors import UserError, check_whole
from spectrain.measure.contenders import Method, Work, build_peer
from spectrain.measure.parity import Logits, computed, counted, full_steps
from spectrain.methods.loading import load_method
from spectrain.methods.speculative import Speculative
from spectrain.methods.spire import Spire
from spectrain.models.rollout import rollout
from spectrain.reporting.parity_report import (
    ASSISTED,
    AT_STEPS,
    EVERYWHERE,
    LOOP,
    Logged,
    Parity,
    Sides,
    as_json,
    draw,
    render,
    verdicts,
)
from spectrain.serving.exporting import fill, run_export
from spectrain.stores.environment import TYPED_COMMAND, date_of, environment
from spectrain.stores.folder import refuse_existing, write_folder
from spectrain.training.experiments import corpus_rows, spire_config, stored_rows
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

RESULT = "parity.json"


@dataclass(frozen=True)
class Compared:
    """A drafter in the loop, and as training computes it."""

    target: TargetModel
    method: Drafter  # Spire or Speculative
    draft: Logits

    @property
    def gamma(self) -> int:
        return self.method.gamma


def main(cfg: DictConfig) -> None:
    works = works_of(cfg)
    run = RunFolder.open(Path(str(cfg.run)))
    trained = OmegaConf.create(run.config)
    if trained.kind not in DRAFT_LOGITS:
        raise UserError(
            f"run={run.path} is of kind {trained.kind}; give a run of a drafter, +exp=spire or +exp=vanilla"
        )
    out = Path(str(cfg.out or f"runs/parity-{run.name}"))
    if not (cfg.fresh and (out / RESULT).is_file()):
        refuse_existing(out)
    target = open_target(trained)
    compared = open_compared(cfg, run, trained.kind, target)
    contexts = held_out_contexts(cfg, run.config, target)
    parity = Parity(
        run=str(run.path),
        drafter_kind=trained.kind,
        gamma=compared.gamma,
        contexts=len(contexts),
        context_tokens=cfg.context_tokens,
        new_tokens=cfg.new_tokens,
        logged=logged(run, compared.gamma),
        sides={work.sampling: sides(compared, contexts, work, cfg.assisted) for work in works},
    )
    facts = {
        "kind": "parity",
        "command": TYPED_COMMAND.get(),
        "date": date_of(),
        "target": str(trained.target.path),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": environment(1),
    }

    def write(folder: Path) -> None:
        draw(folder / "parity.png", parity)
        (folder / RESULT).write_text(json.dumps(facts | as_json(parity), indent=2) + "\n")

    write_folder(out, write, replace=cfg.fresh)
    console = Console()
    console.print(render(parity))
    for line in verdicts(parity):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"{out}/{RESULT}, parity.png", style="dim")


def works_of(cfg: DictConfig) -> list[Work]:
    """How everything is decoded, for each temperature. No end of text ends a continuation, so that all weigh alike."""
    for name in ("contexts", "context_tokens", "new_tokens", "batch_size"):
        check_whole(name, cfg[name], 1)
    if cfg.gamma is not None:
        check_whole("gamma", cfg.gamma, 1)
    if not cfg.temperatures:
        raise UserError("temperatures must name at least one; give temperatures=[0.0,1.0]")
    laws = [Sampling.from_options({"temperature": temperature}) for temperature in cfg.temperatures]
    return [Work(cfg.new_tokens, law, cfg.batch_size, cfg.seed, stop_token_ids=()) for law in laws]


def held_out_contexts(cfg: DictConfig, trained: Mapping, target: TargetModel) -> list[list[int]]:
    """Beginnings of the held-out rows on which the run measured tau.

    Raises:
        UserError: none is long enough, or contexts and new tokens exceed the target's context.
    """
    if cfg.context_tokens + cfg.new_tokens > target.max_positions:
        raise UserError(
            f"context_tokens={cfg.context_tokens} and new_tokens={cfg.new_tokens} exceed the target's context of "
            f"{target.max_positions}; lower them"
        )
    if trained["data"].get("source", "online") == "online":
        rows = corpus_rows(trained, target).contexts
    else:
        rows = stored_rows(trained, target, spire_config(trained, target).captured_layers).contexts
    contexts = [list(row[: cfg.context_tokens]) for row in rows if len(row) >= cfg.context_tokens]
    if not contexts:
        longest = max(map(len, rows))
        raise UserError(f"the longest held-out row has {longest} tokens; lower context_tokens={cfg.context_tokens}")
    return contexts[: cfg.contexts]


def open_compared(cfg: DictConfig, run: RunFolder, kind: str, target: TargetModel) -> Compared:
    """The drafter as it is exported."""
    options = {} if cfg.gamma is None else {"gamma": cfg.gamma}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, run_export(run, "best", target), str(run.config["target"]["path"]))
        method = load_method(folder, target, **options)
    return Compared(target, method, DRAFT_LOGITS[kind](method, target))


def sides(compared: Compared, contexts: list[list[int]], work: Work, assisted: bool) -> Sides:
    """Acceptance as each side has it, on the same contexts."""
    target, method, gamma = compared.target, compared.method, compared.gamma
    numbers = list(range(len(contexts)))
    log.info("%s: the loop continues %d contexts", work.sampling.describe(), len(contexts))
    written = Method(target, method).decode(contexts, numbers, work)
    steps = [full_steps(context, one, gamma) for context, one in zip(contexts, written, strict=True)]
    ours = computed(steps, gamma, compared.draft, logits_of(target), work.sampling)
    found = {EVERYWHERE: ours.everywhere, AT_STEPS: ours.at_steps, LOOP: counted(steps, gamma)}
    if assisted and isinstance(method, Speculative):
        log.info("%s: transformers' assisted generation", work.sampling.describe())
        # It drafts from the context's last token on, our loop from the first token that it drew.
        begun = [[*context, one.tokens[0]] for context, one in zip(contexts, written, strict=True)]
        rest = replace(work, max_new_tokens=work.max_new_tokens - 1, batch_size=1)
        theirs = build_peer("hf_assisted", target, {}, method).decode(begun, numbers, rest)
        found[ASSISTED] = counted(
            [full_steps(context, one, gamma, of_context=True) for context, one in zip(begun, theirs, strict=True)],
            gamma,
        )
    return found


def logged(run: RunFolder, gamma: int) -> Logged | None:
    """What validation said of the exported weights; None of an unfinished run, or for drafts of another length."""
    metrics = (run.read_result() or {"metrics": {}})["metrics"]
    rates = [metrics[name] for i in range(1, len(metrics) + 1) if (name := f"eval/alpha_step_{i}") in metrics]
    return Logged(rates, metrics["eval/tau_expected"]) if len(rates) == gamma else None


def logits_of(model: TargetModel) -> Logits:
    """One plain forward over a text; the logits do not depend on where drafts begin."""

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        return model.forward(tokens[None].to(model.device)).logits[0][positions.to(model.device)]

    return logits


def vanilla_logits(method: Speculative, target: TargetModel) -> Logits:
    return logits_of(method.draft_model)


def spire_logits(method: Spire, target: TargetModel) -> Logits:
    """The training rollout, once for each place of a block's root modulo k."""
    drafter = method.drafter.to(device=target.device, dtype=target.dtype).eval()
    reading = target.with_capture(drafter.config.captured_layers)

    def logits(tokens: Tensor, positions: Tensor) -> Tensor:
        tokens, positions = tokens[None].to(target.device), positions.to(target.device)
        captured = reading.features(tokens).captured
        roots = positions[:, 0] % method.gamma
        states = {  # [L, D]
            root: rollout(drafter, tokens, captured, block_tokens=method.gamma, first_root=root)[0]
            for root in roots.unique().tolist()
        }
        hidden = torch.stack([states[root][row] for root, row in zip(roots.tolist(), positions, strict=True)])
        return drafter.lm_head(hidden)

    return logits


DRAFT_LOGITS = {"spire": spire_logits, "vanilla": vanilla_logits}


if __name__ == "__main__":
    command("parity")(main)()
