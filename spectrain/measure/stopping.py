"""Compare stop rules on one drafter and the same texts: acceptance heads, heuristics and fixed draft lengths.

The drafter is rolled out once from every token of every text. What each setting would have cost follows exactly. Real
runs of a few prompts say what a forward costs, which predicts the speed of every setting. The best setting of each
family is then timed itself (SpecDec++, sections 4.3 and 5).
"""

from __future__ import annotations

import glob
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, generate
from spectrain.errors import UserError, check_whole
from spectrain.measure.draft_paths import draft_paths
from spectrain.measure.simulation import Text
from spectrain.measure.stop_results import ORACLE, fastest, oracle_results, predicted, stop_results
from spectrain.measure.stop_simulation import FIXED, HEAD, Counts, Setting, simulate_stops
from spectrain.measure.stop_times import fit_times, time_drafters
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.registry import BASELINE, find_artifact
from spectrain.methods.specdecpp import OpenDrafter, open_given_drafter
from spectrain.methods.stopping import OracleStop
from spectrain.models.artifacts import MANIFEST, read_manifest
from spectrain.models.head import AcceptanceHead, HeadFacts, read_head_facts
from spectrain.stores.folder import sha256
from spectrain.stores.locations import CHECKPOINTS

log = logging.getLogger(__name__)

WRITER_GAMMA = 4  # tokens drafted while the target answers
COIN_STREAM = 0xC01  # tells the coins' random numbers from all others of this seed


@dataclass(frozen=True)
class StopOptions:
    """The settings that are compared, and how texts are decoded. UserError where settings contradict each other."""

    gammas: Sequence[int]  # fixed draft lengths
    confidence: Sequence[float]  # thresholds, as the two below
    entropy: Sequence[float]
    thresholds: Sequence[float]  # of every head, with each way to judge
    judge: Sequence[str]
    min_candidates: int
    max_candidates: int
    timed: int  # prompts
    rows: int  # roots drafted from at a time
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 3)  # the first two are never drafted
        for name, value in (("stopping.gammas", max(self.gammas)), ("method.min_candidates", self.min_candidates)):
            if value > self.max_candidates:
                raise UserError(
                    f"{name} has {value}, but a draft has at most {self.max_candidates} tokens "
                    "(method.max_candidates, or a SPIRe drafter's window); lower it"
                )

    def settings(self, heads: Sequence[str]) -> list[Setting]:
        """Every setting, fixed lengths first."""
        values = {FIXED: self.gammas, "confidence": self.confidence, "entropy": self.entropy}
        plain = [Setting(family, None, None, value) for family, own in values.items() for value in own]
        return plain + [Setting(HEAD, *options) for options in product(heads, self.judge, self.thresholds)]


@dataclass(frozen=True)
class OpenHead:
    """An acceptance head with its weights."""

    folder: Path
    facts: HeadFacts
    module: AcceptanceHead


@dataclass(frozen=True)
class StopSearch:
    """A drafter, the heads that were trained on it, and the options of their comparison."""

    opened: OpenDrafter
    heads: dict[str, OpenHead]
    options: StopOptions
    sampling: Sampling

    @property
    def writer(self) -> Drafter:
        """A method for the target to answer with; the answers do not depend on it."""
        return self.opened.with_stop(min(WRITER_GAMMA, self.options.max_candidates), None)

    def digests(self) -> dict:
        """What a resumed run must share with its beginning."""
        heads = {name: sha256(head.folder / "model.safetensors") for name, head in self.heads.items()}
        return {"drafter": self.opened.facts.fingerprint, "heads": heads}

    def described(self) -> dict:
        """The part of `results.json` about what was compared."""
        given = ("max_new_tokens", "min_candidates", "max_candidates", "seed")
        heads = {
            name: {
                "folder": str(head.folder),
                "w_rej": head.facts.w_rej,
                "n_blocks": head.facts.head.n_blocks,
                "mixing_share": head.facts.mixing_share,
                "trained_for": head.facts.sampling.describe(),
                "trained": read_manifest(head.folder, "head").trained,
            }
            for name, head in self.heads.items()
        }
        return {
            "drafter": {"kind": self.opened.facts.kind, "path": self.opened.facts.path},
            "heads": heads,
            "sampling": self.sampling.describe(),
            "batch_size": 1,
            **{name: getattr(self.options, name) for name in given},
        }

    def tuned_options(self, best: Mapping[str, Mapping]) -> dict[str, dict]:
        """The best setting of each family, of the results, as options of methods that can run with this drafter."""
        limits = {name: getattr(self.options, name) for name in ("min_candidates", "max_candidates")}
        spire, head = self.opened.facts.kind == "spire", best[HEAD]
        folder = str(self.heads[head["head"]].folder)
        tuned: dict[str, dict] = {"spire" if spire else "speculative": {"gamma": best[FIXED]["value"]}}
        tuned["specdecpp"] = {"head": folder, "threshold": head["value"], **limits, "judge": head["judge"]}
        for family in ("confidence", "entropy"):
            if family in best and not spire:  # these methods take an ordinary draft model
                tuned[f"{family}_stop"] = {"threshold": best[family]["value"], **limits}
        return tuned


