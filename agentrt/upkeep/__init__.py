"""What is done with a store that no node has open: check it, measure it, show it, make it smaller, bring it up."""
