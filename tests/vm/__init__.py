"""A small virtual machine for what this host's kernel cannot do: User Mode Linux on the host's own files.

``probe`` finds out whether it is needed, ``build`` makes its kernel, ``machine`` runs a command in it and
``init`` is its first process. It sees the host's files, and what it writes is forgotten at the end.
"""
