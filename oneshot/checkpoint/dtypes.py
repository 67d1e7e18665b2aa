"""The dtypes of safetensors files."""

import torch

# Names by torch's dtypes, in the order of the safetensors library, which stores the later ones first.
DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
RANKS = {dtype: rank for rank, dtype in enumerate(DTYPE_NAMES)}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")  # of weights that are not quantised
