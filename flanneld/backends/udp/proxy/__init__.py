"""Udp proxy of the udp backend: a process that carries packets between a TUN and a UDP socket.

It outlives the daemon, so that a restart loses no packet.

    plane.py      interface and choice of a data plane, implemented in python.py and native.py
    __main__.py   the process: a data plane in one thread, the control channel in the other
    server.py     the proxy's end of the control channel

The folder above has the daemon's side:

    control.py      protocol and addresses of the control channel
    client.py       the daemon's end
    tables.py       the reconciler's tables
    watchdog.py     detection of a proxy that hangs
"""
