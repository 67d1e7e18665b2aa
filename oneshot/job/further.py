"""The blocks of layers that predict tokens after the next one, where the sizes of the model's layers are theirs."""

from oneshot.checkpoint import Journal
from oneshot.compression import LayerCompressor
from oneshot.export import FurtherResult, cast, is_same
from oneshot.job.job import Job
from oneshot.stream import States, enter_further


def compress_further(job: Job, further: FurtherResult, states: States | None, journal: Journal) -> None:
    """Compress the blocks into the journal, behind the layers; those of an interrupted run are only replayed.

    `states`: after the model's last layer; None if the method chooses by weights alone.
    """
    run, first = job.run, job.run.model.shape.num_hidden_layers
    for index, layer in enumerate(further.layers.layers[: further.num_blocks]):
        if states is not None:
            states.advance = lambda tokens: None
            enter_further(states, run.model, layer, index)
        compressor = LayerCompressor(
            layer.model,
            run.method,
            further.plan_alone,
            run.form.grid(layer.model),
            run.machine,
            states=states,
            seed=job.config.seed,
            layers_before=first + index,
        )
        tensors = layer.model.read_layer(0)
        if first + index < journal.num_finished:
            stored, scaffold = journal.reread(first + index)
            compressor.replay_layer(0, tensors, scaffold or further.original(index, stored))
            continue
        done = compressor.compress_layer(0, tensors)
        saved = cast(job.config.save_dtype, further.layer(index, done.folded))
        is_stored = is_same(further.original(index, saved), done.working)
        journal.add(saved, scaffold=None if is_stored else done.working)
