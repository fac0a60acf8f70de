"""Mutation tests of the deciding modules: a unit test must fail for each small change of the code."""
