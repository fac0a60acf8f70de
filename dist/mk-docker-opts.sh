#!/bin/sh
# Turns flanneld's subnet.env into options for dockerd, in a file that a shell or systemd can read.
# Options, output and exit statuses are those of the script that comes with flannel v0.12.0.

usage() {
    cat >&2 <<END
Usage: $0 [-f SUBNET-FILE] [-d DOCKER-FILE] [-i] [-c] [-m] [-r] [-k NAME]

  -f FILE  read the subnet from here; default /run/flannel/subnet.env
  -d FILE  write the options here; default /run/docker_opts.env
  -i       write a variable for each option, such as DOCKER_OPT_MTU="--mtu=1450"
  -c       write one variable that holds all options; without -i and -c, both kinds are written
  -k NAME  the variable of -c, which begins with what the environment has in it; default DOCKER_OPTS
  -m       leave out --ip-masq
  -r       fail, and write nothing, if a route to the subnet leads through a gateway

Whatever the environment has as DOCKER_OPT_... is an option as well.
END
    exit 1
}

fail() {
    echo "$0: $*" >&2
    exit 1
}

subnet_file=/run/flannel/subnet.env
docker_file=/run/docker_opts.env
each= all= masquerade=yes routes=
name=DOCKER_OPTS

while getopts f:d:icmrk:h option; do
    case $option in
    f) subnet_file=$OPTARG ;;
    d) docker_file=$OPTARG ;;
    i) each=yes ;;
    c) all=yes ;;
    m) masquerade= ;;
    r) routes=yes ;;
    k) name=$OPTARG ;;
    *) usage ;;
    esac
done
[ "$each$all" ] || each=yes all=yes

case $name in
'' | [0-9]* | *[!A-Za-z0-9_]*) fail "-k: '$name' cannot be the name of a variable" ;;
esac
case $subnet_file in
*/*) ;;
*) subnet_file=./$subnet_file ;; # Without a slash the shell would look for it in PATH.
esac

# shellcheck disable=SC1090  # Which file it is, is known only now.
[ ! -f "$subnet_file" ] || . "$subnet_file"

# With such a route packets for this host's containers leave it again.
if [ "$routes" ] && [ "$FLANNEL_SUBNET" ]; then
    address=${FLANNEL_SUBNET%/*} # of the bridge: the one after that of the subnet
    subnet=${address%.*}.$((${address##*.} - 1))/${FLANNEL_SUBNET#*/}
    found=$(ip -4 route show exact "$subnet") || fail "cannot read the routes"
    case $found in
    *" via "*) fail "a route to $subnet leads through a gateway: $found; remove it: ip route del $subnet" ;;
    esac
fi

[ -z "$FLANNEL_SUBNET" ] || DOCKER_OPT_BIP=--bip=$FLANNEL_SUBNET
[ -z "$FLANNEL_MTU" ] || DOCKER_OPT_MTU=--mtu=$FLANNEL_MTU
# One of the two has to masquerade, and only one.
if [ "$masquerade" ]; then
    case $FLANNEL_IPMASQ in
    '') ;;
    true) DOCKER_OPT_IPMASQ=--ip-masq=false ;;
    false) DOCKER_OPT_IPMASQ=--ip-masq=true ;;
    *) fail "FLANNEL_IPMASQ in $subnet_file is '$FLANNEL_IPMASQ'; it must be true or false" ;;
    esac
fi

newline='
'
lines=
eval "combined=\$$name"
combined=${combined:+$combined }
for variable in $(set | sed -n 's/^\(DOCKER_OPT_[A-Za-z0-9_]*\)=.*/\1/p'); do
    eval "value=\$$variable"
    combined="$combined $value"
    [ -z "$each" ] || lines="$lines$variable=\"$value\"$newline"
done
[ -z "$all" ] || lines="$lines$name=\"$combined\"$newline"

printf %s "$lines" >"$docker_file" || exit 1
