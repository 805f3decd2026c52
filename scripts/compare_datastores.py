"""Compare datastores of equal size that were chosen in different ways: how many tokens `sssd` would accept from each.

    python -m data_prep.datastore corpus=<folder of conversations> target=<target> keep=null always_score=true out=full
    python -m data_prep.datastore ... keep=null always_score=true score_on=response out=answers
    python scripts/compare_datastores.py full --answers answers --own <store of the target's own text> \
        --samples <responses> ... --measured <responses of other prompts> ... [--only gsm8k] [--share 0.15]

Every store holds the same share of the candidates' tokens. Decoding of the measured answers is simulated. The output is
the acceptance length (tau) with documents drawn at random, the mean of several draws, and what every other choice has
more, in pairs, with 95 % bootstrap intervals over questions. The last row is the store of all candidates.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from spectrain.measure.simulation import Text, simulate

from data_prep.coverage import Samples, acceptance_places
from data_prep.documents import DOCUMENTS
from data_prep.select import Selection, select
from spectrain.errors import UserError
from spectrain.measure.statistics import difference_of_ratios, ratio_of_sums
from spectrain.methods.sssd import Sssd, SssdOptions
from spectrain.retrieval.datastore import Datastore, Manifest, write_manifest, write_shard
from spectrain.stores.rows import open_responses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("full", type=Path, help="datastore of all candidates, scored")
    parser.add_argument("--answers", type=Path, help="the same with score_on=response")
    parser.add_argument("--own", type=Path, help="datastore of the target's own responses to prompts of the corpus")
    parser.add_argument("--samples", type=Path, nargs="+", required=True, help="responses that rank=acceptance reads")
    parser.add_argument("--measured", type=Path, nargs="+", required=True, help="responses to other prompts")
    parser.add_argument("--only", default="", help="candidates whose source begins so, and own text likewise")
    parser.add_argument("--share", type=float, default=0.15, help="of the candidates' tokens that a store holds")
    parser.add_argument("--nodes", type=int, default=8, help="of a draft tree, the root included")
    parser.add_argument("--draws", type=int, default=5, help="random stores")
    options = parser.parse_args()
    try:
        compare(options)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


def compare(options: argparse.Namespace) -> None:
    candidates = Candidates.read(options.full, options.only)
    keep_tokens = int(options.share * candidates.lengths.sum())
    samples = [text for folder in options.samples for text in read_texts(folder)]
    measured = {folder.name: read_texts(folder) for folder in options.measured}
    if {tuple(text.prompt) for text in samples} & {tuple(t.prompt) for texts in measured.values() for t in texts}:
        raise UserError("a measured prompt is among the samples; give --samples of other prompts")
    draws = [candidates.chosen(keep_tokens, by_perplexity=False, seed=seed) for seed in range(options.draws)]
    stores = chosen_stores(options, candidates, keep_tokens, samples)
    title = f"{keep_tokens:,} of {candidates.lengths.sum():,} tokens, {options.nodes} nodes"
    table = Table("store", "documents", *measured, title=title, title_justify="left")
    work = track([*draws, *stores.values()], "stores", console=Console(stderr=True))
    found = [counted_steps(documents, candidates.vocab_size, measured, options.nodes) for documents in work]
    random, others = found[: len(draws)], found[len(draws) :]
    base = {name: np.mean([steps[name] for steps in random], axis=0) for name in measured}
    n_documents = f"{np.mean([len(documents) for documents in draws]):.0f}"
    table.add_row("random", n_documents, *(str(ratio_of_sums(*base[name].T)) for name in measured))
    for (name, documents), steps in zip(stores.items(), others, strict=True):
        more = [difference_of_ratios(*steps[of].T, *base[of].T) for of in measured]
        table.add_row(name, str(len(documents)), *(f"{d.value:+.3f} \\[{d.low:+.3f}, {d.high:+.3f}]" for d in more))
    Console(width=40 + 28 * len(measured)).print(table)


@dataclass(frozen=True)
class Candidates:
    """The documents that stores are chosen from, with what `data_prep.datastore` knows of them."""

    ids: list[str]
    sources: list[str]
    lengths: np.ndarray  # [documents] tokens
    perplexities: np.ndarray  # [documents], infinity where there is none
    documents: list[np.ndarray]
    vocab_size: int

    @classmethod
    def read(cls, folder: Path, source: str) -> Candidates:
        """Read the documents of a datastore whose source begins with `source`; UserError where there is none."""
        store = Datastore(folder)
        lines = (folder / DOCUMENTS).read_text().splitlines()
        both = [(json.loads(line), tokens) for line, tokens in zip(lines, store.documents(), strict=True)]
        both = [(row, tokens) for row, tokens in both if row["source"].startswith(source)]
        if not both:
            raise UserError(f"{folder} has no document of a source {source}; change --only")
        rows, documents = zip(*both, strict=True)
        scores = [np.inf if row["perplexity"] is None else row["perplexity"] for row in rows]
        lengths = np.array([row["tokens"] for row in rows])
        names = [row["id"] for row in rows], [row["source"] for row in rows]
        return cls(*names, lengths, np.array(scores), list(documents), store.vocab_size)

    def chosen(self, keep_tokens: int, places: np.ndarray | None = None, **selection: object) -> list[np.ndarray]:
        """Return the documents that a selection keeps."""
        limits = Selection(keep=None, keep_tokens=keep_tokens, **selection)
        kept = select(limits, self.ids, self.lengths, self.perplexities, places, self.sources)
        return [document for document, one in zip(self.documents, kept, strict=True) if one]


def chosen_stores(
    options: argparse.Namespace, candidates: Candidates, keep_tokens: int, samples: list[Text]
) -> dict[str, list[np.ndarray]]:
    """Return the documents of each store that is compared with random ones, by its name."""
    ways = {"": {}, ", quotas": {"quota": "source"}} if len(set(candidates.sources)) > 1 else {"": {}}
    read = Samples.of((np.array(text.prompt), np.array(text.response)) for text in samples)
    places = acceptance_places(read, candidates.documents)
    answers = Candidates.read(options.answers, options.only) if options.answers else None
    if answers and answers.ids != candidates.ids:
        raise UserError(f"{options.answers} has other documents than {options.full}; make both of one corpus")
    stores = {}
    for name, quota in ways.items():
        stores[f"perplexity{name}"] = candidates.chosen(keep_tokens, **quota)
        if answers:
            stores[f"perplexity of answers{name}"] = answers.chosen(keep_tokens, **quota)
        stores[f"acceptance{name}"] = candidates.chosen(keep_tokens, places, rank="acceptance", **quota)
    if options.own:
        own = Candidates.read(options.own, options.only)
        if own.lengths.sum() < keep_tokens:
            raise UserError(f"{options.own} has {own.lengths.sum()} tokens, not {keep_tokens}; lower --share")
        stores["own text"] = own.chosen(keep_tokens, by_perplexity=False)
    return stores | {"all candidates": candidates.documents}


def read_texts(folder: Path) -> list[Text]:
    """Read prompts and answers of at least two tokens from a store of responses."""
    rows = open_responses(folder).rows
    return [Text(row["prompt"], row["response"]) for row in rows if len(row["response"]) > 1]


def counted_steps(
    documents: list[np.ndarray], vocab_size: int, measured: dict[str, list[Text]], max_nodes: int
) -> dict[str, np.ndarray]:
    """Return [questions, 2] for each set: tokens that steps emit with a store of these documents, and steps."""
    with tempfile.TemporaryDirectory() as folder:
        shard = write_shard(Path(folder), 0, documents, vocab_size)
        n_tokens = sum(len(document) for document in documents)
        write_manifest(Path(folder), Manifest("", "", "", vocab_size, len(documents), n_tokens, [shard]))
        drafter = Sssd(Datastore(folder), SssdOptions(), max_nodes)
        steps = {name: [simulate(drafter, text, [max_nodes])[0] for text in texts] for name, texts in measured.items()}
    return {name: np.array([(one[:, 0].sum(), len(one)) for one in of], dtype=float) for name, of in steps.items()}


if __name__ == "__main__":
    main()
