"""An encoder's run that is interrupted between layers ends with the bytes of an undisturbed one."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import MakeConfig, build_model, topics

from oneshot.compression import LayerCompressor
from oneshot.pipeline import compress
from oneshot.report.card import REPORT_NAME

WITH_SECONDS = {REPORT_NAME, "report.html", "README.md"}
LAYERS = 3
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("bert", {"form": "stock", "correction": "two-stream"}),
    ("bert", {"form": "stock", "correction": "same-layer", "save_dtype": "bfloat16"}),
    ("bert", {"form": "per-layer", "heads": "id", "correction": "two-stream", "allocation": "uniform"}),
    ("bert", {"form": "per-layer", "allocation": "sensitivity"}),
    (
        "bert",
        {"form": "per-layer", "recipe": "group-pca", "group_size": 1, "hidden_size": 24, "correction": "two-stream"},
    ),
    ("bert", {"form": "per-layer", "query_key_size": 4, "value_size": 4, "ffn": "none"}),
    ("distilbert", {"form": "stock", "correction": "two-stream"}),
    ("distilbert", {"form": "per-layer", "heads": "id", "allocation": "uniform", "batch_size": 2}),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write single texts and pairs of many lengths."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [line for line in topics(0, 12).splitlines() if line.strip()][:150]
    pairs = [{"text": line} | ({} if place % 2 else {"text_pair": "a pair"}) for place, line in enumerate(lines)]
    path.write_text("\n".join(json.dumps(pair) for pair in pairs))
    return str(path)


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name not in WITH_SECONDS}


@pytest.mark.parametrize(("family", "settings"), SETTINGS, ids=str)
def test_an_interrupted_run_ends_with_the_same_bytes(
    family: str,
    settings: dict[str, Any],
    text: str,
    make_config: MakeConfig,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Press Ctrl-C before the second layer, then before the last one."""
    name = {"bert": "BertModel", "distilbert": "DistilBertForMaskedLM"}[family]
    build_model(family, width=64, layers=LAYERS, tied=True, model_class=name).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    config = make_config(tmp_path / "dense", calibration=text, **settings)
    beside = replace(config, output=f"{config.output}-undisturbed")
    compress(beside)
    original, finished = LayerCompressor.compress_layer, []
    for last in (1, LAYERS - 1):

        def interrupted(self: LayerCompressor, layer: int, *rest: Any, last: int = last) -> Any:
            if layer == last:
                raise KeyboardInterrupt
            finished.append(layer)
            return original(self, layer, *rest)

        with monkeypatch.context() as patch:
            patch.setattr(LayerCompressor, "compress_layer", interrupted)
            with pytest.raises(KeyboardInterrupt):
                compress(replace(config, resume=True))
        assert not Path(config.output).exists()
    assert finished == list(range(LAYERS - 1)), "no finished layer is compressed again"
    compress(replace(config, resume=True))
    assert contents(config.output) == contents(beside.output)
