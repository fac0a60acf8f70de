"""A backend for flanneld that tells a switch which node has which subnet."""
