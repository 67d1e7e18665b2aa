"""Compress a model, train the result towards the dense model's predictions, and print how to serve it.

python examples/heal_and_serve.py HuggingFaceTB/SmolLM2-135M-Instruct --text my_text.jsonl --steps 300
"""

import argparse
from collections.abc import Sequence

import torch
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer

import oneshot
from oneshot.text import load_text

SERVE = {
    "per-layer": "pip install ./vllm-plugin && vllm serve {0}",
    "stock": "vllm serve {0}\nor: convert_hf_to_gguf.py {0} --outfile {0}.gguf && llama-server -m {0}.gguf",
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub name")
    parser.add_argument("--text", default="builtin", help="text for calibration and for training, some megabytes")
    parser.add_argument("--output", default="healed", help="folder of the trained model")
    parser.add_argument("--form", default="per-layer", choices=SERVE)
    parser.add_argument("--lora", action="store_true", help="train adapters and merge them, which needs peft")
    parser.add_argument("--steps", type=int, default=300, help="each of 16 sequences of 256 tokens")
    given = parser.parse_args(arguments)

    sizes = {"num_sequences": 512, "sequence_length": 256}
    options = sizes | {"sparsity": 0.2, "form": given.form, "calibration": given.text}
    result = oneshot.compress(given.model, f"{given.output}-untrained", **options)
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    teacher = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(device)
    model = result.load(device=device, dtype=torch.float32)  # in bfloat16 small steps are lost to rounding
    if given.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4 if given.lora else 5e-5)
    rows = load_text(given.text, tokenizer, seed=1, **sizes).token_ids.to(device)
    for step in range(given.steps):
        batch = rows[torch.randint(len(rows), (16,))]
        with torch.no_grad():
            target = teacher(batch).logits.log_softmax(-1).flatten(0, 1)
        loss = kl_div(model(batch).logits.log_softmax(-1).flatten(0, 1), target, log_target=True, reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step + 1} of {given.steps}: KL divergence {loss.item():.4f}")
    (model.merge_and_unload() if given.lora else model).save_pretrained(given.output)
    tokenizer.save_pretrained(given.output)
    print("serve it:", SERVE[given.form].format(given.output))


if __name__ == "__main__":
    main()
