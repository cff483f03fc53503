"""The control plane's side of Python agents: templates, hosts and the runs in them."""
