"""Write the text of `--calibration builtin`: by an instruct model, on many subjects.

    python benchmarks/builtin_text.py MODEL oneshot/text/builtin.jsonl

MODEL is a folder of Qwen2.5-Coder-0.5B-Instruct (Apache-2.0; `real_models.py` fetches it). A row is a text and a kind.
Texts that repeat themselves are left out. What matters is that the text is broad, not that it is right: a correction
learns which inputs a model's neurons meet, and no facts.
"""

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PLACES = (
    *("the Danube", "Kyoto", "the Atacama desert", "Lagos", "the Great Barrier Reef", "Reykjavik", "the Silk Road"),
    *("the Sahara", "Buenos Aires", "the Himalayas", "Venice", "Lake Victoria"),
)
SCIENCE = (
    *("photosynthesis", "black holes", "the immune system", "plate tectonics", "bees and pollination", "vaccines"),
    *("the periodic table", "evolution", "semiconductors", "ocean currents", "DNA", "glaciers", "sleep", "volcanoes"),
)
HISTORY = (
    *("the printing press", "the Roman aqueducts", "the fall of Constantinople", "the steam engine", "the Inca roads"),
    *("the French Revolution", "the history of chess", "the Black Death", "the first aeroplanes", "the Olympic Games"),
)
PREMISES = (
    *(
        "a lighthouse keeper who finds a letter",
        "two sisters who inherit an old bakery",
        "a detective on a night train",
    ),
    *("a robot that learns to paint", "a boy who talks to crows", "a storm on the first day of school"),
    *("a chess game between strangers", "a village without clocks", "a violin that was lost in a war"),
    *("an astronaut's last evening on Mars", "a dog that saves a market", "a quarrel about a garden wall"),
    *("a ferry in the fog", "a grandmother's secret recipe", "a spy who wants to retire", "a map with a mistake"),
)
TASKS = (
    *("repair a bicycle tyre", "bake bread without yeast", "plan a week of meals", "remove ink from a shirt"),
    *("prepare for a job interview", "grow tomatoes on a balcony", "learn a language alone", "save money on heating"),
    *("train for a first marathon", "pack for a hiking trip", "paint a room", "choose a used car", "tie a bow tie"),
    *("write a letter of complaint", "calm a crying baby", "back up a computer", "clean a coffee machine"),
    *("set up a home network", "sharpen a kitchen knife", "organise a birthday party for children"),
)
PROGRAMS = (
    *("reads a CSV file and prints the mean of every column", "finds the shortest path in a graph"),
    *("implements a least-recently-used cache as a class", "parses command-line options and copies files"),
    *("merges overlapping intervals", "downloads a page and counts its links", "sorts a list by merge sort"),
    *("checks whether a string is a palindrome, with tests", "keeps a to-do list in SQLite"),
    *("trains a linear regression with NumPy", "simulates a bank account with exceptions", "plays tic-tac-toe"),
    *("validates e-mail addresses with a regular expression", "walks a binary tree in three orders"),
    *("measures the time of a function with a decorator", "serves JSON over HTTP", "solves a sudoku by backtracking"),
)
LANGUAGES = ("JavaScript", "C", "Java", "Rust", "Go", "SQL", "a shell script", "HTML and CSS")
SUMS = (
    *("a train that meets another train", "the price of a discount", "the area of a garden", "mixing two paints"),
    *("the interest of a savings account", "probabilities with dice", "a quadratic equation", "the speed of a river"),
    *("the mean and the median of marks", "fractions of a cake", "a geometric series", "prime numbers"),
)
PRODUCTS = (
    "a kettle",
    "running shoes",
    "a novel",
    "headphones",
    "a hotel by the sea",
    "a tent",
    "a restaurant",
    "a phone",
)
EVENTS = (
    *("a new bridge", "a local election", "a heat wave", "a football final", "a merger of two companies"),
    *("a discovery in medicine", "a strike of bus drivers", "a film festival", "a flood", "a rise of prices"),
)
OPINIONS = (
    *("working from home", "school uniforms", "public transport", "artificial intelligence at work", "zoos"),
    *("nuclear power", "social media and children", "museums without entrance fees"),
)
REQUESTS = {
    "encyclopedia": [
        *(f"Write an encyclopedia article about {one}." for one in (*PLACES, *SCIENCE, *HISTORY)),
        *(f"Explain {one} to a student, with examples." for one in SCIENCE),
    ],
    "story": [
        *(f"Write the first page of a novel about {one}." for one in PREMISES),
        *(f"Write a scene with much dialogue about {one}." for one in PREMISES),
    ],
    "how-to": [f"How do I {one}? Answer step by step." for one in TASKS],
    "dialogue": [
        f"Write a conversation between a customer and an adviser about how to {one}. Begin lines with names."
        for one in TASKS
    ],
    "code": [
        *(f"Write a documented Python program that {one}." for one in PROGRAMS),
        *(f"Write a small program in {language} and explain it." for language in LANGUAGES),
        *(f"Explain a bug in a Python function that {one}, and correct it." for one in PROGRAMS[:8]),
    ],
    "mathematics": [f"Pose a problem about {one} and solve it step by step." for one in SUMS],
    "web": [
        *(f"Write an honest review of {one} for a web shop." for one in PRODUCTS),
        *(f"Write a newspaper report about {one}." for one in EVENTS),
        *(f"Write a forum thread in which people argue about {one}." for one in OPINIONS),
        *(f"Write an essay for and against {one}." for one in OPINIONS),
        *(f"Write a business e-mail about {one}." for one in EVENTS),
    ],
    "technical": [
        *(f"Write a chapter of a reference manual about {one}." for one in (*LANGUAGES, "HTTP", "Git", "Unix pipes")),
        *(f"Write a section of a scientific paper about {one}." for one in SCIENCE),
    ],
}
NEW_TOKENS = 420
TOGETHER = 64
MOST_REPEATED = 0.15  # share of the runs of three words
MOST_FOREIGN = 0.03  # share of letters outside ASCII
FEWEST_WORDS = 60


