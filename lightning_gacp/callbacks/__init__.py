"""Callbacks over the rooms below: each in a file of its own."""
