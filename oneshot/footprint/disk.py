"""Bytes of the disk that a run takes at the place of its result, until it is complete."""

from oneshot.footprint import terms
from oneshot.footprint.work import Work


def scaffold_bytes(work: Work) -> int:
    """Return the bytes of the layers that the hidden states pass, if these are not the stored ones; 0 if they are.

    The journal keeps them for a resumed run. They are at most as large as the dense layers.
    """
    plan, method, shape = work.plan, work.method, work.shape
    if plan is None:
        return 0
    inner = plan.reduces_values or plan.reduces_queries_keys or method.plans_inner_sizes
    fixed_heads = method.reduces_heads and any(
        sublayer.mixer.fixed_heads for sublayer in work.grid.family.stack.sublayers
    )
    folds = inner or fixed_heads or method.plans_ranks or method.leaves_out_sublayers or work.grid.folds_layer_norms
    if not (folds or work.hidden is not None or terms.cast_share(work)):
        return 0
    of_layer = work.layer_bytes
    if work.hidden is not None:  # projected linears are float32
        of_layer = max(of_layer, terms.FLOAT * shape.layer_parameters())
    return of_layer * shape.num_hidden_layers
