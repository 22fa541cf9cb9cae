"""The Ray cluster itself: connection, head, nodes, resources and session folders."""
