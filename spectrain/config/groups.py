"""Groups of options that several commands share, and that the packages below the commands read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spectrain.config.fields import group, option
from spectrain.errors import UserError


@dataclass
class Target:
    """The model whose text is decoded."""

    path: str = option(
        "pystdlib-8l",
        "a bundled checkpoint, smollm2, a folder, or an id on the hub",
        path=True,
        example="target=smollm2",
    )
    dtype: str = option(
        "auto",
        "of its weights and activations; auto: the checkpoint's on a GPU, float32 on a CPU",
        one_of=("auto", "float32", "bfloat16", "float16"),
    )
    device: str = option("auto", "auto | cpu | cuda | cuda:1")
    engine: str = option(
        "auto",
        "the lean decoder knows llama, mistral, qwen2 and qwen3, and auto takes it there",
        one_of=("auto", "lean", "transformers"),
    )
    graphs: str = option("auto", "on a GPU steps are recorded as CUDA graphs and replayed", one_of=("auto", "none"))
    compile: str = option(
        "auto",
        "on a GPU steps of the lean decoder run through our own kernels; auto: where Triton is installed",
        one_of=("auto", "triton", "none"),
    )
    parallel: str = option(
        "none",
        "for a target that does not fit one GPU; tp: torchrun's ranks divide its weights; device_map: one process "
        "spreads its layers",
        one_of=("none", "device_map", "tp"),
    )
    tp: int | None = option(None, "ranks that hold one target together with parallel=tp; null: all", least=1)

    def ranks_of_group(self, n_ranks: int) -> int:
        """Return how many of so many ranks hold one target together."""
        if self.tp is not None and self.parallel != "tp":
            raise UserError(f"target.tp={self.tp} is for target.parallel=tp; give it, or remove target.tp")
        return (self.tp or n_ranks) if self.parallel == "tp" else 1


@dataclass
class Sampling:
    """How tokens are drawn."""

    temperature: float = option(0.0, "0: greedy", least=0, example="sampling.temperature=0.8")
    top_k: int = option(0, "0: off", least=0)
    top_p: float = option(1.0, "1: off", above=0, most=1)
    min_p: float = option(0.0, "0: off", least=0, below=1)
    draws: str = option(
        "auto",
        "shared: noise fixed by seed, place and token, so that all methods write the same sampled text; auto: shared "
        "where a method drafts trees of a draft model, which gain from it, else inverse",
        one_of=("auto", "inverse", "shared"),
    )


@dataclass
class Corpus:
    """Chats, prose or source code that is learned from."""

    path: Any = option(
        None,
        "a file or folder of chat data, prose or source code, a saved dataset, an id on the hub, responses:<folder>, "
        "or several of these in a list; null: the sources of Python's standard library",
        several=True,
        path=True,
        example="corpus=chats.json",
    )
    weights: list[float] | None = option(
        None, "of the paths, in their order: how often each document is read, 0.5 for half of them", above=0
    )
    limits: list[int] | None = option(None, "of the paths, in their order: the most documents of each", least=1)
    fields: Any = option(
        None, "columns of a row that hold its conversation or its texts; null: as docs/data.md says", several=True
    )
    split: str = option("train", "of a saved dataset or a hub dataset")
    subset: str | None = option(None, "of a hub dataset; null: its default")
    held_out_share: float = option(0.05, "documents that no training and no datastore sees", least=0, below=1)
    max_documents: int | None = option(None, "the most documents to read; null: all", least=1)
    decontaminate: Any = option(
        None, "prompts of benchmarks; documents that share a run of 13 tokens are left out", several=True, path=True
    )

    @property
    def paths(self) -> list[str | None]:
        return self.path if isinstance(self.path, list) else [self.path]

    @property
    def prompt_paths(self) -> list[str]:
        given = self.decontaminate or []
        return given if isinstance(given, list) else [given]

    @property
    def name(self) -> str:
        return ", ".join(path or "the standard library" for path in self.paths)


@dataclass
class Artifacts:
    """What methods draft with; null: the best that fits, below checkpoints/ or as it comes with spectrain."""

    drafter: Any = option(None, "folder of a trained drafter, or several in a list", several=True, path=True)
    head: str | None = option(None, "folder of an acceptance head of +exp=specdecpp", path=True)
    datastore: str | None = option(None, "folder of data_prep.datastore", path=True)


@dataclass
class Configured(Artifacts):
    """One method with its options, and what it drafts with."""

    method: dict[str, Any] = group(dict)


@dataclass
class Built:
    """What a command writes into a folder of its own."""

    out: str | None = option(
        None, "folder; null: named by the hash of the options. The same command resumes", path=True
    )
    fresh: bool = option(False, "true: replace what an earlier command left there")


@dataclass
class Server:
    """An OpenAI-compatible server that works for the target."""

    base_url: str | None = option(
        None, "server: http://host:port, with or without /v1; the key is read from the variable OPENAI_API_KEY"
    )
    model: str | None = option(None, "server: the model's name there; null: the only one that it serves")
    concurrency: int = option(8, "server: requests at the same time", least=1)
    retries: int = option(5, "server: how often a request is repeated, after pauses that double", least=0)
    timeout_s: float = option(120.0, "server: seconds per request", above=0)


@dataclass
class Hardware:
    """Peaks of a machine, as the files of conf/hardware/ have them."""

    name: str = option("", "of the machine")
    flops_per_s: dict[str, float] | None = option(None, "by dtype (bf16, fp32); null: this CPU is measured")
    bytes_per_s: float | None = option(None, "of the memory", above=0)
    memory_bytes: float | None = option(None, "of one GPU", above=0)
    link_bytes_per_s: float | None = option(None, "of one GPU, to the others of its machine", above=0)
    network_bytes_per_s: float | None = option(None, "of one GPU, to other machines", above=0)
    training_share: float = option(1.0, "of the peaks, that kernels of a training reach", above=0, most=1)
    source: str | None = option(None, "where the numbers are from")


SEED = option(0, "prompt i draws from a generator seeded by (seed, i)", least=0, most=2**32 - 1)
