"""Other tools' own code beside `oneshot compress`: CPU seconds ÷ one dense pass over the same tokens, and peak memory.

    python benchmarks/peers.py RUNS.json --tokens TOKENS.pt

RUNS.json is a list of runs, each with `tool`, `method`, `source` (repository and commit, or package), `patched`,
`model`, `dense` (its folder), `environment` (such as PYTHONPATH) and `command`, whose first word is the Python of its
environment. A run ends its output with a line of JSON: `removed` (share of the stored parameters) and `versions`. Our
own runs name their `output` instead, whose report is read. Nothing of other tools is in this repository.

TOKENS.pt has the tokens `(sequences, length)` of the dense pass. The pass is one of float32 with the logits of all
tokens, before the first of adjacent runs with one environment and folder. Its process also measures the imports of
torch and transformers, and `ratio` leaves them out. The runs alternate; each makes a row of
`results/peers_seconds.jsonl`.
"""

import json
import tempfile
from pathlib import Path

import torch
from harness import Row, append_row, cpu_and_peak, parser, provenance, read_report

DENSE_PASS = """
import json, sys, time
import torch, transformers
from transformers import AutoModelForCausalLM
folder, tokens = sys.argv[1:]
imported = time.process_time()
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
with torch.inference_mode():
    token_ids = torch.load(tokens)
    model(token_ids[:1, :64], use_cache=False)
    seconds = 0.0
    for batch in token_ids.split(4):
        started = time.process_time()
        model(batch, use_cache=False)
        seconds += time.process_time() - started
print(json.dumps({"imports": imported, "pass": seconds}))
"""


def run(command: list[str], environment: dict[str, str]) -> tuple[str, float, int]:
    """Return the last line that a command printed, its CPU seconds and its peak resident bytes."""
    with tempfile.TemporaryFile("w+") as printed:
        cpu_seconds, peak_bytes = cpu_and_peak(command, environment, stdout=printed)
        printed.seek(0)
        lines = printed.read().splitlines()
    return lines[-1] if lines else "", cpu_seconds, peak_bytes


def measured(job: Row, dense: Row, token_ids: torch.Tensor) -> Row:
    """Return the row of one run beside a dense pass in the same environment."""
    last, cpu_seconds, peak_bytes = run(job["command"], job.get("environment", {}))
    if "output" in job:
        report = read_report(Path(job["output"]))
        result = {"removed": report["sparsity"]["reached"], "versions": provenance()["versions"]}
    else:
        result = json.loads(last)
    return provenance(
        **{name: job[name] for name in ("tool", "method", "source", "patched", "model")},
        num_tokens=token_ids.numel(),
        removed=result["removed"],
        tool_versions=result["versions"],
        dense_pass_seconds=dense["pass"],
        import_seconds=dense["imports"],
        cpu_seconds=cpu_seconds,
        peak_bytes=peak_bytes,
        ratio=(cpu_seconds - dense["imports"]) / dense["pass"],
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("runs", type=Path)
    options.add_argument("--tokens", type=Path, required=True)
    options.add_argument("--turns", type=int, default=2)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    token_ids = torch.load(arguments.tokens)
    jobs = json.loads(arguments.runs.read_text())
    place: tuple[str, ...] = ()
    for job in jobs * arguments.turns:
        environment = job.get("environment", {})
        if place != (place := (job["command"][0], job["dense"], *environment.values())):
            dense_pass = [job["command"][0], "-c", DENSE_PASS, job["dense"], str(arguments.tokens)]
            dense = json.loads(run(dense_pass, environment)[0])
        append_row("peers_seconds", measured(job, dense, token_ids))


if __name__ == "__main__":
    main()
