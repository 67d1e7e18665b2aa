"""The real MiniLM: its own questions find their passages, also after compression."""

import json
from pathlib import Path
from typing import Any

import pytest
from factories import topics

from oneshot.config import Config
from oneshot.evaluation import evaluate
from oneshot.pipeline import compress

pytestmark = pytest.mark.long
EXAMPLES = {
    "which animal purrs and hunts mice": "Cats are small carnivores that people keep at home. They catch rodents.",
    "how high is the tallest mountain": "Mount Everest rises 8,849 metres above the level of the sea.",
    "who wrote the play about a prince of Denmark": "William Shakespeare finished Hamlet around the year 1600.",
    "what do plants make from sunlight": "Photosynthesis turns light, water and carbon dioxide into sugar.",
    "why does iron become red in the rain": "Rust is an oxide that forms where iron meets oxygen and water.",
    "which language runs inside web browsers": "JavaScript was made in ten days for the Netscape Navigator.",
}


def test_a_smaller_minilm_still_retrieves(minilm: Path, tmp_path: Path) -> None:
    """The stock form: 10 % fewer parameters, loaded by BertModel."""
    judged = tmp_path / "judged.jsonl"
    rows = [{"question": question, "passage": passage} for question, passage in EXAMPLES.items()]
    judged.write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = tmp_path / "calibration.jsonl"
    passages = [{"text": piece} for piece in topics().split("\n\n") if piece.strip()]
    text.write_text("".join(json.dumps(row) + "\n" for row in passages))
    options: dict[str, Any] = {"num_sequences": 12, "sequence_length": 128, "device": "cpu", "dtype": "float32"}
    compress(
        Config.of(
            str(minilm),
            str(tmp_path / "out"),
            sparsity=0.1,
            form="stock",
            calibration=str(text),
            heads="none",
            **options,
        )
    )
    smaller, dense = evaluate(
        [str(tmp_path / "out")], [str(judged)], baseline=str(minilm), device="cpu", dtype="float32"
    )
    assert smaller.measures is not None
    assert dense.measures is not None
    assert dense.measures[str(judged)] == {"retrieval": 1.0}
    numbers = smaller.measures[str(judged)]
    assert numbers["agreement"] == numbers["retrieval"] == 1.0
    assert 0.8 < numbers["cosine"] < 1
    assert smaller.stored_parameters <= 0.91 * dense.stored_parameters
    assert smaller.kv_bytes_per_token is None
