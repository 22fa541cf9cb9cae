"""actors acts: workers, process groups, transfers and the controller's shell around the core.

A training program reaches it as a `Program`. `worker` and all below it run without Ray; only the
files whose names begin with `ray_`, `launch` and `interface` need it.

This file imports nothing: processes that compute nothing, such as a snapshot server, start without
torch.
"""
