"""Plugins that are told what becomes of runs: notifiers and observers, on a thread of their own."""
