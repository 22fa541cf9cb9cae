"""Views of a run: live display, status page, logs, sweep table and timeline picture.

This file imports nothing: most commands do not need the plotting library, which loads slowly.
"""
