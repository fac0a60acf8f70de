"""The packet pump of the udp backend: a process that carries packets between a TUN and a UDP socket.

It outlives the daemon, so that a restart loses no packet.

    plane.py      what a data plane is; python.py and native.py are the two
    __main__.py   the process: a plane in one thread, the control channel in the other
    control.py    what daemon and pump say to each other; meeting.py is where
    client.py     the daemon's end of it; driver.py lets the reconciler use it, pulse.py sees whether it hangs
"""
