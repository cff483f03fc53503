"""What authors of plugins and of agentrt itself test with: contract suites, models and faults.

Suites, one for each kind of plugin, that a plugin's own tests subclass: `stores`, `backends`, `tools`,
`model_providers`, `ingresses`, `notifiers`, `policies`; and `observers`. Fakes and faults on demand:
`agentrt.testing.faults` (a store that refuses or holds back), `agentrt.testing.models` (a model server),
`agentrt.testing.ingresses` (a node, and a bus in memory). Fixtures for pytest: `agentrt.testing.pytest_plugin`.

Needs the ``test`` extra (pytest, hypothesis).
"""
