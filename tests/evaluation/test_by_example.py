"""Encoders and encoder–decoders on examples: against stock classes, one example at a time, and NumPy."""

import gc
import json
import string
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import edit_config
from factories import build_model, topics
from scipy.special import log_softmax, rel_entr

from oneshot.checkpoint.pooling import write_pooling
from oneshot.cli.evaluate import main
from oneshot.config import Config
from oneshot.errors import ConfigError, OneshotError
from oneshot.evaluation import Evaluation, evaluate, kind_of
from oneshot.evaluation import by_example as by_example_module
from oneshot.evaluation.answers import LONGEST_ANSWER, Answers, best_span, normalised, token_f1
from oneshot.evaluation.examples import Inputs, Reading
from oneshot.evaluation.generation import Generation, TargetPrediction
from oneshot.evaluation.masked_tokens import MaskedTokens
from oneshot.pipeline import compress
from oneshot.text import load_tokenizer

pytestmark = pytest.mark.long

Rows = list[dict[str, Any]]
Write = Callable[[Rows], str]
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
TEXTS = [piece.strip() for piece in topics(0, 3).split("\n\n") if piece.strip()][:12]
ROUNDING = 1e-5


def save_encoder_tokenizer(folder: Path) -> None:
    """Save a byte-level BPE of 400 tokens with BERT's special tokens and pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([topics(0, 20)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = dict(zip(("pad_token", "cls_token", "sep_token", "mask_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    """`save(model)` -> a complete checkpoint folder."""

    def to_folder(model: Any) -> Path:
        folder = tmp_path_factory.mktemp("checkpoint") / model.config.model_type
        model.save_pretrained(folder)
        save_encoder_tokenizer(folder)
        return folder

    return to_folder


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(rows)` -> the path of a file of JSON lines."""

    def to_file(rows: Rows) -> str:
        path = tmp_path / f"rows{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return to_file


