"""Workers, process groups, state transfer, storage, and the shell that drives the controller core.

A training program reaches a worker through the `Program` protocol. Only `ray_backend` needs Ray.

This file imports nothing, so that processes without tensors, such as a snapshot server, start
without torch.
"""
