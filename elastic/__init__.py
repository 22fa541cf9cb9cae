"""The decisions of an elastic run: pure values and functions that get the time as an argument.

Start reading at `controller.core.Core.step(now, event) -> commands`. `protocol.events` lists its
inputs, `protocol.commands` its outputs, and `protocol.phases` the legal transitions.

This file imports nothing: a worker needs the values, but not the controller.
"""
