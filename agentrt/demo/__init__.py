"""`agentrt demo`: four tiers of wasm agents on a node that is killed half-way, checked against an independent ledger.

Three processes: the supervisor (supervisor.py: submits orders, kills the node, judges), the node (node.py: a Runtime),
and the ledger (ledger.py: where keyed tools leave their effects). Agents (agents.py) are wasm, the indexers scripts in
MicroPython; tools (tools.py) run in the node's tool hosts.
"""
