"""The recipes of docs/containers.md, command by command."""
