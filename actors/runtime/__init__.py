"""The runtime of one process: the `Program` protocol, fault injection, threads, sockets, clocks."""
