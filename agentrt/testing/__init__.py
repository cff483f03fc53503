"""What authors of plugins and of agentrt itself test with: contract suites, models and faults.

- `agentrt.testing.stores`: the suite that every store must pass.
- `agentrt.testing.faults`: a store that refuses or holds back on demand.

Needs the ``test`` extra (pytest, hypothesis).
"""
