"""What the newest run of the quick start printed and measured, as the README and docs/quick-start.md tell it."""

import textwrap

from harness import Row, read_rows

from oneshot.report.words import duration

SHOWN = ("result", "parameters", "weight files", "same dtype", "time", "quality")  # lines of the end of a run
WIDTH = 100


def newest() -> Row:
    """Return the newest row of `benchmarks/first_run.py`."""
    return read_rows("first_run")[-1]


def first_run() -> str:
    """Return the README's part of the end of the run."""
    row = newest()
    text = f"--num-sequences {row['num_sequences']} --sequence-length {row['sequence_length']}"
    minutes = row["compression"]["cpu"] / 60
    opening = (
        f"A quick try (`{text}`, without `+self`) takes {minutes:.0f} CPU minutes. It ends with a rough check "
        "on few tokens:"
    )
    return "\n".join([opening, "", *_block(_end(row, ("parameters", "quality")))])


def quick_start_end() -> str:
    """Return the end of the run."""
    return "\n".join(_block(_end(newest(), SHOWN)))


def quick_start_answers() -> str:
    """Return what both models answered."""
    return "\n".join(_block([line for answer in newest()["answers"] for line in textwrap.wrap(answer, WIDTH)]))


def quick_start_comparison() -> str:
    """Return the table of what is in favour of the result and of the original."""
    row = newest()
    small, dense, check = row["measured"]["compressed"], row["measured"]["dense"], row["check"]
    [ratio] = (small["perplexity"][text] / dense["perplexity"][text] for text in dense["perplexity"])
    in_text = check["perplexity"]["compressed"] / check["perplexity"]["dense"]

    def share(name: str) -> float:
        return float(small[name] / dense[name])

    remedies = " ([choose the form](guides/form.md#when-to-use-it) has remedies)"
    lines = [
        ("parameters", f"{share('stored_parameters'):.3f} times", share("stored_parameters"), ""),
        ("operations per token", f"{share('flops_per_token'):.3f} times", share("flops_per_token"), ""),
        ("seconds of prefill", f"{share('prefill_seconds'):.2f} times", share("prefill_seconds"), ""),
        ("seconds of decoding", f"{share('decode_seconds'):.2f} times", share("decode_seconds"), remedies),
        ("perplexity on text like the calibration's", f"{in_text:.2f} times, on {check['tokens']} tokens", in_text, ""),
        ("perplexity on this project's README", f"{ratio:.2f} times", ratio, ""),
        (
            "bytes of the file",
            f"{share('file_bytes'):.2f} times: the input has about six bits for a weight, the result sixteen",
            share("file_bytes"),
            "; [quantise the result](llama-cpp.md)",
        ),
    ]
    rows = [f"| {name} | {shown} | {_winner(ratio, more)} |" for name, shown, ratio, more in lines]
    return "\n".join(["| compared with the original | the result | in favour of |", "|---|---|---|", *rows])


def _winner(ratio: float, more: str) -> str:
    if f"{ratio:.2f}" == "1.00":
        return "neither"
    return "the result" if ratio < 1 else f"the original{more}"


def quick_start_time() -> str:
    """Return how long the run took."""
    seconds = newest()["compression"]
    load = newest()["load"][1]
    busy = f", and {duration(seconds['clock'])} by the clock on two cores with a load of {load:.0f}" if load > 2 else ""
    return f"{duration(seconds['cpu'])} of CPU time here{busy}"


def seconds_of(name: str) -> str:
    """Return the CPU seconds of another command of the quick start."""
    return f"{newest()[name]['cpu']:.0f} s of CPU time"


def _end(row: Row, names: tuple[str, ...]) -> list[str]:
    """Return these lines of the end of the run as they were printed, with the lines that belong to them."""
    kept, is_kept = [], False
    for line in row["printed"].splitlines():
        if not line.startswith(" "):
            is_kept = line[:14].strip() in names
        if is_kept:
            kept.append(line)
    return kept


def _block(lines: list[str]) -> list[str]:
    return ["```", *lines, "```"]
