"""flanneld: gives every host its own subnet of one cluster network."""

__version__ = "0.12.0+py1"
