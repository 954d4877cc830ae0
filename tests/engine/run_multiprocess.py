"""Runs `identity` with the engine in processes of its own and writes what it gave.

Called by test_identity.py: `run_multiprocess.py MODEL OUT`.
Process: api
"""

import json
import multiprocessing
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the plain case of test_identity and write tokens and counters as JSON."""
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    from test_identity import VALUES, plain_jobs
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_kvpolicy.metrics import CounterFile

    jobs = plain_jobs()
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=16,
        block_size=32,
        enforce_eager=True,
        kv_cache_memory_bytes=64 * 2**20,
        num_gpu_blocks_override=400,
        additional_config={"kv_policy": {"policy": "identity", **VALUES}},
    )
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=job.prompt) for job in jobs],
        [
            SamplingParams(temperature=0, max_tokens=job.max_tokens, ignore_eos=True)
            for job in jobs
        ],
        use_tqdm=False,
    )
    instance_id = llm.llm_engine.vllm_config.instance_id
    found = {
        "tokens": {
            job.name: list(output.outputs[0].token_ids)
            for job, output in zip(jobs, outputs, strict=True)
        },
        "events": CounterFile(instance_id, create=False).read()["events"],
        "processes": 1 + len(multiprocessing.active_children()),
    }
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
