"""Triton kernels of the data plane and what launches them. Imported on hosts with a CUDA device only.

`gather`    paged caches -> one segment, all layers and planes in one launch
`convert`   segment -> bfloat16 planes, or straight into an engine's cache tensors
`checksum`  the word sums of `vllm_tilert.checksum`
`inject`    converted planes or received bytes -> every device of a TileRT engine (runs on the CPU too)
"""