def two_models(save: Callable[[Any], Path], family: str, name: str, **options: Any) -> list[Path]:
    """Return a model that differs a little from a dense one, and the dense one."""
    models = [build_model(family, model_class=name, **options) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    return [save(model) for model in models]


def measures(folders: list[Path], source: str, **options: Any) -> list[dict[str, float]]:
    """Return the numbers of a model and of its baseline on one source."""
    results = evaluate([str(folders[0])], [source], baseline=str(folders[1]), **OPTIONS | options)
    return [numbers_of(result, source) for result in results]


def numbers_of(result: Evaluation, source: str) -> dict[str, float]:
    assert result.measures is not None
    return result.measures[source]


def stock(folders: list[Path], auto: str) -> list[Any]:
    import transformers

    return [getattr(transformers, auto).from_pretrained(folder).eval() for folder in folders]


def ask(model: Any, tokenizer: Any, *texts: str | None, **more: Any) -> Any:
    """Return the output of a stock model for one text or one pair, alone and without padding."""
    with_types = model.config.model_type == "bert"
    with torch.no_grad():
        return model(
            **tokenizer(
                *texts,
                return_tensors="pt",
                truncation=True,
                max_length=getattr(model.config, "max_position_embeddings", None),
                return_token_type_ids=with_types,
            ),
            **more,
        )


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(("family", "name"), [("bert", "Bert"), ("distilbert", "DistilBert")])
def test_classification(family: str, name: str, batch_size: int, save: Callable[[Any], Path], write: Write) -> None:
    """Padding, and cutting at 64 positions, change nothing; labels may be names."""
    folders = two_models(save, family, f"{name}ForSequenceClassification", num_labels=3)
    rows: Rows = [{"text": text, "label": place % 3} for place, text in enumerate(TEXTS)]
    for row in rows[:6]:
        row["text_pair"] = row["text"][::-1][:40]
    rows[0]["label"] = "LABEL_2"
    (got, dense) = measures(folders, write(rows), batch_size=batch_size)
    tokenizer = load_tokenizer(folders[0])
    p, q = (
        log_softmax(
            np.concatenate([ask(model, tokenizer, row["text"], row.get("text_pair")).logits for row in rows]).astype(
                np.float64
            ),
            axis=-1,
        )
        for model in stock(folders, "AutoModelForSequenceClassification")
    )
    labels = [2, *(row["label"] for row in rows[1:])]
    assert got["accuracy"] == pytest.approx(np.mean(p.argmax(-1) == labels))
    assert dense == {"accuracy": pytest.approx(np.mean(q.argmax(-1) == labels))}
    assert got["agreement"] == pytest.approx(np.mean(p.argmax(-1) == q.argmax(-1)))
    assert got["KL divergence"] == pytest.approx(rel_entr(np.exp(q), np.exp(p)).sum(-1).mean(), rel=1e-3)
    assert got["KL divergence"] > 1e-5


@pytest.mark.parametrize("padding", [None, -1, 7])
@pytest.mark.parametrize(("family", "options"), [("llama", {}), ("qwen3", {"head_dim": 8}), ("opt", {})])
def test_a_decoder_classifies_with_and_without_a_padding_token(
    family: str, options: dict[str, Any], padding: int | None, save: Callable[[Any], Path], write: Write
) -> None:
    """transformers' decoders find the last token by it, and refuse batches without it. No token is −1."""
    folders = two_models(save, family, "AutoModelForSequenceClassification", num_labels=3, **options)
    for folder in folders:
        edit_config(folder, pad_token_id=padding)
    rows: Rows = [{"text": text, "label": place % 3} for place, text in enumerate(TEXTS)]
    source = write(rows)
    one, several = (measures(folders, source, batch_size=size) for size in (1, 5))
    assert several == [pytest.approx(numbers) for numbers in one]
    tokenizer = load_tokenizer(folders[0])
    [model, _] = stock(folders, "AutoModelForSequenceClassification")
    best = [int(ask(model, tokenizer, row["text"]).logits.argmax()) for row in rows]
    assert one[0]["accuracy"] == pytest.approx(np.mean([a == row["label"] for a, row in zip(best, rows, strict=True)]))


@pytest.mark.parametrize("batch_size", [1, 5])
def test_masked_tokens(batch_size: int, save: Callable[[Any], Path], write: Write) -> None:
    """Against transformers' own loss, one piece at a time; long texts give several pieces."""
    folders = two_models(save, "bert", "BertForMaskedLM", tied=True)
    source = write([{"text": text} for text in TEXTS])
    got, dense = measures(folders, source, batch_size=batch_size)
    tokenizer = load_tokenizer(folders[0])
    examples = MaskedTokens.read(source, Reading(tokenizer, 64, None, {}, Path()))
    whole = tokenizer(TEXTS, truncation=True, max_length=64, return_overflowing_tokens=True)["input_ids"]
    assert len(whole) > len(TEXTS)
    sums, best = np.zeros(2), [[], []]  # type: ignore[var-annotated]
    count = 0
    for original, masked in zip(whole, examples.inputs.token_ids, strict=True):
        changed = [place for place, (a, b) in enumerate(zip(original, masked, strict=True)) if a != b]
        assert changed, "every piece has a masked token"
        assert all(masked[place] == tokenizer.mask_token_id for place in changed)
        assert not {original[place] for place in changed} & set(tokenizer.all_special_ids)
        ordinary = [token for token in original if token not in tokenizer.all_special_ids]
        assert len(changed) == max(1, round(0.15 * len(ordinary)))
        labels = torch.full((1, len(original)), -100)
        labels[0, changed] = torch.tensor(original)[changed]
        count += len(changed)
        for number, model in enumerate(stock(folders, "AutoModelForMaskedLM")):
            with torch.no_grad():
                output = model(input_ids=torch.tensor([masked]), labels=labels)
            sums[number] += float(output.loss) * len(changed)
            best[number] += output.logits[0, changed].argmax(-1).tolist()
    wanted = [original[place] for original, places in zip(whole, examples.masked, strict=True) for place in places]
    assert got["masked tokens"] == dense["masked tokens"] == count
    assert [got["loss"], dense["loss"]] == pytest.approx(sums / count, rel=1e-4)
    assert got["accuracy"] == pytest.approx(np.mean(np.equal(best[0], wanted)))
    assert got["agreement"] == pytest.approx(np.mean(np.equal(best[0], best[1])))
    assert 0 < got["agreement"] < 1


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(
    ("family", "name", "pooling"),
    [
        ("bert", "BertModel", None),
        ("distilbert", "DistilBertModel", "mean"),
        ("bert", "BertModel", "cls"),
        ("qwen3", "Qwen3Model", "lasttoken"),
    ],
)
def test_retrieval(
    family: str, name: str, pooling: str | None, batch_size: int, save: Callable[[Any], Path], write: Write
) -> None:
    """Two questions share a passage: either one's passage is right for both. States are pooled as the files say."""
    folders = two_models(save, family, name)
    if pooling is not None:
        write_pooling(folders[0], pooling, 32)
    rows = [{"question": text[:30], "passage": text} for text in TEXTS]
    rows.append({"question": "And what else is there?", "passage": TEXTS[3]})
    got, dense = measures(folders, write(rows), batch_size=batch_size)
    tokenizer = load_tokenizer(folders[0])

    def embeddings(model: Any, column: str) -> Any:
        states = [ask(model, tokenizer, row[column]).last_hidden_state[0].double().numpy() for row in rows]
        pooled = [{"cls": one[0], "lasttoken": one[-1]}.get(str(pooling), one.mean(0)) for one in states]
        return np.stack([one / np.linalg.norm(one) for one in pooled])

    questions, passages = (
        [embeddings(model, column) for model in stock(folders, "AutoModel")] for column in ("question", "passage")
    )
    found = [(q @ p.T).argmax(-1) for q, p in zip(questions, passages, strict=True)]
    texts = [row["passage"] for row in rows]
    right = [[texts[place] == text for place, text in zip(places, texts, strict=True)] for places in found]
    assert [got["retrieval"], dense["retrieval"]] == pytest.approx([np.mean(hits) for hits in right])
    assert got["agreement"] == pytest.approx(np.mean([texts[a] == texts[b] for a, b in zip(*found, strict=True)]))
    nearest = [[np.delete(q @ one, place).argmax() for place, one in enumerate(q)] for q in questions]
    assert got["neighbours"] == pytest.approx(np.mean(np.equal(*nearest)))
    distinct = [texts.index(text) for text in dict.fromkeys(texts)]
    cosines = np.concatenate([(questions[0] * questions[1]).sum(-1), (passages[0] * passages[1]).sum(-1)[distinct]])
    assert got["cosine"] == pytest.approx(cosines.mean(), abs=ROUNDING)
    assert dense.keys() == {"retrieval"}
    assert got["cosine"] < 0.9999


def tiny_t5(*, gated: bool, tied: bool, seed: int = 0) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    config = T5Config(
        vocab_size=400,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu" if gated else "relu",
        tie_word_embeddings=tied,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        initializer_factor=1.0,
    )
    model: Any = T5ForConditionalGeneration(config).eval()
    return model


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize(("gated", "tied"), [(False, True), (True, False)])
def test_text_to_text(gated: bool, tied: bool, batch_size: int, save: Callable[[Any], Path], write: Write) -> None:
    """Loss of transformers, and generation without a cache, one example at a time."""
    models = [tiny_t5(gated=gated, tied=tied) for _ in range(2)]
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    folders = [save(model) for model in models]
    rows = [{"text": text[:60], "target": text[60:75] or text[:3]} for text in TEXTS[:6]]
    source = write(rows)
    got, dense = measures(folders, source, batch_size=batch_size)
    tokenizer = load_tokenizer(folders[0])
    targets = [tokenizer(row["target"])["input_ids"] for row in rows]
    longest = max(map(len, targets)) + 1
    losses, best, written = np.zeros(2), [[], []], [[], []]  # type: ignore[var-annotated]
    for row, target in zip(rows, targets, strict=True):
        ids = tokenizer(row["text"], return_tensors="pt").input_ids
        for number, model in enumerate(models):
            with torch.no_grad():
                output = model(input_ids=ids, labels=torch.tensor([target]))
                plain = model.generate(ids, max_new_tokens=longest, use_cache=False, do_sample=False)
            losses[number] += float(output.loss) * len(target)
            best[number] += output.logits[0].argmax(-1).tolist()
            written[number].append([token for token in plain[0].tolist() if token not in (0, 2)])
    tokens = [token for target in targets for token in target]
    assert [got["loss"], dense["loss"]] == pytest.approx(losses / len(tokens), rel=1e-4)
    assert got["token accuracy"] == pytest.approx(np.mean(np.equal(best[0], tokens)))
    assert got["token agreement"] == pytest.approx(np.mean(np.equal(best[0], best[1])))
    same = np.mean([one == other for one, other in zip(*written, strict=True)])
    assert got["agreement"] == pytest.approx(same)
    examples = Generation.read(source, Reading(tokenizer, 512, None, models[0].config.to_dict(), folders[0]))
    with torch.inference_mode():
        assert examples.predict(models[0], batch_size).written == written[0]


def test_exact_match_ignores_start_end_and_padding(write: Write, save: Callable[[Any], Path]) -> None:
    model = tiny_t5(gated=False, tied=True)
    tokenizer = load_tokenizer(save(model))
    source = write([{"text": "a", "target": "yes"}, {"text": "b", "target": "no"}])
    examples = Generation.read(source, Reading(tokenizer, 512, None, model.config.to_dict(), Path()))
    right = [[token for token in target if token not in (0, 2)] for target in examples.targets]
    tokens = torch.tensor([token for target in examples.targets for token in target])
    prediction = TargetPrediction(torch.ones(len(tokens)), tokens, [right[0], [*right[1], 77]])
    assert examples.numbers(prediction, None) == {"loss": 1.0, "token accuracy": 1.0, "exact match": 0.5}


def test_question_answering(save: Callable[[Any], Path], write: Write) -> None:
    """Against a search of all spans of all windows; the long contexts need several windows."""
    folders = two_models(save, "bert", "BertForQuestionAnswering")
    rows: Rows = [
        {"context": text, "question": "What is it?", "answers": {"text": [text[5:20]], "answer_start": [5]}}
        for text in TEXTS
    ]
    rows[1]["answers"] = [TEXTS[1][:8], TEXTS[1][2:9]]
    rows[2]["answers"] = "one text"
    source = write(rows)
    got, dense = measures(folders, source, batch_size=1)
    again, _ = measures(folders, source, batch_size=5)
    assert got == pytest.approx(again)
    tokenizer = load_tokenizer(folders[0])
    found: list[list[str]] = [[], []]
    windows = 0
    for row in rows:
        encoded = tokenizer(
            row["question"],
            row["context"],
            truncation="only_second",
            max_length=64,
            stride=(64 - len(tokenizer(row["question"], " ")["input_ids"])) // 2,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            return_token_type_ids=True,
        )
        windows += len(encoded["input_ids"])
        for number, model in enumerate(stock(folders, "AutoModelForQuestionAnswering")):
            scored = []
            for window, ids in enumerate(encoded["input_ids"]):
                with torch.no_grad():
                    types = torch.tensor([encoded["token_type_ids"][window]])
                    output = model(input_ids=torch.tensor([ids]), token_type_ids=types)
                parts = encoded.sequence_ids(window)
                for first in range(len(ids)):
                    for last in range(first, min(len(ids), first + LONGEST_ANSWER)):
                        if parts[first] == parts[last] == 1:
                            score = float(output.start_logits[0, first]) + float(output.end_logits[0, last])
                            start, end = (
                                encoded["offset_mapping"][window][first],
                                encoded["offset_mapping"][window][last],
                            )
                            scored.append((score, row["context"][start[0] : end[1]]))
            found[number].append(max(scored, key=lambda pair: pair[0])[1])
    assert windows > len(rows)
    with torch.inference_mode():
        examples = Answers.read(source, Reading(tokenizer, 64, None, {}, Path()))
        assert examples.predict(stock(folders[:1], "AutoModelForQuestionAnswering")[0], 5) == found[0]
    assert got["agreement"] == pytest.approx(np.mean([one == other for one, other in zip(*found, strict=True)]))
    assert examples.numbers(found[1], None) == pytest.approx(dense)


def test_further_modules_are_told(save: Callable[[Any], Path], write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """They follow the pooling, which is the stated one."""
    folders = two_models(save, "bert", "BertModel")
    source = write([{"question": text[:30], "passage": text} for text in TEXTS])
    write_pooling(folders[0], "cls", 32)
    expected = measures(folders, source)
    path = folders[0] / "modules.json"
    dense = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
    path.write_text(json.dumps([*json.loads(path.read_text()), dense]))
    assert measures(folders, source) == expected
    assert "oneshot does not apply the module Dense of" in caplog.text


def test_other_poolings_are_told(save: Callable[[Any], Path], write: Write, caplog: pytest.LogCaptureFixture) -> None:
    folders = two_models(save, "bert", "BertModel")
    source = write([{"question": text[:30], "passage": text} for text in TEXTS])
    expected = measures(folders, source)
    write_pooling(folders[0], "cls", 32)
    (folders[0] / "1_Pooling" / "config.json").write_text('{"pooling_mode": "max"}')
    assert measures(folders, source) == expected
    assert "The embeddings are means over tokens, because" in caplog.text
    assert "states max; only mean, cls, lasttoken are known here." in caplog.text


@pytest.mark.parametrize(("family", "name"), [("roberta", "Roberta"), ("camembert", "Camembert")])
def test_texts_are_cut_to_the_rows_of_positions_that_tokens_have(
    family: str, name: str, save: Callable[[Any], Path], write: Write
) -> None:
    """The config of RoBERTa's kind states two rows more, which padding has; the tokenizer here has no limit."""
    folder = save(build_model(family, model_class=f"{name}ForSequenceClassification", groups=4))
    source = write([{"text": topics(0, 3), "label": 1}])
    found, cut = (evaluate([str(folder)], [source], sequence_length=most, **OPTIONS)[0] for most in (1024, 62))
    assert found.texts[source].tokens == 62
    assert found == cut


def test_squad_scores() -> None:
    """Cases by hand, with the normalisation of the official script."""
    assert normalised(f"The  Cat, {string.punctuation}") == "cat"
    assert token_f1("the big red cat", "a red cat!") == pytest.approx(2 * (2 / 3) * 1 / (2 / 3 + 1))
    assert token_f1("dog", "cat") == 0
    examples = Answers(Inputs([], []), [], [], ["", ""], [["The cat.", "red cat"], ["dog"]])
    numbers = examples.numbers(["cat", "the hot dog"], dense=["cat", "dog"])
    assert numbers == {"exact match": 0.5, "F1": pytest.approx((1 + 2 * 0.5 / 1.5) / 2), "agreement": 0.5}


def test_a_span_is_short_and_inside_the_context() -> None:
    starts, ends = torch.zeros(50), torch.zeros(50)
    starts[0], ends[49] = 9.0, 9.0  # too far apart, and the first token is not of the context
    starts[5], ends[3] = 5.0, 5.0  # ends before it starts
    starts[7], ends[8] = 2.0, 2.0
    score, first, last = best_span(starts, ends, [False, *[True] * 39])
    assert (score, first, last) == (5.0 + 2.0, 5, 8)


def test_one_model_is_in_memory_at_a_time(
    save: Callable[[Any], Path], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = two_models(save, "bert", "BertModel")
    source = write([{"question": text[:20], "passage": text} for text in TEXTS[:3]])
    alive: list[weakref.ref[Any]] = []
    original = by_example_module.load_as

    def load(kind: Any, folder: Path, *rest: Any) -> Any:
        gc.collect()
        assert not any(reference() is not None for reference in alive)
        model = original(kind, folder, *rest)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(by_example_module, "load_as", load)
    measures(folders, source)
    assert len(alive) == 2


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM", "BertForSequenceClassification"])
def test_a_result_in_the_per_layer_form(name: str, save: Callable[[Any], Path], write: Write, tmp_path: Path) -> None:
    """Read by this package's own class; with nothing removed its numbers are the dense model's."""
    folder = save(build_model("bert", model_class=name))
    text = tmp_path / "calibration.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    options: dict[str, Any] = {"num_sequences": 8, "sequence_length": 32, "calibration": str(text), **OPTIONS}
    compress(Config.of(str(folder), str(tmp_path / "out"), sparsity=0.0, form="per-layer", **options))
    rows = [
        {"text": text, "label": 0, "question": text[:20], "passage": text} for text in TEXTS if name != "BertModel"
    ] or [{"question": text[:20], "passage": text} for text in TEXTS]
    got, dense = measures([tmp_path / "out", folder], write(rows))
    assert got["agreement"] == 1
    assert {name: got[name] for name in dense} == pytest.approx(dense, rel=1e-3)
    assert got.get("cosine", 1.0) == pytest.approx(1.0, abs=ROUNDING)


def test_the_command_prints_a_table_and_writes_json(
    save: Callable[[Any], Path], write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = two_models(save, "bert", "BertForSequenceClassification")
    source = write([{"text": text, "label": 0} for text in TEXTS])
    output = tmp_path / "numbers.json"
    options = [f"--baseline={folders[1]}", f"--text={source}", "--device=cpu", f"--output={output}", "--max-windows=5"]
    assert main([str(folders[0]), *options]) == 0
    printed = capsys.readouterr().out
    for part in ("stored parameters", "accuracy rows", "agreement rows", "KL divergence rows"):
        assert part in printed
    written = json.loads(output.read_text())
    row = written["evaluations"][0]
    assert row["measures"][source].keys() == {"accuracy", "agreement", "KL divergence"}
    assert row["kv_bytes_per_token"] is None
    assert row["stored_parameters"] == sum(p.numel() for p in stock(folders[:1], "AutoModel")[0].parameters()) + 2 * 33
    assert written["texts"][source]["windows"] == 5
    assert written["settings"]["max_windows"] == 5


@pytest.mark.parametrize(
    ("name", "rows", "options", "message"),
    [
        ("BertForSequenceClassification", [{"text": "a"}], {}, "needs text and label"),
        ("BertForSequenceClassification", [{"text": "a", "label": 2}], {}, "holds the label 2"),
        ("BertForSequenceClassification", [{"text": "a", "label": "good"}], {}, "holds the label 'good'"),
        ("BertForSequenceClassification", [{"text": 3, "label": 1}], {}, "holds 3 where text should be"),
        ("BertForSequenceClassification", [{"text": "a", "label": 1}], {"tasks": ["piqa"]}, "--tasks are for"),
        ("BertForSequenceClassification", [{"text": "a"}], {"kind": "masked-lm"}, "lacks .* which masked-lm needs"),
        ("BertModel", [{"text": "a"}], {}, "needs question and passage"),
        ("BertForQuestionAnswering", [{"context": "a", "question": "b", "answers": []}], {}, "at least one"),
        (
            "BertForQuestionAnswering",
            [{"context": "a", "question": "b " * 90, "answers": ["a"]}],
            {},
            "fills all 64 tokens",
        ),
        ("BertForTokenClassification", [{"text": "a"}], {}, "give --kind"),
    ],
)
def test_unfit_examples_are_one_sentence(
    name: str, rows: Rows, options: dict[str, Any], message: str, save: Callable[[Any], Path], write: Write
) -> None:
    folder = save(build_model("bert", model_class=name))
    with pytest.raises(OneshotError, match=message) as caught:
        evaluate([str(folder)], [write(rows)], **OPTIONS | options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "options", "stated"),
    [
        ("bert", {"num_labels": 1}, "a number and not a class (it has one output)"),
        ("bert", {"num_labels": 3, "problem_type": "regression"}, "a number and not a class,"),
        ("bert", {"num_labels": 3, "problem_type": "multi_label_classification"}, "several classes at once"),
        ("bert", {"num_labels": 1, "problem_type": "multi_label_classification"}, "several classes at once"),
        ("qwen3", {"num_labels": 1, "head_dim": 8}, "a number and not a class (it has one output)"),
    ],
)
def test_outputs_that_are_not_classes_are_refused(
    family: str,
    options: dict[str, Any],
    stated: str,
    save: Callable[[Any], Path],
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Softmax says nothing of them. They are refused before a model is loaded, and sizes alone are told."""
    name = {"bert": "BertForSequenceClassification", "qwen3": "AutoModelForSequenceClassification"}[family]
    folder, source = save(build_model(family, model_class=name, **options)), write([{"text": "a", "label": 0}])
    plain = save(build_model("bert", model_class="BertForSequenceClassification", num_labels=3))
    monkeypatch.setattr(by_example_module, "load_as", None)
    for model, baseline in ((folder, None), (plain, str(folder))):
        with pytest.raises(ConfigError) as told:
            evaluate([str(model)], [source], baseline=baseline, **OPTIONS)
        assert str(told.value).startswith(f"{folder} ")
        assert stated in str(told.value)
    [sizes] = evaluate([str(folder)], [], **OPTIONS)
    assert sizes.measures is None


def test_a_class_that_no_config_states_is_found_by_its_tensors(save: Callable[[Any], Path], write: Write) -> None:
    folders, source = two_models(save, "bert", "BertForMaskedLM"), write([{"text": TEXTS[0]}])
    stated = measures(folders, source)
    for folder in folders:
        edit_config(folder, architectures="removed")
    assert measures(folders, source) == stated


def test_models_of_different_tasks_are_refused(save: Callable[[Any], Path], write: Write) -> None:
    folders = [
        save(build_model("bert", model_class="BertForSequenceClassification", num_labels=count)) for count in (2, 3)
    ]
    with pytest.raises(OneshotError, match="3 classes and the model 2"):
        measures(folders, write([{"text": "a", "label": 1}]))


def test_the_same_classes_in_another_order_are_refused(save: Callable[[Any], Path], write: Write) -> None:
    """Names in other letters, and other names, say nothing of the order."""
    folders = two_models(save, "bert", "BertForSequenceClassification", num_labels=2)
    for classes, is_refused in (("no", "yes"), False), (("NO", "YES"), False), (("YES", "NO"), True):
        for folder, names in zip(folders, (("no", "yes"), classes), strict=True):
            edit_config(folder, id2label={str(number): name for number, name in enumerate(names)}, label2id="removed")
        source = write([{"text": "a", "label": 1}])
        if is_refused:
            with pytest.raises(OneshotError, match=r"same classes in another order \(id2label\)"):
                measures(folders, source)
        else:
            measures(folders, source)


def test_a_tokenizer_of_a_larger_model_is_refused(save: Callable[[Any], Path], write: Write) -> None:
    folder = save(build_model("bert", model_class="BertForMaskedLM", vocabulary=50))
    with pytest.raises(OneshotError, match="no embedding"):
        evaluate([str(folder)], [write([{"text": "some text"}])], **OPTIONS)


def test_a_mask_token_that_a_model_lacks_is_refused(save: Callable[[Any], Path], write: Write) -> None:
    """The tokenizer has one more token than the tokenizer of the other model, and than the rows of its own."""
    models = [build_model("bert", model_class="BertForMaskedLM", vocabulary=rows) for rows in (400, 401)]
    small, larger, other = [save(model) for model in (*models, models[1])]
    for folder in (small, larger):
        tokenizer = load_tokenizer(folder)
        tokenizer.add_special_tokens({"mask_token": "<another mask>"})
        tokenizer.save_pretrained(folder)
    source = write([{"text": "some text"}])
    with pytest.raises(OneshotError, match=f"tokens of {source} that {small} has no embedding for"):
        evaluate([str(small)], [source], **OPTIONS)
    with pytest.raises(OneshotError, match=f"The tokenizers of {larger} and {other} differ"):
        evaluate([str(larger)], [source], baseline=str(other), **OPTIONS)


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "classification"),
        ({"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]}, "masked-lm"),
        ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"]}, "question-answering"),
        ({"model_type": "bert", "architectures": ["BertModel"]}, "embedding"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "text-to-text"),
        ({"model_type": "oneshot-encoder", "architectures": ["OneshotEncoderModel"]}, "embedding"),
        ({"model_type": "oneshot", "architectures": ["OneshotForCausalLM"]}, "causal"),
        ({"model_type": "llama", "architectures": ["LlamaModel"]}, "embedding"),
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "causal"),
        ({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}, "causal"),
        ({"model_type": "opt"}, "causal"),
    ],
)
def test_kinds(config: dict[str, Any], kind: str) -> None:
    assert kind_of(config) == kind


def test_a_data_set_of_the_hub(save: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """GLUE's columns are found, and its validation split is read."""
    asked = []

    def load_dataset(path: str, config: str | None, split: str, streaming: bool) -> Rows:
        asked.append((path, config, split, streaming))
        return [{"sentence1": text, "sentence2": text[::-1], "label": 1, "idx": 0} for text in TEXTS]

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    folder = save(build_model("bert", model_class="BertForSequenceClassification"))
    source = "nyu-mll/glue:mrpc"
    (result,) = evaluate([str(folder)], [source], max_windows=4, **OPTIONS)
    assert asked == [("nyu-mll/glue", "mrpc", "validation", True)]
    assert result.texts[source].windows == 4
    (model,), tokenizer = stock([folder], "AutoModelForSequenceClassification"), load_tokenizer(folder)
    labels = [int(ask(model, tokenizer, text, text[::-1]).logits.argmax()) for text in TEXTS[:4]]
    assert numbers_of(result, source) == {"accuracy": np.mean(labels)}


def test_a_wrong_option_is_one_sentence(save: Callable[[Any], Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(build_model("bert", model_class="BertModel"))
    capsys.readouterr()  # the progress bar of saving, if no test before this one has switched it off
    assert main([str(folder), "--batch-size=0"]) == 1
    assert capsys.readouterr().err.startswith("error: --batch-size 0")
    assert main([str(folder), "--text=some.txt", "--device=cpu"]) == 1
    assert "some.txt holds no columns" in capsys.readouterr().err
