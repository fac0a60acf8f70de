"""What others do to a node's kernel: commands, with ``{words}`` for what belongs to one peer (data).

``{subnet}``, ``{base}`` and ``{device}`` are those of one family, ``{host}`` and ``{mac}`` the peer's.
"""

from __future__ import annotations

from tests.netns.histories.setting import GATEWAY, OURS, UPLINK, Setting

ROUTES = (
    "ip route del {subnet} via {base}",
    "ip route del {subnet} via {host}",
    "ip route replace {subnet} via {gateway}",
    "ip route replace {subnet} dev lo",
    "ip route replace blackhole {subnet}",
)
BOUNCE = f"ip link set {UPLINK} down"  # and up again
ANYWHERE = (f"ip link set {UPLINK} mtu 1400", f"ip link set {UPLINK} mtu 1500", BOUNCE)
#: Any device of ours.
DEVICE = (
    "ip address flush dev {device} scope global",
    "ip address add {inside} dev {device}",
    "ip route add {elsewhere} dev {device}",
    "ip route flush dev {device}",
    "ip link set {device} down",
    "ip link set {device} up",
    "ip link set {device} mtu 1300",
    "ip link del {device}",
    "ip link add {device} type bridge",
)
VXLAN = (
    "ip neigh del {base} dev {device}",
    "ip neigh replace {base} lladdr 02:00:00:00:00:99 dev {device} nud permanent",
    "ip neigh replace {base} lladdr {mac} dev {device} nud stale",
    "ip neigh add {neighbor} lladdr 02:00:00:00:00:99 dev {device} nud permanent",
    "ip neigh flush dev {device} nud permanent",
    "bridge fdb del {mac} dev {device}",
    "bridge fdb replace {mac} dev {device} dst {nobody} self permanent",
    "bridge fdb replace {mac} dev {device} dst {nobody} port 99 self permanent",
    "bridge fdb replace {mac} dev {device} dst {nobody} vni 99 self permanent",
    "bridge fdb add 02:00:00:00:00:99 dev {device} dst {nobody}",
    "bridge fdb add 02:00:00:00:00:97 dev {device} dst {nobody} port 99",
    "ip link set {device} address 02:00:00:00:00:98",
    "ip link set {device} type vxlan learning",
    f"ip link add {{device}} type vxlan id 2 dev {UPLINK} local {{ours}} dstport 8472",
)
TUNNEL = DEVICE + VXLAN

#: Words that are the same for all peers, by family.
WORDS = {
    4: {
        "gateway": GATEWAY[4],
        "ours": OURS[4],
        "inside": "10.5.0.7/32",
        "neighbor": "10.5.0.7",
        "elsewhere": "10.99.0.0/16",
        "nobody": "198.18.0.99",
    },
    6: {
        "gateway": GATEWAY[6],
        "ours": OURS[6],
        "inside": "fc00:5::7/128",
        "neighbor": "fc00:5::7",
        "elsewhere": "fc00:99::/48",
        "nobody": "fd00:18::99",
    },
}

#: What an operator or another program has.
FOREIGN = (
    "route add 192.0.2.0/24 via 198.18.0.254",
    "route add 10.5.3.0/24 via 198.18.0.254 metric 50",
    "route add 10.5.2.0/24 via 198.18.0.104 metric 50",
    "route add 10.5.2.0/24 tos 0x10 via 198.18.0.254",
    "route add 10.5.1.0/24 via 198.18.0.254 table 100",
    "route add 10.5.4.0/25 via 198.18.0.254",
    "route add 10.5.0.0/20 via 198.18.0.254",
    "route add blackhole 10.5.5.0/24 metric 9000",
    "route add 172.30.0.0/24 via 198.18.0.254 proto 70",  # another flanneld's
    "neighbor add 198.18.0.99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
    "address add 198.18.0.201/24 dev eth0",
    "address add 192.168.77.1/24 dev br9",
    "rule add to 10.5.3.0/24 lookup 100 pref 500",
)
FOREIGN_6 = (
    "route add 2001:db8::/32 via fd00:18::fe",
    "route add fc00:5:0:3::/64 via fd00:18::fe metric 50",
    "route add fc00:5:0:1::/64 via fd00:18::fe table 100",
    "route add fc00:5:0:4::/65 via fd00:18::fe",
    "route add blackhole fc00:5:0:5::/64 metric 9000",
    "neighbor add fd00:18::99 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
    "address add fd00:77::1/64 dev br9",
)


def foreign(setting: Setting) -> tuple[str, ...]:
    return FOREIGN + (FOREIGN_6 if 6 in setting.families else ())


#: Set the uplink down and up; the kernel removes with it what leads through it, which is its owner's.
BOUNCED = (
    BOUNCE,
    f"ip link set {UPLINK} up",
    f"ip route add default via {GATEWAY[4]}",
    f"ip address add {OURS[6]}/64 dev {UPLINK} nodad",
    f"ip route add default via {GATEWAY[6]}",
)
