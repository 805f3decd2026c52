"""REST (He et al. 2023): the likeliest continuations of the last tokens in a datastore.

The longest suffix of 16 down to 2 tokens that the store holds gives up to 5,000 continuations of 10 tokens. The draft
tree is made of the 64 nodes that most of them share.

Differs from the reference, which samples every path of the tree on its own, also where paths share a node, and draws a
new token after a mismatch: its text does not follow the target's distribution. Here trees are verified as everywhere.
"""

from __future__ import annotations

from collections import deque

from spectrain.config.values import Nodes, Whole
from spectrain.drafting.lookup import LookupDrafter
from spectrain.retrieval.candidate_tree import CandidateTree
from spectrain.retrieval.datastore import Datastore, open_datastore
from spectrain.retrieval.fusion import RetrievalOptions, Retriever, store_priors
from spectrain.target import TargetModel

TOKENS_ONLY = True  # a serving engine can run it; see registry.py


def build(
    target: TargetModel,
    datastore: str,
    max_suffix: Whole = 16,
    min_suffix: Whole = 2,
    max_matches: Whole = 5000,
    branch_tokens: Whole = 10,
    max_nodes: Nodes = 65,
) -> Rest:
    """Build the method over the datastore of a folder; conf/method/rest.yaml explains the options.

    The first matches in sorted order are read, as the reference reads them, of each shard by its share of all.
    """
    options = RetrievalOptions(min_suffix, max_suffix, branch_tokens, max_matches, first_matches=True)
    return Rest(open_datastore(datastore, target), options, max_nodes)


class Rest(LookupDrafter):
    """A tree per step, of max_nodes with the root, of what followed the last tokens in a datastore.

    `max_guesses`: branches; None: no limit.
    """

    priors = store_priors()

    def __init__(
        self, store: Datastore, options: RetrievalOptions, max_nodes: int | str, max_guesses: int | None = None
    ):
        super().__init__(max_nodes)
        self.retriever, self.max_guesses = Retriever(store, options), max_guesses
        self.describe(store=store)

    def new_row(self, tokens: list[int]) -> deque[int]:
        return deque(tokens, maxlen=self.retriever.options.max_suffix)

    def propose_row(self, state: deque[int], tree: CandidateTree, row: int) -> None:
        self.retriever.add_to(tree, list(state), self.max_guesses)
