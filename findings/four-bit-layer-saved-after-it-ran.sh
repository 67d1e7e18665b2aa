#!/usr/bin/env bash
# bitsandbytes 0.50.2: a four-bit linear that has run on a CPU with AVX512-BF16 is saved with its scales in another order.
#
# Expected: `state_dict` of a Linear4bit is the same before and after a forward pass.
# Seen: on such a CPU (Zen 4, Sapphire Rapids and later) the first forward pass in eval mode repacks the weight, and `state_dict`
# turns this back. It turns the four-bit numbers back, and the scales only if they are quantised themselves (`compress_statistics`,
# in transformers `bnb_4bit_use_double_quant`, which is off by default). Otherwise they stay transposed, so a row gets other rows'
# scales. There is no message. The layer that was saved computes wrongly from then on also. Exempt are rows of one block.
# On other CPUs this script calls the repacking itself, which `forward` would call.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ${TORCH_INDEX:-} torch==2.13.0
"$folder/venv/bin/pip" install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy
"$folder/venv/bin/python" -W ignore - 2>"$folder/messages" <<'PYTHON' || { cat "$folder/messages"; exit 1; }
import bitsandbytes
import torch
from bitsandbytes.functional import _convert_weight_packed_for_cpu, dequantize_4bit, has_avx512bf16
from bitsandbytes.nn import Linear4bit, Params4bit


def dequantised(state: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight of a saved layer, as it is opened."""
    scales = {name: tensor for name, tensor in state.items() if name.startswith("weight.")}
    weight = Params4bit.from_prequantized(state["weight"], scales, device="cpu")
    return dequantize_4bit(weight.data, weight.quant_state).float()


def saved(doubly: bool, columns: int) -> float:
    """Return how much the saved weight differs after the layer has run, against the weight's own size."""
    torch.manual_seed(0)
    layer = Linear4bit(
        columns, 64, bias=False, compute_dtype=torch.bfloat16, compress_statistics=doubly, quant_type="nf4"
    )
    spread = torch.randn(64, columns) * torch.logspace(-1, 1, 64)[:, None]  # rows of different sizes
    layer.weight = Params4bit(spread.bfloat16(), False, compress_statistics=doubly, quant_type="nf4", module=layer)
    layer = layer.to("cpu").eval()
    before = dequantised({name: tensor.clone() for name, tensor in layer.state_dict().items()})
    if has_avx512bf16():
        with torch.no_grad():
            layer(torch.randn(3, columns, dtype=torch.bfloat16))
    else:
        layer.weight.data, _ = _convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    after = dequantised(layer.state_dict())
    return ((after - before).norm() / before.norm()).item()


print(f"bitsandbytes {bitsandbytes.__version__}, torch {torch.__version__}, AVX512-BF16: {bool(has_avx512bf16())}")
seen = {}
for doubly, columns in ((False, 64), (False, 256), (True, 256)):
    seen[doubly, columns] = saved(doubly, columns)
    print(f"rows of {columns}, scales quantised {doubly}: the saved weight changes by {seen[doubly, columns]:.1%}")
assert seen[False, 64] < 0.01 and seen[True, 256] < 0.05 and seen[False, 256] > 0.5, "The behaviour has changed."
PYTHON
