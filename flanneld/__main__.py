"""``python -m flanneld``."""

from flanneld.main import main

main()
