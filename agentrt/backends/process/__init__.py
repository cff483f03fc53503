"""Native programs as children of the node."""
