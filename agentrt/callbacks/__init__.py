"""Callbacks: telling an address outside that a run has ended. Signed, repeated until it is taken, and never sent to an
address that only this host can reach."""
