"""Runtime of a process: the `Program` protocol, faults, threads, sockets, clocks."""
