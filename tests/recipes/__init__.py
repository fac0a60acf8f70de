"""The recipes of docs/recipes.md, command by command."""
