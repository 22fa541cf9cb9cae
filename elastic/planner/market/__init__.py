"""Markets of machines: whether spot or on-demand machines pay."""
