"""The weight files of a result, joined from the parts that a run has finished.

One `model.safetensors` if it is small enough, else numbered files with an index, as transformers names them. Each file
appears whole. A part is removed when all its bytes are in files, so the disk holds little more than the result.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from oneshot.checkpoint.durable import UNFINISHED, make_durable, read_whole, write_whole
from oneshot.checkpoint.join import StoredTensor, stored_tensors, write_joined
from oneshot.checkpoint.reader import INDEX_NAME
from oneshot.checkpoint.work_folder import CHECKPOINT, WorkFolder


def stored_parts(work: WorkFolder, num_parts: int) -> list[StoredTensor]:
    """Return the tensors of the parts that are still there, in order."""
    parts = map(work.part, range(num_parts))
    return [tensor for path in parts if path.exists() for tensor in stored_tensors(path)]


def join_parts(work: WorkFolder, num_parts: int, max_file_bytes: int, advance: Callable[[int], None]) -> None:
    """Join the parts into files in `work.checkpoint`; those that an interrupted run has joined are kept.

    No tensor is in memory. `advance` receives the bytes written.

    Raises `OSError` if a file cannot be written.
    """
    numbers, stored = {work.part(number): number for number in range(num_parts)}, stored_parts(work, num_parts)
    num_done, at_hand = len(work.all_joined()), {tensor.name: tensor for tensor in stored}
    layout = _layout(work, stored, max_file_bytes)
    groups, files = layout["files"], file_names(len(layout["files"]))
    for index in range(num_done, len(files)):
        tensors = [at_hand[name] for name in groups[index]]
        later = {at_hand[name].path for group in groups[index + 1 :] for name in group}
        path = work.checkpoint / files[index]
        unfinished = path.with_name(path.name + UNFINISHED)
        digest = write_joined(unfinished, tensors, advance)
        make_durable(unfinished, path)
        used = {tensor.path for tensor in tensors} - later
        checksums = {f"{CHECKPOINT}/{path.name}": digest}
        record = {"checksums": checksums, "parts": sorted(numbers[part] for part in used)}
        write_whole(work.joined(index), json.dumps(record))
        for part in used:
            part.unlink()
    if len(files) > 1:
        places = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        content = {"metadata": {"total_size": layout["bytes"]}, "weight_map": places}
        write_whole(work.checkpoint / INDEX_NAME, json.dumps(content, indent=2) + "\n")


def _layout(work: WorkFolder, stored: list[StoredTensor], max_file_bytes: int) -> dict[str, Any]:
    """Return the names of every file's tensors and all their bytes; decided once, while every part is there."""
    layout = read_whole(work.layout)
    if layout is None:
        groups = [[tensor.name for tensor in group] for group in group_by_size(stored, max_file_bytes)]
        layout = {"files": groups, "bytes": sum(tensor.num_bytes for tensor in stored)}
        write_whole(work.layout, json.dumps(layout))
    return layout


def group_by_size(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    """Return groups in order, each of at most `max_bytes`; a larger tensor is a group of its own."""
    groups: list[list[StoredTensor]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.num_bytes
    return groups


def file_names(count: int) -> list[str]:
    """Return the names that transformers gives to the weight files of a checkpoint."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
