"""How values travel, as the kernels know it."""

CODEC_NUMBERS = {"fp32": 0, "fp16": 1, "bf16": 2, "sign": 3, "levels": 4}
SCALED = ("sign", "levels")  # with one scale for all entries of a segment
