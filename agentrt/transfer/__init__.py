"""Runs that move from one store to another, in a file."""
