"""What `/metrics` tells Prometheus: vLLM's names, which dashboards know, with the prefix spectrain."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from spectrain.decoding import Generation
from spectrain.serving.replies import accepted_by_position
from spectrain.serving.worker import Worker

TOKEN_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
REQUEST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


HISTOGRAMS = {
    "time_to_first_token_seconds": ("from request to first token", REQUEST_S),
    "inter_token_latency_seconds": ("between two steps of a request", TOKEN_S),
    "request_time_per_output_token_seconds": ("per token behind the first", TOKEN_S),
    "e2e_request_latency_seconds": ("from request to last token", REQUEST_S),
}
COUNTERS = {
    "request_success": "answers that have ended, those whose client left as abort",
    "prompt_tokens": "tokens of prompts",
    "prompt_tokens_cached": "tokens of prompts that were known from earlier ones",
    "generation_tokens": "tokens of answers",
    "spec_decode_num_drafts": "steps behind a first token",
    "spec_decode_num_draft_tokens": "drafted tokens",
    "spec_decode_num_accepted_tokens": "drafted tokens that were accepted",
    "spec_decode_num_draft_tokens_per_pos": "steps with a draft that reached this place",
    "spec_decode_num_accepted_tokens_per_pos": "accepted tokens by their place in the draft",
}
LABELS = {"request_success": ["finished_reason"]}


class Metrics:
    """Counts and times of all requests, by model and method. `waiting` counts those that no engine has yet."""

    def __init__(self, worker: Worker, model: str, waiting: Callable[[], int]) -> None:
        self.registry, self._model = CollectorRegistry(), model
        counts = {"running": lambda: worker.n_running, "waiting": lambda: worker.n_waiting + waiting()}
        for name, read in counts.items():
            gauge = Gauge(f"spectrain:num_requests_{name}", "requests now", ["model_name"], registry=self.registry)
            gauge.labels(model).set_function(read)
        self._known: dict[str, Histogram | Counter] = {}
        labels = ["model_name", "method"]
        for name, (meaning, buckets) in HISTOGRAMS.items():
            own = {"registry": self.registry, "buckets": buckets}
            self._known[name] = Histogram(f"spectrain:{name}", meaning, labels, **own)
        for name, meaning in COUNTERS.items():
            more = LABELS.get(name, ["position"] if name.endswith("per_pos") else [])
            self._known[name] = Counter(f"spectrain:{name}", meaning, labels + more, registry=self.registry)

    def observe(self, name: str, method: str, seconds: float) -> None:
        self._known[name].labels(self._model, method).observe(seconds)

    def aborted(self, method: str) -> None:
        """Count an answer that nobody waits for any more."""
        self._known["request_success"].labels(self._model, method, "abort").inc()

    def ended(
        self, method: str, reason: str, n_prompt: int, generation: Generation, to_first_s: float, all_s: float
    ) -> None:
        """Count an answer that has ended."""

        def add(name: str, count: int, *more: str) -> None:
            self._known[name].labels(self._model, method, *more).inc(count)

        add("request_success", 1, reason)
        add("prompt_tokens", n_prompt)
        add("prompt_tokens_cached", generation.cached_tokens)
        add("generation_tokens", len(generation.tokens))
        add("spec_decode_num_drafts", len(generation.drafted))
        add("spec_decode_num_draft_tokens", sum(generation.drafted))
        add("spec_decode_num_accepted_tokens", sum(generation.accepted))
        for position, count in enumerate(generation.steps_by_depth):
            add("spec_decode_num_draft_tokens_per_pos", count, str(position))
        for position, count in enumerate(accepted_by_position(generation)):
            add("spec_decode_num_accepted_tokens_per_pos", count, str(position))
        self.observe("e2e_request_latency_seconds", method, all_s)
        if len(generation.tokens) > 1:
            per_token_s = (all_s - to_first_s) / (len(generation.tokens) - 1)
            self.observe("request_time_per_output_token_seconds", method, per_token_s)

    def text(self) -> bytes:
        return generate_latest(self.registry)