def texts(model: Any, tokenizer: Any, *, together: int = TOGETHER, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield a text for every request, sampled from the model; the kinds take turns."""
    by_kind = ([(kind, request) for request in requests] for kind, requests in REQUESTS.items())
    turns = [one for several in itertools.zip_longest(*by_kind) for one in several if one is not None]
    tokenizer.padding_side = "left"
    torch.manual_seed(seed)
    for start in range(0, len(turns), together):
        batch = turns[start : start + together]
        chats = [[{"role": "user", "content": request}] for _, request in batch]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        ).to(model.device)
        sampling = {"do_sample": True, "temperature": 0.9, "top_p": 0.95, "top_k": 0}
        written = model.generate(**inputs, max_new_tokens=NEW_TOKENS, **sampling)
        answers = tokenizer.batch_decode(written[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for (kind, _), answer in zip(batch, answers, strict=True):
            if is_good(answer):
                yield {"kind": kind, "text": answer.strip()}


def is_good(text: str) -> bool:
    """Say whether a text is long enough, mostly ASCII, and does not repeat itself."""
    words = text.split()
    runs = Counter(itertools.pairwise(itertools.pairwise(words)))
    repeated = sum(count - 1 for count in runs.values())
    return (
        len(words) >= FEWEST_WORDS
        and repeated <= MOST_REPEATED * len(words)
        and sum(not letter.isascii() for letter in text) <= MOST_FOREIGN * len(text)
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("model", help="folder of safetensors")
    options.add_argument("output", type=Path)
    options.add_argument("--device", default="cpu")
    options.add_argument("--together", type=int, default=TOGETHER, help="texts at once (default %(default)s)")
    arguments = options.parse_args()
    write(arguments.model, arguments.output, arguments.device, arguments.together)


def write(folder: str, output: Path, device: str, together: int) -> None:
    """Write all texts as rows of a file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with output.open("w") as file:
        for row in texts(model, tokenizer, together=together):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
