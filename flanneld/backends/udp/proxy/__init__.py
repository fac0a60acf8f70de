"""Udp proxy of the udp backend: a process that carries packets between a TUN and a UDP socket.

It outlives the daemon, so that a restart loses no packet.

    plane.py      interface and choice of a data plane, and the one in Python
    native.py     the one in C, of ``udp_pump/``
    __main__.py   the process: a data plane in one thread, the control channel in the other

The folder above has the daemon's side:

    control.py    resources, protocol and addresses of the control channel
    client.py     the daemon's end
    tables.py     the reconciler's tables, and detection of a proxy that hangs
"""
