"""Mutation tests of the deciding modules: each small change of the code must make a unit test fail."""
