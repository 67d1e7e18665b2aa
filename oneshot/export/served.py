"""Know the forms that each engine of `--serve engine=` opens, and the families that it lacks.

Classes of engines were looked up in the packages of vLLM 0.32, SGLang 0.5.23, mlx-lm 0.32.2 and llama.cpp (of
llama-cpp-python 0.3.36); TensorRT-LLM's were not.
"""

from typing import Any

from oneshot.checkpoint import Model, stock_classes
from oneshot.config import FormName
from oneshot.export.encoder import EncoderForm
from oneshot.export.engines import engines_that_differ
from oneshot.export.form import Form
from oneshot.export.forms import form_of
from oneshot.export.nemotron_nas import WIDTH_STEP, obstacle
from oneshot.export.resized import ResizedForm
from oneshot.families import NAS_MODEL_TYPE, RESIZED_MODEL_TYPE
from oneshot.serving import ENGINES, Engine, Serving

FORMS_OPENED: dict[Engine, tuple[FormName, ...]] = {  # the best one first
    "vllm": ("per-layer", "stock", "nemotron-nas"),
    "sglang": ("stock", "nemotron-nas"),
    "trtllm": ("stock", "nemotron-nas"),
    "mlx": ("stock", "nemotron-nas"),
    "llama.cpp": ("gguf", "stock"),
}
ENCODERS = ("bert", "distilbert", "roberta", "xlm-roberta", "camembert", "electra", "modernbert", "t5", "mt5")
NO_CLASS: dict[Engine, tuple[str, ...]] = {
    "vllm": ("t5", "mt5", "distilbert", "electra", "camembert"),
    "sglang": ("t5", "mt5", "distilbert", "electra", "camembert", "modernbert"),
    "mlx": (
        *("arcee", "cwm", "falcon", "glm4v", "internvl", "lfm2_vl", "llava_next", "llava_onevision", "ministral"),
        *("opt", "qwen3_5_moe_text", "qwen3_5_text", "smolvlm", *ENCODERS),
    ),
    "llama.cpp": ("cwm", "helium", "ministral", "opt", "electra"),
}
# families whose layers are not Llama's, by transformers' class, that the plugin opens; it has the same lists
IN_PLUGIN = (
    *("Cohere2ForCausalLM", "Exaone4ForCausalLM", "GPTNeoXForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Glm4ForCausalLM", "GraniteForCausalLM", "HunYuanDenseV1ForCausalLM", "MistralForCausalLM"),
    *("NemotronForCausalLM", "Olmo2ForCausalLM", "PhiForCausalLM", "Qwen2ForCausalLM", "SmolLM3ForCausalLM"),
    *("StableLmForCausalLM", "Glm4MoeForCausalLM", "GptOssForCausalLM", "GraniteMoeForCausalLM"),
    *("MixtralForCausalLM", "OlmoeForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"),
)


def reason_against_form(engine: Engine | None, form: Form, model: Model) -> str | None:
    """Return a sentence why an engine does not open a form of a model; None if it does, or if any will do."""
    if engine is None:
        return None
    name, model_type, forms = ENGINES[engine], model.family.model_type, FORMS_OPENED[engine]
    no_class = f"{name} has no class for {model_type}; leave engine={engine} out of --serve."
    if form.name not in forms:
        held = [one for one in (form_of(other, model.family) for other in forms) if one.grid(model).refusal is None]
        opened = [one.name for one in held if reason_against_form(engine, one, model) is None]
        if not opened:
            return no_class
        return f"{name} does not open --form {form.name}; give --form {' or '.join(opened)}, or leave --form out."
    if form.name == "stock" and model_type in NO_CLASS.get(engine, ()):
        return no_class
    in_plugin = not isinstance(form, ResizedForm) or stock_classes(model.checkpoint.config)[1].__name__ in IN_PLUGIN
    if isinstance(form, EncoderForm) or not in_plugin:
        return f"{name} does not open the per-layer form of {model_type}; give --form stock."
    return None


def reason_against_ranks(serving: Serving, form: Form, model: Model) -> str | None:
    """Return a sentence why GPUs cannot share linears of low rank; None if they can.

    vLLM's Transformers backend shares the linears of a family as transformers' own plan says.
    """
    if serving.engine != "vllm" or serving.tp == 1 or not isinstance(form, ResizedForm):
        return None
    config_class, _ = stock_classes(model.checkpoint.config)
    if getattr(config_class, "base_model_tp_plan", None):
        return None
    return (
        f"transformers has no plan by which GPUs share {model.family.model_type}, so vLLM cannot share its low ranks; "
        "set ranks=none."
    )


def reason_against_result(engine: Engine | None, config: dict[str, Any]) -> str | None:
    """Return a sentence why an engine does not open the result with this config.json, or computes another model."""
    if engine is None:
        return None
    if config["model_type"] == NAS_MODEL_TYPE and engine != "vllm" and (reason := obstacle(config)) is not None:
        return f"{ENGINES[engine]} does not open the result: {reason}; leave --form out."
    if config["model_type"] == RESIZED_MODEL_TYPE and engine == "vllm":
        heads = {layer["num_attention_heads"] for layer in config["sizes"]["layers"]}
        if heads != {config["num_attention_heads"]}:
            return "vLLM opens this family with the same heads in all layers only; set heads=none."
    notes = (note for engines, note in engines_that_differ(config) if engine in engines)
    return next((f"{note.removesuffix('.')}; leave engine={engine} out of --serve." for note in notes), None)


def width_step_in(engine: Engine | None, form: Form) -> int:
    """Return what FFN widths must be multiples of for an engine."""
    return WIDTH_STEP if engine not in (None, "vllm") and form.name == "nemotron-nas" else 1
