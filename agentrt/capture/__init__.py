"""Modules that can be captured: whose guests can be suspended with their stack in their memory (docs/frames.md)."""
