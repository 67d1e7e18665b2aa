"""RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA: BERT's layers under BERT's names, in the stock form."""

from dataclasses import replace
from typing import Any

from oneshot.architecture.description import Description
from oneshot.architecture.resizing import set_width
from oneshot.errors import CheckpointError
from oneshot.families.bert import KINDS, SIZES, STACK, check


def variant(family: Description, config: dict[str, Any]) -> Description:
    """Return the family whose first positions, up to the padding token's number, are not used."""
    padding = config.get("pad_token_id")
    offset = 2 if padding is None else int(padding) + 1
    return replace(family, stack=replace(family.stack, position_offset=offset))


def check_electra(config: dict[str, Any]) -> None:
    """Refuse embeddings of another width than the layers, as ELECTRA small has them."""
    check(config)
    if config.get("embedding_size") != config.get("hidden_size"):
        raise CheckpointError(
            "This ELECTRA projects its embeddings to the hidden size, which is not supported; give one of equal widths."
        )


def _roberta(model_type: str, name: str) -> Description:
    return Description(
        model_type,
        STACK,
        set_width,
        check,
        head=None,
        masked_head="lm_head.decoder.weight",
        classes=tuple(f"{name}{kind}" for kind in KINDS),
        prefix="roberta",
        sizes=SIZES,
        variant=variant,
    )


ROBERTA = _roberta("roberta", "Roberta")
XLM_ROBERTA = _roberta("xlm-roberta", "XLMRoberta")
CAMEMBERT = _roberta("camembert", "Camembert")
ELECTRA = replace(
    ROBERTA,
    model_type="electra",
    check=check_electra,
    masked_head="generator_lm_head.weight",
    classes=(*(f"Electra{kind}" for kind in KINDS), "ElectraForPreTraining"),
    prefix="electra",
    variant=lambda family, config: family,
)
