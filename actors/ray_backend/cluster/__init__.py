"""The Ray cluster itself: joining it, its head, its nodes, its session folders."""
