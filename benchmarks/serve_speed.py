"""Prefill and decoding in vLLM: the dense model, and results by the plugin and by vLLM's Transformers backend.

`serve_speed.py DENSE RESULT … --vllm-python .clients/vllm/bin/python` starts every model once in vLLM's environment.
Then all models take turns, round by round, and one row for each goes to `serve_speed.jsonl`: minima over the rounds.
"""

import argparse
import json
import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import ROOT, Row, append_row, parser, provenance
from speed import describe

from oneshot.report.card import REPORT_NAME

WORKER = Path(__file__).parent / "serve_worker.py"
NEW_TOKENS = 32


@dataclass(frozen=True)
class Server:
    """A model in a process of its own."""

    folder: Path
    implementation: str
    process: subprocess.Popen[str]
    about: Row

    def ask(self, batch: int, length: int) -> dict[str, float]:
        """Return the seconds of one round."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"batch": batch, "length": length, "new_tokens": NEW_TOKENS}) + "\n")
        self.process.stdin.flush()
        return _answer(self.process)


def _answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("A model ended; its messages are above.")
    return json.loads(line)


def start(stack: ExitStack, folder: Path, implementation: str, arguments: argparse.Namespace) -> Server:
    """Start a model, and wait until it is ready."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    longest = max(arguments.lengths) + NEW_TOKENS + 1
    sizes = ["--max-batch", str(max(arguments.batches)), "--max-length", str(longest)]
    command = [arguments.vllm_python, WORKER, folder, "--implementation", implementation, "--dtype", arguments.dtype]
    process = stack.enter_context(
        subprocess.Popen(
            [*command, "--mode", arguments.mode, *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment | {"OMP_NUM_THREADS": str(arguments.threads)},
        )
    )
    return Server(folder, implementation, process, _answer(process))


def quantised(folder: Path) -> str | None:
    """Return what linears of a result were rounded to in its run; None if they were not, or of another model."""
    report = folder / REPORT_NAME
    return json.loads(report.read_text())["config"].get("quantise") if report.exists() else None


def has_ranked_embedding(folder: Path) -> bool:
    """Return whether the embedding has ranks, which vLLM's Transformers backend cannot hold."""
    return bool(json.loads((folder / "config.json").read_text()).get("embedding"))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("dense", type=Path)
    options.add_argument("results", type=Path, nargs="+")
    options.add_argument("--vllm-python", type=Path, default=ROOT / ".clients" / "vllm" / "bin" / "python")
    options.add_argument("--implementations", choices=("vllm", "transformers"), nargs="+", default=["vllm"])
    options.add_argument("--place", choices=("cpu", "cuda"), default="cpu", help="where vLLM computes")
    options.add_argument("--device", help="name of the GPU")
    options.add_argument("--dtype", default="float32")
    options.add_argument("--mode", choices=("eager", "compiled"), default="eager")
    options.add_argument("--batches", type=int, nargs="+", default=(1, 16))
    options.add_argument("--lengths", type=int, nargs="+", default=(512,))
    options.add_argument("--rounds", type=int, default=3)
    arguments = options.parse_args()
    with ExitStack() as stack:
        dense = start(stack, arguments.dense, "vllm", arguments)
        servers = [
            dense,
            *(
                start(stack, folder, implementation, arguments)
                for folder in arguments.results
                for implementation in arguments.implementations
                if implementation == "vllm" or not has_ranked_embedding(folder)
            ),
        ]
        for batch in arguments.batches:
            for length in arguments.lengths:
                record(servers, batch, length, arguments)


def record(servers: list[Server], batch: int, length: int, arguments: argparse.Namespace) -> None:
    """Measure all models in turns, and add a row for every result; a first round warms up."""
    rounds = [[server.ask(batch, length) for server in servers] for _ in range(arguments.rounds + 1)][1:]
    least = [{kind: min(one[at][kind] for one in rounds) for kind in rounds[0][at]} for at in range(len(servers))]
    ratios = [[one[at]["prefill"] / one[0]["prefill"] for one in rounds] for at in range(len(servers))]
    dense, machine = least[0], {"device": arguments.device} if arguments.device else {}
    for server, own, by_round in list(zip(servers, least, ratios, strict=True))[1:]:
        case = {"place": arguments.place, "dtype": arguments.dtype, "mode": arguments.mode}
        row = {"model": arguments.dense.name} | describe(server.folder) | case
        row |= {"quantised": quantised(server.folder), "dense_quantised": quantised(arguments.dense)}
        row |= {"implementation": server.implementation, "batch": batch, "length": length, "new_tokens": NEW_TOKENS}
        row |= {f"{kind}_seconds": seconds for kind, seconds in own.items()}
        row |= {f"dense_{kind}_seconds": seconds for kind, seconds in dense.items()}
        row |= {f"{kind}_ratio": seconds / dense[kind] for kind, seconds in own.items()}
        row |= {"prefill_ratios_by_round": by_round}
        append_row("serve_speed", provenance(rounds=arguments.rounds, **server.about, **machine) | row)


if __name__ == "__main__":
    main()
