"""Runs in the engine's own Python: starts vLLM and generates, as lines of JSON on stdin ask, one answer per line.

vLLM finds our code as it does for any user. tests/engines/engine.py is the other end.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback

OPTIONS = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
OPTIONS |= {"disable_log_stats": False, "kv_cache_memory_bytes": 32 << 20}
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_position",
}


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """Fill `output` itself. vLLM 0.32.0 fills a copy of it where it is not int64, so temperatures stay unset."""
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = values.where(values != replace_from, values.new_tensor(replace_to))
    output.copy_(values.repeat_interleave(counts.to(values.device)))


class Driver:
    """One LLM at a time, and what is asked of it."""

    def __init__(self) -> None:
        self.llm = None
        self.requests = 0

    def load(self, model: str, speculative: dict | None = None, repaired: bool = True, **options) -> str:
        """Start an LLM in place of the last, and return vLLM's version.

        `repaired`: a function of vLLM is replaced, without which samples of the build 0.32.0 for CPUs are wrong.
        """
        import vllm
        from vllm.utils import cpu_triton_utils

        self.stop()
        own = getattr(cpu_triton_utils, "_own_expand", cpu_triton_utils._expand_kernel_impl)
        cpu_triton_utils._own_expand, cpu_triton_utils._expand_kernel_impl = own, expand if repaired else own
        self.llm = vllm.LLM(model, speculative_config=speculative, **{**OPTIONS, **options})
        return vllm.__version__

    def stop(self) -> None:
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            gc.collect()

    def generate(self, prompts: list[list[int]], max_tokens: list[int], together: bool, abort: dict, **sampling):
        """Generate for prompts at once, or one by one. `abort`: number of a prompt -> tokens; then it is cancelled."""
        before, tokens = self.counters(), []
        for group in [list(range(len(prompts)))] if together else [[i] for i in range(len(prompts))]:
            tokens += self._run([(prompts[i], max_tokens[i], abort.get(str(i))) for i in group], sampling)
        return {"tokens": tokens, **difference(self.counters(), before)}

    def _run(self, asked: list[tuple], sampling: dict) -> list[list[int]]:
        from vllm import SamplingParams

        engine, tokens, limits = self.llm.llm_engine, {}, {}
        for prompt, n_tokens, limit in asked:
            params = SamplingParams(max_tokens=n_tokens, detokenize=False, **sampling)
            name, self.requests = str(self.requests), self.requests + 1
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            tokens[name], limits[name] = [], limit
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            for name in [name for name, limit in limits.items() if limit and len(tokens[name]) >= limit]:
                engine.abort_request([name])
                del limits[name]
        return list(tokens.values())

    def states(self, prompt: list[int]) -> dict:
        """Return where the hidden states of a prompt are, once its connector has written them."""
        from vllm import SamplingParams

        engine, self.requests, found = self.llm.llm_engine, self.requests + 1, []
        engine.add_request(str(self.requests), {"prompt_token_ids": prompt}, SamplingParams(max_tokens=1))
        while not found:
            found = [output.kv_transfer_params for output in engine.step() if output.finished]
        engine.step()  # the connector works one step later
        return found[0]

    def lookup(self, folder: str) -> None:
        """Replace the proposer by a new one for another folder, as the worker makes it at its start."""
        from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

        os.environ["SPECTRAIN_LOOKUP"] = folder
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        runner.drafter = create_custom_proposer(runner.vllm_config)

    def proposed(self) -> list[dict]:
        """Return the calls that the recording proposer kept, and forget them."""
        calls = sys.modules["recording"].CALLS
        found, calls[:] = list(calls), []
        return found

    def record(self) -> None:
        """Keep what the proposer drafts from now on, of one text after the other; see `drafted`."""
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        propose, self.drafts = runner.drafter.propose, []

        def recorded(*args, **options):
            drafts = propose(*args, **options)
            self.drafts += drafts.tolist()
            return drafts

        runner.drafter.propose = recorded

    def drafted(self) -> list[list[int]]:
        """The drafts since the last call, in their order."""
        found, self.drafts[:] = list(self.drafts), []
        return found

    def samples_are_right(self) -> bool:
        from spectrain.exports.vllm_versions import samples_are_right

        return samples_are_right()

    def counters(self) -> dict:
        found = dict.fromkeys(COUNTERS.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in COUNTERS:
                found[COUNTERS[metric.name]] = getattr(metric, "values", None) or metric.value
        return found


def difference(now: dict, before: dict) -> dict:
    both = {name: (now[name], before[name]) for name in now}
    return {
        name: [a - b for a, b in zip(new, old or [0] * len(new), strict=True)] if isinstance(new, list) else new - old
        for name, (new, old) in both.items()
    }


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to the log
    driver = Driver()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(driver, name)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
    driver.stop()


if __name__ == "__main__":  # vLLM starts this file again to look at a model class
    main()
