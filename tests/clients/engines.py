"""Shared by fixtures and tests: the command line, transformers' answers, and llama-perplexity's measure by it."""

import math
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from factories import topics

from oneshot.evaluation.models import cached, load_model
from oneshot.text import load_tokenizer

NUM_PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 10, 24, 32
BY_LAYER: dict[str, Any] = {"embedding": "none", "sparsity": 0.2, "round_to": 8}
# vLLM needs heads of at least 32 values
SIZES: dict[str, Any] = {"hidden": 128, "width": 192, "heads": 4, "groups": 2, "layers": 4}
CONTEXT = 128  # tokens of a chunk of llama-perplexity, of which the second half is scored

# options of vLLM for two processes: of tensors, and of stages. On a CPU vLLM makes the buffers of a stage only when it
# warms up, which it leaves out if it traces nothing
SHARED_TENSORS: dict[str, Any] = {"tensor_parallel_size": 2}
SHARED_LAYERS: dict[str, Any] = {"pipeline_parallel_size": 2, "enforce_eager": False}
SHARED_LAYERS |= {"compilation_config": {"mode": 2, "backend": "eager"}}

Answer = dict[str, Any]  # `scores`: log-probabilities of tokens, `tokens`: a greedy continuation


def run_oneshot(*arguments: str | Path) -> None:
    """Run the command line, as users do."""
    subprocess.run([sys.executable, "-m", "oneshot", *map(str, arguments), "--quiet"], check=True, capture_output=True)


def half_chunk_perplexity(model: Any, token_ids: list[int], chunks: int) -> float:
    """Return the perplexity that llama-perplexity measures, by transformers."""
    losses = []
    with torch.inference_mode():
        for chunk in torch.tensor(token_ids[: chunks * CONTEXT]).view(chunks, CONTEXT).split(1):
            logits = model(chunk, use_cache=False).logits[0, CONTEXT // 2 : CONTEXT - 1]
            losses.append(torch.nn.functional.cross_entropy(logits, chunk[0, CONTEXT // 2 + 1 :]))
    return math.exp(float(torch.stack(losses).double().mean()))


class Expected:
    """What transformers answers to the prompts, by this package's own class."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source = source
        self.model = load_model(folder, device=torch.device("cpu"), dtype=torch.float32)
        self.text = topics(20, 40)
        # transformers gives every Qwen2 its tokenizer, so the input's is asked
        self.token_ids = load_tokenizer(source)(self.text, verbose=False).input_ids
        length = len(self.token_ids) // NUM_PROMPTS
        self.prompts = [self.token_ids[at * length : at * length + PROMPT_TOKENS] for at in range(NUM_PROMPTS)]
        with torch.inference_mode():
            self.answers = [self._answer(torch.tensor([prompt])) for prompt in self.prompts]

    def _answer(self, prompt: torch.Tensor) -> Answer:
        whole, step, cache = prompt, prompt, dict[str, Any]()
        for _ in range(NEW_TOKENS):  # `generate` would stop at the end token or never take it
            output = self.model(step, **cache, use_cache=True)
            step, cache = output.logits[:, -1:].argmax(-1), cached(output)
            whole = torch.cat((whole, step), dim=1)
        scores = self.model(whole).logits.log_softmax(-1)[0, :-1].gather(1, whole[0, 1:, None])[:, 0].tolist()
        return {"scores": scores, "tokens": whole[0, PROMPT_TOKENS:].tolist()}

    def agrees_with_vllm(self, answers: list[Answer]) -> None:
        for ours, theirs in zip(self.answers, answers, strict=True):
            assert theirs["tokens"] == ours["tokens"]
            assert theirs["scores"] == pytest.approx(ours["scores"][: PROMPT_TOKENS - 1], abs=1e-3)
        engine, transformers = self.perplexities(answers)
        assert engine == pytest.approx(transformers, rel=1e-3)

    def staggered(self) -> tuple[list[list[int]], list[int]]:
        """Return prompts of unequal lengths, and unequal numbers of tokens to write: all begin and end at other steps.

        They are the prompts with the first tokens of their answers, so the answers are the next ones.
        """
        numbers = range(NUM_PROMPTS)
        prompts = [self.prompts[at] + self.answers[at]["tokens"][: at % 4] for at in numbers]
        return prompts, [3 + 5 * at % 17 for at in numbers]

    def agrees_when_staggered(self, answers: list[Answer]) -> None:
        for at, (theirs, limit) in enumerate(zip(answers, self.staggered()[1], strict=True)):
            ours, known = self.answers[at], at % 4
            assert theirs["tokens"] == ours["tokens"][known : known + limit]
            assert theirs["scores"] == pytest.approx(ours["scores"][: PROMPT_TOKENS - 1 + known], abs=1e-3)

    def perplexities(self, answers: list[Answer]) -> tuple[float, float]:
        """Return the perplexity of the prompts by an engine and by transformers."""
        theirs = [score for answer in answers for score in answer["scores"]]
        ours = [score for answer in self.answers for score in answer["scores"][: PROMPT_TOKENS - 1]]
        return math.exp(-mean(theirs)), math.exp(-mean(ours))

    def agrees_with_llama(self, answers: list[Answer]) -> int:
        """Return the number of answers with comparable scores.

        llama-server stops at the end token. It gives no score of a token whose bytes are not yet a letter: what is
        before the first of them is compared.
        """
        end, compared = self.model.config.eos_token_id, 0
        for ours, theirs in zip(self.answers, answers, strict=True):
            tokens = [*ours["tokens"], end][: [*ours["tokens"], end].index(end)]
            assert [token for token in theirs["tokens"] if token != end] == tokens
            same = [one == other for one, other in zip(theirs["tokens"], theirs["scored"], strict=False)]
            count = [*same, False].index(False)
            scores = ours["scores"][PROMPT_TOKENS - 1 :][:count]
            assert theirs["scores"][:count] == pytest.approx(scores, abs=1e-2)
            compared += count > 0
        return compared
