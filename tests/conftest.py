"""Lets every test import what stands beside this file."""
