"""Records of an incident as tensors of torch, Transformer Engine and torchao; needs torch, reads no files itself."""
