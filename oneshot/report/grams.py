"""Sentences about Grams that rounding left singular: one for every kind, with the layers."""

from collections.abc import Iterable, Sequence

from oneshot.linalg.psd import GramNote
from oneshot.report.records import LayerReport

MEANINGS = {  # what it means for the result, and what is to be done
    "raised": "they count a little less there, which is safe; nothing has to be done, and more text "
    "(--num-sequences) or --dtype float32 makes it more exact",
    "left out": "those were left out, which is safe but less exact; give more text (--num-sequences), or --set "
    "damping= above zero",
    "singular": "rounding may decide there, so measure the result; give more text (--num-sequences), or a larger --set "
    "damping=",
}
NAMED_LAYERS = 8


def worst(notes: Iterable[GramNote]) -> tuple[GramNote, ...]:
    """Return one note of each name and kind, the one with the largest size, in the order of the first ones."""
    found: dict[tuple[str, str], GramNote] = {}
    for note in notes:
        key = note.of, note.kind
        found[key] = max(found.get(key, note), note, key=lambda each: each.size)
    return tuple(found.values())


def gram_sentences(elsewhere: Sequence[GramNote], layers: Sequence[LayerReport]) -> list[str]:
    """Return what the user should know: a sentence for each kind of Gram, and what was done about it.

    Args:
        elsewhere: notes from before the layers, such as a profile's. layers: the reports of all layers.
    """
    sentences = []
    for note in worst([*elsewhere, *(each for layer in layers for each in layer.gram_notes)]):

        def same(other: GramNote, note: GramNote = note) -> bool:
            return (other.of, other.kind) == (note.of, note.kind)

        numbers = [layer.layer for layer in layers if any(map(same, layer.gram_notes))]
        earlier = sum(map(same, elsewhere))
        places = [f"{_layers(numbers)} of {len(layers)}"] if numbers else []
        places += [f"{earlier} times while sizes were measured"] if earlier else []
        sentences.append(
            f"The text says too little about some directions of the {note.of} ({', '.join(places)}): "
            f"{MEANINGS[note.kind]}. (The Gram is singular to rounding; at worst {note}.)"
        )
    return sentences


def _layers(numbers: list[int]) -> str:
    """Return the layers by number, or how many they are."""
    if len(numbers) > NAMED_LAYERS:
        return f"{len(numbers)} layers"
    return f"layer{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
