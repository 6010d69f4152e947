"""vLLM as a peer of `bench_embedded_engine.py`: samples what a line of JSON asks for, and answers with its seconds.

    python benchmarks/vllm_peer.py MODEL THREADS

A line has prompts and a number of new tokens. The answer has the seconds of wall time and of CPU time.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    model, threads = sys.argv[1:]
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, whose CPU time is measured
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": threads,
    }
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM prints its log
    import vllm  # late: the environment must be set

    engine: Any = vllm.LLM(
        model, max_model_len=1024, max_num_seqs=64, kv_cache_memory_bytes=2**30, generation_config="vllm"
    )
    for line in sys.stdin:
        prompts, new_tokens = json.loads(line)
        params = vllm.SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        wall, cpu = time.perf_counter(), time.process_time()
        engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]), file=answers, flush=True)


if __name__ == "__main__":
    main()