def open_search(
    target: TargetModel,
    patterns: Sequence[str],
    drafters: Mapping[str, str],
    options: StopOptions,
    sampling: Sampling,
) -> StopSearch:
    """Open a drafter and the acceptance heads that were trained on it.

    Args:
        target: of both.
        patterns: folders or globs of heads; none: all below `checkpoints/` that belong to this target and drafter.
        drafters: the drafter's folder by its kind; empty: the drafter that the first (or newest) head names.
        options: drafts of a SPIRe drafter are at most as long as its window.
        sampling: of the texts; a head that was trained for another one gives a warning.
    """
    prints = fingerprint(target.model, target.tokenizer)
    folders: list[Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]
        if not matches:
            raise UserError(f"stopping.heads={pattern} matches no folder; give folders of +exp=specdecpp")
        folders += [Path(match) for match in matches if Path(match) not in folders]
    if not drafters:
        known = read_head_facts(folders[0] if folders else Path(find_artifact("head", target)), prints).drafter
        drafters = {known.kind: known.path if Path(known.path).exists() else find_artifact(known.kind, target)}
    opened = open_given_drafter(drafters, target)
    heads: dict[str, OpenHead] = {}
    for folder in folders or _fitting_heads(prints, opened):
        facts = read_head_facts(folder, prints)
        name = folder.name if folder.name not in heads else str(folder)
        heads[name] = OpenHead(folder, facts, opened.open_head(folder, facts))
        if warning := facts.why_off(folder, sampling):
            log.warning("%s", warning)
    longest = opened.with_stop(options.max_candidates, None).gamma
    return StopSearch(opened, heads, replace(options, max_candidates=longest), sampling)


def _fitting_heads(prints: str, opened: OpenDrafter) -> list[Path]:
    """All heads below `checkpoints/` of this target and drafter, by name."""
    found = []
    for file in sorted(CHECKPOINTS.glob(f"*/{MANIFEST}")):
        try:
            is_head = read_manifest(file.parent, "head").kind == "head"
            if is_head and read_head_facts(file.parent, prints).drafter.fingerprint == opened.facts.fingerprint:
                found.append(file.parent)
        except UserError as error:
            log.info("passed over: %s", error)
    if not found:
        raise UserError(
            f"{CHECKPOINTS}/ holds no acceptance head for the drafter {opened.facts.path}; train one with python -m "
            "spectrain.train +exp=specdecpp, or give stopping.heads=[<folder>]"
        )
    return found


def compare_stop_rules(target: TargetModel, search: StopSearch, texts: Sequence[Text], file: Path) -> dict:
    """Simulate all settings, time some, and time the best of each family.

    Returns the content of `results.json`, without what was asked for. `file` keeps timed rows if interrupted.
    """
    options, opened, sampling = search.options, search.opened, search.sampling
    modules = {name: head.module for name, head in search.heads.items()}
    settings, paths = options.settings(list(modules)), []
    for number, text in enumerate(track(texts, "drafts", console=Console(stderr=True))):
        coins = np.random.default_rng((options.seed, number, COIN_STREAM))
        limits = options.max_candidates, options.max_new_tokens, sampling, coins, options.rows
        paths.append(draft_paths(target, opened, list(modules.values()), text, *limits))
    limits = options.max_candidates, options.min_candidates
    counts = simulate_stops(paths, settings, list(modules), *limits)

    timed = texts[: options.timed]
    # Token by token, as `simulate_stops` predicts.
    decode = partial(generate, target, sampling=sampling, seed=options.seed, verification="token")
    time = partial(time_drafters, decode, timed, options.max_new_tokens, file)
    by_name = {str(setting): setting for setting in settings}

    def drafters_of(names: Sequence[str]) -> dict[tuple[str, str], Drafter]:
        """Plain decoding, and the drafters of these settings."""
        chosen = [by_name[name] for name in names]
        drafters = {(str(one), one.family): one.drafter(opened, modules, *limits) for one in chosen}
        return {(BASELINE, BASELINE): Autoregressive()} | drafters

    regression = time("regression", drafters_of([str(one) for one in regression_settings(settings, counts)]))
    drafted = regression[regression.draft_forwards > 0]
    if drafted.empty:
        raise UserError("every timed text ended with its first token; give other prompts")
    times = fit_times(drafted, options.seed)
    described = predicted(settings, counts, times)
    last = drafters_of(fastest(described, ["family"])["name"])
    # A SPIRe drafter's guess depends on the root, so its oracle's drafts are limited.
    gamma = None if opened.facts.kind == "vanilla" else options.max_candidates
    if sampling.greedy:
        stop = OracleStop([text.prompt + text.response for text in timed])
        last[ORACLE, ORACLE] = opened.with_stop(gamma or options.max_new_tokens, stop)
    measured = time("best", last)
    oracle = oracle_results(paths, gamma, times, measured) if sampling.greedy else None
    return stop_results(described, counts, times, regression, measured) | {"oracle": oracle}


def regression_settings(settings: Sequence[Setting], counts: Counts) -> list[Setting]:
    """A few settings of each rule, far apart: four lengths, three thresholds of one head, two of each heuristic.

    The head is the one whose least sum of both rates is lowest.
    """
    sums = counts.rates[0] + counts.rates[1]
    head = settings[min((i for i, s in enumerate(settings) if s.head), key=lambda i: sums[i])].head
    found: list[Setting] = []
    for family, count in ((FIXED, 4), (HEAD, 3), ("confidence", 2), ("entropy", 2)):
        own = [s for s in settings if s.family == family and s.head in (None, head)]
        own = [s for s in own if s.judge == own[0].judge]
        if family == FIXED:
            preferred = [s for s in own if s.value in (2, 4, 8, 14)]
            own = preferred if len(preferred) == count else own
        places = [(2 * i + 1) * len(own) // (2 * count) for i in range(count)]
        found += dict.fromkeys(own[place] for place in places if own)
    return found
