"""Form `stock`: a checkpoint of the input's own class, which every engine loads without code of ours."""

from dataclasses import replace
from typing import Any

from oneshot.architecture import Stack, from_files, predicts_tokens, stated_class, to_files
from oneshot.checkpoint import Model, reason_against_config, resized_config, with_kept_layers
from oneshot.compression import StreamSubspaces
from oneshot.errors import PlanError
from oneshot.export.engines import notes_on_engines
from oneshot.export.form import Form
from oneshot.export.outside import OutsideNames, Part, as_in_input, as_named, folded_outside, unchanged_outside
from oneshot.families import FAMILIES
from oneshot.planning import Grid, Plan
from oneshot.tensors import Tensors


class StockForm(Form):
    """A stock checkpoint: all layers have equal sizes."""

    name = "stock"
    title = "A stock checkpoint"
    further_in_class = False  # whether layers that predict further tokens have the tensors of their class

    def loading(self, config: dict[str, Any]) -> str:
        classes, stated = FAMILIES[config["model_type"]].classes, stated_class(config)
        own = stated or (classes[0] if classes else None)
        name = "AutoModelForCausalLM" if own is None or (not classes and predicts_tokens(config)) else own
        return " ".join((f"It loads like the original: `{name}.from_pretrained(...)`.", *notes_on_engines(config)))

    def grid(self, model: Model) -> Grid:
        """Return the sizes that the family's stock config can state."""
        free = model.family.free_head_size

        def holds_heads(heads: int, groups: int) -> bool:
            smaller = replace(model.shape, num_attention_heads=heads, num_key_value_heads=groups)
            return reason_against_config(resized_config(model.family, model.checkpoint.config, smaller)) is None

        return Grid(
            model.family,
            model.shape,
            self.remedy(model),
            inner_sizes=free,
            equal_inner_sizes=free,
            holds_heads=holds_heads,
        )

    @staticmethod
    def remedy(model: Model) -> str | None:
        """Return the option for layers of different sizes; None where the family has no such form."""
        return "--form per-layer" if model.family.reason_against("per-layer form") is None else None

    def config(self, model: Model, plan: Plan) -> dict[str, Any]:
        """Return the config.json of the result. Raises `PlanError` if the stock config cannot state the plan."""
        config, shape, kept = model.checkpoint.config, model.shape, plan.kept_layers
        resized = replace(
            plan.shape_of_layer(shape, kept[0]),
            hidden_size=self.grid(model).stack(plan).embedding_size,
            head_dim=plan.layers[kept[0]].value_size or shape.head_dim,
        )
        if len(kept) < shape.num_hidden_layers:
            config = with_kept_layers(config, kept, model.family)
        config = resized_config(model.family, config, resized)
        reason = reason_against_config(config)
        if reason is not None:
            all_heads = "--set heads=none" if resized.num_attention_heads < shape.num_attention_heads else None
            remedies = ", or ".join(remedy for remedy in (self.remedy(model), all_heads) if remedy)
            raise PlanError(f"No stock config holds this plan: {reason} Use {remedies}.")
        stock = {name: value for name, value in config.items() if name not in ("auto_map", "_model_name_or_path")}
        return stock | dict(model.family.own_head) if plan.hidden is not None else stock

    def layer_prefix(self, model: Model, number: int) -> str:
        return model.family.layer_prefix(number)

    def layer(self, model: Model, number: int, tensors: Tensors) -> Tensors:
        """Return a layer's tensors under their stored names; only a stack's first layer stores its positions."""
        stack, prefix = self._stack(model, number), self.layer_prefix(model, number)
        left_out = None if number == stack.first_layer else stack.relative_bias
        stored = {name: tensor for name, tensor in tensors.items() if name != left_out}
        return as_in_input(model, {prefix + name: tensor for name, tensor in to_files(stored, stack).items()})

    def original(self, model: Model, number: int, stored: Tensors) -> Tensors:
        stack, prefix = self._stack(model, number), self.layer_prefix(model, number)
        names = {as_named(model, prefix + name): name for name in model.family.stored_tensors(model.shape, number)}
        tensors = from_files(
            {names.get(name, name.removeprefix(prefix)): value for name, value in stored.items()}, stack
        )
        if stack.relative_bias is not None:
            tensors.setdefault(stack.relative_bias, model.read_relative_bias(stack))
        return tensors

    def reason_against_further(self, model: Model, plan: Plan) -> str | None:
        """Return why the result has no layers that predict tokens after the next one, as a clause; None if it can."""
        return None if plan.hidden is None else "they read states of the whole hidden size"

    @staticmethod
    def _stack(model: Model, number: int) -> Stack:
        """Return the stack of a layer of the result; with experts if any layer has them, as numbers may be others."""
        stack, experts = model.family.stack_of(number), model.family.stack.experts
        return stack if experts is None else stack.with_experts(experts)

    def outside(self, model: Model, plan: Plan, subspaces: StreamSubspaces | None) -> list[Part]:
        if plan.hidden is None:
            return unchanged_outside(model)
        stack, last, head = model.family.stack, model.family.last_stack, model.family.head
        assert stack.final_norm is not None
        assert last.final_norm is not None
        assert head is not None
        inner = None if last is stack else f"{stack.final_norm.name}.weight"
        names = OutsideNames(stack.embedding, f"{last.final_norm.name}.weight", head, encoder_norm=inner)
        return folded_outside(model, names, subspaces, keep_tied=False, centred=False)
