"""Replica: one rank's part of a model and its optimizer."""
