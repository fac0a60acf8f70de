"""Checks of ``flannelctl doctor``: one small function each over facts, beside the evidence that it needs."""
