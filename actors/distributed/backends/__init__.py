"""The libraries that connect process groups: Gloo on a CPU, NCCL on a GPU."""
