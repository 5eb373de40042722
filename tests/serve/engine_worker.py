"""An engine in a process of its own: reads a job, writes what came of it. For what cannot share a process with others.

engine_worker.py JOB.json OUT.json, where a job has: folder, options of the engine, prompts, new.
"""

import json
import sys
from pathlib import Path


def main(job_path: str, out_path: str) -> None:
    import vllm
    from served import bytes_per_token, counters, free_pages, greedy, scheduler, start

    job = json.loads(Path(job_path).read_text())
    engine = start(job["folder"], **job["options"])
    answers, found = greedy(engine, job["prompts"], job["new"])
    result = {
        "vllm": vllm.__version__,
        "answers": answers,
        "found": found,
        "counters": {k: v for k, v in counters(engine).items() if isinstance(v, int | float)},
        "bytes_per_token": bytes_per_token(engine),
        "pages_held": scheduler(engine).kv_cache_config.num_blocks - 1 - free_pages(engine),
    }
    Path(out_path).write_text(json.dumps(result))


if __name__ == "__main__":  # vLLM starts workers that import this file again
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    main(*sys.argv[1:])
