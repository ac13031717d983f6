"""The embedded demonstration: a small GPT trained in FP8 on a CPU, a planted fault, and what the recorder says."""
