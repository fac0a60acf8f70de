"""A small virtual machine for what this host's kernel cannot do: User Mode Linux on the host's own files.

``probe`` finds out whether it is needed, ``build`` makes its kernel as ``kernel.config`` says, ``machine``
runs a command in it and ``init`` is its first process. Tests that need it are marked ``needs_kernel``.
"""
