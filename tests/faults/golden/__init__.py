"""Golden hosts: what operators and programs see of some hosts, kept as files."""
